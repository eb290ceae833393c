"""An engine that serves: what comes and goes while it runs changes nobody's tokens, and leaves nothing behind."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.ranks.timed_client import Arrival, Client, RequestTiming
from comm.loopback import LoopbackWorld, run_ranks
from helix.config import ScheduleConfig
from helix.engine.core import POLL_S, Engine
from helix.engine.inbox import Inbox
from helix.engine.request import Request, RequestUpdate
from helix.engine.scheduler_output import SchedulerOutput
from helix.kv_placement import BlockBudget
from helix.layout import HelixLayout
from helix.sampling_params import SamplingParams
from helix.speculation import DraftBudget, SuffixDrafter
from helix.worker.step_tokens import StepTokens
from tests.e2e.checkpoints import checkpoint, oracle
from tests.e2e.masked_attention import reads_table
from tests.e2e.parity import Continuation, SelfDrafts, Sparse, build_engine
from tests.e2e.test_parity import MOE_LENGTHS, MOE_TOKENS
from tests.e2e.test_sampling_params import EveryThirdToken
from tests.sequences import resize, updates_of

KVP_2 = HelixLayout.create("helix", 2)
# Slots for three, pages that three of them fill, leases of a few tokens: they are extended, and preempted.
CLOSE: dict[str, Any] = dict(
    max_batch=3, max_length=192, prefill_chunk=24, schedule=ScheduleConfig(lookahead_tokens=2, max_prefill_stall_ms=2.0)
)


@dataclass
class ServeResult:
    """What came out of a call."""

    tokens: dict[Any, list[int]] = field(default_factory=dict)
    ends: dict[Any, str] = field(default_factory=dict)
    cached: dict[Any, int] = field(default_factory=dict)
    prefilled: dict[Any, list[int]] = field(default_factory=dict)

    def add(self, delta: RequestUpdate) -> None:
        assert delta.id not in self.ends, "nothing comes behind the end"
        self.tokens.setdefault(delta.id, []).extend(delta.new_token_ids)
        self.cached[delta.id] = delta.cached_tokens
        self.prefilled.setdefault(delta.id, []).append(delta.num_computed_tokens)
        if delta.finish_reason is not None:
            self.ends[delta.id] = delta.finish_reason


def serve(e: Engine, *rounds: list[Request], aborts: dict[Any, int] | None = None) -> ServeResult:
    """Serves rounds of requests, each when all before it have ended; some are aborted after so many tokens."""
    inbox, served, todo = Inbox(), ServeResult(), list(rounds)
    under_way: set[Any] = set()

    def next_round() -> None:
        if not todo:
            inbox.close()
            return
        under_way.update(r.id for r in todo[0])
        for request in todo.pop(0):
            inbox.submit(request)

    next_round()
    for delta in updates_of(e, inbox if e.comm.rank == 0 else None):
        served.add(delta)
        under_way.difference_update(served.ends)
        if delta.id in (aborts or {}) and len(served.tokens[delta.id]) >= (aborts or {})[delta.id]:
            inbox.abort(delta.id)
        if not under_way:
            next_round()
    return served


def resources_in_use(e: Engine) -> tuple[int, int, int]:
    """Pages in use, slots in use, sequences on the device."""
    return sum(t.pool.used for t in e.tables), len(e.runner.requests), int(e.runner.state.active.sum())


def turns(wanted: list[Continuation]) -> tuple[list[Request], list[Request]]:
    """Prompts, and what follows them as the beginning of further prompts."""
    return (
        [Request(i, c.prompt, len(c.tokens)) for i, c in enumerate(wanted)],
        [Request(f"next {i}", c.prompt + c.tokens[:-3], 3) for i, c in enumerate(wanted)],
    )


@pytest.mark.parametrize("family", ["mistral-windowed", "gpt-oss"])
def test_a_prompt_that_skips_what_another_one_computes_lacks_its_windows(family: str) -> None:
    """Two prompts begin alike: the second resumes where the first has come, behind tokens that its rings lack."""
    generator = torch.Generator().manual_seed(3)
    same, *rest = (tuple(torch.randint(1, 250, (n,), generator=generator).tolist()) for n in (260, 7, 9))
    requests = [Request(i, same + tail, 8) for i, tail in enumerate(rest)]

    def body(world: LoopbackWorld, rank: int) -> list[ServeResult]:
        comm = world.communicator(rank, KVP_2.kvp_group(rank))
        sizes: dict[str, Any] = dict(page_size=4, max_batch=2, prefill_chunk=16)
        return [
            serve(build_engine(checkpoint(family), KVP_2, comm, 4, prefix_cache=cached, **sizes), requests)
            for cached in (True, False)
        ]

    cached, plain = run_ranks(2, body, timeout_s=120.0)[0]
    assert cached.tokens == plain.tokens
    steps = [b - a for of in cached.prefilled.values() for a, b in pairwise(of)]
    assert max(steps) > 16, "neither skipped anything"


def engine(world: LoopbackWorld, rank: int, layout: HelixLayout, **options: Any) -> Engine:
    return build_engine(checkpoint("qwen3"), layout, world.communicator(rank, layout.kvp_group(rank)), 16, **options)


def alone(**options: Any) -> Engine:
    return engine(LoopbackWorld(1), 0, HelixLayout.create(), **options)


def test_an_output_says_how_far_a_prompt_is() -> None:
    e = alone(prefill_chunk=64, page_size=64)
    prompt = tuple(range(1, 231))
    first, second = (serve(e, [Request(0, prompt, 2)]) for _ in range(2))
    assert first.cached[0] == 0 and first.prefilled[0][:5] == [0, 64, 128, 192, 230], "it begins with its admission"
    assert second.cached[0] == 229 and [*dict.fromkeys(second.prefilled[0])] == [229, 230], "the last one is computed"
    assert first.tokens == second.tokens


def test_streams_of_a_benchmark_end_with_the_prompt_that_they_run_beside() -> None:
    e = alone(max_batch=2, schedule=ScheduleConfig(lookahead_tokens=2))
    for layer in (layer for tensor in e.runner.cache.tensors for layer in tensor):
        layer.normal_()  # contexts are not computed
    client = Client(e, 7)
    short, stream = (client.request(client.context(16), 3, new) for new in (9, 400))
    seen = client.serve([Arrival(0.0, stream), Arrival(0.0, short)], until=short)
    assert [seen[int(r.id)].end for r in (short, stream)] == ["length", "abort"]
    assert len(seen[int(short.id)].token_times) == 9 and seen[int(short.id)].num_cached_tokens == 16
    assert 0 < len(seen[int(stream.id)].token_times) < 400 and resources_in_use(e) == (0, 0, 0)
    came = RequestTiming(token_times=[1.0, 1.5, 3.0, 7.0])
    assert came.gaps_s == [0.5, 1.5, 4.0] and came.gaps_between(1.5, 6.0) == [0.5, 1.5]


def test_the_next_run_is_launched_before_the_one_before_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """And rank 0 is never further ahead than that."""
    e = alone(schedule=ScheduleConfig(max_decode_run_ms=1e6))  # however slow this machine is just now
    resize(e, run_steps=3)
    e.runner.step_seconds |= {(1, 0): 1e-3}
    seen: list[str] = []
    execute = e.runner.execute

    def launched(decision: SchedulerOutput) -> list[StepTokens]:
        if decision.decode_steps:
            seen.append("run")
        return execute(decision)

    read = StepTokens.read

    def reads(self: StepTokens) -> list[tuple[int, int]]:
        seen.append("step")
        return read(self)

    monkeypatch.setattr(e.runner, "execute", launched)
    monkeypatch.setattr(StepTokens, "read", reads)
    monkeypatch.setattr("helix.engine.core.LEAD_S", 60.0)  # never early: everything else is a matter of time
    serve(e, [Request(0, (1, 2, 3), 13)])
    # The first run brings the prompt's token as well.
    assert seen == ["run", "run", *["step"] * 4, "run", *["step"] * 3, "run", *["step"] * 6]


def test_what_ends_sooner_than_predicted_is_read_then(monkeypatch: pytest.MonkeyPatch) -> None:
    e = alone(schedule=ScheduleConfig(max_decode_run_ms=1e6))
    resize(e, run_steps=2)
    e.runner.step_seconds |= {(1, 0): 40.0}
    looks: list[bool] = []

    def there(self: StepTokens) -> bool:
        looks.append(len(looks) % 3 == 2)
        return looks[-1]

    monkeypatch.setattr(StepTokens, "ready", property(there))
    naps: list[float] = []
    monkeypatch.setattr("helix.engine.core.time", SimpleNamespace(sleep=naps.append))
    serve(e, [Request(0, (1, 2, 3), 5)])
    assert any(looks) and 0 < max(naps) <= POLL_S


def forbid_waits(e: Engine) -> None:
    """From now on the host does not wait for the GPU in what a decision says."""
    execute = e.runner.execute

    def watched(decision: SchedulerOutput) -> list[StepTokens]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return execute(decision)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    e.runner.execute = watched  # type: ignore[method-assign]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "given",
    [
        None,
        SuffixDrafter(2, 2),
        SelfDrafts(2, DraftBudget(sparsity=0.2)),
        Sparse(BlockBudget(1, 2, 4, 16), "local"),
        Sparse(BlockBudget(1, 2, 4, 16), "local", resident=70),
    ],
    ids=["plain", "ngram", "sparse drafts", "block-sparse", "host memory"],
)
def test_what_a_decision_says_is_launched_without_a_wait(given: Any) -> None:
    """Steps and chunks, admissions and retirements: the device never drains for one. The first time compiles.

    Prompts are found in the cache, and then computed, since another tenant has them.
    """
    first, second = turns(oracle("qwen2", MOE_LENGTHS, MOE_TOKENS))
    shaped = SamplingParams(temperature=0.7, top_p=0.9, frequency_penalty=0.1, logit_bias={3: -1.0}, logprobs=2)
    sampled = [replace(r, id=f"drawn {r.id}", sampling=shaped) for r in first]

    others = [replace(r, id=f"others' {r.id}", cache_salt="others") for r in (*first, *sampled)]

    def guided() -> list[Request]:
        return [replace(r, id=f"guided {r.id}", matcher=EveryThirdToken()) for r in first]

    def body(world: LoopbackWorld, rank: int) -> tuple[ServeResult, ServeResult]:
        options = dict(sparse=given) if isinstance(given, Sparse) else dict(drafter=given)
        e = build_engine(checkpoint("qwen2"), HelixLayout.create(), world.communicator(0, [0]), 16, **options, **CLOSE)
        with closing(e):
            before = serve(e, first, sampled, guided(), second)
            forbid_waits(e)
            return before, serve(e, first, sampled, guided(), second, others)

    before, watched = run_ranks(1, body, timeout_s=120.0, device="cuda")[0]
    theirs = {r.id.removeprefix("others' "): watched.tokens.pop(r.id) for r in others}
    assert watched.tokens == before.tokens
    assert theirs == {str(r.id): before.tokens[r.id] for r in (*first, *sampled)}


class Silent(Inbox):
    """Nobody asks for anything for so many times as an engine waits for a request."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left, self.waited = times, list[float]()

    def wait(self, seconds: float) -> bool:
        self.waited.append(seconds)
        self.left -= 1
        if self.left == 0:
            self.submit(Request(0, (1, 2, 3), 4))
            self.close()
        return self.left <= 0


def test_an_idle_engine_lives_and_its_ranks_hear_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several times within the time after which they would give up, for as long as it takes."""
    limits: list[float | None] = []

    def body(world: LoopbackWorld, rank: int) -> tuple[list[int], int, list[float]]:
        e = engine(world, rank, KVP_2, timeout_s=60.0)
        inbox, heard = Silent(20), Counter[bool]()
        execute = e.runner.execute

        def hears(decision: SchedulerOutput) -> list[StepTokens]:
            heard[
                bool(
                    decision.new_requests or decision.prefill_chunks or decision.decode_steps or decision.released_slots
                )
            ] += 1
            return execute(decision)

        e.runner.execute = hears  # type: ignore[method-assign]
        if rank == 1:
            e.comm.set_control_timeout = limits.append  # type: ignore[method-assign]
        tokens = [t for d in updates_of(e, inbox if rank == 0 else None) for t in d.new_token_ids]
        return tokens, heard[False], inbox.waited

    (tokens, _, waited), (_, heard, _) = run_ranks(2, body, timeout_s=60.0)
    assert len(tokens) == 4 and heard == 19 and limits == [60.0, None]
    assert len(waited) == 20 and max(waited) <= 60.0 / 3


@pytest.mark.parametrize(
    "layout, sizes",
    [
        (HelixLayout.create("helix", 4), dict(max_batch=48, pages=44)),
        (HelixLayout.create("dp", dp=4), dict(max_batch=12, pages=60)),
    ],
    ids=str,
)
def test_many_come_and_go_and_nothing_is_left(layout: HelixLayout, sizes: dict[str, int]) -> None:
    """600 requests with shared beginnings over four ranks; the model is a table of what follows a token."""
    table = torch.randn(257, 257, generator=torch.Generator().manual_seed(3))
    following = table.argmax(1).tolist()
    count = 600
    rng = random.Random(5)
    heads = [tuple(rng.randrange(257) for _ in range(length)) for length in (8, 40, 100, 130)]
    requests = []
    for i in range(count):
        tail = tuple(rng.randrange(257) for _ in range(rng.randrange(1, 20)))
        requests.append(Request(i, rng.choice(heads) + tail, rng.randrange(1, 40), priority=rng.randrange(2)))
    aborts = {i: rng.randrange(4) for i in range(count) if rng.random() < 0.3}

    def body(world: LoopbackWorld, rank: int) -> tuple[ServeResult, tuple[int, int, int]]:
        e = engine(
            world, rank, layout, page_size=4, max_length=192, prefill_chunk=1024,
            schedule=ScheduleConfig(lookahead_tokens=2),
            **sizes,
        )  # fmt: skip
        resize(e, run_steps=4)
        reads_table(e.runner.model, table)
        served = serve(e, requests[:250], requests[250:], aborts=aborts)
        # Some preemptions: how many depends on the host's clock, that there are any must not.
        assert rank or (e.timings.preemptions > 0 and e.timings.prefill_tokens < sum(len(r.prompt) for r in requests))
        return served, resources_in_use(e)

    (served, held), *others = run_ranks(4, body, timeout_s=300.0)
    assert held == (0, 0, 0) and all(left[1:] == (0, 0) for _, left in others)
    for request in requests:
        last, wanted = int(request.prompt[-1]), []
        for _ in range(request.max_tokens):
            wanted.append(last := following[last])
        found = served.tokens[request.id]
        assert found == wanted[: len(found)], "tokens are each request's own"
        assert served.ends[request.id] == "abort" or (served.ends[request.id] == "length" and found == wanted)
    assert 120 < sum(end == "abort" for end in served.ends.values()) < 350
