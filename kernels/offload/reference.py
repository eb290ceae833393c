"""Plain torch reference of `kernels.offload`."""

from __future__ import annotations

import torch

from kernels.resident_blocks import NOT_RESIDENT, BlockList, FetchList, QueryRanges, ResidentBlocks
from kernels.sparse.reference import full_pages


def resolve(
    table: torch.Tensor,
    query_ranges: QueryRanges,
    resident: ResidentBlocks,
    misses: FetchList,
    *,
    parts: int = 1,
    part_stride: int = 1,
    **grid: int,
) -> None:
    """Plain torch `kernels.offload.resolve.resolve`."""
    hi, pages, positions, starts, queries, first_row = query_ranges
    ring_pages = resident.ring_pages
    N, heads, _ = table.shape
    columns, num_pages = (-(-hi // (grid["page_size"] // parts))).tolist(), pages.tolist()
    full = [full_pages(*x, **grid) for x in zip(positions[::queries].tolist(), starts[::queries].tolist(), strict=True)]
    for h in range(heads):
        entries_of_page: dict[int, list[tuple[int, int]]] = {}  # table entries per page, in order
        for n in range(N):
            row = n // queries
            for j, entry in enumerate(table[n, h, : columns[n]].tolist()):
                column, page = (num_pages[n] - columns[n] + j) // parts, entry // parts
                if page >= 0 and column >= full[row]:
                    gpu_block = ((first_row + row) * ring_pages + column % ring_pages) * heads + h
                    table[n, h, j] = gpu_block * part_stride + entry % parts
                elif page >= 0:
                    entries_of_page.setdefault(page, []).append((n, j))
        gpu_block_of, page_of, lru_order = resident.gpu_block_of[h], resident.page_of[h], resident.lru_order[:, h]
        lru_half = int(resident.lru_half[h])
        found = {int(gpu_block_of[page]) for page in entries_of_page if gpu_block_of[page] >= 0}
        missing = [page for page in entries_of_page if gpu_block_of[page] < 0]
        old_order = lru_order[lru_half].tolist()
        stay = [gpu_block for gpu_block in old_order if gpu_block not in found]
        victims = stay[: len(missing)]
        assert len(victims) == len(missing), (
            f"{len(entries_of_page)} blocks of a KV head selected at once, {resident.num_blocks} fit"
        )
        for i, (page, gpu_block) in enumerate(zip(missing, victims, strict=True)):
            old = int(page_of[gpu_block])
            if old >= 0 and gpu_block_of[old] == gpu_block:
                gpu_block_of[old] = NOT_RESIDENT
            page_of[gpu_block] = page
            misses.source[h, i], misses.target[h, i] = (
                page * heads + h,
                resident.begin + h * resident.num_blocks + gpu_block,
            )
        for page, gpu_block in zip(missing, victims, strict=True):
            gpu_block_of[page] = gpu_block
        if not misses.is_prefetch:
            recent = [gpu_block for gpu_block in old_order if gpu_block in found][::-1] + victims[::-1]
            lru_order[1 - lru_half] = torch.tensor(stay[len(victims) :] + recent, dtype=torch.int32)
            resident.lru_half[h] = 1 - lru_half
        misses.counts[h] = len(missing)
        hit_counts = [sum(map(len, entries_of_page.values())) - len(missing), len(missing)]
        misses.hit_counts.add_(torch.tensor(hit_counts, device=misses.hit_counts.device))
        for page, entries in entries_of_page.items():
            for n, j in entries:
                gpu_block = resident.begin + h * resident.num_blocks + int(gpu_block_of[page])
                table[n, h, j] = gpu_block * part_stride + table[n, h, j] % parts


def copy_blocks(source: torch.Tensor, target: torch.Tensor, blocks: BlockList) -> None:
    """Plain torch `kernels.offload.copy_blocks.copy_blocks`."""
    for source_ids, target_ids, count in zip(blocks.source, blocks.target, blocks.counts.tolist(), strict=True):
        copied = source[:, source_ids[:count].long().to(source.device)]
        target[:, target_ids[:count].long().to(target.device)] = copied.to(target.device)


def write_back(
    gpu_blocks: torch.Tensor,
    host: torch.Tensor,
    gpu_block_of: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    first_row: int,
    ring_pages: int,
    **grid: int,
) -> None:
    """Plain torch `kernels.offload.write_back.write_back`."""
    heads = gpu_block_of.shape[1]
    head = torch.arange(heads, device=gpu_blocks.device)
    lengths = zip(tables, starts.tolist(), before.tolist(), after.tolist(), strict=True)
    for row, (table, start, old, new) in enumerate(lengths, first_row):
        for column in range(full_pages(old, start, **grid), full_pages(new, start, **grid)):
            page = int(table[column])
            ring_block = (row * ring_pages + column % ring_pages) * heads
            host[:, page * heads : (page + 1) * heads] = gpu_blocks[:, ring_block + head].to(host.device)
            gpu_block_of[:, :, page] = NOT_RESIDENT


def fetch_tokens(
    source: torch.Tensor, target: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor, last: int | None = None
) -> None:
    """Plain torch `kernels.offload.fetch_tokens.fetch_tokens`."""
    page_size = source.shape[1]
    for to, row, count in zip(target, slots.long().to(source.device), counts.tolist(), strict=True):
        columns = slice(0 if last is None else max(count - last, 0), count)
        to[columns] = source[row[columns] // page_size, row[columns] % page_size].to(to.device)
