"""Events in the life of the sequences in a batch's slots, for what keeps something of them on a rank.

Caches, the device's state of the slots, shaping and drafters implement the events that they need. A model runner calls
them on every rank alike, in the order of its decisions: pages are copied before those who take them are admitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from helix.events.decision import Admission, StepKind, TableWrite
from helix.placement import ChunkPart, PromptChunk


@dataclass(frozen=True, eq=False)
class Span:
    """Tokens that n sequences have come to hold in their pages.

    Attributes:
        tables: pages [n, P] int32.
        starts: kvp rank of the first block [n] int64.
        before, after: tokens in the cache, over all ranks [n] int64.
        most: the most that one of them has taken in between.
    """

    tables: Tensor
    starts: Tensor
    before: Tensor
    after: Tensor
    most: int


@dataclass(frozen=True, eq=False)
class Prefilled:
    """A chunk of prompts that has gone through the model.

    Attributes:
        prompts: the chunk of each sequence.
        span: what their pages have come to hold.
        parts: where their tokens lie, of layers that keep a window.
        hidden: [N, H], of all their tokens.
    """

    prompts: Sequence[PromptChunk]
    span: Span
    parts: tuple[ChunkPart, ...]
    hidden: Tensor


@dataclass(frozen=True, eq=False)
class Taken:
    """A decode step whose tokens have been taken; part of a captured step.

    Attributes:
        span: of slots 0, 1, ..; `most` counts drafts that were refused as well.
        live: sequences that decode on [n] bool.
        hidden: [n * (1 + drafts), H].
    """

    kind: StepKind
    span: Span
    live: Tensor
    hidden: Tensor


@dataclass(frozen=True, eq=False)
class Retired:
    """A slot whose sequence leaves, with its pages [P] int32, start [1] and tokens in the cache [1], int64."""

    slot: int
    table: Tensor
    start: Tensor
    length: Tensor


class Follower:
    """What follows the sequences; each event does nothing unless it is overridden."""

    def copy(self, sources: Tensor, to: Tensor) -> None:
        """Copies pages `sources` [n] int32 to the pages `to`, which nobody has yet."""

    def admit(self, admission: Admission) -> None:
        """Takes a sequence into its slot."""

    def write(self, table: TableWrite) -> None:
        """Takes other pages into a slot's table."""

    def prefilled(self, chunk: Prefilled) -> None:
        """Follows a chunk of prompts."""

    def takes(self, kind: StepKind) -> bool:
        """Says whether `taken` is to be called after steps of a kind."""
        return False

    def taken(self, step: Taken) -> None:
        """Follows a decode step."""

    def retire(self, gone: Retired) -> None:
        """Lets go of a sequence."""
