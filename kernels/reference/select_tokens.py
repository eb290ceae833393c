"""select_tokens in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

FORCED = 0xFFFF  # above every score
NO_NUMBER = 0xFFFE  # above every other score
MOST_REACH = 16  # keys; pages of more than one key hold at least as many


@dataclass(frozen=True)
class Together:
    """Context of a choice among the keys of all ranks that hold parts of the same sequences.

    Ties go to the first rank. The `counts` of a call are then the room for a rank's share: unused entries are -1, and
    the last keys that do not fit are dropped and counted.

    Attributes:
        gather: gathers a tensor of each rank -> [ranks, ...]; a collective.
        rank: this rank's index in that group.
        counts: [B] int32, contiguous: keys that all ranks choose together.
        overflow: [1] int64, incremented by the number of dropped keys.
    """

    gather: Callable[[torch.Tensor], torch.Tensor]
    rank: int
    counts: torch.Tensor
    overflow: torch.Tensor


def ordered(scores: torch.Tensor) -> torch.Tensor:
    """Maps fp16 to 16-bit numbers of the same order, in int32; NaN is the highest score."""
    bits = scores.contiguous().view(torch.int16).int()
    return torch.where(scores.isnan(), NO_NUMBER, (bits ^ ((bits >> 31) | 0x8000)) & 0xFFFF)


def select_tokens(
    scores: torch.Tensor,
    score_tables: torch.Tensor,
    block_tables: torch.Tensor,
    known: torch.Tensor,
    counts: torch.Tensor,
    sinks: torch.Tensor,
    windows: torch.Tensor,
    fresh: torch.Tensor,
    table: torch.Tensor,
    tail: int,
    *,
    reach: int = 0,
    together: Together | None = None,
) -> None:
    """Writes tables of the best keys' cache slots; shapes as in `kernels.sparse.select_tokens.select_tokens`."""
    page_size, heads = scores.shape[4], table.shape[2]
    for b in range(len(known)):
        n, k, first, last = (int(x[b]) for x in (known, counts, sinks, windows))
        if fresh[b]:
            x = torch.ones(len(scores), heads, n, dtype=torch.int32, device=scores.device)
        else:
            pages = score_tables[b, : -(-n // page_size)].long()
            planes = scores[:, :, pages].transpose(2, 3).flatten(3)[..., :n]  # [L, planes, Hkv, n]
            x = ordered(_total(planes))
        if reach and n:
            x = torch.nn.functional.pad(x, (reach, 0)).unfold(-1, reach + 1, 1).amax(-1)
        x[..., :first] = x[..., n - last : n] = FORCED
        if together is not None:
            _choose_together(x, block_tables[b], page_size, n, k, int(together.counts[b]), table[:, b], tail, together)
            continue
        # Stable, and backwards: ties go to the latest key.
        chosen = n - 1 - x.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :k].sort(-1).values.flip(-1)
        slots = _slots(block_tables[b], page_size)
        table[:, b, :, :k] = slots[chosen]
        _write_tail(table[:, b], slots, n, k, tail)


def _slots(blocks: torch.Tensor, page_size: int) -> torch.Tensor:
    """Lists the cache slots of all keys that a block table has room for."""
    return (blocks[:, None] * page_size + torch.arange(page_size, device=blocks.device)).flatten()


def _write_tail(table: torch.Tensor, slots: torch.Tensor, n: int, k: int, tail: int) -> None:
    after = slots[n : n + tail]
    table[..., k : k + len(after)] = after.int()
    table[..., k + len(after) : k + tail] = 0


def _choose_together(
    x: torch.Tensor,
    blocks: torch.Tensor,
    page_size: int,
    n: int,
    room: int,
    of_all: int,
    table: torch.Tensor,
    tail: int,
    together: Together,
) -> None:
    """Writes this rank's share [L, heads, width] of the `of_all` best keys; its own score x [L, heads, n]."""
    most = len(blocks) * page_size
    own = torch.nn.functional.pad(x.flip(-1), (0, most - n), value=-1)  # the latest first
    everyone = together.gather(own.contiguous())  # [ranks, L, heads, most]
    flat = everyone.permute(1, 2, 0, 3).flatten(2)
    best = flat.sort(dim=-1, descending=True, stable=True).indices[..., :of_all]
    taken = torch.zeros_like(flat, dtype=torch.bool).scatter(-1, best, True)
    mine = taken[..., together.rank * most :][..., :n].flip(-1)
    slots = _slots(blocks, page_size)
    table[..., :room] = -1
    for layer, head in ((i, j) for i in range(len(x)) for j in range(x.shape[1])):
        chosen = slots[:n][mine[layer, head]]
        table[layer, head, : min(len(chosen), room)] = chosen[:room].int()
        together.overflow.add_(max(0, len(chosen) - room))
    _write_tail(table, slots, n, room, tail)


def _total(planes: torch.Tensor) -> torch.Tensor:
    """Sums score planes [L, planes, Hkv, n] to [L, Hkv, n] fp16, in fp32, plane by plane."""
    if planes.shape[1] == 1:
        return planes[:, 0]
    total = torch.zeros_like(planes[:, 0], dtype=torch.float32)
    for plane in planes.unbind(1):
        total += plane.float()
    return total.half()
