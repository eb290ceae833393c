"""Requests that want something of their logits, through the engine: each token is that of a walk over raw logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from comm.loopback import LoopbackWorld, run_ranks
from comm.torch_dist import TorchDistCommunicator
from helix.config import ScheduleConfig
from helix.engine.draft_policy import DraftPolicy
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.sampling_params import SamplingParams
from helix.speculation import SuffixDrafter
from tests.e2e.checkpoints import checkpoint
from tests.e2e.parity import build_engine
from tests.kernels.test_process_logits import LogitsParams, bits
from tests.pool import pool
from tests.sequences import Generated, generated, generated_ids, resize
from tests.unit.test_sampling import oracle

V, EOS = 257, (9, 200)
NEW = 40  # tokens of each request


@dataclass
class EveryThirdToken:
    """A grammar: which third of the vocabulary comes next depends on how many tokens there are."""

    token_ids: list[int] = field(default_factory=list)

    @staticmethod
    def after(count: int) -> list[int]:
        return list(range(count % 3, V, 3))

    def token_bitmask(self) -> np.ndarray:
        return bits(self.after(len(self.token_ids)), V).numpy()

    def accept_token(self, token: int) -> None:
        self.token_ids.append(token)


PARAMS = {
    "plain": SamplingParams(),
    "reported": SamplingParams(1.0, seed=1, logprobs=4),
    "penalized": SamplingParams(frequency_penalty=2.0, presence_penalty=1.0, repetition_penalty=1.4),
    "biased": SamplingParams(0.7, top_k=20, seed=2, logit_bias={200: 100.0, 9: 20.0}, min_tokens=5, logprobs=0),
    "guided": SamplingParams(0.9, top_p=0.9, seed=3, stop_token_ids=[42], ignore_eos=True),
    "guided too": SamplingParams(presence_penalty=2.0, logprobs=20),
    "drawn": SamplingParams(
        1.0, seed=4, repetition_penalty=1.5, presence_penalty=2.0, stop_token_ids=tuple(range(0, 257, 9))
    ),
    "for ever": SamplingParams(logit_bias=dict.fromkeys(EOS, 100.0), frequency_penalty=1.5, ignore_eos=True),
}


def make_requests() -> list[Request]:
    return [
        Request(
            name, [(5 * i + j * j) % 250 for j in range(9 + 7 * i)], NEW, params,
            matcher=EveryThirdToken() if "guided" in name else None,
        )
        for i, (name, params) in enumerate(PARAMS.items())
    ]  # fmt: skip


@dataclass
class RankOutput:
    """What one rank saw: outputs by request, and its columns of the raw logits by (request, draw)."""

    outputs: dict[Any, Generated]
    logits: dict[tuple[Any, int], Tensor]


def play(layout: HelixLayout, requests: Callable[[], list[Request]], **options: Any) -> list[RankOutput]:
    def body(world: LoopbackWorld, rank: int) -> tuple[RankOutput, int]:
        comm = world.communicator(rank, layout.kvp_group(rank))
        engine = build_engine(checkpoint("qwen2"), layout, comm, 4, page_size=4, prefill_chunk=24, **options)
        engine.runner.model.spec = replace(engine.runner.model.spec, eos=EOS)
        resize(engine, run_steps=2 if "pages" in options else 8)
        logits: dict[tuple[Any, int], Tensor] = {}

        def observe(slots: Tensor, positions: Tensor, rows: Tensor) -> None:
            for slot, position, row in zip(slots.tolist(), positions.tolist(), rows, strict=True):
                new_request = engine.runner.requests[slot]
                begin = new_request.length - new_request.num_output_tokens
                logits[new_request.id, position - begin] = row.clone()

        engine.runner.logits_hook = observe
        outputs = generated(engine, requests())
        return RankOutput(outputs, logits), engine.timings.preemptions

    seen = run_ranks(layout.world_size, body, timeout_s=120.0)
    assert (seen[0][1] > 0) == ("pages" in options), "preempted where pages are few"
    return [s for s, _ in seen]


def repeat_requests() -> list[Request]:
    """What they have drawn they want again."""
    penalties = dict(temperature=0.0, frequency_penalty=-2.0, presence_penalty=-2.0)
    return [replace(r, sampling=replace(r.sampling, **penalties)) for r in make_requests()]


def check(ranks: list[RankOutput], requests: list[Request]) -> None:
    """Every token and log-probability is that of the walk over the raw logits of all ranks, up to the right end."""
    for request in requests:
        output, params = ranks[0].outputs[request.id], request.sampling
        output_token_ids: list[int] = []
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}
        for token in output.token_ids:
            assert not ends & {*output_token_ids}, f"{request.id} continues after its end"
            at = request.id, len(output_token_ids)
            raw = torch.cat([rank.logits[at] for rank in ranks if at in rank.logits])  # mode dp: one rank has all
            position = len(request.prompt) + len(output_token_ids)
            logits_params = LogitsParams(
                list(request.prompt), output_token_ids, params.repetition_penalty, params.frequency_penalty,
                params.presence_penalty, dict(params.logit_bias), [*EOS, *params.stop_token_ids],
                len(request.prompt) + params.min_tokens,
                EveryThirdToken.after(len(output_token_ids)) if request.matcher is not None else None,
            )  # fmt: skip
            shaped = torch.tensor(logits_params.shape(raw.tolist(), position), dtype=torch.float64).float()
            assert token == oracle(shaped, params, position), f"{request.id}, token {len(output_token_ids)}"
            if params.logprobs is not None:
                log_probs, place = raw.double().log_softmax(0), output.logprobs[len(output_token_ids)]
                best = sorted(range(V), key=lambda t, log_probs=log_probs: -log_probs[t])[: params.logprobs]
                assert [t for t, _ in place.best] == best
                reported = torch.tensor([place.sampled, *(value for _, value in place.best)])
                torch.testing.assert_close(reported, log_probs[[token, *best]].float(), rtol=1e-6, atol=1e-6)
            output_token_ids.append(token)
        assert len(output.logprobs) == (0 if params.logprobs is None else len(output_token_ids))
        assert output.finish_reason == ("stop" if output_token_ids[-1] in ends else "length")
        assert output.finish_reason == "stop" or len(output_token_ids) == NEW


CLOSE = dict(
    max_batch=3, max_length=192, pages=13, schedule=ScheduleConfig(lookahead_tokens=2, max_prefill_stall_ms=2.0)
)


@pytest.mark.parametrize(
    "layout, options, wanted",
    [
        (HelixLayout.create(), {}, make_requests),
        (HelixLayout.create("helix", 2, 2), dict(max_batch=3), make_requests),
        (HelixLayout.create("helix", 2), CLOSE, make_requests),
        (HelixLayout.create("helix", 2), CLOSE, repeat_requests),
        (HelixLayout.create("helix", 1, 2), dict(drafter=SuffixDrafter(4, 2), adaptive=False), make_requests),
        (HelixLayout.create("dp", dp=3), dict(max_batch=2), make_requests),
    ],
    ids=["all at once", "slots change hands", "preempted", "come back", "beside drafts", "on ranks of their own"],
)
def test_tokens_are_those_of_the_walk(
    layout: HelixLayout, options: dict[str, Any], wanted: Callable[[], list[Request]]
) -> None:
    ranks = play(layout, wanted, **{"max_batch": 8} | options)
    check(ranks, wanted())
    outputs = ranks[0].outputs
    assert len(outputs["biased"].token_ids) == 6, "min_tokens, then what it is biased to"
    assert {*outputs["for ever"].token_ids} <= {*EOS}
    # Who wants nothing draws what it draws alone.
    plain = play(layout, lambda: wanted()[:1])[0].outputs["plain"]
    assert outputs["plain"].token_ids == plain.token_ids


def captured_rank(rank: int, world_size: int, path: Path) -> list[dict[Any, tuple[int, ...]]]:
    """Tokens of each round: one in which steps are captured as they come, two that replay them, one that is eager."""
    layout = HelixLayout.create("helix", world_size)
    comm = TorchDistCommunicator(layout.kvp_groups(), torch.device("cuda", rank), timedelta(seconds=60))
    engine = build_engine(path, layout, comm, 4, max_batch=8, drafter=SuffixDrafter(2, 2), adaptive=False)
    engine.runner.model.spec = replace(engine.runner.model.spec, eos=EOS)
    found = []
    for _ in range(3):
        assert engine.runner.graphs is not None
        found.append(generated_ids(engine, make_requests()))
    engine.close()
    engine.runner.graphs = None
    found.append(generated_ids(engine, make_requests()))
    comm.close()
    return found


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (1, 2)])
def test_steps_in_two_graphs_draw_what_eager_ones_draw(world: int) -> None:
    """A step is captured up to its logits, and from there on: the second half reads what the first one left."""
    *captured, eager = pool(world, "nccl").run(captured_rank, checkpoint("qwen2"), timeout_s=180.0)[0]
    assert all(len(eager[name]) >= 6 for name in PARAMS if "guided" in name)
    assert captured == 3 * [eager]


def test_what_a_grammar_takes_does_not_delay_the_next_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step counts without it; and what is over, as on a CPU a step is when it was launched, is not waited for."""
    naps: list[float] = []
    seconds: list[float] = []
    now = [0.0]  # of a clock that goes on while a grammar thinks

    class Slow(EveryThirdToken):
        def token_bitmask(self) -> np.ndarray:
            now[0] += 1.0
            return super().token_bitmask()

    monkeypatch.setattr("helix.worker.clock.perf_counter", lambda: now[0])
    monkeypatch.setattr("helix.engine.core.time", SimpleNamespace(sleep=naps.append))
    monkeypatch.setattr("helix.engine.core.LEAD_S", 0.0)
    monkeypatch.setattr(
        DraftPolicy,
        "observe",
        lambda policy, rows, kv_tokens, drafts, step_seconds, outcomes: seconds.extend(step_seconds),
    )
    monkeypatch.setattr(DraftPolicy, "seconds", lambda policy, rows, drafts: 1.0)  # longer than any step
    guided = make_requests()[4]
    play(HelixLayout.create(), lambda: [replace(guided, matcher=Slow())])
    assert naps == [] and len(seconds) > 5 and {*seconds} == {0.0} and now[0] > 5
