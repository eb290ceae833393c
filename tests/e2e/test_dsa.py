"""Models whose indexers choose tokens (DSA) give what transformers gives, over every number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from comm import turns
from comm.loopback import LoopbackWorld, run_ranks
from comm.solo import SoloCommunicator
from comm.symm_mem import SymmMemCommunicator
from comm.torch_dist import TorchDistCommunicator
from helix.config import ScheduleConfig
from helix.engine.core import Engine
from helix.layers import indexer, mla, specs
from helix.layers.mla import MLA
from helix.layout import HelixLayout
from helix.models import decoder
from helix.speculation import SuffixDrafter
from helix.worker import graph_keys as chunk_size
from helix.worker.keeps import latents
from helix.worker.step import CHOSEN, Step
from kernels.scaled_keys import rounded
from tests.e2e import mtp
from tests.e2e.checkpoints import checkpoint, continuations, oracle
from tests.e2e.deepseek import DSA_FAMILIES
from tests.e2e.parity import (
    LayerDrafts,
    Result,
    build_engine,
    check,
    distributed_rank,
    generate,
    generate_twice,
    loopback,
)
from tests.e2e.test_parity import BLOCKS, MOE_LENGTHS, MOE_TOKENS, WORLDS
from tests.e2e.test_prompt_chunks import small_sizes  # noqa: F401
from tests.pool import Pool, PoolError, pool
from tests.sequences import resize

CHOOSING = [family for family in DSA_FAMILIES if family != "glm-5-all"]


def matrix() -> list[object]:
    """Each family on every world, with blocks, expert grids, who makes and has queries in turn; wide ones of one."""
    blocks, gathers, worth = cycle(BLOCKS), cycle((False, True)), cycle((0, 0, 2))
    cases = []
    for family in DSA_FAMILIES:
        for world in WORLDS:
            layout = HelixLayout.create("helix", world, ep=2 if world % 2 == 0 else 1)
            slow = [pytest.mark.slow] if world > 4 and family != "glm-5-shared" else []
            cases.append(
                pytest.param(
                    family, layout, next(blocks), next(gathers), next(worth), id=f"{family}-kvp{world}", marks=slow
                )
            )
    return cases


@pytest.mark.parametrize("family, layout, block, gathers, worth", matrix())
def test_every_group(
    monkeypatch: pytest.MonkeyPatch, family: str, layout: HelixLayout, block: int, gathers: bool, worth: int
) -> None:
    monkeypatch.setattr(mla, "gathers_queries", lambda *args: gathers)
    monkeypatch.setattr(specs, "WORTH", worth)
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    check(loopback(checkpoint(family), layout, block, wanted), wanted)


def dealt() -> list[object]:
    """Each family on each grid, with the makers of queries and padding in turn."""
    grids = ("helix", 2, 16), ("helix", 3, 1), ("helix", 5, 4), ("medha", 3, 64)
    ways = cycle(((False, False), (True, False), (True, True)))
    return [
        pytest.param(family, *grid, *next(ways), id="-".join(map(str, (family, *grid))))
        for family in CHOOSING
        for grid in grids
    ]


@pytest.mark.parametrize("family, mode, kvp, block, gathers, padded", dealt())
@pytest.mark.usefixtures("small_sizes")
def test_rows_dealt_to_ranks(
    monkeypatch: pytest.MonkeyPatch, family: str, mode: str, kvp: int, block: int, gathers: bool, padded: bool
) -> None:
    """Each rank attends some rows of a prompt's chunk, to whole sequences."""
    monkeypatch.setattr(mla, "gathers_queries", lambda *args: gathers)
    monkeypatch.setattr(specs, "WORTH", 1 << 20)
    wanted, layout = oracle(family, MOE_LENGTHS, MOE_TOKENS), HelixLayout.create(mode, kvp)

    def in_chunks(engine: Engine) -> None:
        resize(engine, chunk=21)  # those behind the first read what the ones before have left
        engine.runner.pads = padded

    seen, divide = list[int](), decoder.dealt

    def spy(step: Step) -> Step:
        seen.append(len(step.tokens))
        return divide(step)

    monkeypatch.setattr(decoder, "dealt", spy)
    check(loopback(checkpoint(family), layout, block, wanted, in_chunks), wanted)
    assert len(seen) >= 4 * kvp, "all chunks of the long prompt but the last"


@pytest.mark.parametrize("family, kv", [("deepseek-v32", "fp8"), ("glm-5-shared", "fp8_all")])
def test_dealt_rows_of_keys_in_few_bits(monkeypatch: pytest.MonkeyPatch, family: str, kv: str) -> None:
    """Tokens are those of rows that are not dealt, whose ranks read the same numbers."""
    wanted, layout = oracle(family, MOE_LENGTHS, MOE_TOKENS), HelixLayout.create("helix", 3)

    def tokens(worth: int) -> list[Any]:
        monkeypatch.setattr(specs, "WORTH", worth)

        def body(world: LoopbackWorld, rank: int) -> Any:
            comm = world.communicator(rank, layout.kvp_group(rank))
            engine = build_engine(checkpoint(family), layout, comm, 4, kv=kv, prefill_chunk=21)
            return generate(engine, wanted).tokens

        return run_ranks(3, body, timeout_s=120.0)

    assert tokens(1 << 20) == tokens(0)


@pytest.mark.parametrize("family", DSA_FAMILIES)
@pytest.mark.parametrize("mode, kvp, tpa", [("tp", 1, 2), ("tp", 1, 4), ("medha", 3, 1)], ids=lambda x: str(x))
def test_baseline_modes(family: str, mode: str, kvp: int, tpa: int) -> None:
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    check(loopback(checkpoint(family), HelixLayout.create(mode, kvp, tpa), 16, wanted), wanted)


@pytest.mark.parametrize("scores", [1, 2000])
def test_some_rows_of_a_chunk_after_others(monkeypatch: pytest.MonkeyPatch, scores: int) -> None:
    monkeypatch.setattr(indexer, "SCORES", scores)
    wanted = oracle("glm-5-shared", MOE_LENGTHS, MOE_TOKENS)
    check(loopback(checkpoint("glm-5-shared"), HelixLayout.create("helix", 2), 16, wanted), wanted)


@pytest.mark.parametrize("family, kvp", [("glm-5-shared", 3), ("deepseek-v32", 2)])
def test_halves_of_a_chunk(monkeypatch: pytest.MonkeyPatch, family: str, kvp: int) -> None:
    """Rows are not dealt here, and sequences not gathered."""
    monkeypatch.setattr(turns, "LEAST", 7)
    monkeypatch.setattr(specs, "WORTH", 0)
    wanted, seen, halves = oracle(family, MOE_LENGTHS, MOE_TOKENS), list[int](), Step.halves

    def spy(step: Step) -> tuple[Step, Step]:
        seen.append(len(step.tokens))
        return halves(step)

    monkeypatch.setattr(Step, "halves", spy)

    def patient(engine: Engine) -> None:
        resize(engine, chunk=21)
        engine.schedule = ScheduleConfig(stall_ms=60_000)  # however slow this machine is just now
        engine._reset()

    check(loopback(checkpoint(family), HelixLayout.create("helix", kvp), 4, wanted, patient), wanted)
    assert len(seen) > 2


def test_chunks_of_a_batch() -> None:
    wanted = oracle("glm-5-shared", MOE_LENGTHS, MOE_TOKENS)

    def tamper(engine: Engine) -> None:
        engine.runner.hopb = "2"

    check(loopback(checkpoint("glm-5-shared"), HelixLayout.create("helix", 3), 16, wanted, tamper), wanted)


@pytest.mark.parametrize("family", DSA_FAMILIES)
@pytest.mark.parametrize("kvp", [1, 2, 5])
def test_drafts_change_no_token(family: str, kvp: int) -> None:
    """Each verified token reads a choice of its own."""
    wanted, layout = oracle(family, MOE_LENGTHS, MOE_TOKENS), HelixLayout.create("helix", kvp)

    def body(world: LoopbackWorld, rank: int) -> Result:
        comm = world.communicator(rank, layout.kvp_group(rank))
        return generate(build_engine(checkpoint(family), layout, comm, 4, drafter=SuffixDrafter(3, 1)), wanted)

    check(run_ranks(kvp, body, timeout_s=120.0), wanted)


@pytest.mark.parametrize("family", CHOOSING)
@pytest.mark.parametrize("kvp", [1, 3])
def test_index_keys_in_e4m3(monkeypatch: pytest.MonkeyPatch, family: str, kvp: int) -> None:
    """Choices are those of transformers with keys that are rounded as they are kept, and not those without."""
    update, layout = DynamicCache.update_indexer, HelixLayout.create("helix", kvp)

    def rounds(cache: DynamicCache, k: torch.Tensor, *args: Any) -> torch.Tensor:
        few, scales = rounded(k)
        return update(cache, few.float() * scales[..., None], *args)

    with monkeypatch.context() as patched:
        patched.setattr(DynamicCache, "update_indexer", rounds)
        wanted = continuations(checkpoint(family), MOE_LENGTHS, MOE_TOKENS)
    monkeypatch.setattr(specs, "latents", lambda *args: latents(*args[:-1], "auto"))

    def body(world: LoopbackWorld, rank: int) -> Result:
        comm = world.communicator(rank, layout.kvp_group(rank))
        return generate(build_engine(checkpoint(family), layout, comm, 4, kv="fp8_all"), wanted)

    results = run_ranks(kvp, body, timeout_s=120.0)
    check(results, wanted)
    with pytest.raises(AssertionError, match="prompt"):
        check(results, oracle(family, MOE_LENGTHS, MOE_TOKENS))


def test_gloo_ranks(gloo_pool: Callable[[int], Pool]) -> None:
    wanted = oracle("glm-5-shared", MOE_LENGTHS, MOE_TOKENS)
    task = (checkpoint("glm-5-shared"), HelixLayout.create("helix", 4, ep=2), 16, wanted, "cpu")
    check(gloo_pool(4).run(distributed_rank, *task, timeout_s=240.0), wanted)


# On GPUs, a family's kernels take some twenty seconds to compile: each case shows what no other does.
@pytest.mark.gpu
@pytest.mark.parametrize(
    "family, layout",
    [
        ("deepseek-v32", HelixLayout.create("helix", 3)),
        ("glm-5-shared", HelixLayout.create("helix", 4, ep=2)),
        ("glm-5-all", HelixLayout.create("tp", 1, 4)),
    ],
    ids=str,
)
def test_loopback_ranks_on_one_gpu(monkeypatch: pytest.MonkeyPatch, family: str, layout: HelixLayout) -> None:
    monkeypatch.setattr(specs, "WORTH", 1 << 20 if layout.kvp == 3 else 0)
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    check(loopback(checkpoint(family), layout, 16, wanted, device="cuda"), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("family, drafts", [("glm-5-shared", 3), ("deepseek-v32", 0)])
def test_one_gpu(family: str, drafts: int) -> None:
    """Captured steps too, with the drafts of the model's own layer and without."""
    wanted = mtp.plain(family, MOE_LENGTHS, MOE_TOKENS)
    drafter, alone = LayerDrafts(drafts) if drafts else None, SoloCommunicator(torch.device("cuda", 0))
    engine = build_engine(mtp.with_layer(family), HelixLayout.create(), alone, 16, drafter=drafter, adaptive=False)
    check([generate_twice(engine, wanted)], wanted)


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 4, 8)])
@pytest.mark.parametrize(
    "drafts, kind", [(3, SymmMemCommunicator), (0, TorchDistCommunicator)], ids=["symm_mem", "nccl"]
)
def test_gpus(drafts: int, kind: type[TorchDistCommunicator], world: int) -> None:
    """Captured steps too, with drafts and without."""
    family = "glm-5-shared"
    pool(world, "nccl").start()  # it imports while the oracle computes
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    drafter = SuffixDrafter(drafts, 1) if drafts else None
    task = (checkpoint(family), HelixLayout.create("helix", world), 16, wanted, "cuda", kind, drafter)
    check(pool(world, "nccl").run(distributed_rank, *task, timeout_s=120.0), wanted)


LATE = {"first half": True, "second half": False}


def whether_there_or_not(dealt: Any, cache: Any, names: Any) -> dict[str, torch.Tensor]:
    return {name: dealt.whole[name, cache.index][0] for name in names}


def with_late_kernels(rank: int, ranks: int, late: str, waits: bool, *task: Any) -> Result:
    """Serves prompts in halves, one of which comes late in each layer; or with sequences that are gathered late."""
    project, gather = MLA.project, MLA.gather_ahead

    def late_project(self: MLA, x: torch.Tensor, angles: Any, cache: Any, step: Step) -> torch.Tensor:
        if step.half is not None and step.half.first == LATE.get(late):
            torch.cuda._sleep(2_000_000)  # a millisecond
        return project(self, x, angles, cache, step)

    def late_gather(self: MLA, cache: Any, dealt: Any) -> None:
        torch.cuda._sleep(40_000_000)  # 20 ms: longer than a layer that is launched kernel by kernel
        gather(self, cache, dealt)

    with pytest.MonkeyPatch.context() as patched:
        small = {"SIZES": (8, 14, 22, 27, 50, 70), "LONG": 70, "LAUNCHED": 20, "SEQUENCES": (2, 4), "DEEP": 16}
        for name, value in small.items():
            patched.setattr(chunk_size, name, value)
        patched.setattr(turns, "LEAST", 7)
        patched.setattr(specs, "WORTH", 0 if late in LATE else 1 << 20)
        patched.setattr(MLA, "project", late_project)
        patched.setattr(MLA, "gather_ahead", late_gather)
        if not waits:
            patched.setattr(turns.Half, "wait", lambda self, done: None)
            for reads in (mla, indexer):
                patched.setattr(reads, "gathered", whether_there_or_not)
        return distributed_rank(rank, ranks, *task)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "late, waits", [*((late, True) for late in (*LATE, "sequences")), ("first half", False), ("sequences", False)]
)
def test_what_runs_beside_is_waited_for(late: str, waits: bool) -> None:
    """Nobody waits for a second half."""
    family = "glm-5-shared"
    pool(2, "nccl").start()
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    task = (checkpoint(family), HelixLayout.create("helix", 2), 16, wanted, "cuda", TorchDistCommunicator, None)
    run = partial(pool(2, "nccl").run, with_late_kernels, late, waits, *task, timeout_s=120.0)
    if waits:
        check(run(), wanted)
        return
    with pytest.raises((AssertionError, PoolError)):  # other tokens, no numbers, or a choice outside of the cache
        check(run(), wanted)


def rotates_keys_otherwise(engine: Engine) -> None:
    """Neighbours instead of halves or halves instead of neighbours, for index keys alone."""
    for layer in engine.runner.model.layers:
        if layer.mixer.indexer is not None:
            rows = layer.mixer.indexer.down.weight[:8]
            rows.copy_(torch.stack((rows[:4], rows[4:]), 1).flatten(0, 1))


def forgets_the_bias(engine: Engine) -> None:
    for layer in engine.runner.model.layers:
        if layer.mixer.indexer is not None:
            layer.mixer.indexer.bias.zero_()


def forgets_signs(engine: Engine) -> None:
    for layer in engine.runner.model.layers:
        if layer.mixer.indexer is not None:
            layer.mixer.indexer.down.weight[layer.mixer.indexer.spec.width :].abs_()


def reads_one_token_more(engine: Engine) -> None:
    for layer in engine.runner.model.layers:
        if layer.mixer.indexer is not None:
            layer.mixer.indexer.topk += 1


MISTAKES = [rotates_keys_otherwise, forgets_the_bias, forgets_signs, reads_one_token_more]


@pytest.mark.parametrize("family", CHOOSING)
@pytest.mark.parametrize("tamper", MISTAKES)
def test_mistakes_are_caught(family: str, tamper: Callable[[Engine], None]) -> None:
    """And invisible as long as all tokens are read."""
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    results = loopback(checkpoint(family), HelixLayout.create("helix", 2), 16, wanted, tamper)
    with pytest.raises(AssertionError, match="prompt"):
        check(results, wanted)
    if family != "glm-5-shared":  # two tokens are all of hardly any sequence
        short = oracle(family, (1, 3), 2)
        check(loopback(checkpoint(family), HelixLayout.create("helix", 2), 16, short[1:], tamper), short[1:])


def test_a_choice_that_is_not_shared_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    project = MLA.project

    def forgets(self: MLA, *args: object) -> torch.Tensor:
        step = args[-1]
        assert isinstance(step, Step)
        if self.indexer is None:
            step.shared.pop(CHOSEN, None)
        return project(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(MLA, "project", forgets)
    wanted = oracle("glm-5-shared", MOE_LENGTHS, MOE_TOKENS)
    results = loopback(checkpoint("glm-5-shared"), HelixLayout.create(), 16, wanted)
    with pytest.raises(AssertionError, match="prompt"):
        check(results, wanted)
