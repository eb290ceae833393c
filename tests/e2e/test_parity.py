"""The engine gives what transformers gives: every family, layout and append block, on loopback and on gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import pytest
import torch

from comm.loopback import LoopbackWorld, run_ranks
from helix.attention.base import AttentionPolicy
from helix.engine.core import Engine
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.sampling_params import SamplingParams
from helix.worker.step import Step
from kernels.attention.split_kv import PartialAttention
from tests.e2e.checkpoints import FAMILIES, HYBRID_FAMILIES, MOE_FAMILIES, checkpoint, kv_heads, oracle
from tests.e2e.parity import build_engine, check, distributed_rank, loopback
from tests.pairs import Case, params
from tests.pool import Pool
from tests.sequences import generated_ids

BLOCKS = (1, 16, 64)
WORLDS = (1, 2, 3, 4, 6, 8)
# The first one ends early and gives its slot to the last: more prompts than slots. The others lie at the edges of a
# block, and the longest over five prefill chunks of 64, and goes on over the end of a block of 64.
LENGTHS = (7, 1, 15, 16, 17, 310)
NEW_TOKENS = 14
# Fewer and shorter with experts, whose layers differ in the FFN alone, for many grids; the longest is of two chunks.
MOE_LENGTHS, MOE_TOKENS = (1, 17, 90), 12
STATE_LENGTHS = (1, 3, 64, 150)  # below and at the rows of a convolution and of a chunk, over prompt chunks
# Of the others, those with paths of their own through steps get all lengths; what else differs shows at any.
LONG = "llama-llama3", "llama-yarn-biased-tied", "qwen2", "qwen2-windowed-tied", "qwen3", "mistral-windowed"


WIDE = "qwen2", "gemma3"  # how families differ is seen on four ranks, how grids differ in these


def layouts(family: str) -> list[HelixLayout]:
    """Every helix grid of WORLDS that the family's heads allow."""
    grids = [HelixLayout.create("helix", w // tpa, tpa) for w in WORLDS for tpa in range(1, w + 1) if w % tpa == 0]
    return [layout for layout in grids if kv_heads(family) % layout.tpa == 0]


def grids() -> list[Case]:
    """Every family, grid and block."""
    families = [*FAMILIES, "demo"]
    return [(f, layout.kvp, layout.tpa, block) for f in families for layout in layouts(f) for block in BLOCKS]


def grid_params() -> list[object]:
    """On more than four ranks, which cost as much more, families of WIDE; where there is time, all."""
    name = "{}-kvp{}-tpa{}-block{}".format
    wide = [case for case in grids() if case[1] * case[2] > 4 and case[0] not in WIDE]
    return [
        *params([case for case in grids() if case not in wide], name),
        *(pytest.param(*case, id=name(*case), marks=pytest.mark.slow) for case in wide),
    ]


@pytest.mark.parametrize("family, kvp, tpa, block", grid_params())
def test_every_layout_and_block(family: str, kvp: int, tpa: int, block: int) -> None:
    few = family not in LONG or kvp * tpa > (4 if family in WIDE else 2)  # more ranks say the same of long prompts
    wanted = oracle(family, *((MOE_LENGTHS, MOE_TOKENS) if few else (LENGTHS, NEW_TOKENS)))
    check(loopback(checkpoint(family), HelixLayout.create("helix", kvp, tpa), block, wanted), wanted)


@pytest.mark.parametrize(
    "family, mode, kvp, tpa",
    [
        *(("qwen2", *case) for case in (("tp", 1, 8), ("tp", 1, 2), ("medha", 4, 2), ("medha", 3, 1))),
        ("olmo2", "tp", 1, 8),  # norms over all heads, of which keys' are on two ranks each
        ("olmo2", "medha", 2, 2),
        ("gemma3", "tp", 1, 8),
    ],
    ids=str,
)
def test_baseline_modes(family: str, mode: str, kvp: int, tpa: int) -> None:
    wanted = oracle(family, *((LENGTHS, NEW_TOKENS) if family in LONG else (MOE_LENGTHS, MOE_TOKENS)))
    check(loopback(checkpoint(family), HelixLayout.create(mode, kvp, tpa), 16, wanted), wanted)


def gloo_cases() -> list[object]:
    """Every world size, block and family at least once."""
    families, blocks = cycle([*FAMILIES, "demo", *MOE_FAMILIES]), cycle(BLOCKS)
    cases = []
    for world in (*WORLDS, 4, 2, 4, 8):
        family = next(families)
        fitting = [layout for layout in layouts(family) if layout.world_size == world]
        layout = fitting[len(fitting) // 2]
        if family in MOE_FAMILIES:
            layout = HelixLayout.create("helix", layout.kvp, layout.tpa, ep=2)
        cases.append(pytest.param(family, layout, next(blocks), id=f"{family}-kvp{layout.kvp}-tpa{layout.tpa}"))
    return cases


@pytest.mark.parametrize("family, layout, block", gloo_cases())
def test_gloo_ranks(gloo_pool: Callable[[int], Pool], family: str, layout: HelixLayout, block: int) -> None:
    few = family not in LONG or layout.world_size > 3  # many processes wait for each other at each token
    wanted = oracle(family, *((MOE_LENGTHS, MOE_TOKENS) if few else (LENGTHS, NEW_TOKENS)))
    task = (checkpoint(family), layout, block, wanted, "cpu")
    check(gloo_pool(layout.world_size).run(distributed_rank, *task, timeout_s=240.0), wanted)


def expert_grids() -> list[Case]:
    """Every family, attention grid, width of the TPF x EP grid and block; packed weights on few ranks and on many."""
    return [
        (family, layout.kvp, layout.tpa, ep, block)
        for family, worlds in (*((family, WORLDS) for family in MOE_FAMILIES), ("gpt-oss-mxfp4", (3, 8)))
        for layout in layouts(family)
        if layout.world_size in worlds
        for ep in range(1, layout.world_size + 1)
        if layout.world_size % ep == 0
        for block in BLOCKS
    ]


def experts_params() -> list[object]:
    """On more than four ranks two families, of weights as they are and of packed ones; where there is time, all."""
    name = "{}-kvp{}-tpa{}-ep{}-block{}".format
    wide = [case for case in expert_grids() if case[1] * case[2] > 4 and not str(case[0]).startswith("gpt-oss")]
    return [
        *params([case for case in expert_grids() if case not in wide], name),
        *(pytest.param(*case, id=name(*case), marks=pytest.mark.slow) for case in wide),
    ]


@pytest.mark.parametrize("family, kvp, tpa, ep, block", experts_params())
def test_experts_on_every_grid(family: str, kvp: int, tpa: int, ep: int, block: int) -> None:
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    check(loopback(checkpoint(family), HelixLayout.create("helix", kvp, tpa, ep=ep), block, wanted), wanted)


def hybrid_grids() -> list[Case]:
    """Every family with states, attention grid, width of EP and block."""
    return [
        (family, layout.kvp, layout.tpa, ep, block)
        for family in HYBRID_FAMILIES
        for layout in layouts(family)
        for ep in (1, 2)
        if layout.world_size % ep == 0
        for block in BLOCKS
    ]


@pytest.mark.parametrize("family, kvp, tpa, ep, block", params(hybrid_grids(), "{}-kvp{}-tpa{}-ep{}-block{}".format))
def test_states_on_every_grid(family: str, kvp: int, tpa: int, ep: int, block: int) -> None:
    wanted = oracle(family, STATE_LENGTHS, MOE_TOKENS)
    check(loopback(checkpoint(family), HelixLayout.create("helix", kvp, tpa, ep=ep), block, wanted), wanted)


class ShiftedLSE(AttentionPolicy):
    """A planted error: one rank believes its keys weigh 5% more."""

    def __init__(self, inner: AttentionPolicy) -> None:
        self.inner = inner

    def prepare(self, step: Step, windows: set[int | None]) -> None:
        self.inner.prepare(step, windows)

    def attend(self, *args: object) -> PartialAttention:  # type: ignore[override]
        found = self.inner.attend(*args)  # type: ignore[arg-type]
        return PartialAttention(found.out, found.lse + 0.05)


def test_a_shifted_lse_on_one_rank_is_caught() -> None:
    wanted = oracle("qwen3", LENGTHS, NEW_TOKENS)

    def tamper(engine: Engine) -> None:
        if engine.comm.rank == 1:
            engine.runner.dense = ShiftedLSE(engine.runner.dense)

    results = loopback(checkpoint("qwen3"), HelixLayout.create("helix", 2, 1), 16, wanted, tamper)
    with pytest.raises(AssertionError, match="prompt"):
        check(results, wanted)


def test_a_sink_on_every_rank_is_caught() -> None:
    wanted = oracle("gpt-oss", MOE_LENGTHS, MOE_TOKENS)

    def tamper(engine: Engine) -> None:
        if engine.comm.rank == 1:
            for layer in engine.runner.model.layers:
                layer.mixer.sinks = torch.zeros(16)

    results = loopback(checkpoint("gpt-oss"), HelixLayout.create("helix", 2, 1), 16, wanted, tamper)
    with pytest.raises(AssertionError, match="prompt"):
        check(results, wanted)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_experts_that_add_up_twice_are_caught(family: str) -> None:
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)

    def tamper(engine: Engine) -> None:
        if engine.comm.rank == 1:
            engine.runner.model.layers[-1].ffn.down.mul_(2)

    results = loopback(checkpoint(family), HelixLayout.create("helix", 2, 1, ep=2), 16, wanted, tamper)
    with pytest.raises(AssertionError, match="prompt"):
        check(results, wanted)


@pytest.mark.parametrize(
    "family, mode, kvp, tpa, ep",
    [
        *(("gpt-oss", *c) for c in (("tp", 1, 8, 4), ("tp", 1, 3, 3), ("medha", 2, 2, 2), ("medha", 3, 1, 1))),
        ("minimax-m2", "tp", 1, 8, 4),
        ("minimax-m2", "medha", 2, 2, 2),
    ],
)
def test_experts_in_baseline_modes(family: str, mode: str, kvp: int, tpa: int, ep: int) -> None:
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    check(loopback(checkpoint(family), HelixLayout.create(mode, kvp, tpa, ep=ep), 16, wanted), wanted)


def test_a_norm_of_own_heads_alone_is_caught() -> None:
    wanted = oracle("olmo2", MOE_LENGTHS, MOE_TOKENS)

    def tamper(engine: Engine) -> None:
        for layer in engine.runner.model.layers:
            layer.mixer._squares.spread = False

    results = loopback(checkpoint("olmo2"), HelixLayout.create("helix", 1, 2), 16, wanted, tamper)
    with pytest.raises(AssertionError, match="prompt"):
        check(results, wanted)


def test_prefill_has_its_own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt goes through the prefill kernel in chunks; decode steps see new tokens only."""
    import helix.attention.dense as dense

    calls: dict[str, list[int]] = {"prefill": [], "decode": []}
    prefill, decode = dense.flash_prefill, dense.decode_parts

    def spy_prefill(q: torch.Tensor, *args: object, **options: object) -> object:
        calls["prefill"].append(len(q))
        return prefill(q, *args, **options)  # type: ignore[arg-type]

    def spy_decode(q: torch.Tensor, *args: object, **options: object) -> object:
        calls["decode"].append(q.shape[1])
        return decode(q, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(dense, "flash_prefill", spy_prefill)
    monkeypatch.setattr(dense, "decode_parts", spy_decode)
    wanted = oracle("qwen3", LENGTHS, NEW_TOKENS)[-1:]
    check(loopback(checkpoint("qwen3"), HelixLayout.create(), 16, wanted), wanted)
    # The last of two layers attends for the last token alone.
    assert calls["prefill"] == [64, 1] * 4 + [LENGTHS[-1] - 4 * 64, 1]
    assert calls["decode"] == [1] * (NEW_TOKENS - 1) * 2


def sampled(layout: HelixLayout, order: list[int]) -> dict[int, tuple[int, ...]]:
    params = [
        SamplingParams(temperature=0.9, seed=9),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.7, top_k=20, seed=2),
        SamplingParams(),
        SamplingParams(temperature=1.3, top_p=0.8, seed=3),
        SamplingParams(temperature=0.9, min_p=0.05, top_p=0.95, seed=4),
    ]
    prompts = [c.prompt for c in oracle("qwen2", LENGTHS, NEW_TOKENS)]

    def body(world: LoopbackWorld, rank: int) -> dict[int, tuple[int, ...]]:
        comm = world.communicator(rank, layout.kvp_group(rank))
        engine = build_engine(checkpoint("qwen2"), layout, comm, 16)
        requests = [Request(i, prompts[i], 24, params[i]) for i in order]
        return generated_ids(engine, requests)

    return run_ranks(layout.world_size, body, timeout_s=120.0)[0]


def test_sampling_is_the_same_for_every_layout_and_order() -> None:
    reference = sampled(HelixLayout.create(), [0, 1, 2, 3, 4, 5])
    assert len({*reference.values()}) == 6
    for kvp, tpa, order in ((2, 1, [5, 4, 3, 2, 1, 0]), (3, 2, [2, 0, 5, 4, 1, 3]), (1, 4, [0, 1, 2, 3, 4, 5])):
        assert sampled(HelixLayout.create("helix", kvp, tpa), order) == reference
