"""Events in the life of sequences, and `SequenceObserver`, the interface of components that follow them.

KV caches, the slots' device state, logits processors and drafters implement the events that they need. The model runner
calls them on every rank in the same order; pages are copied before the sequences that use them are admitted. All
sequences of a batch share one event: a launch for each would take the host longer than a step takes the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from helix.engine.scheduler_output import BlockTableUpdate, NewRequest
from helix.kv_placement import ChunkPart, PromptChunk
from helix.worker.graph_keys import DecodeGraphKey


@dataclass(frozen=True, eq=False)
class Span:
    """Tokens that n sequences added to their pages.

    Attributes:
        tables: pages [n, P] int32.
        starts: kvp rank of each first block [n] int64.
        before, after: tokens in the cache before and after, over all ranks [n] int64.
        max_tokens: upper bound of the tokens that one of them added.
    """

    tables: Tensor
    starts: Tensor
    before: Tensor
    after: Tensor
    max_tokens: int


@dataclass(frozen=True, eq=False)
class PrefillCommitted:
    """Event: a prefill chunk was computed.

    Attributes:
        parts: locations of its tokens in layers with a window.
        states: [N, W] of all its tokens, see `Decoder.states`; None unless the drafter reads them.
    """

    prompts: Sequence[PromptChunk]
    span: Span
    parts: tuple[ChunkPart, ...]
    states: Tensor | None = None


@dataclass(frozen=True, eq=False)
class FirstTokenSampled:
    """Event: the first tokens of prompts were sampled.

    Attributes:
        slots, tokens, lengths: slots, first tokens, and tokens in the cache [n] int64.
        states: of the prompts' last tokens [n, W], see `Decoder.states`.
    """

    slots: Tensor
    tokens: Tensor
    lengths: Tensor
    states: Tensor


@dataclass(frozen=True, eq=False)
class StepCommitted:
    """Event: the tokens of a decode step were committed; part of a captured step.

    Attributes:
        span: the tokens added in slots 0, 1, ..; `max_tokens` includes rejected drafts.
        live: whether each sequence continues [n] bool.
        tokens: the committed tokens of each sequence, then PLACEHOLDER_TOKEN_ID [n, 1 + drafts] int64.
        states: of all verified tokens [n * (1 + drafts), W], see `Decoder.states`.
    """

    kind: DecodeGraphKey
    span: Span
    live: Tensor
    states: Tensor
    tokens: Tensor


@dataclass(frozen=True, eq=False)
class RequestReleased:
    """Event: a sequence leaves its slot.

    Attributes:
        table: its pages [P] int32.
        start, length: kvp rank of its first block, tokens in the cache, each [1] int64.
        history: its tokens as in `DecodeState`, [L] int32; empty if no drafter reads them.
    """

    slot: int
    table: Tensor
    start: Tensor
    length: Tensor
    history: Tensor


class SequenceObserver:
    """Component that follows the events of sequences; events that it does not override do nothing."""

    def copy_pages(self, sources: Tensor, to: Tensor) -> None:
        """Copies pages `sources` [n] int32 to the pages `to`, which no sequence uses yet."""

    def admit(self, *admissions: NewRequest) -> None:
        """Sets up the slots of admitted sequences."""

    def move_slots(self, sources: Sequence[int], to: Sequence[int]) -> None:
        """Moves the sequences in slots `sources` to the slots `to`, which are free and not among them."""

    def write_tables(self, *tables: BlockTableUpdate) -> None:
        """Writes new pages to block tables."""

    def on_prefill(self, chunk: PrefillCommitted) -> None:
        """Handles a computed prefill chunk."""

    def on_first_token(self, begun: FirstTokenSampled) -> None:
        """Handles the first tokens of prompts."""

    def observes_step(self, kind: DecodeGraphKey) -> bool:
        """Returns whether to call `on_step` after steps of this kind."""
        return False

    def on_step(self, step: StepCommitted) -> None:
        """Handles the committed tokens of a decode step."""

    def release(self, *released: RequestReleased) -> None:
        """Releases the state of sequences that leave."""
