"""Layer drafters that record their drafts, to compare with a reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from helix.speculation import Draft, LayerDrafter
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.step import DecodeState


class RecordingDrafter(LayerDrafter):
    """Records the drafts after each text, and forces some to be accepted that the model would reject."""

    accept_rate = 0.0

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.drafted: list[tuple[list[int], list[int]]] = []
        self.generator = torch.Generator().manual_seed(1)

    def propose(self, state: DecodeState, kind: DecodeGraphKey) -> Draft:
        draft = super().propose(state, kind)
        for row in state.active[: kind.rows].nonzero()[:, 0].tolist():
            count = max(min(kind.drafts, int(state.max_drafts(kind.rows)[row])), 0)
            text = state.history[row, : int(state.lengths[row]) + 1].tolist()
            self.drafted.append((text, draft.tokens[row, :count].tolist()))
        if not self.accept_rate:
            return draft
        coins = torch.rand(draft.tokens.shape, generator=self.generator).to(draft.tokens.device)
        outcome = torch.where(coins < self.accept_rate, draft.tokens, (draft.tokens + 1) % 257)
        return Draft(draft.tokens, forced_tokens=outcome)


class PartlyAcceptingDrafter(RecordingDrafter):
    """Forces the model to accept 70% of the drafts."""

    accept_rate = 0.7


def mismatches(found: RecordingDrafter, drafts_of: Callable[[list[int], int], list[int]]) -> list[str]:
    """Returns the drafts that differ from a reference's."""
    return [
        f"{len(text)}: {drafts}, not {wanted}"
        for text, drafts in found.drafted
        if drafts and drafts != (wanted := drafts_of(text, len(drafts)))
    ]
