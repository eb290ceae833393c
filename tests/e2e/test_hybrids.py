"""Models whose layers keep states beside those with attention, through a whole engine, against transformers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from comm.loopback import LoopbackWorld, run_ranks
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.models import spec_from_config
from helix.models.checkpoint import read_config
from helix.models.loading import Checkpoint, weights_of
from helix.speculation import SuffixDrafter
from tests.e2e.checkpoints import HYBRID_FAMILIES, checkpoint, oracle
from tests.e2e.parity import Continuation, build_engine, check, generate, loopback
from tests.e2e.test_mixers import Prophet, with_refused, without_replay
from tests.e2e.test_serve import CLOSE, Served, left_behind, serve, turns
from tests.pairs import params
from tests.sequences import resize

LENGTHS, NEW = (21, 58, 40), 12
FEW, ENOUGH = 28, 120  # pages of 4 tokens, over all ranks
LAYOUTS = [HelixLayout.create("helix", 1), HelixLayout.create("helix", 2), HelixLayout.create("helix", 2, 2)]


def served(
    family: str,
    layout: HelixLayout,
    wanted: list[Continuation],
    drafts: int,
    change: Callable[[Any], None],
    snapshots: int = 0,
    pages: int = FEW,
) -> Served:
    """Serves requests, one of which is aborted; with few pages the engine preempts, with more it finds prefixes."""
    first, second = turns(wanted)

    def body(world: LoopbackWorld, rank: int) -> Served:
        comm = world.communicator(rank, layout.kvp_group(rank))
        e = build_engine(
            checkpoint(family),
            layout,
            comm,
            4,
            page_size=4,
            pages=pages // layout.kvp,
            drafter=Prophet(drafts, wanted) if drafts else None,
            adaptive=False,
            snapshots=snapshots,
            **CLOSE,
        )
        resize(e, run_steps=1)  # or a lease of its own would be as long as a run
        change(e)
        found = serve(e, [*reversed(first), Request("gone", wanted[1].prompt, 30)], second, aborts={"gone": 2})
        assert left_behind(e)[1:] == (0, 0)
        # Sequences with many drafts end before they need more pages.
        assert rank or drafts > 2 or pages > FEW or e.timings.preemptions > 0, "pages are too many for this test"
        assert rank or not drafts or len(e.timings.kept) > 1, "no draft was kept"
        return found

    return run_ranks(layout.world_size, body, timeout_s=120.0)[0]


def tokens_of(found: Served, wanted: list[Continuation]) -> list[tuple[int, ...]]:
    both = [(tuple(found.tokens[i]), tuple(found.tokens[f"next {i}"])) for i in range(len(wanted))]
    return [tokens for pair in both for tokens in pair]


def tokens_wanted(wanted: list[Continuation]) -> list[tuple[int, ...]]:
    return [tokens for c in wanted for tokens in (c.tokens, c.tokens[-3:])]


@pytest.mark.parametrize("family, layout, drafts", params([*product(HYBRID_FAMILIES, LAYOUTS, [0, 1, 4])]))
def test_states_follow_hits_preemptions_drafts_and_aborts(family: str, layout: HelixLayout, drafts: int) -> None:
    wanted = oracle(family, LENGTHS, NEW)
    found = served(family, layout, wanted, drafts, lambda e: None)
    assert tokens_of(found, wanted) == tokens_wanted(wanted)
    assert found.ends["gone"] == "abort"


@pytest.mark.parametrize("layout, drafts, snapshots", params([*product(LAYOUTS, [0, 2], [1, 4])]))
def test_hits_resume_behind_snapshots(layout: HelixLayout, drafts: int, snapshots: int) -> None:
    """Prompts that go on where others ended begin with a state; so do sequences that were preempted."""
    wanted = oracle("qwen3-next", LENGTHS, NEW)
    found = served("qwen3-next", layout, wanted, drafts, lambda e: None, snapshots)
    assert tokens_of(found, wanted) == tokens_wanted(wanted)
    found = served("qwen3-next", layout, wanted, drafts, lambda e: None, snapshots, ENOUGH)
    assert tokens_of(found, wanted) == tokens_wanted(wanted)
    stripe = 4 * layout.kvp
    ends = [(len(c.prompt) - 1) // stripe * stripe for c in wanted]
    cached = [found.cached[f"next {i}"] for i in range(len(wanted))]
    assert any(cached) and all(found in (0, end) for found, end in zip(cached, ends, strict=True)), (cached, ends)


@pytest.mark.parametrize("mode, kvp, tpa", [("tp", 1, 8), ("tp", 1, 4), ("medha", 2, 2), ("medha", 3, 1)])
def test_baseline_modes(mode: str, kvp: int, tpa: int) -> None:
    """In `tp` over 8 ranks KV heads are copied; in `medha` ranks without columns of an FFN have no heads."""
    wanted = oracle("qwen3-next", LENGTHS, NEW)
    layout = HelixLayout.create(mode, kvp, tpa)
    check(loopback(checkpoint("qwen3-next"), layout, 16, wanted), wanted)


@pytest.mark.parametrize("kv", ["fp8", "k16v8"])
def test_keys_in_few_bits_beside_states(kv: str) -> None:
    """Tokens do not depend on the layout, nor on drafts."""

    def tokens(layout: HelixLayout, drafter: SuffixDrafter | None) -> dict[Any, tuple[int, ...]]:
        def body(world: LoopbackWorld, rank: int) -> dict[Any, tuple[int, ...]]:
            comm = world.communicator(rank, layout.kvp_group(rank))
            e = build_engine(checkpoint("qwen3-next"), layout, comm, 16, drafter=drafter, adaptive=False, kv=kv)
            assert {k.dtype for k in e.runner.cache.groups[0].keeps} == {"float32"}, "states and rows in fp32"
            return generate(e, wanted).tokens

        return run_ranks(layout.world_size, body, timeout_s=120.0)[0]

    wanted = oracle("qwen3-next", LENGTHS, NEW)
    first = tokens(LAYOUTS[0], None)
    assert tokens(LAYOUTS[2], None) == first == tokens(LAYOUTS[1], SuffixDrafter(2, 2))


def with_what_the_slot_had(e: Any) -> None:
    e.runner.cache.admit = lambda *admissions: None
    for group in e.runner.cache.groups:
        if "state" in group.tensors:
            group.tensors["state"].fill_(0.1)


def with_a_ring_too_short(e: Any) -> None:
    """The oldest row that the convolution reads is overwritten before it is read."""
    for group in e.runner.cache.groups:
        if "qkv" in group.tensors:
            group.tensors["qkv"] = group.tensors["qkv"][:, :, :3]


def a_stripe_late(e: Any) -> None:
    """A snapshot is taken for the one before it."""
    snap = e.runner.cache._snap
    e.runner.cache._snap = lambda slot, place, moves: snap(slot, place ^ 1, moves)


def without_its_ring(e: Any) -> None:
    """A snapshot lacks the rows that the next convolution reads."""
    admit = e.runner.cache.admit

    def forgets(*admissions: Any) -> None:
        admit(*admissions)
        for group in e.runner.cache.groups:
            if "qkv" in group.tensors:
                group.tensors["qkv"][:, [a.slot for a in admissions]] = 0

    e.runner.cache.admit = forgets


@pytest.mark.parametrize("mistake", [a_stripe_late, without_its_ring])
def test_mistakes_of_snapshots_are_caught(mistake: Callable[[Any], None]) -> None:
    wanted = oracle("qwen3-next", LENGTHS, NEW)
    found = None
    with contextlib.suppress(RuntimeError):  # its logits may be NaN: memory that nobody wrote
        found = served("qwen3-next", LAYOUTS[1], wanted, 0, mistake, 4, ENOUGH)
    assert found is None or tokens_of(found, wanted) != tokens_wanted(wanted)


@pytest.mark.parametrize("mistake", [without_replay, with_refused, with_what_the_slot_had, with_a_ring_too_short])
def test_mistakes_are_caught(mistake: Callable[[Any], None]) -> None:
    wanted = oracle("qwen3-next", LENGTHS, NEW)
    found = None
    with contextlib.suppress(RuntimeError):  # its logits may be NaN: memory that nobody wrote
        found = served("qwen3-next", LAYOUTS[1], wanted, 2, mistake)
    assert found is None or tokens_of(found, wanted) != tokens_wanted(wanted)


def test_a_text_part_beside_one_for_images(tmp_path: Path) -> None:
    """Published files have the text part's tensors under another name, experts in one tensor, and layers of no use."""
    plain = checkpoint("qwen3.5-moe")
    weights = load_file(plain / "model.safetensors")
    experts = weights.keys() - {name for name in weights if ".experts." not in name}
    for layer in range(2):
        block = f"model.layers.{layer}.mlp.experts"

        def stack(part: str, block: str = block) -> torch.Tensor:
            return torch.stack([weights[f"{block}.{e}.{part}_proj.weight"] for e in range(6)])

        weights[f"{block}.gate_up_proj"] = torch.cat((stack("gate"), stack("up")), 1)
        weights[f"{block}.down_proj"] = stack("down")
    whole = {name.replace("model.", "model.language_model.", 1): weights[name] for name in weights.keys() - experts}
    whole |= {"model.visual.merger.weight": torch.ones(2), "mtp.norm.weight": torch.ones(2)}
    save_file({name: tensor.contiguous() for name, tensor in whole.items()}, tmp_path / "model.safetensors")
    text = json.loads((plain / "config.json").read_text())
    outer = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer | {"eos_token_id": 7}))
    assert spec_from_config(read_config(tmp_path)).eos == (7,)
    wanted = oracle("qwen3.5-moe", LENGTHS, NEW)
    for layout in (HelixLayout.create("helix", 3), HelixLayout.create("helix", 1, 2, ep=2)):
        check(loopback(tmp_path, layout, 16, wanted), wanted)
    made = weights_of(Checkpoint(tmp_path).as_stored(spec_from_config(outer)), layout, 0, torch.float32)
    Checkpoint(tmp_path).check(made.slices, spec_from_config(outer).unused)
    with pytest.raises(ValueError, match="text_config=None must be an object"):
        spec_from_config(outer | {"text_config": None})
