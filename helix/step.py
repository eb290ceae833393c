"""Device-side state of a decode step, and what one forward pass needs to know about its tokens.

Lengths, positions and block tables live on the device and have fixed shapes, so that a step neither waits for the
host nor changes shape as sequences grow.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from helix.kv_cache import Placement
from helix.sampling import SamplingState


@dataclass
class Step:
    """The N tokens of one forward pass.

    Attributes:
        tokens: token ids [N] int64.
        positions: global positions [N] int64.
        starts: kvp rank of the first block of each token's sequence [N] int64.
        live: False [N] for rows that are padding: they read and write no KV.
        block_tables: pages [n, P] int32 of the n sequences.
        append_slots: flat cache slots [N] int64, -1 where this rank stores nothing.
        cu_q: offsets [n + 1] int32 of each sequence's tokens (prefill), or None: N / n tokens each (decode).
        max_q: the most tokens that one sequence has here.
    """

    placement: Placement
    tokens: Tensor
    positions: Tensor
    starts: Tensor
    live: Tensor
    block_tables: Tensor
    append_slots: Tensor
    cu_q: Tensor | None
    max_q: int
    _bounds: dict[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def bounds(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Local keys `[lo, hi)` of each query, int32 [N]; computed once for each window that the model has."""
        if window not in self._bounds:
            self._bounds[window] = self.placement.bounds(self.positions, self.starts, self.live, window)
        return self._bounds[window]


class DecodeState:
    """What the device knows of every slot of the batch: one row a sequence, `max_batch` rows.

    Attributes:
        tokens: last token of each sequence [B] int64, not yet in the cache.
        lengths: tokens in the cache, over all ranks [B] int64.
        starts: kvp rank of the first block [B] int64.
        active: rows that decode [B] bool.
        block_tables: pages on this rank [B, P] int32.
        sampling: each row's sampling parameters.
    """

    def __init__(self, max_batch: int, max_pages: int, placement: Placement, device: torch.device) -> None:
        self.placement = placement
        self.tokens = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.starts = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.active = torch.zeros(max_batch, dtype=torch.bool, device=device)
        self.block_tables = torch.zeros(max_batch, max(max_pages, 1), dtype=torch.int32, device=device)
        self.sampling = SamplingState.create(max_batch, device)

    def admit(self, row: int, start: int, pages: list[int]) -> None:
        """Gives a row to a new sequence; it decodes once `activate` has set its first token."""
        table = torch.zeros(self.block_tables.shape[1], dtype=torch.int32)
        table[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self.block_tables[row] = table.to(self.block_tables.device)
        self.starts[row] = start
        self.active[row] = False

    def activate(self, rows: Tensor, tokens: Tensor, lengths: Tensor) -> None:
        """Starts decoding in `rows` [n] int64, from their first tokens, after `lengths` tokens of prompt."""
        self.tokens[rows] = tokens
        self.lengths[rows] = lengths
        self.active[rows] = True

    def retire(self, row: int) -> None:
        self.active[row] = False

    def decode_step(self, rows: int) -> Step:
        """The step that appends the last token of each of the first `rows` rows and predicts its next."""
        lengths, starts, active = self.lengths[:rows], self.starts[:rows], self.active[:rows]
        block_tables = self.block_tables[:rows]
        return Step(
            self.placement,
            tokens=self.tokens[:rows],
            positions=lengths,
            starts=starts,
            live=active,
            block_tables=block_tables,
            append_slots=self.placement.cache_slots(lengths, starts, active, block_tables),
            cu_q=None,
            max_q=1,
        )

    def commit(self, tokens: Tensor) -> None:
        """Takes the tokens [rows] drawn in a decode step; the only place where lengths grow."""
        rows = len(tokens)
        active = self.active[:rows]
        # In place, after all that the step reads of them: a captured step finds them where they were.
        self.tokens[:rows] = torch.where(active, tokens, self.tokens[:rows])
        self.lengths[:rows] += active

    def prefill_step(self, segments: list[tuple[int, int, Tensor]]) -> Step:
        """The step of several sequences' prompt chunks: (row, global position of the first token, tokens [n] int64)."""
        device = self.tokens.device
        rows = torch.tensor([row for row, _, _ in segments], device=device)
        counts = [len(tokens) for _, _, tokens in segments]
        sequence = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(device)  # [N]
        positions = torch.cat([torch.arange(at, at + len(tokens)) for _, at, tokens in segments]).to(device)
        offsets = torch.tensor([0, *counts]).cumsum(0)
        tables = self.block_tables[rows]
        starts = self.starts[rows][sequence]
        live = torch.ones_like(positions, dtype=torch.bool)
        return Step(
            self.placement,
            tokens=torch.cat([tokens for _, _, tokens in segments]).to(device),
            positions=positions,
            starts=starts,
            live=live,
            block_tables=tables,
            append_slots=self.placement.cache_slots(positions, starts, live, tables, sequence),
            cu_q=offsets.to(device, torch.int32),
            max_q=max(counts),
        )
