"""Chunks of few sizes: padded, several prompts in one, the same launches whatever they hold; no token changes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from threading import Thread
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from comm.loopback import LoopbackWorld
from comm.solo import SoloCommunicator
from helix.engine.core import Engine
from helix.engine.inbox import Inbox
from helix.engine.request import Request
from helix.kv_placement import PromptChunk
from helix.layers import indexer
from helix.layers.mla import min_rows_to_expand
from helix.layers.specs import MLASpec
from helix.layout import HelixLayout
from helix.speculation import Draft
from helix.worker.cuda_graphs import StepGraphs
from helix.worker.graph_keys import (
    CONTEXT_BUCKETS,
    DEEP,
    LONG,
    SIZES,
    UNPACKED_BUCKETS,
    ContextBucket,
    DecodeGraphKey,
    PrefillGraphKey,
    max_captured_size,
    padded_size,
    selection_buckets,
    sizes_to_capture,
)
from helix.worker.step import DecodeState
from kernels import dispatch
from launch.inputs.shapes import spec_of
from tests.e2e import test_layer_drafts
from tests.e2e.checkpoints import DEMO, checkpoint, oracle
from tests.e2e.fuzz_runs import SMALL_CHUNKS
from tests.e2e.parity import UNHURRIED, build_engine
from tests.e2e.test_layer_drafts import KINDS
from tests.e2e.test_parity import MOE_LENGTHS, MOE_TOKENS
from tests.sequences import generated_ids, updates_of

KEYS = [depth.keys for depth in CONTEXT_BUCKETS]


def size_of(counts: list[int], keys: int, depths: Sequence[ContextBucket] = CONTEXT_BUCKETS) -> PrefillGraphKey:
    return padded_size(counts, keys, LONG, depths)


WAITS = {"_local_scalar_dense", "nonzero", "item", "equal", "masked_select"}  # for the device, as no graph may


def test_sizes() -> None:
    assert size_of([3], 7) == PrefillGraphKey(128, 2, 128, KEYS[0], True) and size_of([100, 28], 7) == PrefillGraphKey(
        128, 34, 128, KEYS[0], True
    )
    assert size_of([1024], DEEP) == PrefillGraphKey(1024, 2, 1024, KEYS[1], True)
    assert size_of([1400], 9).tokens == 1536 and not size_of([1300], 9).captured, "a ninth is padding, more is too much"
    assert size_of([1300, 50], 1400) == PrefillGraphKey(1360, 3, 1300, 1400), (
        "as long as it is, but for its last few tokens"
    )
    assert not size_of([1] * 40, 1).captured and not size_of([9000], 9000).captured
    sizes = sizes_to_capture(1024, 1 << 20)
    assert sizes == sorted({*sizes}, reverse=True) and len(sizes) == 2 * 7 + 1 and all(size.captured for size in sizes)
    assert all(size_of([tokens], 1).captured for tokens in SIZES if tokens <= LONG)


def test_depths_of_unpacked_keys() -> None:
    """A chunk is launched with as many keys as there may be, or as it comes."""
    assert size_of([9], DEEP - 1, UNPACKED_BUCKETS) == PrefillGraphKey(128, 2, 128, DEEP, True)
    assert size_of([9], DEEP, UNPACKED_BUCKETS) == PrefillGraphKey(16, 2, 9, DEEP)
    assert {size.keys for size in sizes_to_capture(8192, 1 << 20, UNPACKED_BUCKETS)} == {DEEP}


def test_depths_of_choices() -> None:
    """The host's number decides whether tokens are chosen: it must not be more than a replayed chunk has."""
    depths = selection_buckets(2048, 3, 9000, 8192)
    assert [size_of([9], keys, depths).keys for keys in (1, 682, 683, 9000)] == [682, 682, 9000, 9000]
    assert 3 * 682 <= 2048 < 3 * 683 and selection_buckets(2, 3, 50, 128) == selection_buckets(2, 8, 50, 128)
    assert {size.keys for size in sizes_to_capture(128, 682, depths)} == {682}
    assert {size.keys for size in sizes_to_capture(128, 683, depths)} == {682, 9000}
    assert [size_of([1536], keys, depths).keys for keys in (682, 683)] == [682, 9000]
    deep = selection_buckets(2048, 3, 2 * DEEP, 8192)
    assert [size_of([1536], keys, deep).keys for keys in (682, 683, DEEP)] == [682, DEEP, 2 * DEEP]
    assert size_of([9], 683, deep).keys == 2 * DEEP, "a short chunk chooses for all its rows at once"
    by_depth = {
        keys: [s.tokens for s in sizes_to_capture(2048, 1 << 20, deep) if s.keys == keys] for keys in (DEEP, 2 * DEEP)
    }
    assert by_depth == {DEEP: [2048, 1536], 2 * DEEP: [2048, 1536, *reversed(SIZES[:7])]}
    assert {s.keys for s in sizes_to_capture(8192, 1 << 20, deep) if s.tokens == 8192} == {682, DEEP, 2 * DEEP}
    longest = [size_of([8192], keys, deep).keys for keys in (682, 683, 2730, 2731, 5460, 5461, 10921, DEEP, 21841)]
    assert longest == [682, 2730, 2730, 5460, 5460, 10920, DEEP, 21840, 2 * DEEP], "twice what there are, at most"
    shorter = selection_buckets(2048, 3, 2 * DEEP, 4096)
    assert [size_of([4096], keys, shorter).keys for keys in (682, 683, 1366, 5461)] == [682, 2730, 2730, 10920]
    assert {s.keys for s in sizes_to_capture(4096, 1 << 20, shorter) if s.tokens == 4096} == {682, DEEP, 2 * DEEP}


def test_longer_chunks_are_captured_over_several_ranks() -> None:
    """A rank alone takes longer for them than their launch does."""
    assert [max_captured_size(16384, ranks) for ranks in (1, 2, 8)] == [LONG, 16384, 16384]
    assert max_captured_size(9000, 8) == 8192 and max_captured_size(300, 8) == 256 and max_captured_size(10, 8) == 128
    assert not padded_size([9000], 9000, LONG).captured
    assert padded_size([16000], 9000, 16384) == PrefillGraphKey(16384, 2, 16384, KEYS[0], True)
    assert not padded_size([12000], 9000, 16384).captured, "too much padding"
    longer = {(size.tokens, size.sequences) for size in sizes_to_capture(16384, 1 << 20) if size.tokens > LONG}
    assert longer == {(16384, 2), (16384, 34)}


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes such that chunks of up to 64 tokens are captured, and are not; tokens are chosen for few rows at a time."""
    for target, value in SMALL_CHUNKS.items():
        monkeypatch.setattr(target, value)


def test_latents_are_expanded_for_enough_rows() -> None:
    """512 numbers of a latent by 256 of a head's key and value, for 1,088 products of a row less 320; twice that."""
    r1, glm = (spec_of(model).attention for model in ("deepseek-r1", "glm-5.2"))
    assert isinstance(r1, MLASpec) and isinstance(glm, MLASpec)
    assert min_rows_to_expand(r1) == pytest.approx(2 * 512 * 256 / (1088 - 320)) and min_rows_to_expand(glm) == math.inf


def test_captured_sizes_where_latents_are_expanded() -> None:
    """A chunk that is launched as if of so many keys has no more; several prompts have no captured one."""
    comm = LoopbackWorld(1).communicator(0, (0,))
    path, lengths = checkpoint("deepseek-v3-yarn"), {"max_length": 90_000, "prefill_chunk": 8192}
    e = build_engine(path, HelixLayout.create(), comm, 16, max_batch=4, **lengths)
    runner, ids = e.runner, torch.arange(9000)
    runner.min_rows_to_expand = 340

    def size(*prompts: tuple[int, int]) -> PrefillGraphKey:
        return runner.chunk_size([PromptChunk(i, begin, ids[:count]) for i, (begin, count) in enumerate(prompts)])

    assert size((0, 670)) == PrefillGraphKey(768, 2, 768, KEYS[0], True)
    assert size((0, 690)) == PrefillGraphKey(768, 2, 768, LONG, True, True)
    assert size((8000, 380)) == PrefillGraphKey(384, 2, 380, 8380, False, True), "deep and short: as it is"
    assert size((0, 8192)).keys == 8192 and size((8000, 8190)) == PrefillGraphKey(8192, 2, 8192, 2 * 8192, True, True)
    assert size((60_000, 8190)).keys == 90_000 and size((0, 300), (0, 100)).captured
    assert not size((0, 800), (0, 800)).captured and size((0, 800), (0, 800)).expands
    assert not size((60_000, 100), *[(0, 700)] * 9).expands, "the short would be expanded as long as the longest"
    first = runner.first_sizes(90_000)
    assert {s.tokens for s in first if not s.expands and s.sequences == 2} == {s for s in SIZES if s < 680}
    assert {s.tokens for s in first if s.expands} == {s for s in SIZES if 340 <= s <= LONG}
    assert {s.keys for s in first if s.expands} == {8192} and first == sorted(first, reverse=True)


class Recorder(TorchDispatchMode):
    """Operations with the shapes of their results, and kernels with grids and numbers, as they are launched."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if not func.is_view:
            shapes = tuple(result.shape) if isinstance(result, torch.Tensor) else ()
            self.launches.append(
                (func.overloadpacket.__name__, shapes, [a for a in args if isinstance(a, int | float)])
            )
        return result

    def kernel(self, executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        numbers = [a for a in args if isinstance(a, int | float)]
        self.launches.append((executor.fn.__name__, executor.grid if isinstance(executor.grid, tuple) else (), numbers))


class Replays(StepGraphs):
    """In place of graphs: counts what would be launched one by one, and asserts that a key always launches the same."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.of: dict[Hashable, list[Any]] = {}

    def run(self, step: Callable[..., Any], *args: Hashable, captures: bool = True) -> Any:
        before, self.recorder.launches = self.recorder.launches, []
        result = step(*args)
        mine, self.recorder.launches = self.recorder.launches, [*before, ("graph", args, [])]
        assert self.of.setdefault(args, mine) == mine, "what is launched depends on what the chunk holds"
        return result


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter runs")
@pytest.mark.parametrize(
    "family, scores, kv, expands",
    [
        ("demo", 1 << 26, "auto", math.inf), ("glm-5-shared", 1 << 26, "auto", math.inf),
        ("glm-5-shared", 1 << 14, "auto", math.inf),
        *((family, 1 << 26, "auto", math.inf) for family in ("gpt-oss", "gemma3", "qwen3-next", "qwen3.5-moe")),
        *((family, 1 << 26, "fp8", math.inf) for family in ("demo", "deepseek-v3-yarn", "gpt-oss", "glm-5-shared")),
        ("deepseek-v3-yarn", 1 << 26, "fp8", 70), ("deepseek-v3-yarn", 1 << 26, "auto", 70),
    ],
)  # fmt: skip
def test_a_captured_chunk_is_one_launch_and_the_same_for_any_content(
    monkeypatch: pytest.MonkeyPatch, family: str, scores: int, kv: str, expands: float
) -> None:
    """One prompt at the beginning and deep, several, known prefixes: two keys, and few launches beside the graph.

    Where a prompt's latents are expanded, from `expands` of its tokens on, it has a third key.
    """
    comm = LoopbackWorld(1).communicator(0, (0,))
    path = DEMO if family == "demo" else checkpoint(family)
    monkeypatch.setattr(indexer, "MAX_SCORES", scores)  # few: some rows of a chunk choose after others
    e = build_engine(
        path, HelixLayout.create(), comm, 16, page_size=64, max_length=1000, max_batch=4, prefill_chunk=256, kv=kv
    )
    recorder, e.runner.min_rows_to_expand = Recorder(), expands
    e.runner.pads_chunks, e.runner.graphs = True, Replays(recorder)
    monkeypatch.setattr(dispatch, "on_gpu", lambda t: True)
    monkeypatch.setattr(GridExecutor, "__call__", lambda *args, **kwargs: recorder.kernel(*args, **kwargs))
    contents = [
        [PromptChunk(0, 0, torch.arange(128))],
        [PromptChunk(2, 700, torch.arange(77), 750)],
        [PromptChunk(1, 3, torch.arange(5)), PromptChunk(3, 0, torch.arange(100))],
        [PromptChunk(3, 90, torch.arange(1)), PromptChunk(0, 0, torch.arange(20)), PromptChunk(2, 9, torch.arange(99))],
    ]
    with recorder, torch.inference_mode():
        for prompts in contents:
            recorder.launches.clear()
            e.runner.prompt_states(prompts)
            assert [name for name, *_ in recorder.launches].count("graph") == 1
            assert sum(name.endswith("_kernel") for name, *_ in recorder.launches) == 0
    captured: dict[Any, list[Any]] = e.runner.graphs.of  # type: ignore[attr-defined]
    assert {key[0].sequences for key in captured} == {2, 34}
    assert sum(key[0].expands for key in captured) == (expands < math.inf)
    assert min(len(launches) for launches in captured.values()) > 20
    assert not WAITS & {name for launches in captured.values() for name, *_ in launches}


class Graphs(Replays):
    """In place of graphs: a key is captured with its second run, if that may be."""

    def __init__(self) -> None:
        self.warm, self.captured = set[Hashable](), list[Any]()

    def run(self, step: Callable[..., Any], *args: Any, captures: bool = True) -> Any:
        if captures and args in self.warm and args not in self.captured:
            self.captured.append(args)
        self.warm.add(args)
        return step(*args)

    def has(self, step: Callable[..., Any], *args: Hashable) -> bool:
        return args in self.captured


def test_chunks_are_timed_before_the_first_request(small_sizes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a server's first requests would come in chunks of few tokens, as if these took long."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    comm = LoopbackWorld(1).communicator(0, (0,))
    e = build_engine(checkpoint("qwen2"), HelixLayout.create(), comm, 4, prefill_chunk=70)
    e.runner.pads_chunks, e.runner.graphs = True, Graphs()
    e.warmup([DecodeGraphKey()], chunks=True)
    assert 0 < e._times.seconds(e._times.work(0, 8)) <= e._times.seconds(e._times.work(0, 70))
    assert e._times.max_work(1e3) > 70


def test_sizes_that_came_are_captured_in_a_pause(small_sizes: None) -> None:
    """Not while requests are served; and pages that others share stay as they are."""
    comm = LoopbackWorld(1).communicator(0, (0,))
    e = build_engine(checkpoint("qwen2"), HelixLayout.create(), comm, 4, prefill_chunk=70)
    e.runner.pads_chunks, e.runner.graphs = True, (graphs := Graphs())
    wanted, inbox, seen = oracle("qwen2", MOE_LENGTHS, MOE_TOKENS), Inbox(), dict[Any, list[int]]()

    def feed() -> None:
        for turn in range(2):
            for i, c in enumerate(wanted):
                inbox.submit(Request((turn, i), c.prompt, len(c.tokens)))
            while sum(map(len, seen.values())) < (turn + 1) * sum(len(c.tokens) for c in wanted):
                time.sleep(0.01)
            before.append([key for key in graphs.captured if isinstance(key[0], PrefillGraphKey)])
            while e.runner.eager_size is not None:
                time.sleep(0.01)
        inbox.close()

    before: list[list[Any]] = []
    thread = Thread(target=feed)
    thread.start()
    for update in updates_of(e, inbox):
        seen.setdefault(update.id, []).extend(update.new_token_ids)
    thread.join()
    assert before[0] == [] and len(before[1]) >= 2, before
    assert {i: tuple(tokens) for i, tokens in seen.items()} == {
        (turn, i): c.tokens for turn in range(2) for i, c in enumerate(wanted)
    }


Texts = dict[tuple[int, ...], tuple[int, ...]]


def drafts_by_text(engine: Engine) -> Texts:
    """Fills with what the engine drafts after each text.

    By the text, as how many steps run depends on the clock: they are launched ahead of the tokens that are read, so
    that a sequence may sit in a few after its end, with room for no draft.
    """
    drafter, found = engine.runner.drafter, Texts()
    propose = drafter.propose

    def noted(state: DecodeState, kind: DecodeGraphKey) -> Draft:
        draft = propose(state, kind)
        for row in state.active[: kind.rows].nonzero()[:, 0].tolist():
            count = max(min(kind.drafts, int(state.max_drafts(kind.rows)[row])), 0)
            token_ids = tuple(state.history[row, : int(state.lengths[row]) + 1].tolist())
            if count:
                found[token_ids] = tuple(draft.tokens[row, :count].tolist())
        return draft

    drafter.propose = noted  # type: ignore[method-assign]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family, tokens, kv",
    [
        *(("demo", n, "auto") for n in (128, 1536, 8192)),
        *((of, 128, "auto") for of in ("glm-5", "gpt-oss", "gemma3", "qwen3-next", "qwen3.5-moe", *KINDS)),
        ("demo", 1536, "fp8"),
    ],
)
def test_a_replayed_chunk_is_the_eager_one(family: str, tokens: int, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise: the same kernels run, over whatever was packed last. Tokens are chosen for 32 rows at a time."""
    monkeypatch.setattr(indexer, "MAX_SCORES", 32 * 512)
    comm, demo = SoloCommunicator(torch.device("cuda", 0)), family == "demo"
    drafts = test_layer_drafts.drafts(family) if family in KINDS else None
    path = test_layer_drafts.target(family) if family in KINDS else checkpoint(family)
    e = build_engine(
        path, HelixLayout.create(), comm, 16, page_size=64, drafter=drafts, adaptive=False,
        max_length=9000 if demo else 500, max_batch=3, prefill_chunk=8192 if demo else 256,
        dtype=torch.bfloat16 if demo else torch.float32, kv=kv, schedule=UNHURRIED,
    )  # fmt: skip
    assert e.runner.pads_chunks
    if drafts is not None:
        e.runner.logits_hook = lambda *of_draw: None  # steps that are not captured can be recorded
    e.warmup([], chunks=True)
    assert e._times.seconds(e._times.work(0, 128)) > 0, "timed before the first request"
    vocab = 4000 if demo else 250
    prompts = [tuple((7 * i + seed) % vocab + 1 for i in range(n)) for seed, n in enumerate((tokens, tokens - 9, 40))]
    requests = [Request(i, prompt, 5) for i, prompt in enumerate(prompts)]
    graphs, found = e.runner.graphs, []
    for e.runner.graphs in (graphs, None):
        e._reset()
        drafts_of = {} if drafts is None else drafts_by_text(e)
        found.append((generated_ids(e, requests), dict(drafts_of)))
    e.runner.graphs = graphs
    assert found[0] == found[1] and len(found[0][0]) == 3
    e.close()
