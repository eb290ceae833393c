"""What the scheduler decides, case by case, and whatever comes: against a model of the ranks that carry it out."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from helix.scheduler import LEAST_CHUNK, Decision, StepPlan
from tests.serving import STEP_S, TOKEN_S, Serving


def words(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 900, count).tolist()


class AnyRequests(RuleBasedStateMachine):
    """Requests come, are aborted, draw and end, while up to two decisions are under way."""

    @initialize(
        grid=st.sampled_from([(1, 1, 2), (2, 1, 1), (2, 2, 2), (2, 4, 2), (3, 2, 3), (4, 2, 4)]),
        pages=st.integers(12, 60),
        ahead=st.integers(0, 2),
        caching=st.booleans(),
        max_batch=st.integers(1, 5),
        prefill_chunk=st.sampled_from([7, 40, 4096]),
        run_steps=st.integers(1, 6),
        lease=st.sampled_from([1, 8, 30]),
        drafts=st.sampled_from([0, 0, 3]),
        patience_s=st.sampled_from([0.0, 0.05, 30.0]),
        stall_s=st.sampled_from([0.002, 0.05]),
        decode_share=st.sampled_from([0.1, 0.25, 0.7]),
    )
    def begin(self, grid: tuple[int, int, int], pages: int, **options: int) -> None:
        kvp, append_block, page_size = grid
        self.serving = Serving(
            pages, kvp=kvp, append_block=append_block, page_size=page_size, kept=(0, 3, 1, 2, 0), **options
        )
        self.texts = [words(200, seed) for seed in range(2)]

    @rule(
        text=st.integers(0, 1),
        shared=st.integers(0, 60),
        own=st.integers(1, 20),
        new=st.integers(1, 40),
        stops=st.integers(1, 60),
        priority=st.sampled_from([0, 0, 0, 1]),
        salt=st.sampled_from([None, None, "a"]),
    )
    def submit(self, text: int, shared: int, own: int, new: int, stops: int, priority: int, salt: str | None) -> None:
        serving = self.serving
        prompt = self.texts[text][:shared] + words(own, len(serving.served))
        if serving.stripes.pages_for(len(prompt) + new + serving.drafts) <= serving.pool.pages:
            serving.submit(prompt, new, stops, priority, salt)

    @precondition(lambda self: self.serving.served)
    @rule(data=st.data())
    def again(self, data: st.DataObject) -> None:
        """A further turn of a conversation, or what was aborted once more."""
        serving = self.serving
        before = data.draw(st.sampled_from(list(serving.served.values())[-4:]))
        prompt = [*before.request.prompt.tolist(), *before.drawn, *words(data.draw(st.integers(0, 6)))]
        if serving.stripes.pages_for(len(prompt) + 10 + serving.drafts) <= serving.pool.pages:
            serving.submit(prompt, 10, None, 0, before.request.salt)

    @precondition(lambda self: self.serving.served)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.serving.abort(data.draw(st.sampled_from(list(self.serving.served)[-6:])))

    @rule(times=st.integers(1, 6))
    def turn(self, times: int) -> None:
        for _ in range(times):
            self.serving.turn()

    @precondition(lambda self: self.serving.flying)
    @rule()
    def land(self) -> None:
        self.serving.land()

    def teardown(self) -> None:
        if hasattr(self, "serving"):
            self.serving.drain(5000)
            self.serving.check_nothing_is_left()


AnyRequests.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyRequests = AnyRequests.TestCase
