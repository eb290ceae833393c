"""A cache in host memory changes no token: not with places for one choice alone, nor with some for all there is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, cycle, product
from typing import Any

import pytest
import torch

from benchmarks.ranks.kept import keep_blocks
from comm.loopback import LoopbackWorld, run_ranks
from comm.torch_dist import TorchDistCommunicator
from helix.attention import tiered
from helix.attention.block_sparse import BlockSparseAttention
from helix.engine.core import Engine
from helix.engine.decision import Admission
from helix.engine.inbox import Inbox
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.sampling_params import SamplingParams
from helix.worker.tiered_cache import TieredCache
from kernels.hot_blocks import BlockList
from kernels.tier.copy_blocks import copy_blocks
from tests.e2e.checkpoints import checkpoint
from tests.e2e.parity import Sparse, build_engine
from tests.e2e.test_block_sparse import (
    BUDGET,
    GRIDS,
    KINDS,
    LENGTHS,
    NEW_TOKENS,
    PAGE,
    SHORT_WINDOW,
    SLOW,
    Tokens,
    captured_rank,
    dense,
    generate,
    prompts,
    tokens,
    wanted,
)
from tests.pairs import params
from tests.pool import pool
from tests.sequences import generated, generated_ids

# Hot places of a KV head: no more than five sequences choose at once on a rank of so many; and for every page there is.
FEW, ALL = {1: 25, 2: 17, 3: 11, 4: 9}, 40


def in_host_memory(kvp: int) -> Sparse:
    return Sparse(SHORT_WINDOW, hot=FEW.get(kvp, FEW[4]))


@pytest.mark.parametrize(
    "family, kvp, tpa, drafts",
    [
        ("gpt-oss", 1, 1, 0),
        ("qwen2", 2, 2, 0),
        ("qwen3", 2, 1, 3),
        pytest.param("qwen3-moe", 3, 1, 0, marks=SLOW),
    ],
)
def test_what_a_guess_names_comes_early(family: str, kvp: int, tpa: int, drafts: int) -> None:
    """Over places for one choice alone: what comes for a guess takes them from blocks that are chosen next."""
    counted: list[torch.Tensor] = []

    def watched(engine: Engine) -> None:
        assert isinstance(engine.runner.cache, TieredCache)
        counted.append(engine.runner.cache.counted_ahead)

    budget = replace(BUDGET, local_blocks=2) if drafts else SHORT_WINDOW
    sparse = Sparse(budget, hot=19 if drafts else FEW[kvp], ahead=True)
    assert tokens(family, HelixLayout.create("helix", kvp, tpa), sparse, watched, drafts=drafts) == wanted(
        family, budget
    )
    assert len(counted) == kvp * tpa and all(misses > 0 for _, misses in counted), "every rank fetches ahead"


def on_late_streams(monkeypatch: pytest.MonkeyPatch, *ops: str) -> Callable[[Engine], None]:
    """Lets operations on side streams wait until somebody waits for them: on a GPU, streams run beside each other."""
    waiting: dict[object, list[Callable[[], None]]] = defaultdict(list)
    sides: list[object] = [None]

    def deferred(op: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **more: Any) -> None:
            if sides[-1] is None:
                op(*args, **more)
            else:
                waiting[sides[-1]].append(partial(op, *args, **more))

        return call

    @contextmanager
    def beside(side: object) -> Iterator[None]:
        sides.append(side)
        yield
        sides.pop()

    def join(side: object) -> None:
        while waiting[side]:
            waiting[side].pop(0)()

    def on_streams(engine: Engine) -> None:
        for name, value in {"_side": "side", "_ahead": ["even", "odd"], "_beside": beside, "_join": join}.items():
            monkeypatch.setattr(engine.runner.policy, name, value)

    for name in ops:
        monkeypatch.setattr(tiered, name, deferred(getattr(tiered, name)))
    return on_streams


@pytest.mark.parametrize("late", [("copy_blocks",), ("copy_blocks", "resolve")])
def test_a_guess_may_take_until_its_layer_waits_for_it(late: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, or what it lets come."""
    # Of full pages, the five sequences read 1, 4, 6, 6 and 3 at most.
    sparse = Sparse(SHORT_WINDOW, hot=20, ahead=True)
    found = tokens("qwen2", HelixLayout.create(), sparse, on_late_streams(monkeypatch, *late))
    assert found == wanted("qwen2", SHORT_WINDOW)


def test_a_right_guess_leaves_nothing_to_fetch() -> None:
    """A set pattern is guessed to the block: what the first layer fetches, the others have come ahead."""
    counts: list[list[list[int]]] = []

    def repeating(engine: Engine) -> None:
        assert isinstance(engine.runner.policy, BlockSparseAttention) and isinstance(engine.runner.cache, TieredCache)
        keep_blocks(engine.runner, 0.5)
        cache = engine.runner.cache
        counts.append([[len(engine.runner.model.spec.full)], cache.counted, cache.counted_ahead])  # type: ignore[list-item]

    sparse = Sparse(SHORT_WINDOW, choice="local", hot=4 * ALL, ahead=True)
    tokens("qwen2", HelixLayout.create(), sparse, repeating)
    ((layers,), (_, chosen), (_, ahead)) = counts[0]
    assert ahead == (layers - 1) * chosen > 0


@pytest.mark.parametrize("kvp, tpa", GRIDS)
def test_every_grid(kvp: int, tpa: int) -> None:
    counted: list[torch.Tensor] = []

    def watched(engine: Engine) -> None:
        assert isinstance(engine.runner.cache, TieredCache)
        counted.append(engine.runner.cache.counted)

    found = tokens("qwen2", HelixLayout.create("helix", kvp, tpa), in_host_memory(kvp), watched)
    assert found == wanted("qwen2", SHORT_WINDOW) != dense("qwen2")
    assert len(counted) == kvp * tpa and all(misses > 0 for _, misses in counted), "every rank fetches"


FEW_BITS = pytest.mark.parametrize("kv", ["fp8", "k16v8"])


@pytest.mark.parametrize(
    "kvp, tpa, kv",
    [
        pytest.param(*grid.values, kv, marks=[*grid.marks, *([SLOW] if kv != once else [])])
        for grid, once in zip(GRIDS, cycle(("fp8", "k16v8")), strict=False)
        for kv in ("fp8", "k16v8")
    ],
)
def test_every_grid_in_few_bits(kvp: int, tpa: int, kv: str) -> None:
    """Tokens are those over a cache on the GPU that keeps as few."""
    layout = HelixLayout.create("helix", kvp, tpa)
    on_gpu = tokens("qwen2", layout, Sparse(SHORT_WINDOW), kv=kv)
    assert tokens("qwen2", layout, in_host_memory(kvp), kv=kv) == on_gpu


@pytest.mark.parametrize(
    "family, guess, kv, chunk",
    [
        *params([*product(["gpt-oss"], [(0, True), (3, False), (3, True)], ["fp8", "k16v8"], [24, 64])]),
        *(pytest.param("qwen3", (3, True), kv, 24, marks=SLOW) for kv in ("fp8", "k16v8")),
    ],
)
def test_few_bits(family: str, guess: tuple[int, bool], kv: str, chunk: int) -> None:
    """With rejected drafts, and guesses; chunks of prompts end within pages."""
    drafts, ahead = guess
    layout, budget = HelixLayout.create("helix", 2), replace(BUDGET, local_blocks=2) if drafts else SHORT_WINDOW
    on_gpu = tokens(family, layout, Sparse(budget), drafts=drafts, kv=kv)
    few = Sparse(budget, hot=19 if drafts else FEW[2], ahead=ahead)
    assert tokens(family, layout, few, drafts=drafts, kv=kv, prefill_chunk=chunk) == on_gpu


@FEW_BITS
def test_scales_that_do_not_come_along_are_missed(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, few = HelixLayout.create(), in_host_memory(1)
    on_gpu = tokens("qwen2", layout, Sparse(SHORT_WINDOW), kv=kv)

    def numbers_alone(source: torch.Tensor, target: torch.Tensor, blocks: BlockList) -> None:
        scales = 2 * PAGE if kv == "fp8" else PAGE  # words at the end of a block
        copy_blocks(source[..., :-scales], target[..., :-scales], blocks)

    found = None
    monkeypatch.setattr(tiered, "copy_blocks", numbers_alone)
    with suppress(RuntimeError):
        found = tokens("qwen2", layout, few, kv=kv)
    assert found != on_gpu


def test_with_places_for_everything_a_block_comes_once() -> None:
    caches: list[TieredCache] = []

    def watched(engine: Engine) -> None:
        assert isinstance(engine.runner.cache, TieredCache)
        caches.append(engine.runner.cache)

    for hot in (FEW[1], ALL):
        found = tokens("qwen2", HelixLayout.create(), Sparse(SHORT_WINDOW, hot=hot), watched)
        assert found == wanted("qwen2", SHORT_WINDOW)
    few, most = (int(cache.counted[1]) for cache in caches)
    full = sum((n + NEW_TOKENS - 1) // PAGE for n in LENGTHS)
    # How many blocks lose one of few places depends on when requests come together, which is a matter of time.
    assert most <= full * caches[1].hot.place_of[:, :, 0].numel() and most < few


def test_a_set_pattern_of_blocks() -> None:
    """In benchmarks: what the token's position says is read, wherever it lies."""

    def repeating(engine: Engine) -> None:
        assert isinstance(engine.runner.policy, BlockSparseAttention)
        keep_blocks(engine.runner, 0.5)

    local = Sparse(SHORT_WINDOW, choice="local")
    found = [
        tokens("qwen2", HelixLayout.create("helix", 2), sparse, repeating) for sparse in (local, replace(local, hot=17))
    ]
    assert found[0] == found[1] != tokens("qwen2", HelixLayout.create("helix", 2), local)


@pytest.mark.parametrize(
    "family", ["gpt-oss", *(pytest.param(f, marks=SLOW) for f in ("llama-llama3", "qwen3", "qwen3-moe"))]
)
def test_families(family: str) -> None:
    """With a learned sink, and windowed layers, whose keys come from the host too."""
    assert tokens(family, HelixLayout.create("helix", 2), in_host_memory(2)) == wanted(family, SHORT_WINDOW)


@pytest.mark.parametrize("mode, kvp, tpa", [pytest.param(*x, marks=SLOW) for x in (("medha", 3, 1), ("tp", 1, 2))])
def test_modes(mode: str, kvp: int, tpa: int) -> None:
    found = tokens("qwen2", HelixLayout.create(mode, kvp, tpa), in_host_memory(kvp))
    assert found == wanted("qwen2", SHORT_WINDOW)


@pytest.mark.parametrize("drafts, hot", [(3, 19), pytest.param(8, 24, marks=SLOW), pytest.param(20, 30, marks=SLOW)])
def test_drafts(drafts: int, hot: int) -> None:
    """Rejected ones run over into pages that are overwritten."""
    budget = replace(BUDGET, local_blocks=2 if drafts < 16 else 3)
    found = tokens("qwen2", HelixLayout.create("helix", 2), Sparse(budget, hot=hot), drafts=drafts)
    assert found == wanted("qwen2", budget)


def test_short_sequences_read_everything() -> None:
    budget = replace(BUDGET, from_tokens=140)
    assert tokens("qwen2", HelixLayout.create("helix", 2), Sparse(budget, hot=17)) == wanted("qwen2", budget)


@pytest.mark.parametrize("block, kvp", [(8, 3), *(pytest.param(*x, marks=SLOW) for x in ((1, 2), (16, 4), (64, 2)))])
def test_each_rank_its_own_share(block: int, kvp: int) -> None:
    """Pages of several append blocks, and append blocks of several pages."""
    layout, local = HelixLayout.create("helix", kvp), Sparse(SHORT_WINDOW, choice="local")
    few = replace(local, hot=FEW[kvp])
    assert tokens("qwen2", layout, few, block=block) == tokens("qwen2", layout, local, block=block)


@pytest.mark.parametrize("ahead", [False, True])
def test_chunks_change_no_token(ahead: bool) -> None:
    """Each part of the batch chooses, fetches and attends before the next one does: both take the same places."""
    layout, local = HelixLayout.create("helix", 2), Sparse(SHORT_WINDOW, choice="local")
    few = replace(local, hot=FEW[2], ahead=ahead, chunks="2")
    assert tokens("qwen2", layout, few) == tokens("qwen2", layout, local)


@pytest.mark.slow
def test_sampled() -> None:
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=11)
    found = tokens("qwen2", HelixLayout.create("helix", 2), in_host_memory(2), sampling=sampling)
    assert found == wanted("qwen2", SHORT_WINDOW, sampling=sampling)


@pytest.mark.parametrize("kv", ["auto", "fp8", "k16v8"])
def test_what_is_found_in_pages(kv: str) -> None:
    """What was in a sequence's unfinished page as it ended goes on in another sequence, to the token."""
    found: list[Tokens] = []
    known: list[int] = []

    def follow_up(engine: Engine) -> None:
        admit = engine.runner.admit

        def noted(*admissions: Admission) -> None:
            known.extend(admission.known for admission in admissions)
            admit(*admissions)

        first = engine.comm.broadcast_object(generate(engine))
        engine.runner.admit = noted  # type: ignore[method-assign]
        requests = [Request(i, (*p, *first[i][:-1], 7, 8, 9), 6) for i, p in enumerate(prompts())]
        outputs = generated_ids(engine, requests)
        if engine.comm.rank == 0:
            found.append(outputs)

    again = [
        tokens("qwen2", HelixLayout.create("helix", 2), sparse, follow_up, kv=kv)
        for sparse in (Sparse(SHORT_WINDOW), in_host_memory(2))
    ]
    assert again[0] == again[1] and (kv != "auto" or again[0] == wanted("qwen2", SHORT_WINDOW))
    assert found[0] == found[1] and any(n % PAGE for n in known)


def test_where_memory_is_full_the_next_waits() -> None:
    """Five sequences do not fit together; one that never does is refused; in the end the host has its memory back."""

    def body(world: LoopbackWorld, rank: int) -> tuple[Tokens, str | None]:
        comm = world.communicator(rank, [0, 1])
        engine = build_engine(
            checkpoint("qwen2"),
            HelixLayout.create("helix", 2),
            comm,
            PAGE,
            page_size=PAGE,
            sparse=in_host_memory(2),
            pages=12,
        )
        found = generate(engine)
        refused = generated(engine, [Request("huge", (1,) * 450, 5)]).get("huge")
        engine.close()
        assert isinstance(engine.runner.cache, TieredCache) and engine.runner.cache.store.tensor is None
        return found, None if refused is None else f"{refused.finish_reason}: {refused.reason}"

    found, refused = run_ranks(2, body, timeout_s=120.0)[0]
    assert found == wanted("qwen2", SHORT_WINDOW)
    assert refused is not None and refused.startswith("error: prompt of 450") and "raise kv.host_bytes" in refused


@pytest.mark.parametrize("shared", [True, False], ids=["begins with another's pages", "pages of its own"])
def test_who_is_aborted_before_its_first_token_writes_to_nobodys_pages(shared: bool) -> None:
    """Its slot was somebody's, whose length and unfinished page are still there."""
    everything = Sparse(replace(BUDGET, topk=40), choice="local", hot=ALL)
    long = prompts()[2][:180]
    last = long if shared else long[::-1]

    def served(*names: str) -> list[int]:
        world = LoopbackWorld(1)
        engine = build_engine(
            checkpoint("qwen2"), HelixLayout.create(), world.communicator(0, [0]), PAGE, page_size=PAGE,
            sparse=everything, max_batch=2,
        )  # fmt: skip
        generated(engine, [Request(i, (7 + i,) * 39, 3 + 20 * i) for i in range(2)])  # in both slots
        inbox, found = Inbox(), list[int]()
        for name in names:
            inbox.submit(Request(name, long if name == "stays" else last, 20))
        for update in chain.from_iterable(engine.serve(inbox)):
            found += update.new_ids if update.id == "stays" else ()
            if update.prefilled >= 64:
                inbox.abort("goes")
                inbox.close()
        # What was computed of the other one is right, too.
        found += generated_ids(engine, [Request("again", last, 20)])["again"]
        return found

    assert served("stays", "goes") == served("stays")


@pytest.mark.parametrize("kind, world", KINDS)
@pytest.mark.parametrize(
    "drafts, ahead",
    [(0, False), (3, False), (0, True), (3, True)],
)
def test_captured_steps(drafts: int, ahead: bool, kind: type[TorchDistCommunicator], world: int) -> None:
    """One graph resolves, fetches and writes back for sequences of 7 to 278 tokens, over memory of the host."""
    budget = replace(BUDGET, local_blocks=2)
    # Four queries read 8 + 3 * 5 blocks of a sequence, where it has so many: five sequences 23 + 18 + 9 + 6 + 3.
    sparse = Sparse(budget, hot=60 if drafts else 30, ahead=ahead)
    task = captured_rank, checkpoint("qwen2"), kind, sparse, drafts, torch.float32
    found = pool(world, "nccl").run(*task, timeout_s=120.0)[0]
    assert found == [wanted("qwen2", budget)] * 3


@pytest.mark.parametrize("kind, world", KINDS)
@pytest.mark.parametrize("drafts, ahead", [(0, False), (3, True)])
@FEW_BITS
def test_captured_steps_in_few_bits(
    kv: str, drafts: int, ahead: bool, kind: type[TorchDistCommunicator], world: int
) -> None:
    budget = replace(BUDGET, local_blocks=2)
    found = [
        pool(world, "nccl").run(
            captured_rank, checkpoint("qwen2"), kind, sparse, drafts, torch.float32, kv, timeout_s=120.0
        )[0]
        for sparse in (Sparse(budget), Sparse(budget, hot=60 if drafts else 30, ahead=ahead))
    ]
    assert found[0] == found[1]


@pytest.mark.gpu
@FEW_BITS
def test_few_bits_on_one_gpu(kv: str) -> None:
    """Eager steps and prompts, by the kernels."""
    for family in ("qwen2", "gpt-oss"):
        layout = HelixLayout.create("helix", 3)
        on_gpu, found = (
            tokens(family, layout, Sparse(SHORT_WINDOW, hot=hot), device="cuda", kv=kv) for hot in (None, FEW[3])
        )
        assert found == on_gpu


@pytest.mark.gpu
def test_loopback_ranks_on_one_gpu() -> None:
    """Eager steps and prompts, by the kernels."""
    for family in ("qwen2", "gpt-oss"):
        found = tokens(family, HelixLayout.create("helix", 3), Sparse(SHORT_WINDOW, hot=FEW[3]), device="cuda")
        assert found == wanted(family, SHORT_WINDOW)


def without_write_back(engine: Engine) -> None:
    cache = engine.runner.cache
    cache.taken = lambda step: cache.fold(step.span)  # type: ignore[method-assign]


def with_stale_places(engine: Engine) -> None:
    """A page of a new sequence is looked up where the one before, of another sequence, has its place."""
    cache = engine.runner.cache
    assert isinstance(cache, TieredCache)
    layer = cache.layer

    def forgetful(index: int, prefill: bool = False) -> object:
        found = layer(index, prefill)
        hot = found.hot  # type: ignore[attr-defined]
        return replace(found, hot=replace(hot, place_of=hot.place_of.clone())) if prefill else found

    cache.layer = forgetful  # type: ignore[method-assign, assignment]
    for turn in range(5):  # until no page is left that nobody had
        others = [Request(i, (turn, *prompt[::-1]), NEW_TOKENS) for i, prompt in enumerate(prompts())]
        generated(engine, others)


@pytest.mark.parametrize("mistake", [without_write_back, with_stale_places])
def test_mistakes_are_caught(mistake: Callable[[Engine], None]) -> None:
    """In tokens, or by memory that nobody has written, which is NaN."""
    found = None
    with suppress(RuntimeError):
        found = tokens("qwen2", HelixLayout.create("helix", 2), Sparse(SHORT_WINDOW, hot=4 * ALL), mistake)
    assert found != wanted("qwen2", SHORT_WINDOW)
