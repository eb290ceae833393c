"""select_tokens in plain torch."""

from __future__ import annotations

import torch

FORCED = 0xFFFF  # above every score
NO_NUMBER = 0xFFFE  # above every other score
MOST_REACH = 16  # keys; a page that holds more than one holds as many


def ordered(scores: torch.Tensor) -> torch.Tensor:
    """fp16 as numbers of 16 bits of the same order, in int32; NaN is the highest score."""
    bits = scores.contiguous().view(torch.int16).int()
    return torch.where(scores.isnan(), NO_NUMBER, (bits ^ ((bits >> 31) | 0x8000)) & 0xFFFF)


def select_tokens(
    scores: torch.Tensor,
    weights: torch.Tensor | None,
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
    block: int = 1,
) -> None:
    """Writes tables of the best keys' slots; shapes as in `kernels.sparse.select_tokens.select_tokens`."""
    page_size, heads = scores.shape[4], table.shape[2]
    for b in range(len(known)):
        n, k, first, last = (int(x[b]) for x in (known, counts, sinks, windows))
        if fresh[b]:
            x = torch.ones(len(scores), heads, n, dtype=torch.int32, device=scores.device)
        else:
            pages = score_tables[b, : -(-n // page_size)].long()
            planes = scores[:, :, pages].transpose(2, 3).flatten(3)[..., :n]  # [L, planes, Hkv, n]
            x = ordered(_total(planes, None if weights is None else weights[b].tolist(), heads))
        if reach and n:
            x = torch.nn.functional.pad(x, (reach, 0)).unfold(-1, reach + 1, 1).amax(-1)
        if block > 1 and n:
            x = torch.nn.functional.pad(x, (0, -n % block)).unflatten(-1, (-1, block)).amax(-1)
            x = x.repeat_interleave(block, -1)[..., :n]
        x[..., :first] = x[..., n - last : n] = FORCED
        # Stable, and backwards: of equals the latest.
        chosen = n - 1 - x.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :k].sort(-1).values.flip(-1)
        slots = (block_tables[b, :, None] * page_size + torch.arange(page_size, device=scores.device)).flatten()
        table[:, b, :, :k] = slots[chosen]
        after = slots[n : n + tail]
        table[:, b, :, k : k + len(after)] = after.int()
        table[:, b, :, k + len(after) : k + tail] = 0


def _total(planes: torch.Tensor, weights: list[float] | None, heads: int) -> torch.Tensor:
    """The scores [L, heads, n] in fp16 of [L, planes, Hkv, n], summed in fp32, plane by plane and head by head."""
    if weights is None and planes.shape[1] == 1 and planes.shape[2] == heads:
        return planes[:, 0]
    total = torch.zeros(len(planes), heads, planes.shape[3], device=planes.device)
    for i, plane in enumerate(planes.unbind(1)):
        if weights is not None and weights[i] == 0:
            continue
        for part in plane.float().split(heads, 1):
            total += part if weights is None else part * weights[i]
    return total.half()
