"""Times the kernels of a cache in host memory, on one GPU: `helix bench tier`.

Blocks of 64 KB, keys and values of 128 tokens of one KV head, come from pinned host memory to places on the GPU, by
lists on the device: `gbs` is the link's rate, by programs of the copy; 50.6 GB/s was measured for a plain gather of
such blocks. The store is filled with known numbers, and what came is compared first. `pin_s_gb` is what pinning took.

`resolve` turns the tables of a step's chosen pages into places: all of them hot, or none, by places of a KV head. It is
checked against the reference. Beside it, the write-back of a step that fills no page, in all layers, and of one in
which each sequence fills one.
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

from benchmarks.runner import Given, Row
from benchmarks.timer import DIM, seconds
from helix.worker.clock import Moment
from helix.worker.host_store import HostStore
from kernels.hot_blocks import BlockList, FetchList, HotBlocks, Readers
from kernels.tier.copy_blocks import copy_blocks
from kernels.tier.reference import resolve as reference
from kernels.tier.resolve import resolve
from kernels.tier.write_back import write_back

PAGE, HEADS, LAYERS = 128, 4, 28
STORE = 4 << 30  # bytes
PROGRAMS = (4, 8, 16, 32, 64, 128)
COPIES = 8
GRID = {"kvp": 1, "kvp_rank": 0, "append_block": PAGE, "page_size": PAGE}


@cache
def store(device: torch.device) -> tuple[HostStore, float]:
    """Host memory whose blocks begin with their numbers, and the seconds that pinning a GB of it took."""
    gpu = device.type == "cuda"
    begin = time.perf_counter()
    made = HostStore((1, (STORE if gpu else 1 << 20) // (4 * PAGE * DIM), 2, PAGE, DIM), torch.bfloat16, device)
    took = time.perf_counter() - begin
    assert made.tensor is not None
    numbers = torch.arange(made.tensor.shape[1], dtype=torch.int32, device=device)
    made.tensor.view(torch.int32).view(len(numbers), -1)[:, ::1024] = numbers[:, None]
    return made, took / made.bytes * 1e9


def fetch(given: Given, pieces: int, programs: int) -> Iterator[Row]:
    """The rate at which blocks of four KV heads' lists come."""
    device = given.device
    held, pinning = store(device)
    host = held.tensor
    assert host is not None
    places = torch.zeros(1, 2 * pieces, 2, PAGE, DIM, dtype=host.dtype, device=device)
    lists = []
    for _ in range(COPIES if given.gpu else 1):
        source = torch.randperm(host.shape[1])[:pieces].int().view(HEADS, -1)
        target = torch.randperm(2 * pieces)[:pieces].int().view(HEADS, -1)
        counts = torch.full((HEADS,), pieces // HEADS, dtype=torch.int32)
        lists.append(BlockList(*(x.to(device) for x in (source, target, counts))))
    copy_blocks(host, places, lists[0], programs)
    came = places.view(torch.int32).view(2 * pieces, -1)[lists[0].target.flatten().long()]
    assert torch.equal(
        came, host.view(torch.int32).view(host.shape[1], -1)[lists[0].source.flatten().long().cpu()].to(device)
    )
    s = seconds(lambda i: copy_blocks(host, places, lists[i], programs), len(lists), device)
    size = pieces * 4 * PAGE * DIM
    row: Row = {"kind": "fetch", "pieces": pieces, "programs": programs, "us": 1e6 * s, "gbs": size / s / 1e9}
    yield row | {"pin_s_gb": pinning}


def fetch_at_once(gpus: Sequence[torch.device], pieces: int, copies: int = 20) -> tuple[int, float]:
    """Bytes of a fetch of so many blocks, and its seconds on the slowest of these GPUs while all of them fetch."""
    works = []
    for device in gpus:
        held, _ = store(device)
        host = held.tensor
        assert host is not None
        places = torch.zeros(1, pieces, 2, PAGE, DIM, dtype=host.dtype, device=device)
        lists = []
        for _ in range(copies):
            source = torch.randperm(host.shape[1])[:pieces].int().view(HEADS, -1)
            counts = torch.full((HEADS,), pieces // HEADS, dtype=torch.int32)
            target = torch.arange(pieces).int().view(HEADS, -1)
            lists.append(BlockList(*(x.to(device) for x in (source, target, counts))))
        works.append((device, host, places, lists))
    size = pieces * works[0][2][0, 0].numel() * works[0][2].itemsize
    runs = []
    for device, host, places, lists in works:

        def run(host: Any = host, places: Any = places, lists: Any = lists) -> None:
            for blocks in lists:
                copy_blocks(host, places, blocks)

        if device.type == "cuda":
            with torch.cuda.device(device):
                copy_blocks(host, places, lists[0])
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
                begin = Moment(device)
                launch()
                pairs.append((begin, Moment(device)))
        for _, end in pairs:
            end.wait()
        slowest.append(max(end.since(begin) for begin, end in pairs) / copies)
    return size, median(slowest)


def find(given: Given, batch: int, chosen: int, places: int, hot: bool) -> Iterator[Row]:
    """A layer's tables of `chosen` pages, which are all hot, or none of which is."""
    device, copies = given.device, 1 if hot else max(2, places // (batch * chosen))
    pages = copies * batch * chosen
    lanes = torch.arange(HEADS, device=device)[None, :, None]
    tables = [
        (torch.arange(batch * chosen, device=device).view(batch, 1, chosen) + i * batch * chosen + 0 * lanes).int()
        for i in range(copies)
    ]
    state = HotBlocks.create(1, HEADS, pages, places if hot else (copies - 1) * batch * chosen, 0, 1, device)
    misses = FetchList.create(HEADS, batch * chosen, device, torch.zeros(2, dtype=torch.int64, device=device))
    held = torch.full((batch,), chosen, dtype=torch.int32, device=device)
    starts = torch.zeros(batch, dtype=torch.int64, device=device)
    readers = Readers(held * PAGE, held, starts + chosen * PAGE, starts, 1)
    out = tables[0].clone()

    def run(i: int) -> None:
        out.copy_(tables[i])
        resolve(out, readers, state.layer(0), misses, **GRID)

    cpu = torch.device("cpu")
    known = HotBlocks.create(1, HEADS, pages, state.places, 0, 1, cpu)
    lists = FetchList.create(HEADS, batch * chosen, cpu, torch.zeros(2, dtype=torch.int64))
    on_cpu = Readers(held.cpu() * PAGE, held.cpu(), starts.cpu() + chosen * PAGE, starts.cpu(), 1)
    for i in range(copies):
        run(i)
        if i < 2:  # the reference takes its time
            expected = tables[i].to(cpu, copy=True)
            reference(expected, on_cpu, known.layer(0), lists, **GRID)
            assert torch.equal(out.cpu(), expected)
            assert all(torch.equal(getattr(state, f.name).cpu(), getattr(known, f.name)) for f in fields(state)[:-2])
    s = seconds(run, copies, device) - seconds(lambda i: out.copy_(tables[i]), copies, device)
    missing = 0 if hot else HEADS * batch * chosen
    assert int(misses.counts.sum()) == missing
    yield {
        "kind": "resolve",
        "batch": batch,
        "chosen": chosen,
        "places": state.places,
        "missing": missing,
        "us": 1e6 * s,
    }


def write(given: Given, batch: int, filled: bool) -> Iterator[Row]:
    """A step's write-back, in all layers."""
    device, layers = given.device, LAYERS if given.gpu else 2
    held, _ = store(device)
    assert held.tensor is not None
    pages = held.tensor.shape[1] // layers // HEADS
    host = held.tensor[0, : layers * pages * HEADS].view(layers, pages * HEADS, 2, PAGE, DIM)
    places = torch.randn(layers, batch * HEADS, 2, PAGE, DIM, device=device).to(host.dtype)
    state = HotBlocks.create(layers, HEADS, pages, 1, batch * HEADS, 1, device)
    tables = torch.randperm(pages)[:batch].int().view(batch, 1).to(device)
    starts = torch.zeros(batch, dtype=torch.int64, device=device)
    before = starts + PAGE - 1
    after = before + filled

    def run(i: int) -> None:
        write_back(places, host, state.place_of, tables, starts, before, after, 1, 0, 1, **GRID)

    run(0)
    if filled:
        for n, page in enumerate(tables[:, 0].tolist()):
            ours = places[:, n * HEADS : (n + 1) * HEADS]
            assert torch.equal(host[:, page * HEADS : (page + 1) * HEADS], ours)
    s = seconds(run, 1, device)
    size = filled * layers * places[0].numel() * 2
    yield {"kind": "write-back", "batch": batch, "missing": 0, "us": 1e6 * s, "bytes": size, "gbs": size / s / 1e9}
