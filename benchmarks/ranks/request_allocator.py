"""Assigns rows and pages to sequences without a scheduler; nothing is shared."""

from __future__ import annotations

import numpy as np

from helix.engine.pages import PagePool
from helix.engine.scheduler_output import NewRequest
from helix.sampling_params import SamplingParams
from helix.worker.model_runner import ModelRunner

NO_TOKENS = np.empty(0, dtype=np.int32)


class RequestAllocator:
    """The free pages of a runner without other requests."""

    def __init__(self, runner: ModelRunner) -> None:
        self._stripes, self._pool = runner.placement.stripes, PagePool(runner.cache.pages)

    def new_request(
        self,
        slot: int,
        reserved: int,
        *,
        prompt: np.ndarray = NO_TOKENS,
        limit: int | None = None,
        sampling: SamplingParams | None = None,
    ) -> NewRequest:
        """Makes a sequence with pages for `reserved` tokens; its first block is on another kvp rank in each slot.

        Args:
            prompt: int32 [n].
            limit: number of cached tokens at which it ends; None: `reserved`.
        """
        return NewRequest(
            slot,
            slot,
            len(prompt),
            prompt,
            slot % self._stripes.layout.kvp,
            self._pool.allocate(self._stripes.pages_for(reserved)),
            reserved,
            reserved if limit is None else limit,
            sampling or SamplingParams(),
        )
