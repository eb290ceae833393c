"""Long prompt chunks go through the layers in two halves: tokens and logits stay those of the whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from comm import turns
from comm.loopback import LoopbackCommunicator, run_ranks
from helix.engine.core import Engine
from helix.layers import specs
from helix.layout import HelixLayout
from helix.placement import PromptChunk
from helix.worker.step import Step
from tests.e2e.checkpoints import checkpoint, oracle
from tests.e2e.parity import build_engine, check, loopback
from tests.e2e.test_parity import LENGTHS, MOE_LENGTHS, MOE_TOKENS, NEW_TOKENS
from tests.sequences import admission


@pytest.fixture
def halved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Chunks of 14 tokens and more are cut, and none is dealt; the tokens of the halves, as they come."""
    monkeypatch.setattr(turns, "LEAST", 7)
    monkeypatch.setattr(specs, "WORTH", 0)
    cut, seen = Step.halves, []

    def spy(step: Step) -> tuple[Step, Step]:
        halves = cut(step)
        seen.append((len(halves[0].tokens), len(halves[1].tokens)))
        return halves

    monkeypatch.setattr(Step, "halves", spy)
    return seen


def test_what_two_ranks_add_up_at_once_is_not_halved(
    halved: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoopbackCommunicator, "sums_at_once", True)
    wanted = oracle("qwen2", LENGTHS, NEW_TOKENS)
    check(loopback(checkpoint("qwen2"), HelixLayout.create("tp", 1, 2), 16, wanted), wanted)
    assert not halved


def test_norms_over_all_heads_of_several_ranks_are_not_halved(halved: list[tuple[int, int]]) -> None:
    """Their sums go through boxes that one stream owns."""
    wanted = oracle("olmo2", MOE_LENGTHS, MOE_TOKENS)
    check(loopback(checkpoint("olmo2"), HelixLayout.create("helix", 1, 2), 16, wanted), wanted)
    assert not halved


@pytest.mark.gpu
def test_halves_on_two_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second half reads what the first has appended, and memory of neither is given to the other too soon."""

    def body(world: object, rank: int) -> None:
        engine: Engine = build_engine(
            checkpoint("qwen2"), HelixLayout.create(), world.communicator(0, [0]), 16, max_batch=1, max_length=8192
        )  # type: ignore[attr-defined]
        runner, model = engine.runner, engine.runner.model
        tokens = torch.randint(0, model.spec.vocab, (8000,))
        pages = np.arange(runner.placement.stripes.pages_for(8000), dtype=np.int32)
        runner.state.admit(admission(0, 0, pages, 8000, tokens.int().numpy()))
        step = runner.state.prefill_step([PromptChunk(0, 0, tokens)])
        whole = model.hidden(runner.cache, step, runner.dense).clone()
        several: Any = SimpleNamespace(
            world_size=2, device=torch.device("cuda"), capturable=True, half=0, sums_at_once=False
        )
        model.own, model.overlap = several, turns.DualBatchOverlap(several)
        cut = Step.halves
        counts: list[int] = []
        monkeypatch.setattr(Step, "halves", lambda step: counts.append(len(step.tokens)) or cut(step))
        for _ in range(10):
            for tensor in runner.cache.tensors:
                tensor.fill_(torch.nan)
            torch.testing.assert_close(model.hidden(runner.cache, step, runner.dense), whole, atol=1e-4, rtol=1e-4)
        assert counts == 10 * [8000]

    run_ranks(1, body, timeout_s=120.0, device="cuda")
