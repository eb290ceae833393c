"""The engine as its callers meet it: refusals, ends, early leaving, failures, and what it measures."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from comm.loopback import LoopbackWorld, run_ranks
from comm.torch_dist import TorchDistCommunicator
from helix.config import Config
from helix.engine.core import Engine
from helix.engine.draft_policy import DraftPolicy
from helix.engine.inbox import Inbox
from helix.engine.request import Request, RequestUpdate
from helix.engine.timings import Timings
from helix.layout import HelixLayout
from helix.sampling_params import SamplingParams
from helix.setup import engine as build
from helix.speculation import SuffixDrafter
from helix.worker.graph_keys import StepKind
from kernels.tokens.commit import Candidates
from tests.e2e.checkpoints import checkpoint, oracle
from tests.e2e.parity import build_engine, build_model
from tests.pool import Pool
from tests.sequences import Generated, generated, generated_ids, resize, updates_of

FAMILY = "qwen3"
PROMPT = tuple(range(1, 20))


def engine(world: LoopbackWorld, rank: int, layout: HelixLayout, **options: Any) -> Engine:
    path: Path = options.pop("path", None) or checkpoint(FAMILY)
    return build_engine(path, layout, world.communicator(rank, layout.kvp_group(rank)), 16, **options)


def alone(**options: Any) -> Engine:
    return engine(LoopbackWorld(1), 0, HelixLayout.create(), **options)


@pytest.mark.parametrize(
    "request_, reason",
    [
        (Request(0, (), 5), "prompt is empty"),
        (Request(0, (1, 257), 5), r"token id 257 is outside the vocabulary \[0, 257\)"),
        (Request(0, (-1,), 5), "token id -1 is"),
        (Request(0, (1, 2**31), 5), "token id 2147483648 is"),
        (Request(0, (1, -(2**70), 2**63), 5), "token id -1180591620717411303424 is"),
        (Request(0, PROMPT, 0), "max_tokens=0"),
        (Request(0, PROMPT, 500), "exceed the model's context of 512"),
    ],
)
def test_what_cannot_be_served_is_refused_and_the_others_are(request_: Request, reason: str) -> None:
    outputs = generated(alone(), [request_, Request(1, PROMPT, 3)])
    assert outputs[0].finish_reason == "error" and outputs[0].output_ids == ()
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(outputs[0].reason)
    assert outputs[1].finish_reason == "length" and len(outputs[1].output_ids) == 3


def test_over_the_capacity_is_refused() -> None:
    small = alone(max_batch=1, max_length=100)
    outputs = generated(small, [Request(0, PROMPT, 82), Request(1, PROMPT, 81)])
    assert outputs[0].finish_reason == "error" and "101 tokens" in (outputs[0].reason or "")
    assert len(outputs[1].output_ids) == 81


@pytest.mark.parametrize("drafter", [None, SuffixDrafter(4, 3)])
def test_over_its_length_is_refused_though_the_cache_would_hold_it(drafter: SuffixDrafter | None) -> None:
    small = alone(max_batch=2, max_length=100, drafter=drafter)
    outputs = generated(small, [Request(0, PROMPT, 82), Request(1, PROMPT, 81)])
    assert outputs[0].finish_reason == "error" and "max_length=100" in (outputs[0].reason or "")
    assert len(outputs[1].output_ids) == 81


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_the_longest_sequence_of_an_engine_fits(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sets no limit asks for as many tokens as a sequence may have."""
    monkeypatch.setattr(build, "free_bytes", lambda device: 700_000)
    config = Config()
    config.speculation.drafter, config.decode.prefill_chunk = drafter, "64"
    layout, comm = HelixLayout.create(), LoopbackWorld(1).communicator(0, [0])
    model = build_model(checkpoint(FAMILY), layout, comm, torch.float32)
    e = build.build_engine(layout, model, config, 4, 4 * 512)
    assert e.runner.sizes.length < 200, "the test needs a cache that is shorter than the context"
    most = e.runner.sizes.length - len(PROMPT)
    ends = generated(e, [Request(n, PROMPT, most + n) for n in range(2)])
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
    draw, steps = e.runner._candidates, itertools.count()

    def lost(*args: Any) -> Candidates:
        drawn = draw(*args)
        if next(steps) < broken:
            return drawn
        gave_up.append(True)
        return Candidates(torch.zeros_like(drawn.pairs))

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
    assert tuple(t for update in updates for t in update.new_ids) == wanted[: broken - 1 if broken > 2 else 0]
    with pytest.raises(RuntimeError, match=r"engine is broken.*rank 0 waited 300 s for rank 3"):
        generated(e, [])


def test_a_rank_that_gave_up_in_the_last_step_says_so() -> None:
    """Rank 0 looks before it takes a token; the others, which read none, look when their run of steps ends."""

    def body(world: LoopbackWorld, rank: int) -> None:
        e = engine(world, rank, HelixLayout.create("helix", 2, 1))
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


def test_every_token_is_an_update_in_order() -> None:
    updates = list(updates_of(alone(), Inbox.of(Request(i, PROMPT[: 5 + i], 6) for i in range(3))))
    for i in range(3):
        mine = [update for update in updates if update.id == i]
        assert [len(update.new_ids) for update in mine] == [0] + [1] * 6, "its admission, then its tokens"
        assert [update.prefilled for update in mine] == [0] + [5 + i] * 6
        assert [update.finish_reason for update in mine] == [None] * 6 + ["length"]


@pytest.mark.parametrize("run_steps, prefill_chunk", [(1, 64), (5, 1), (8, 7), (64, 4096)])
def test_run_length_and_chunks_change_nothing(run_steps: int, prefill_chunk: int) -> None:
    wanted = oracle(FAMILY, (7, 1, 15, 16, 17, 300), 48)[:4]
    e = alone(prefill_chunk=prefill_chunk)
    resize(e, run_steps=run_steps)
    outputs = generated(e, [Request(i, c.prompt, len(c.tokens)) for i, c in enumerate(wanted)])
    assert [outputs[i].output_ids for i in range(4)] == [c.tokens for c in wanted]


def test_eos_ends_a_request_and_gives_its_slot_on() -> None:
    wanted = oracle(FAMILY, (7, 1, 15, 16, 17, 300), 48)
    tokens = wanted[3].tokens
    eos = next(t for t in tokens[5:] if tokens.index(t) >= 5)  # first seen after a few tokens
    e = alone(max_batch=1)
    e.runner.model.spec = replace(e.runner.model.spec, eos=(eos,))
    outputs = generated(e, [Request(0, wanted[3].prompt, 48), Request(1, wanted[2].prompt, 2)])
    assert outputs[0].finish_reason == "stop" and outputs[0].output_ids == tokens[: tokens.index(eos) + 1]
    assert outputs[1].output_ids == wanted[2].tokens[:2]
    assert sum(t.pool.used for t in e.tables) == 0 and not e.runner.admitted


@pytest.mark.parametrize("layout", [HelixLayout.create("helix", 2, 1), HelixLayout.create("dp", dp=2)], ids=str)
def test_leaving_early_frees_everything_on_every_rank(layout: HelixLayout) -> None:
    def body(world: LoopbackWorld, rank: int) -> tuple[dict[Any, Generated], int, int]:
        e = engine(world, rank, layout)
        seen = 0
        for update in updates_of(e, Inbox.of(Request(i, PROMPT, 30) for i in range(7))):
            seen += len(update.new_ids)
            if seen == 5:
                break
        again = generated(e, [Request(0, PROMPT, 4)])
        return again, sum(t.pool.used for t in e.tables), len(e.runner.admitted)

    (again, *held), (_, *held_elsewhere) = run_ranks(2, body, timeout_s=60)
    assert held == held_elsewhere == [0, 0]
    assert len(again[0].output_ids) == 4


def raising(error: BaseException, after: int = 0) -> Callable[..., Any]:
    """A function that raises from its call number `after` on, and returns None before."""
    calls = itertools.count()

    def call(*args: Any) -> None:
        if next(calls) >= after:
            raise error

    return call


def fails_by_callback(e: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DraftPolicy, "observe", raising(KeyError("planted"), after=2))
    generated(e, REQUESTS)


def fails_by_caller(e: Engine, patch: pytest.MonkeyPatch) -> None:
    updates = e.serve(Inbox.of(REQUESTS))
    for _ in range(3):
        next(updates)
    updates.throw(KeyError("planted"))


def fails_by_control_c(e: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Timings, "step", raising(KeyboardInterrupt("planted"), after=3))
    generated(e, REQUESTS)


def fails_by_nan(e: Engine, patch: pytest.MonkeyPatch) -> None:
    updates, weight = e.serve(Inbox.of(REQUESTS)), e.runner.model.norm.read.weight
    next(updates)
    before = weight.clone()
    weight.fill_(torch.nan)
    try:
        list(updates)
    finally:
        weight.copy_(before)


REQUESTS = [Request(i, PROMPT, 9) for i in range(7)]


@pytest.mark.parametrize(
    "fails",
    [fails_by_callback, fails_by_caller, fails_by_control_c, fails_by_nan],
)
def test_an_error_between_steps_ends_the_call_and_no_more(fails: Callable[..., None]) -> None:
    layout = HelixLayout.create("helix", 2, 1)
    wanted = generated_ids(alone(), REQUESTS)[0]

    def body(world: LoopbackWorld, rank: int) -> None:
        e = engine(world, rank, layout)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                with pytest.raises((KeyError, KeyboardInterrupt, RuntimeError), match=r"planted|NaN"):
                    fails(e, patch)
            else:
                generated(e, [])
        assert sum(t.pool.used for t in e.tables) == 0 and not e.runner.admitted
        again = generated(e, REQUESTS)
        assert all(output.output_ids == wanted for output in again.values()) and len(again) == (7 if rank == 0 else 0)
        assert sum(t.pool.used for t in e.tables) == 0

    run_ranks(2, body, timeout_s=60)


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_error_in_a_step_breaks_the_engine_on_every_rank(culprit: int) -> None:
    broken: dict[int, str] = {}

    def body(world: LoopbackWorld, rank: int) -> None:
        e = engine(world, rank, HelixLayout.create("helix", 2, 1))
        if rank == culprit:
            e.runner.observer = raising(KeyError("planted"), after=3)
        with pytest.raises((KeyError, RuntimeError), match="planted") as first:
            generated(e, REQUESTS)
        assert first.type is (KeyError if rank == culprit else RuntimeError)
        with pytest.raises(RuntimeError) as caught:
            generated(e, REQUESTS)
        broken[rank] = str(caught.value)

    with pytest.raises(RuntimeError, match="planted"):  # what the transport was told
        run_ranks(2, body, timeout_s=30)
    assert all("engine is broken" in words and "KeyError: 'planted'" in words for words in broken.values()), broken
    assert set(broken) == {0, 1}


def test_where_a_call_cannot_be_ended_its_first_error_is_raised_and_says_so() -> None:
    e = alone()
    updates = e.serve(Inbox.of(REQUESTS))
    next(updates)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(e.comm, "broadcast_object", raising(OSError("no way out")))
        with pytest.raises(KeyboardInterrupt, match="planted") as caught:
            updates.throw(KeyboardInterrupt("planted"))
    assert "no way out" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match=r"engine is broken.*OSError: no way out"):
        generated(e, REQUESTS)


def test_leaving_early_does_not_hide_that_it_failed() -> None:
    e = alone()
    updates = e.serve(Inbox.of(REQUESTS))
    next(updates)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(e.comm, "broadcast_object", raising(OSError("no way out")))
        with pytest.raises(OSError, match="no way out"):
            updates.close()


def test_one_call_at_a_time() -> None:
    e = alone()
    outer = e.serve(Inbox.of(REQUESTS))
    next(outer)
    with pytest.raises(RuntimeError, match="a call is under way"):
        generated(e, REQUESTS)
    assert {u.id for of_step in outer for u in of_step if u.finish_reason == "length"} == {*range(7)}
    assert len(generated(e, REQUESTS)) == 7


def slow_caller(rank: int, world_size: int, path: Path) -> tuple[int, ...]:
    layout = HelixLayout.create("helix", world_size)
    dist.barrier()  # under the deadline of the pool: a worker may just have been started
    comm = TorchDistCommunicator(layout.kvp_groups(), "cpu", timedelta(seconds=2))
    e = build_engine(path, layout, comm, 16)
    found: tuple[int, ...] = ()
    for count, update in enumerate(updates_of(e, Inbox.of([Request(0, PROMPT, 24)]))):
        if count == 9:  # within a run of steps
            time.sleep(3.0)
        found += update.new_ids
    comm.close()
    return found


def test_callers_may_take_longer_than_a_collective(gloo_pool: Callable[[int], Pool]) -> None:
    wanted = generated_ids(alone(), [Request(0, PROMPT, 24)])[0]
    assert gloo_pool(2).run(slow_caller, checkpoint(FAMILY))[0] == wanted


def test_the_caller_is_not_left_in_inference_mode() -> None:
    for _ in alone().serve(Inbox.of([Request(0, PROMPT, 3)])):
        assert not torch.is_inference_mode_enabled()


def test_nan_is_an_error_and_not_a_token() -> None:
    e = alone()
    e.runner.model.norm.read.weight.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="logits are NaN"):
        generated(e, [Request(0, PROMPT, 3)])


def test_nan_in_one_rank_of_two_ends_both() -> None:
    def body(world: LoopbackWorld, rank: int) -> None:
        e = engine(world, rank, HelixLayout.create("helix", 2, 1))
        if rank == 1:
            e.runner.model.layers[0].ffn.down.weight.fill_(torch.nan)
        generated(e, [Request(0, PROMPT, 3)])

    with pytest.raises(RuntimeError, match="logits are NaN"):
        run_ranks(2, body, timeout_s=30)


def test_what_is_measured() -> None:
    layout = HelixLayout.create("helix", 3, 1)
    requests = [Request(0, PROMPT, 10), Request(1, tuple(range(1, 101)), 10)]

    def body(world: LoopbackWorld, rank: int) -> Any:
        e = engine(world, rank, layout, max_batch=2)
        prefilled = {update.id: update.prefilled for update in updates_of(e, Inbox.of(requests))}
        return e.timings, prefilled

    timings, prefilled = run_ranks(3, body, timeout_s=60)[0]
    assert prefilled == {0: 19, 1: 100} and timings.prefill_tokens == 119
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
    e.warm_up({StepKind()}, {StepKind(shaped=True)}, marks.append)
    assert marks == ["first_request", "capture"]
    ran = ran[-6:]  # behind those of the first request
    assert ran == [StepKind(rows, 1) for rows in (1, 2, 3) for _ in range(2)]
