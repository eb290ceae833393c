"""Times the kernels of a KV cache in host memory, on one GPU: `helix bench offload`.

Blocks of 64 KB (keys and values of 128 tokens of one KV head) are fetched from pinned host memory into GPU blocks by
lists on the device: `gbs` is the link's rate, by number of copy programs; a plain gather of such blocks reached
50.6 GB/s. The store holds known numbers, and fetched blocks are compared first. `pin_s_gb` is the time to pin a GB.

`resolve` maps the block tables of a step's selected pages to GPU blocks: all of them resident, or none, by resident
blocks of a KV head. It is checked against the reference. The last part is the write-back of a step, in all layers, in
which no sequence fills a page, and in which each fills one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import fields
from functools import cache
from statistics import median
from typing import Any

import torch

from benchmarks.runner import BenchContext, Row
from benchmarks.timer import DIM, seconds
from helix.worker.clock import TimedEvent
from helix.worker.host_store import HostStore
from kernels.offload.copy_blocks import copy_blocks
from kernels.offload.reference import resolve as reference
from kernels.offload.resolve import resolve
from kernels.offload.write_back import write_back
from kernels.resident_blocks import BlockList, FetchList, QueryRanges, ResidentBlocks

PAGE, HEADS, LAYERS = 128, 4, 28
STORE = 4 << 30  # bytes
PROGRAMS = (4, 8, 16, 32, 64, 128)
COPIES = 8
GRID = {"kvp": 1, "kvp_rank": 0, "append_block": PAGE, "page_size": PAGE}


@cache
def store(device: torch.device) -> tuple[HostStore, float]:
    """Returns host memory whose blocks begin with their numbers, and the seconds per GB to pin it."""
    gpu = device.type == "cuda"
    begin = time.perf_counter()
    made = HostStore((1, (STORE if gpu else 1 << 20) // (4 * PAGE * DIM), 2, PAGE, DIM), torch.bfloat16, device)
    took = time.perf_counter() - begin
    assert made.tensor is not None
    numbers = torch.arange(made.tensor.shape[1], dtype=torch.int32, device=device)
    made.tensor.view(torch.int32).view(len(numbers), -1)[:, ::1024] = numbers[:, None]
    return made, took / made.bytes * 1e9


def fetch(ctx: BenchContext, pieces: int, programs: int) -> Iterator[Row]:
    """Measures the rate at which the blocks of four KV heads are fetched."""
    device = ctx.device
    host_store, pinning = store(device)
    host = host_store.tensor
    assert host is not None
    resident = torch.zeros(1, 2 * pieces, 2, PAGE, DIM, dtype=host.dtype, device=device)
    lists = []
    for _ in range(COPIES if ctx.gpu else 1):
        source = torch.randperm(host.shape[1])[:pieces].int().view(HEADS, -1)
        target = torch.randperm(2 * pieces)[:pieces].int().view(HEADS, -1)
        counts = torch.full((HEADS,), pieces // HEADS, dtype=torch.int32)
        lists.append(BlockList(*(x.to(device) for x in (source, target, counts))))
    copy_blocks(host, resident, lists[0], programs)
    fetched = resident.view(torch.int32).view(2 * pieces, -1)[lists[0].target.flatten().long()]
    assert torch.equal(
        fetched, host.view(torch.int32).view(host.shape[1], -1)[lists[0].source.flatten().long().cpu()].to(device)
    )
    s = seconds(lambda i: copy_blocks(host, resident, lists[i], programs), len(lists), device)
    size = pieces * 4 * PAGE * DIM
    row: Row = {"kind": "fetch", "pieces": pieces, "programs": programs, "us": 1e6 * s, "gbs": size / s / 1e9}
    yield row | {"pin_s_gb": pinning}


def fetch_at_once(gpus: Sequence[torch.device], pieces: int, copies: int = 20) -> tuple[int, float]:
    """Returns the bytes of a fetch of `pieces` blocks, and its seconds on the slowest GPU while all GPUs fetch."""
    works = []
    for device in gpus:
        host_store, _ = store(device)
        host = host_store.tensor
        assert host is not None
        resident = torch.zeros(1, pieces, 2, PAGE, DIM, dtype=host.dtype, device=device)
        lists = []
        for _ in range(copies):
            source = torch.randperm(host.shape[1])[:pieces].int().view(HEADS, -1)
            counts = torch.full((HEADS,), pieces // HEADS, dtype=torch.int32)
            target = torch.arange(pieces).int().view(HEADS, -1)
            lists.append(BlockList(*(x.to(device) for x in (source, target, counts))))
        works.append((device, host, resident, lists))
    size = pieces * works[0][2][0, 0].numel() * works[0][2].itemsize
    runs = []
    for device, host, resident, lists in works:

        def run(host: Any = host, resident: Any = resident, lists: Any = lists) -> None:
            for blocks in lists:
                copy_blocks(host, resident, blocks)

        if device.type == "cuda":
            with torch.cuda.device(device):
                copy_blocks(host, resident, lists[0])
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    run()
        runs.append((device, graph.replay if device.type == "cuda" else run))
    slowest = []
    for _ in range(5 if gpus[0].type == "cuda" else 1):
        pairs = []
        for device, launch in runs:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                begin = TimedEvent(device)
                launch()
                pairs.append((begin, TimedEvent(device)))
        for _, end in pairs:
            end.wait()
        slowest.append(max(end.since(begin) for begin, end in pairs) / copies)
    return size, median(slowest)


def find(ctx: BenchContext, batch: int, num_selected: int, resident: int, all_resident: bool) -> Iterator[Row]:
    """Times a layer's block tables of `num_selected` pages, all resident or none."""
    device, copies = ctx.device, 1 if all_resident else max(2, resident // (batch * num_selected))
    pages = copies * batch * num_selected
    lanes = torch.arange(HEADS, device=device)[None, :, None]
    tables = [
        (
            torch.arange(batch * num_selected, device=device).view(batch, 1, num_selected)
            + i * batch * num_selected
            + 0 * lanes
        ).int()
        for i in range(copies)
    ]
    state = ResidentBlocks.create(
        1, HEADS, pages, resident if all_resident else (copies - 1) * batch * num_selected, 0, 1, device
    )
    misses = FetchList.create(HEADS, batch * num_selected, device, torch.zeros(2, dtype=torch.int64, device=device))
    counts = torch.full((batch,), num_selected, dtype=torch.int32, device=device)
    starts = torch.zeros(batch, dtype=torch.int64, device=device)
    readers = QueryRanges(counts * PAGE, counts, starts + num_selected * PAGE, starts, 1)
    out = tables[0].clone()

    def run(i: int) -> None:
        out.copy_(tables[i])
        resolve(out, readers, state.layer(0), misses, **GRID)

    cpu = torch.device("cpu")
    reference_state = ResidentBlocks.create(1, HEADS, pages, state.num_blocks, 0, 1, cpu)
    lists = FetchList.create(HEADS, batch * num_selected, cpu, torch.zeros(2, dtype=torch.int64))
    on_cpu = QueryRanges(counts.cpu() * PAGE, counts.cpu(), starts.cpu() + num_selected * PAGE, starts.cpu(), 1)
    for i in range(copies):
        run(i)
        if i < 2:  # the reference is slow
            expected = tables[i].to(cpu, copy=True)
            reference(expected, on_cpu, reference_state.layer(0), lists, **GRID)
            assert torch.equal(out.cpu(), expected)
            assert all(
                torch.equal(getattr(state, f.name).cpu(), getattr(reference_state, f.name)) for f in fields(state)[:-2]
            )
    s = seconds(run, copies, device) - seconds(lambda i: out.copy_(tables[i]), copies, device)
    missing = 0 if all_resident else HEADS * batch * num_selected
    assert int(misses.counts.sum()) == missing
    yield {
        "kind": "resolve",
        "batch": batch,
        "selected": num_selected,
        "resident_blocks": state.num_blocks,
        "missing": missing,
        "us": 1e6 * s,
    }


def write(ctx: BenchContext, batch: int, filled: bool) -> Iterator[Row]:
    """Times a step's write-back in all layers."""
    device, layers = ctx.device, LAYERS if ctx.gpu else 2
    host_store, _ = store(device)
    assert host_store.tensor is not None
    pages = host_store.tensor.shape[1] // layers // HEADS
    host = host_store.tensor[0, : layers * pages * HEADS].view(layers, pages * HEADS, 2, PAGE, DIM)
    resident = torch.randn(layers, batch * HEADS, 2, PAGE, DIM, device=device).to(host.dtype)
    state = ResidentBlocks.create(layers, HEADS, pages, 1, batch * HEADS, 1, device)
    tables = torch.randperm(pages)[:batch].int().view(batch, 1).to(device)
    starts = torch.zeros(batch, dtype=torch.int64, device=device)
    before = starts + PAGE - 1
    after = before + filled

    def run(i: int) -> None:
        write_back(resident, host, state.gpu_block_of, tables, starts, before, after, 1, 0, 1, **GRID)

    run(0)
    if filled:
        for n, page in enumerate(tables[:, 0].tolist()):
            ours = resident[:, n * HEADS : (n + 1) * HEADS]
            assert torch.equal(host[:, page * HEADS : (page + 1) * HEADS], ours)
    s = seconds(run, 1, device)
    size = filled * layers * resident[0].numel() * 2
    yield {"kind": "write-back", "batch": batch, "missing": 0, "us": 1e6 * s, "bytes": size, "gbs": size / s / 1e9}
