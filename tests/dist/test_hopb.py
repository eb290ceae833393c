"""HOP-B changes when things run, not what comes out: chunked decode steps beside whole ones, and the order of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.ranks.hopb import EXPECTED_UNITS, delays
from comm.base import Communicator, PackedPartials
from comm.hopb import Pipeline
from comm.symm_mem import SymmMemCommunicator
from comm.torch_dist import TorchDistCommunicator
from helix.config import HopBChunks
from helix.engine.core import Engine
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.kv_cache_spec import EngineSizes
from helix.worker.model_runner import ModelRunner
from helix.worker.warmup import choose_chunks
from launch.job.report import describe_hopb
from tests.e2e.checkpoints import checkpoint, oracle
from tests.e2e.parity import Continuation, Result, build_engine, check, generate, loopback
from tests.pool import APART, pool
from tests.sequences import generated_ids

CHUNKS: tuple[HopBChunks, ...] = (2, 3, 8)
# Six prompts in five slots: steps of five rows, no multiple of any number of chunks, some of them idle at the end.
LENGTHS = (7, 1, 15, 16, 17, 60)
NEW_TOKENS = 8


def chunked(family: str, layout: HelixLayout, hopb: HopBChunks) -> set[int]:
    """Into how many chunks rank 0's attention phases are cut; a wrong chunk is off by 1e-2 and more."""
    seen: set[int] = set()

    def tamper(engine: Engine) -> None:
        engine.runner.hopb = hopb
        run = engine.runner.model.pipeline.run

        def spy(chunks: int, attend: Callable[[int], PackedPartials], exchange: object, head_start: bool) -> None:
            sizes: list[int] = []

            def sized(chunk: int) -> PackedPartials:
                found = attend(chunk)
                sizes.append(found.shape[0])
                return found

            assert head_start
            run(chunks, sized, exchange, head_start=head_start)  # type: ignore[arg-type]
            assert len(sizes) == chunks and {*sizes} <= {size := sum(sizes) // chunks, size + 1}
            if engine.comm.rank == 0:
                seen.add(chunks)

        engine.runner.model.pipeline.run = spy  # type: ignore[method-assign]

    wanted = oracle(family, LENGTHS, NEW_TOKENS)
    check(loopback(checkpoint(family), layout, 16, wanted, tamper), wanted)
    return seen


@pytest.mark.parametrize(
    "family, layout, chunks",
    [
        ("qwen2", HelixLayout.create("helix", 3), {"none": set(), 2: {2}, 3: {3}, 8: {5}}),
        ("qwen2", HelixLayout.create("helix", 2, 2), {2: {2}, 8: {5}}),
        ("qwen2", HelixLayout.create("medha", 2), {4: {4}}),
        ("mistral-windowed", HelixLayout.create("helix", 2), {4: {4}, "auto": set()}),  # a CPU overlaps nothing
        ("mistral-windowed", HelixLayout.create("helix", 1, 2), {4: set()}),  # nobody to exchange with
    ],
    ids=str,
)
def test_chunked_steps_are_those_of_one_exchange(
    family: str, layout: HelixLayout, chunks: dict[HopBChunks, set[int]]
) -> None:
    for hopb, expected in chunks.items():
        assert chunked(family, layout, hopb) == expected


def rank(
    index: int, world_size: int, kind: type[TorchDistCommunicator], device: str, path: Path,
    wanted: list[Continuation], hopbs: Sequence[HopBChunks],
) -> list[Result]:  # fmt: skip
    """One rank's results for each number of chunks; on a GPU, captured steps have to draw the same tokens."""
    layout = HelixLayout.create("helix", world_size, 1)
    comm: Communicator = kind(
        layout.kvp_groups(), torch.device(device, index if device == "cuda" else None), timedelta(seconds=60)
    )
    results = []
    for hopb in hopbs:
        engine = build_engine(path, layout, comm, 16)
        engine.runner.hopb = hopb
        results.append(generate(engine, wanted))
        if comm.capturable:
            engine.runner.logits_hook = None
            if hopb in ("auto", "best"):  # what it reads while it chooses; the tests' memory is NaN
                for tensor in engine.runner.cache.tensors:
                    tensor.zero_()
                engine.warmup([DecodeGraphKey()])
                assert set(engine.runner.hopb_chunks) == ({2, 4, 5} if hopb == "auto" else {4, 5})
            for _ in range(2):
                requests = [Request(i, c.prompt, len(c.tokens)) for i, c in enumerate(wanted)]
                assert generated_ids(engine, requests) == results[-1].tokens
        engine.close()
    comm.close()
    return results


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "kind, backend",
    [(TorchDistCommunicator, "nccl"), (SymmMemCommunicator, "nccl"), (TorchDistCommunicator, APART)],
    ids=["nccl", "symm_mem", "host memory"],
)
def test_captured_chunks_give_the_same_tokens(kind: type[TorchDistCommunicator], backend: str) -> None:
    wanted = oracle("qwen2", LENGTHS, NEW_TOKENS)
    hopbs: tuple[HopBChunks, ...] = ("none", *CHUNKS, "auto", "best")
    found = pool(2, backend).run(rank, kind, "cuda", checkpoint("qwen2"), wanted, hopbs, timeout_s=240.0)
    for results in zip(*found, strict=True):
        check(results, wanted)


def planted(hopb: HopBChunks, kvp: int = 2, slots: int = 8, capturable: bool = True) -> ModelRunner:
    """A runner of which only the choice of chunks works."""
    runner = object.__new__(ModelRunner)
    runner.hopb, runner.hopb_chunks, runner.layout = hopb, {}, HelixLayout.create("helix", kvp)
    runner.sizes = EngineSizes(slots)
    runner.comm = SimpleNamespace(capturable=capturable, broadcast_object=lambda value: value)  # type: ignore[assignment]
    return runner


@pytest.mark.parametrize(
    "hopb, seconds, num_chunks",
    [
        ("auto", {1: 1.0, 2: 1.01, 4: 0.5, 8: 0.5}, 1),  # not tried: 2 do not pay
        ("auto", {1: 1.0, 2: 0.995, 4: 0.9, 8: 0.8}, 1),  # less than a hundredth
        ("auto", {1: 1.0, 2: 0.9, 4: 0.8, 8: 0.85}, 4),
        ("auto", {1: 1.0, 2: 0.9, 4: 0.8, 8: 0.7}, 8),
        ("best", {1: 1.0, 2: 1.3, 4: 1.1, 8: 1.2}, 4),  # one exchange is no choice
        ("best", {1: 1.0, 2: 0.9, 4: 0.95, 8: 0.8}, 8),  # all are tried
        ("none", {1: 1.0, 2: 0.5, 4: 0.5, 8: 0.5}, 1),
    ],
)
def test_chunks_are_chosen_by_their_times(
    hopb: str, seconds: dict[int, float], num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = planted(hopb)
    monkeypatch.setattr("helix.worker.warmup.step_seconds", lambda runner, kind: seconds[kind.chunks])
    monkeypatch.setattr("helix.worker.warmup.fill", lambda *args: None)
    choose_chunks(runner, 8, 1 << 20 if hopb == "best" else None)
    assert runner.chunks(8) == runner.chunks(8, row_tokens=1) == num_chunks
    if hopb == "best":
        text = (
            f"2 sequences into 2, 4 sequences into 2, 8 sequences into {num_chunks} chunks; steps of one sequence have"
        )
        assert text in describe_hopb(runner)


def test_hopb_on_says_where_it_changes_nothing() -> None:
    alone, one = planted("best", kvp=1), planted("best", slots=1)
    assert alone.chunks(8) == one.chunks(1) == 1
    assert "has no effect: with layout.kvp=1" in describe_hopb(alone)
    assert "has no effect: steps have one sequence" in describe_hopb(one)
    cpu = planted("best", slots=5, capturable=False)
    choose_chunks(cpu, 5, 100)  # nothing overlaps there: the fewest, untimed
    assert [cpu.chunks(rows) for rows in (1, 2, 5)] == [1, 2, 2]
    assert "several sequences into 2 chunks; steps of one sequence have one exchange" in describe_hopb(cpu)


def test_auto_cuts_no_steps_that_are_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = planted("auto")
    tokens = 0

    def fill(runner: ModelRunner, rows: int, length: int) -> None:
        nonlocal tokens
        tokens = length

    def seconds(runner: ModelRunner, kind: DecodeGraphKey) -> float:
        attention, exchange, each = tokens * 1e-8, 1e-4, 1e-5  # hidden: half of the shorter
        return attention + exchange - min(attention, exchange) / 2 * (kind.chunks > 1) + each * kind.chunks

    monkeypatch.setattr("helix.worker.warmup.fill", fill)
    monkeypatch.setattr("helix.worker.warmup.step_seconds", seconds)
    choose_chunks(runner, 8, 100_000)
    # 6,250 tokens are 62 us of attention, of which 31 are hidden at the price of 10; a quarter of that does not pay.
    assert runner.hopb_chunks == {8: (2, 6250)}
    assert [runner.chunks(8, length) for length in (6249, 6250, 1 << 20)] == [1, 2, 2]


@pytest.mark.parametrize("head_start", [False, True])
def test_an_exchange_of_whole_multiprocessors_is_launched_before_the_attention_beside_it(
    head_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def stream(name: str) -> SimpleNamespace:
        waits = lambda other: calls.append(f"{name} waits for {other.name}")  # noqa: E731
        return SimpleNamespace(name=name, device=torch.device("cpu"), wait_stream=waits)

    main, side = stream("main"), stream("side")
    current = [main]

    @contextmanager
    def on(stream: SimpleNamespace) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def call(what: str) -> Callable[..., str]:
        def called(*args: object) -> str:
            words = ["pause"] if what == "pause" else [what, *map(str, args)]
            calls.append(f"{current[-1].name}: {' '.join(words)}")
            return f"found {args[0]}"

        return called

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "_sleep", call("pause"))
    pipeline = Pipeline(None)
    pipeline.run(2, call("attend"), call("exchange"), head_start)
    assert calls == [f"main: {what}" for i in (0, 1) for what in (f"attend {i}", f"exchange {i} found {i}")]
    calls.clear()
    pipeline._side_stream = side  # type: ignore[assignment]
    pipeline.run(3, call("attend"), call("exchange"), head_start)
    beside = [
        call
        for i in range(2)
        for call in (
            f"main: attend {i}", "side waits for main", f"side: exchange {i} found {i}", *["main: pause"] * head_start,
        )
    ]  # fmt: skip
    assert calls == [*beside, "main: attend 2", "main waits for side", "main: exchange 2 found 2"]


@pytest.mark.gpu(gb=1000)  # alone: it is timed
def test_delays_overlap_as_in_the_paper() -> None:
    # Other processes take the GPU's time by turns, which can only add: the least of five. A twentieth: launches,
    # clocks.
    measured = [delays(torch.device("cuda"))[0] for _ in range(5)]
    for regime, units in EXPECTED_UNITS.items():
        assert min(m[f"{regime}_units"] for m in measured) == pytest.approx(units, rel=0.05)


def test_the_timeline_of_the_benchmark_has_every_chunk_once() -> None:
    for row in delays(torch.device("cpu"))[1:]:
        spans = [(span["stream"], span["chunk"]) for span in row["spans"]]
        assert sorted(spans) == sorted((stream, i) for stream in ("attention", "exchange") for i in range(8))
        assert all(0 <= span["start_us"] < span["end_us"] for span in row["spans"])
