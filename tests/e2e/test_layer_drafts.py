"""Drafts of layers for multi-token prediction and of EAGLE-3 are those of the layers, and drawn as they should be.

That they change no token is said by rows of parity.yaml.
"""

from __future__ import annotations

import functools
import json
import shutil
from contextlib import closing
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from comm.loopback import LoopbackWorld, run_ranks
from helix.config import SpeculationConfig
from helix.engine.core import Engine
from helix.engine.draft_policy import DraftPolicy
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.models import spec_from_config
from helix.models.checkpoint import read_config
from helix.setup.parts import make_eagle3
from helix.speculation import Draft, LayerDrafter, SuffixDrafter
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.sequence_observer import StepCommitted
from helix.worker.step import DecodeState
from tests.e2e import eagle3, mtp, test_draft_model
from tests.e2e.checkpoints import checkpoint, continuations
from tests.e2e.fuzz_runs import SMALL_CHUNKS, random_pace
from tests.e2e.parity import Continuation, LayerDrafts, build_engine, check, loopback, on_loopback
from tests.e2e.recording_drafters import PartlyAcceptingDrafter, RecordingDrafter, mismatches
from tests.e2e.test_parity import MOE_LENGTHS, MOE_TOKENS
from tests.e2e.test_serve import CLOSE, ServeResult, forbid_waits, serve, turns
from tests.pairwise import params
from tests.sequences import generated

MTP, EAGLE = "deepseek-v3-halves", "qwen3"
KINDS = ["mtp", "eagle3"]
LATENT = ["deepseek-v3-yarn", "deepseek-v3-halves"]
INDEXED = ["deepseek-v32", "glm-5-shared"]  # the layer chooses tokens too
HEADS = ["glm4-moe", "hy-v3", "qwen3-next", "qwen3.5-tied", "qwen3.5-moe"]  # of queries and keys, in place of latents


def target(kind: str) -> Path:
    return mtp.with_layer(MTP) if kind == "mtp" else eagle3.target(EAGLE)


def eagle(family: str, kind: str, window: int = 512) -> SpeculationConfig:
    return SpeculationConfig(drafter="eagle3", path=str(eagle3.layer(family, kind, window)))


def drafts(of: str, count: int = 3, **more: Any) -> LayerDrafts:
    return LayerDrafts(count, eagle3=eagle(EAGLE, "shared") if of == "eagle3" else None, **more)


@functools.cache
def plain(path: Path) -> list[Continuation]:
    return continuations(path, MOE_LENGTHS, MOE_TOKENS)


def drafted(
    path: Path, given: LayerDrafts, kvp: int, tpa: int = 1, adaptive: bool = False, chunk: int = 40,
    device: str = "cpu", pads: bool = False,
) -> RecordingDrafter:  # fmt: skip
    """The drafter of rank 0 after two rounds of the prompts; the second ones go on behind prefixes of the first."""
    layout = HelixLayout.create("helix", kvp, tpa)
    prompts = [c.prompt for c in plain(path)]
    drafters: dict[int, Any] = {}

    def run(engine: Engine) -> None:
        drafters[engine.comm.rank] = engine.runner.drafter
        engine.runner.pads_chunks |= pads
        generated(engine, [Request(i, p, 12) for i, p in enumerate(prompts)])
        generated(engine, [Request(i, (*p, 9, i), 12) for i, p in enumerate(prompts)])

    options = dict(drafter=given, adaptive=adaptive, prefill_chunk=chunk)
    on_loopback(path, layout, 16, run, device, **options)
    return drafters[0]


class UncommittedDrafter(PartlyAcceptingDrafter):
    """Leaves the rows of kept drafts as drafts wrote them."""

    def on_step(self, step: StepCommitted) -> None:
        before = self.cache.layer(2).tensors["latents"].clone()
        super().on_step(step)
        now = self.cache.layer(2).tensors["latents"]
        now.copy_(torch.where(before.isnan(), now, before))


class ReselectingDrafter(PartlyAcceptingDrafter):
    """Lets each draft choose its tokens."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.layer.shared_topk = 0


@pytest.mark.parametrize(
    "family, kvp, kind",
    params(
        [*product([*LATENT, *INDEXED, *HEADS], (1, 3), (RecordingDrafter, PartlyAcceptingDrafter))],
        lambda family, kvp, kind: f"{family}-{kvp}-{kind.__name__}",
    ),
)
def test_drafts_are_those_of_the_layer(family: str, kvp: int, kind: type[RecordingDrafter]) -> None:
    found = drafted(mtp.with_layer(family), LayerDrafts(3, kind=kind), kvp)
    assert len(found.drafted) > 20
    assert mismatches(found, mtp.oracle(family).drafts) == []


@pytest.mark.parametrize(
    "family, kind, window, kvp, tpa, drafter",
    [
        ("qwen3", "shared", 512, 1, 1, PartlyAcceptingDrafter),
        ("qwen3", "whole", 21, 3, 1, RecordingDrafter),
        ("qwen3", "own", 9, 2, 1, PartlyAcceptingDrafter),
        ("deepseek-v3-halves", "own", 512, 2, 1, RecordingDrafter),
        ("deepseek-v3-halves", "own", 512, 2, 1, PartlyAcceptingDrafter),
        ("gpt-oss", "shared", 30, 2, 2, RecordingDrafter),
        ("gpt-oss", "shared", 30, 2, 1, PartlyAcceptingDrafter),
        ("qwen3", "3.1", 512, 1, 1, PartlyAcceptingDrafter),
        ("qwen3", "3.1", 512, 3, 2, RecordingDrafter),
        ("qwen3", "one norm", 512, 2, 1, PartlyAcceptingDrafter),
    ],
)
def test_drafts_are_those_of_an_eagle3_layer(
    family: str, kind: str, window: int, kvp: int, tpa: int, drafter: type[RecordingDrafter]
) -> None:
    given = LayerDrafts(3, kind=drafter, eagle3=eagle(family, kind, window))
    found = drafted(eagle3.target(family), given, kvp, tpa)
    assert len(found.drafted) > 20
    assert mismatches(found, eagle3.oracle(family, kind, window).drafts) == []


@pytest.mark.parametrize("spelling, window", [("llama", 512), ("prefixed", 512), ("unstated", 512), ("sliding", 20)])
def test_drafts_do_not_depend_on_how_a_checkpoint_is_spelt(spelling: str, window: int) -> None:
    given = LayerDrafts(3, kind=RecordingDrafter, eagle3=eagle("qwen3", spelling))
    found = drafted(eagle3.target("qwen3"), given, 2)
    assert len(found.drafted) > 20
    assert mismatches(found, eagle3.oracle("qwen3", "shared", window).drafts) == []


@pytest.mark.parametrize("norms", [("fc_norm", "norm_output"), ("fc_norm",), ("norm_output",)])
def test_a_norm_that_is_left_out_is_found(norms: tuple[str, ...], tmp_path: Path) -> None:
    directory = shutil.copytree(eagle3.layer("qwen3", "3.1"), tmp_path / "layer")
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(content | dict.fromkeys(norms, False)))
    given = SpeculationConfig(drafter="eagle3", path=str(directory))
    found = drafted(eagle3.target("qwen3"), LayerDrafts(3, kind=RecordingDrafter, eagle3=given), 1)
    assert mismatches(found, eagle3.oracle("qwen3", "3.1").drafts) != []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kvp", [1, 3])
@pytest.mark.parametrize("device", ["padded", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_drafts_behind_padded_chunks_and_on_one_gpu(
    kind: str, kvp: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for replaced, value in SMALL_CHUNKS.items() if device == "padded" else ():
        monkeypatch.setattr(replaced, value)
    where = dict(device=device) if device == "cuda" else dict(pads=True, chunk=70)
    found = drafted(target(kind), drafts(kind, kind=PartlyAcceptingDrafter), kvp, **where)  # type: ignore[arg-type]
    of = mtp.oracle(MTP) if kind == "mtp" else eagle3.oracle(EAGLE, "shared")
    assert len(found.drafted) > 20 and mismatches(found, of.drafts) == []


def test_drafts_after_steps_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftPolicy, "plan_steps", random_pace(0))
    found = drafted(mtp.with_layer(LATENT[0]), LayerDrafts(3, kind=PartlyAcceptingDrafter), 2, adaptive=True, chunk=7)
    assert len(found.drafted) > 10
    assert mismatches(found, mtp.oracle(LATENT[0]).drafts) == []


def test_without_the_drafter_its_layer_is_not_read() -> None:
    path = mtp.with_layer(LATENT[0])
    check(loopback(path, HelixLayout.create(), 16, plain(path)), plain(path))


@pytest.mark.parametrize("family, mistake", [(LATENT[0], UncommittedDrafter), ("glm-5-shared", ReselectingDrafter)])
def test_mistakes_are_found(family: str, mistake: type[RecordingDrafter]) -> None:
    """Rows that are not written anew; drafts that choose anew, of a model that was trained to choose for the first."""
    found = drafted(mtp.with_layer(family), LayerDrafts(3, kind=mistake), 1)
    assert mismatches(found, mtp.oracle(family).drafts) != []


def test_who_hits_a_prefix_spoils_no_row_of_it() -> None:
    """The states computed again lack their windows, and the rows lie in pages that sequences share."""
    prompt = torch.randint(90, (300,), generator=torch.Generator().manual_seed(3)).tolist()
    given = LayerDrafts(3, kind=RecordingDrafter, eagle3=eagle("gpt-oss", "shared", 120))
    comm = LoopbackWorld(1).communicator(0, [0])
    engine = build_engine(eagle3.target("gpt-oss"), HelixLayout.create(), comm, 16, drafter=given, adaptive=False)
    assert 1 < engine.runner.recomputed_tokens < len(prompt) / 2
    for i in range(3):
        generated(engine, [Request(i, (*prompt, *range(9, 9 + i)), 12)])
    found = engine.runner.drafter
    assert isinstance(found, RecordingDrafter) and len(found.drafted) > 20
    assert mismatches(found, eagle3.oracle("gpt-oss", "shared", 120).drafts) == []


@pytest.mark.parametrize(
    "kind, family, kvp, tpa",
    [
        ("mtp", "qwen3-next", 1, 1),
        ("mtp", "qwen3-next", 2, 1),
        ("mtp", "qwen3.5-tied", 1, 2),
        ("eagle3", "qwen3-next", 1, 2),
        ("eagle3", "qwen3.5-tied", 2, 1),
    ],
)
def test_behind_a_snapshot_drafts_are_those_without_the_cache(kind: str, family: str, kvp: int, tpa: int) -> None:
    """The same prompt again; a second turn; and one that goes on otherwise at the exact end of the snapshot."""
    path = mtp.with_layer(family) if kind == "mtp" else eagle3.target(family)
    given = LayerDrafts(3, kind=RecordingDrafter, eagle3=eagle(family, "shared") if kind == "eagle3" else None)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(90, (n,), generator=generator).tolist() for n in (97, 33, 17)]

    def run(engine: Engine) -> tuple[list[Any], list[int]]:
        for i, prompt in enumerate(prompts):
            generated(engine, [Request(i, prompt, 1)])
        computed, found = [], engine.runner.drafter
        assert isinstance(found, RecordingDrafter)
        for i, again in enumerate((prompts[0], (*prompts[1], *range(5)), (*prompts[2][:16], 8))):
            generated(engine, [Request(i, again, 12)])
            computed.append(engine.timings.prefill_tokens)
        return found.drafted, computed

    options: dict[str, Any] = dict(drafter=given, adaptive=False, prefill_chunk=40, snapshots=4, page_size=16 // kvp)
    layout = HelixLayout.create("helix", kvp, tpa)
    drafted, computed = on_loopback(path, layout, 16 // kvp, run, **options)[0]
    assert computed == [1, 6, 1], "all but the whole stripes of 16 of the first turn"
    alone, all_computed = on_loopback(path, layout, 16 // kvp, run, prefix_cache=False, **options)[0]
    assert all_computed == [97, 38, 17]
    assert drafted == alone and len(drafted) > 9
    oracle = mtp.oracle(family) if kind == "mtp" else eagle3.oracle(family, "shared")
    assert mismatches(SimpleNamespace(drafted=drafted), oracle.drafts) == []  # type: ignore[arg-type]


def changed(tmp_path: Path, **keys: Any) -> SpeculationConfig:
    directory = tmp_path / "layer"
    shutil.copytree(eagle3.layer("qwen3", "shared"), directory)
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(content | keys))
    return SpeculationConfig(drafter="eagle3", path=str(directory))


@pytest.mark.parametrize(
    "ids, aux_layers",
    [(None, (2, 2, 2)), ([], (2, 2, 2)), ([1, 1, 1], (2, 2, 2)), ([2, 2, 2], (2, 2, 2)), ([0, 1, 4], (1, 2, 5))],
)
def test_states_are_named_in_two_ways(ids: list[int] | None, aux_layers: tuple[int, ...], tmp_path: Path) -> None:
    of = spec_from_config(read_config(eagle3.target("qwen3")))
    given = changed(tmp_path, eagle_config=None if ids is None else {"eagle_aux_hidden_state_layer_ids": ids})
    assert make_eagle3(given, of).aux_hidden_state_layers == aux_layers


@pytest.mark.parametrize(
    "keys, error",
    [
        ({"architectures": ["MistralForCausalLM"]}, "architectures=.* must name one of LlamaForCausalLMEagle3"),
        ({"architectures": 7}, "architectures=7 must name one of"),
        ({"speculators_model_type": "eagle3", "transformer_layer_config": "x"}, "layer_config='x' must be an object"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2 must be 1"),
        ({"vocab_size": 300}, "vocab_size=300, but the target has 257"),
        ({"target_hidden_size": 73}, "target_hidden_size=73"),
        ({"norm_before_fc": True, "eagle_config": {"fc_norm": True}}, "norm_before_fc and fc_norm are both true"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states=4 is not supported; supported: 3"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False is not supported"),
        ({"draft_vocab_size": 99}, "draft_vocab_size=99, but lm_head.weight has 100 rows"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window=None must be a positive integer"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}, r"\[1, 2, 9\] must be 3 of .* 5 layers"),
    ],
)
def test_another_layer_is_refused(keys: dict[str, Any], error: str, tmp_path: Path) -> None:
    of = spec_from_config(read_config(eagle3.target("qwen3")))
    with pytest.raises(ValueError, match=error):
        make_eagle3(changed(tmp_path, **keys), of)


def test_a_plain_model_is_no_layer() -> None:
    of = spec_from_config(read_config(eagle3.target("qwen3")))
    with pytest.raises(
        ValueError, match=r"not an EAGLE-3 checkpoint .*: it has no fc.weight and no layers.0.hidden_norm"
    ):
        make_eagle3(SpeculationConfig(drafter="eagle3", path=str(checkpoint("llama-llama3"))), of)


def test_the_demo_models_layer_is_for_it() -> None:
    given = SpeculationConfig(drafter="eagle3", path="assets/demo-eagle3")
    spec = spec_from_config(read_config(Path("assets/demo-model")))
    layer = make_eagle3(given, spec)
    assert layer.aux_hidden_state_layers == (2, 4, 5) and layer.hidden == spec.hidden and layer.vocab is None


class TestDistribution(test_draft_model.TestDistribution):
    """Draws with drafts of a layer whose head has but some of the tokens."""

    def tables(self) -> tuple[Tensor, Tensor]:
        target_table, layer_table = super().tables()
        layer_table[:, self.IDS[2]] = -torch.inf
        return target_table, layer_table

    def engine(self, world: LoopbackWorld, rank: int, tamper: test_draft_model.Tamper, **sizes: Any) -> Engine:
        class Tampered(LayerDrafter):
            def propose(self, state: DecodeState, kind: DecodeGraphKey) -> Draft:
                return tamper(super().propose(state, kind))

        layout, drafter = HelixLayout.create("helix", 2), drafts("mtp", noise="own", kind=Tampered)
        comm = world.communicator(rank, layout.kvp_group(rank))
        engine = build_engine(target("mtp"), layout, comm, 16, drafter=drafter, adaptive=False, **sizes)
        model, layer, rows = engine.runner.model, engine.runner.model.next_token, engine.runner.model.embedding.rows
        assert layer is not None
        target_table, layer_table = (table[:, rows.start : rows.stop] for table in self.tables())

        def states(step: Any) -> Tensor:
            return step.tokens[:, None].expand(-1, model.spec.hidden).float()

        model.states = lambda cache, step, policy: (states(step), states(step))  # type: ignore[method-assign]
        model.logits = lambda x: target_table[x[:, 0].long()]  # type: ignore[method-assign]
        layer.append = lambda cache, step, x, from_draft: (states(step), states(step))  # type: ignore[assignment]
        layer.attend = lambda queries, x, *of_step: x  # type: ignore[method-assign]
        layer.logits = lambda x: layer_table[x[:, 0].long()]  # type: ignore[assignment]
        return engine


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*KINDS, "suffix"])
def test_what_a_decision_says_is_launched_without_a_wait(kind: str) -> None:
    """The device never drains for a step, a chunk, an admission or a retirement. The first time compiles."""
    path = target("mtp" if kind == "suffix" else kind)
    first, second = turns(plain(path))

    def body(world: LoopbackWorld, rank: int) -> tuple[ServeResult, ServeResult]:
        comm = world.communicator(0, [0])
        given = SuffixDrafter(2, 4, 1000, 3, comm.device) if kind == "suffix" else drafts(kind, 2)
        e = build_engine(path, HelixLayout.create(), comm, 16, drafter=given, **CLOSE)
        with closing(e):
            before = serve(e, first, second)
            forbid_waits(e)
            return before, serve(e, first, second)

    before, after = run_ranks(1, body, timeout_s=240.0, device="cuda")[0]
    assert after.tokens == before.tokens
