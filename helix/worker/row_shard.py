"""Row-sharded prefill: each rank attends a slice of the query rows, with all heads, over whole sequences.

With sharded KV, every rank needs the queries of all rows, and returns partial outputs of all heads. Where a query reads
few tokens of one latent head, these messages are longer than the sequences themselves. So ranks all-gather latents and
index keys, and exchange queries and outputs by rows:

    queries [N, local heads, D]  -- all-to-all -->  [N / K, all heads, D]       select and attend over all tokens
    outputs [N / K, all heads, V]  -- all-to-all -->  [N, local heads, V]       no counts or partials to exchange

Between attention and FFN each rank has the residual stream of its rows: sums over ranks are reduce-scattered, and
inputs of projections over all rows are all-gathered.

Gathered pages lie rank after rank. A table of runs maps them to the order of the sequence, so indexer and attention see
the cache of a single rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from comm.base import Communicator
from helix.kv_placement import KVPlacement
from helix.layout import HelixLayout
from helix.worker.kv_cache import LayerCache
from helix.worker.step import RowShard, Step


def can_shard_rows(rows: int, ranks: int) -> bool:
    """Returns whether each rank would have some of the rows."""
    return (ranks - 1) * -(-rows // ranks) < rows


def shard_rows(step: Step) -> Step:
    """Shards the rows of a prefill step over the ranks, each of which has some."""
    owners = step.owners()
    assert step.cu_q is not None and owners is not None
    placement, rows, page = step.placement, len(step.tokens), step.placement.page_size
    ranks, rank, run_length = placement.layout.kvp, placement.kvp_rank, run_length_of(placement)
    sequences = len(step.slots) - step.padded
    columns = min(-(-step.max_k // page), step.block_tables.shape[1])

    rows_per_rank = -(-rows // ranks)
    local = slice(rank * rows_per_rank, min((rank + 1) * rows_per_rank, rows))
    table = runs(step, range(columns))
    if step.padded:
        table = torch.cat([table, table.new_zeros(step.padded, table.shape[1])])
    alone, nowhere = (
        KVPlacement(HelixLayout.create("helix", 1), 0, run_length, run_length),
        torch.zeros_like(step.starts),
    )
    part = replace(
        step.part(local.start, local.stop),
        placement=alone,
        starts=nowhere[local],
        tables={None: table},
        slot_mappings={},
        max_k=ranks * columns * page,
    )
    slots = alone.compute_slot_mapping(step.positions, nowhere, step.live, table, owners)
    pages = step.block_tables[:sequences, :columns].flatten().long()
    return replace(step, row_shard=RowShard(part, rows, local, rows_per_rank, run_length, pages, slots, {}))


def run_length_of(placement: KVPlacement) -> int:
    """Returns how many consecutive tokens of a sequence lie together on a rank."""
    return math.gcd(placement.page_size, placement.append_block)


def runs(step: Step, columns: range) -> Tensor:
    """Finds the runs of tokens in these columns of all ranks' gathered pages.

    Returns:
        [n, K * columns * page / run] int32 of the step's sequences without padding, in the order of their tokens.
    """
    assert step.cu_q is not None
    placement, sequences = step.placement, len(step.slots) - step.padded
    layout, page, block, run_length = (
        placement.layout,
        placement.page_size,
        placement.append_block,
        run_length_of(placement),
    )
    device, room = step.positions.device, len(columns) * page  # tokens of a sequence on a rank
    first = columns.start * page
    begins = torch.arange(first * layout.kvp, (first + room) * layout.kvp, run_length, device=device)
    sequence = torch.arange(sequences, device=device)[:, None]
    starts = step.starts[step.cu_q[:sequences].long().clamp(max=len(step.tokens) - 1)][:, None]
    # Clamped ones are beyond the longest sequence.
    offsets = (layout.token_slot(begins, block) - first).clamp(max=room - run_length)
    owners_of_runs = layout.token_owner(begins, block, starts)
    return (((owners_of_runs * sequences + sequence) * room + offsets) // run_length).int()


def gather_sequences(shard: RowShard, comm: Communicator, cache: LayerCache, names: Sequence[str]) -> None:
    """All-gathers pages of a layer, [K * n * columns, ...] by name, rank after rank.

    It may overlap the layer before: the step's own tokens are added later.
    """
    for name in names:
        for older in [key for key in shard.gathered if key[0] == name and key[1] < cache.index - 1]:
            del shard.gathered[older]  # reuse its memory
        pages = cache.tensors[name].view(torch.uint8).index_select(0, shard.pages)
        all_pages = comm.gather_in_group(pages).flatten(0, 1).view(cache.tensors[name].dtype)
        event = torch.cuda.Event() if all_pages.is_cuda else None
        if event is not None:
            event.record()
        shard.gathered[name, cache.index] = all_pages, event


def gathered(shard: RowShard, cache: LayerCache, names: Sequence[str]) -> dict[str, Tensor]:
    """Returns a layer's gathered pages, to which the step's own tokens are still to be added (`RowShard.slots`)."""
    found = {}
    for name in names:
        found[name], event = shard.gathered[name, cache.index]
        if event is not None:
            event.wait()
    return found


def gather_latents(
    step: Step, comm: Communicator, cache: LayerCache, columns: range, unpack: Callable[..., Tensor]
) -> Tensor:
    """All-gathers the latents of a step's sequences in these columns of all ranks' pages, in token order.

    Args:
        unpack: makes one tensor [pages, page, E] of the parts of latents, by name.

    Returns:
        [n, K * columns * page, E]; tokens that are not written yet are arbitrary.
    """
    sequences = len(step.slots) - step.padded
    pages = step.block_tables[:sequences, columns.start : columns.stop].flatten().long()
    found = unpack(
        {name: data.view(torch.uint8).index_select(0, pages).view(data.dtype) for name, data in cache.tensors.items()}
    )
    if step.placement.layout.kvp > 1:
        all_pages = comm.gather_in_group(found.view(torch.uint8)).view(found.dtype)
        found = all_pages.view(-1, run_length_of(step.placement), found.shape[2]).index_select(
            0, runs(step, columns).flatten()
        )
    return found.view(sequences, -1, found.shape[2])


def to_rows(shard: RowShard, comm: Communicator, q: Tensor, heads: list[int]) -> Tensor:
    """Sends queries [N, local heads, D] to the ranks of their rows -> [R, Hq, D]; `heads`: heads of each rank."""
    ranks, max_heads = len(heads), max(heads)
    padding = 0, 0, 0, max_heads - q.shape[1], 0, ranks * shard.rows_per_rank - len(q)
    send = F.pad(q, padding) if any(padding) else q.contiguous()
    parts = comm.all_to_all(send.view(ranks, shard.rows_per_rank, max_heads, -1))[
        :, : shard.local.stop - shard.local.start
    ]
    if min(heads) == max_heads:
        return parts.transpose(0, 1).flatten(1, 2)
    return torch.cat([part[:, :n] for part, n in zip(parts, heads, strict=True)], 1)


def to_heads(shard: RowShard, comm: Communicator, x: Tensor, heads: list[int]) -> Tensor:
    """Sends outputs [R, Hq, V] to the ranks of their heads -> [N, local heads, V]; `heads`: heads of each rank."""
    ranks, max_heads = len(heads), max(heads)
    if min(heads) == max_heads and len(x) == shard.rows_per_rank:
        send = x.view(shard.rows_per_rank, ranks, max_heads, -1).transpose(0, 1).contiguous()
    else:
        send = x.new_zeros(ranks, shard.rows_per_rank, max_heads, x.shape[2])
        for part, part_of_rank in zip(send, x.split(heads, 1), strict=True):
            part[: len(x), : part_of_rank.shape[1]] = part_of_rank
    return comm.all_to_all(send).flatten(0, 1)[: shard.rows, : heads[comm.kvp_rank]]


def reduce_scatter_rows(shard: RowShard, comm: Communicator, parts: Tensor) -> Tensor:
    """Sums all ranks' partial sums [N, H] and returns this rank's rows [R, H]."""
    ranks = len(comm.kvp_group)
    missing = ranks * shard.rows_per_rank - len(parts)
    parts = F.pad(parts, (0, 0, 0, missing)) if missing else parts
    return comm.reduce_scatter(parts.view(ranks, shard.rows_per_rank, -1))[: shard.local.stop - shard.local.start]


def gather_some_rows(shard: RowShard, comm: Communicator, x: Tensor, rows: Tensor) -> Tensor:
    """Gathers the given rows [m] int64 of the step from all ranks' rows [R, ...] -> [m, ...]."""
    local = (rows - shard.local.start).clamp(0, len(x) - 1)
    return comm.gather_in_group(x[local])[rows // shard.rows_per_rank, torch.arange(len(rows), device=rows.device)]


def all_gather_rows(shard: RowShard, comm: Communicator, x: Tensor) -> Tensor:
    """Gathers all ranks' rows [R, H] -> [N, H]."""
    missing = shard.rows_per_rank - len(x)
    x = F.pad(x, (0, 0, 0, missing)) if missing else x
    return comm.gather_in_group(x).flatten(0, 1)[: shard.rows]
