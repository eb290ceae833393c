"""The engine as its callers meet it: refusals, ends, early leaving, failures, and what it measures."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from comm.loopback import LoopbackWorld, run_ranks
from helix.config import Config
from helix.engine.core import Engine
from helix.engine.draft_policy import DraftPolicy
from helix.engine.inbox import Inbox
from helix.engine.request import Request, RequestUpdate
from helix.engine.scheduler import Scheduler
from helix.engine.timings import Timings
from helix.layout import HelixLayout
from helix.sampling_params import SamplingParams
from helix.setup import engine as build
from helix.speculation import SuffixDrafter
from helix.worker.graph_keys import DecodeGraphKey
from kernels.tokens.commit import Candidates
from tests.e2e.checkpoints import checkpoint, oracle
from tests.e2e.parity import build_model
from tests.e2e.test_sampling_params import EveryThirdToken
from tests.e2e.test_serve import KVP_2, alone, engine, resources_in_use
from tests.sequences import generated, generated_ids, resize, updates_of

FAMILY = "qwen3"
PROMPT = tuple(range(1, 20))


REFUSED = [
    (Request(0, (), 5), "the prompt is empty"),
    (Request(1, (1, 257), 5), "prompt has token id 257, but the model's vocabulary is [0, 257)"),
    (Request(2, (-1,), 5), "prompt has token id -1, but"),
    (Request(3, (1, 2**31), 5), "prompt has token id 2147483648, but"),
    (Request(4, (1, -(2**70), 2**63), 5), "prompt has token id -1180591620717411303424, but"),
    (
        Request(5, PROMPT, 3, SamplingParams(logit_bias={257: 1.0})),
        "logit_bias has token id 257, but the model's vocabulary",
    ),
    (Request(6, PROMPT, 0), "max_tokens=0"),
    (Request(7, PROMPT, 500), "exceeds the model's context of 512"),
    (Request(8, PROMPT, 82), "needs 101 tokens of KV, but a sequence has at most 100 here: "),
]


@pytest.mark.parametrize("drafter", [None, SuffixDrafter(4, 3)], ids=["plain", "drafts"])
@pytest.mark.parametrize("slots", [1, 2])  # 2: the cache would hold what is longer than a sequence may be
def test_what_cannot_be_served_harms_nobody(slots: int, drafter: SuffixDrafter | None) -> None:
    e, inbox = alone(max_batch=slots, max_length=100, drafter=drafter), Inbox()
    good = Request("good", PROMPT, 81)
    for request in (good, *(request for request, _ in REFUSED), Request("waits", PROMPT, 9), good):
        inbox.submit(request)
    for name in ("waits", "nobody"):
        inbox.abort(name)
    inbox.close()
    updates = list(updates_of(e, inbox))
    ends = {update.id: (update.finish_reason, update.reason) for update in updates if update.finish_reason is not None}
    assert ends.pop("waits") == ("abort", None) and ends.pop("good") == ("length", None)
    assert [*ends] == [request.id for request, _ in REFUSED]
    for (why, reason), (_, words) in zip(ends.values(), REFUSED, strict=True):
        assert why == "error" and words in (reason or ""), reason
    (twice,) = (u.reason for u in updates if u.id == "good" and u.finish_reason == "error")
    assert twice is not None
    tokens = tuple(t for update in updates for t in update.new_token_ids)
    assert len(tokens) == 81 and tokens == generated_ids(alone(), [good])["good"]
    assert resources_in_use(e) == (0, 0, 0)


@pytest.mark.parametrize("where", ["refusal", "scheduler"])
def test_a_failure_while_one_request_is_read_is_its_own(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted, in what no request is known to do."""
    e = alone()
    of: Any = e if where == "refusal" else Scheduler
    read = getattr(of, name := where if where == "refusal" else "submit")

    def reading(*arguments: Any) -> str | None:
        if arguments[-1 if of is e else 1].id == "bad":
            raise MemoryError("planted")
        return read(*arguments)  # type: ignore[no-any-return]

    monkeypatch.setattr(of, name, reading)
    found = generated(e, [Request(request, PROMPT, 12) for request in ("bad", "good")])
    assert found["bad"].finish_reason == "error" and found["good"].finish_reason == "length"
    assert found["bad"].reason == "could not read the request: MemoryError: planted"
    assert found["good"].token_ids == generated_ids(alone(), [Request(0, PROMPT, 12)])[0]
    assert resources_in_use(e) == (0, 0, 0)


@pytest.mark.parametrize("drafter, free", [("none", 700_000), ("suffix", 900_000)])
def test_the_longest_sequence_of_an_engine_fits(drafter: str, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sets no limit asks for as many tokens as a sequence may have."""
    monkeypatch.setattr(build, "free_bytes", lambda device: free)
    config = Config()
    config.speculation.drafter, config.speculation.suffix_pool_tokens = drafter, 0
    config.decode.prefill_chunk = "64"
    layout, comm = HelixLayout.create(), LoopbackWorld(1).communicator(0, [0])
    model = build_model(checkpoint(FAMILY), layout, comm, torch.float32)
    e = build.build_engine(layout, model, config, 4, 4 * 512)
    assert e.runner.sizes.length < 200, "the test needs a cache that is shorter than the context"
    max_new_tokens = e.runner.sizes.length - len(PROMPT)
    ends = generated(e, [Request(n, PROMPT, max_new_tokens + n) for n in range(2)])
    assert (ends[0].finish_reason, ends[1].finish_reason) == ("length", "error")


def test_the_limits_of_one_call_are_not_those_of_the_next() -> None:
    """A sequence whose log-probabilities are reported takes no drafts; who has its slot in the next call does."""
    e, prompt = alone(max_batch=2, drafter=SuffixDrafter(4, 3), adaptive=False), (1, 2, 3, 4) * 6
    steps = []
    for sampling in SamplingParams(), SamplingParams(logprobs=0), SamplingParams():
        generated(e, [Request(0, prompt, 60, sampling)])
        steps.append(e.timings.sequence_steps)
    assert steps[0] == steps[2] < steps[1] == 59


@pytest.mark.parametrize("broken", range(4), ids="step {}".format)
def test_no_token_comes_out_of_a_step_in_which_a_rank_gave_up(broken: int) -> None:
    """A collective that gave up leaves numbers that mean nothing: they are no tokens, however well they look."""
    e = alone()
    resize(e, run_steps=1)
    wanted = generated_ids(alone(), [Request(0, PROMPT, 8)])[0]
    gave_up = []
    original, steps = e.runner._candidates, itertools.count()

    def lost(*args: Any) -> Candidates:
        sampled = original(*args)
        if next(steps) < broken:
            return sampled
        gave_up.append(True)
        return Candidates(torch.zeros_like(sampled.pairs))

    def check(wait: bool = True) -> None:
        if gave_up:
            raise RuntimeError("rank 0 waited 300 s for rank 3")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(e.runner, "_candidates", lost)
        patch.setattr(e.comm, "check", check)
        updates: list[RequestUpdate] = []
        with pytest.raises(RuntimeError, match="rank 3"):
            deque(map(updates.append, updates_of(e, Inbox.of([Request(0, PROMPT, 8)]))))
    # Prefill and the first step are one decision's; the next one is launched before anything of it comes out.
    assert tuple(t for update in updates for t in update.new_token_ids) == wanted[: broken - 1 if broken > 2 else 0]
    with pytest.raises(RuntimeError, match=r"engine is broken.*rank 0 waited 300 s for rank 3"):
        generated(e, [])


def test_a_rank_that_gave_up_in_the_last_step_says_so() -> None:
    """Rank 0 looks before it takes a token; the others, which read none, look when their run of steps ends."""

    def body(world: LoopbackWorld, rank: int) -> None:
        e = engine(world, rank, KVP_2)
        steps, decode = itertools.count(1), e.runner.decode

        def last_step(*args: Any) -> torch.Tensor:
            if next(steps) == 7:  # the first of 8 tokens comes from the prompt
                e.comm.check = gave_up  # type: ignore[method-assign]
            return decode(*args)

        def gave_up(wait: bool = True) -> None:
            if rank == 1:
                raise RuntimeError("rank 1 waited 300 s for rank 0")

        e.runner.decode = last_step  # type: ignore[method-assign]
        generated(e, [Request(0, PROMPT, 8)])

    with pytest.raises(RuntimeError, match="waited 300 s for rank 0"):
        run_ranks(2, body, timeout_s=60)


@pytest.mark.parametrize("run_steps, prefill_chunk", [(1, 64), (5, 1), (8, 7), (64, 4096)])
def test_run_length_and_chunks_change_nothing(run_steps: int, prefill_chunk: int) -> None:
    wanted = oracle(FAMILY, (7, 1, 15, 16, 17, 300), 48)[:4]
    e = alone(prefill_chunk=prefill_chunk)
    resize(e, run_steps=run_steps)
    outputs = generated(e, [Request(i, c.prompt, len(c.tokens)) for i, c in enumerate(wanted)])
    assert [outputs[i].token_ids for i in range(4)] == [c.tokens for c in wanted]


def test_eos_ends_a_request_and_gives_its_slot_on() -> None:
    wanted = oracle(FAMILY, (7, 1, 15, 16, 17, 300), 48)
    tokens = wanted[3].tokens
    eos = next(t for t in tokens[5:] if tokens.index(t) >= 5)  # first seen after a few tokens
    e = alone(max_batch=1)
    e.runner.model.spec = replace(e.runner.model.spec, eos=(eos,))
    outputs = generated(e, [Request(0, wanted[3].prompt, 48), Request(1, wanted[2].prompt, 2)])
    assert outputs[0].finish_reason == "stop" and outputs[0].token_ids == tokens[: tokens.index(eos) + 1]
    assert outputs[1].token_ids == wanted[2].tokens[:2]
    assert resources_in_use(e) == (0, 0, 0)


def raising(error: BaseException, after: int = 0) -> Callable[..., Any]:
    """A function that raises from its call number `after` on, and returns None before."""
    calls = itertools.count()

    def call(*args: Any) -> None:
        if next(calls) >= after:
            raise error

    return call


REQUESTS = [Request(i, PROMPT, 9) for i in range(7)]


def end_early(e: Engine, how: str) -> None:
    """Begins to serve the requests, and raises what ends that."""
    updates, norm = e.serve(Inbox.of(REQUESTS)), e.runner.model.norm.pre_norm
    next(updates)
    with pytest.MonkeyPatch.context() as patch:
        match how:
            case "the caller leaves":
                updates.close()
                raise KeyError("planted")
            case "the caller":
                updates.throw(KeyError("planted"))
            case "a callback":
                patch.setattr(DraftPolicy, "observe", raising(KeyError("planted"), after=2))
            case "control-C":
                patch.setattr(Timings, "step", raising(KeyboardInterrupt("planted"), after=3))
            case "NaN":
                patch.setattr(norm, "weight", torch.full_like(norm.weight, torch.nan))
        list(updates)


@pytest.mark.parametrize(
    "how, layout",
    [
        *((how, KVP_2) for how in ("the caller leaves", "the caller", "a callback", "control-C", "NaN")),
        ("the caller leaves", HelixLayout.create("dp", dp=2)),
    ],
    ids=str,
)
def test_an_error_between_steps_ends_the_call_and_no_more(how: str, layout: HelixLayout) -> None:
    wanted = generated_ids(alone(), REQUESTS)[0]

    def body(world: LoopbackWorld, rank: int) -> None:
        e = engine(world, rank, layout)
        if rank == 0:
            with pytest.raises((KeyError, KeyboardInterrupt, RuntimeError), match=r"planted|NaN"):
                end_early(e, how)
        else:
            generated(e, [])
        assert resources_in_use(e) == (0, 0, 0)
        again = generated(e, REQUESTS)
        assert all(output.token_ids == wanted for output in again.values()) and len(again) == (7 if rank == 0 else 0)
        assert resources_in_use(e) == (0, 0, 0)

    run_ranks(2, body, timeout_s=60)


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_error_in_a_step_breaks_the_engine_on_every_rank(culprit: int) -> None:
    broken: dict[int, str] = {}

    def body(world: LoopbackWorld, rank: int) -> None:
        e = engine(world, rank, KVP_2)
        if rank == culprit:
            e.runner.logits_hook = raising(KeyError("planted"), after=3)
        with pytest.raises((KeyError, RuntimeError), match="planted") as first:
            generated(e, REQUESTS)
        assert first.type is (KeyError if rank == culprit else RuntimeError)
        with pytest.raises(RuntimeError) as caught:
            generated(e, REQUESTS)
        broken[rank] = str(caught.value)

    with pytest.raises(RuntimeError, match="planted"):  # what the transport was told
        run_ranks(2, body, timeout_s=60)
    assert all("engine is broken" in words and "KeyError: 'planted'" in words for words in broken.values()), broken
    assert set(broken) == {0, 1}


@pytest.mark.parametrize("left", [False, True])
def test_where_a_call_cannot_be_ended_that_is_said(left: bool) -> None:
    """The first error is raised, with a note; leaving early does not hide that it failed."""
    e = alone()
    updates = e.serve(Inbox.of(REQUESTS))
    next(updates)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(e.comm, "broadcast_object", raising(OSError("no way out")))
        with pytest.raises(OSError if left else KeyboardInterrupt) as caught:
            updates.close() if left else updates.throw(KeyboardInterrupt("planted"))
    assert "no way out" in (str(caught.value) if left else caught.value.__notes__[0])
    with pytest.raises(RuntimeError, match=r"engine is broken.*OSError: no way out"):
        generated(e, REQUESTS)


def test_one_call_at_a_time() -> None:
    e = alone()
    outer = e.serve(Inbox.of(REQUESTS))
    next(outer)
    assert not torch.is_inference_mode_enabled()
    with pytest.raises(RuntimeError, match="this engine is already serving"):
        generated(e, REQUESTS)
    assert {u.id for of_step in outer for u in of_step if u.finish_reason == "length"} == {*range(7)}
    assert len(generated(e, REQUESTS)) == 7


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_no_number_in_one_rank_of_two_ends_both(value: float) -> None:
    def body(world: LoopbackWorld, rank: int) -> None:
        e = engine(world, rank, KVP_2)
        if rank == 1:
            e.runner.model.layers[0].ffn.down.weight.fill_(value)
        generated(e, [Request(0, PROMPT, 3)])

    with pytest.raises(RuntimeError, match="logits are NaN"):
        run_ranks(2, body, timeout_s=60)


def test_what_is_measured() -> None:
    layout = HelixLayout.create("helix", 3, 1)
    requests = [Request(0, PROMPT, 10), Request(1, tuple(range(1, 101)), 10)]

    def body(world: LoopbackWorld, rank: int) -> Any:
        e = engine(world, rank, layout, max_batch=2)
        return list(updates_of(e, Inbox.of(requests))), e.timings

    updates, timings = run_ranks(3, body, timeout_s=60)[0]
    short, long = ([update for update in updates if update.id == i] for i in range(2))
    assert [len(update.new_token_ids) for update in short] == [0] + [1] * 10, "its admission, then its tokens"
    assert [update.num_computed_tokens for update in short] == [0] + [19] * 10 and long[-1].num_computed_tokens == 100
    assert [update.finish_reason for update in short] == [None] * 10 + ["length"]
    assert timings.prefill_tokens == 119
    assert timings.decode_tokens == 2 * 9
    # Prompts share the first chunk of 64: the first one decodes between the chunks.
    assert 10 <= len(timings.ttl_s) <= 12 and all(t > 0 for t in timings.ttl_s)

    # Most held at a time: near the end of both, the last token drawn not being in the cache.
    def lacking(starts: tuple[int, int]) -> int:
        ends = zip((19 + 8, 100 + 9), starts, strict=True)
        held = np.sum([[layout.local_length(end, k, 16, start) for k in range(3)] for end, start in ends], axis=0)
        return int(np.abs(held - timings.kv_tokens).sum())

    assert min(map(lacking, itertools.product(range(3), repeat=2))) <= 4


def test_steps_that_may_come_are_captured_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that will come run twice of every batch size, eagerly and captured; the others not yet."""
    e, ran, marks = alone(max_batch=3, drafter=SuffixDrafter(1, 2), adaptive=False), [], list[str]()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    e.runner.graphs = SimpleNamespace(run=lambda step, kind: ran.append(kind) or step(kind))  # type: ignore[assignment]
    for tensor in e.runner.cache.tensors:
        tensor.zero_()
    e.warmup({DecodeGraphKey()}, {DecodeGraphKey(process_logits=True)}, marks.append)
    assert marks == ["first_request", "capture"]
    ran = ran[-6:]  # behind those of the first request
    assert ran == [DecodeGraphKey(rows, 1) for rows in (1, 2, 3) for _ in range(2)]


class CountingGraphs:
    """In place of graphs: how often each key ran; the first two times take long on a GPU."""

    def __init__(self) -> None:
        self.runs = Counter[Hashable]()

    def run(self, step: Callable[..., Any], *args: Hashable) -> Any:
        self.runs[step.__name__, *args] += 1
        return step(*args)

    def has(self, step: Callable[..., Any], *args: Hashable) -> bool:
        return True


def test_nothing_is_captured_for_a_first_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both parts of its steps are there for every batch size and sampling, the first part once for all sampling."""
    e, graphs = alone(max_batch=3), CountingGraphs()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    e.runner.graphs = graphs  # type: ignore[assignment]
    for tensor in e.runner.cache.tensors:
        tensor.zero_()
    draws = [(False, False), (True, False), (True, True)]
    plain = [DecodeGraphKey(0, 0, *of) for of in draws]
    processed = [replace(key, process_logits=True) for key in plain]
    e.warmup(plain, processed, grammars=True)
    assert all(runs > 1 for (_, key), runs in graphs.runs.items() if key.rows == 3)
    known = [key for key, runs in graphs.runs.items() if runs > 1]
    counts = Counter(name for name, _ in known)
    assert counts["_compute"] == 3 and counts["_sample_pending"] == 9
    graphs.runs.clear()
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=3)):
        generated(e, [Request(i, PROMPT[i:], 4, sampling, matcher=EveryThirdToken()) for i in range(3)])
    assert {name for name, _ in graphs.runs} == {"_compute", "_sample_pending"}
    assert graphs.runs.keys() <= {*known}
