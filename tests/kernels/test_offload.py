"""A cache on the host, hot blocks and rings on the GPU: what a query reads is what was written, whatever happens."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helix.kv_placement import KVPlacement
from helix.layout import HelixLayout
from kernels.offload.copy_blocks import copy_blocks
from kernels.offload.fetch_tokens import fetch_tokens
from kernels.offload.reference import copy_blocks as reference_copy
from kernels.offload.reference import fetch_tokens as reference_fetch
from kernels.offload.reference import resolve as reference
from kernels.offload.reference import write_back as reference_write
from kernels.offload.resolve import resolve
from kernels.offload.write_back import write_back
from kernels.resident_blocks import NOT_RESIDENT, BlockList, FetchList, QueryRanges, ResidentBlocks
from tests.kernels.interleaving import Streams

HEADS, DIM, LAYERS, ROWS = 2, 2, 2, 3
generators = st.integers(0, 2**32 - 1).map(random.Random)


class Offload:
    """Sequences that come, grow, and go, over a cache whose every number is known.

    Args:
        ops: resolve, copy_blocks, write_back.
        queries: of a step, the drafts among them.
    """

    def __init__(
        self, ops: tuple[Any, Any, Any], generator: random.Random, device: torch.device, queries: int, hot: int
    ) -> None:
        self.resolve, self.copy, self.write = ops
        self.generator, self.device, self.queries = generator, device, queries
        kvp, page, block = generator.choice([(1, 4, 4), (2, 4, 4), (3, 4, 2), (2, 2, 6)])
        self.page, self.pages = page, 96
        self.placement = KVPlacement(HelixLayout.create("helix", kvp), generator.randrange(kvp), block, page)
        self.most = [] if self.write is reference_write else [(queries - 1) // page + 1]
        self.ring = (page + queries - 2) // page + 1
        shape = 2, page, DIM
        rings = ROWS * self.ring * HEADS
        self.hot = ResidentBlocks.create(LAYERS, HEADS, self.pages, hot, rings, self.ring, device)
        self.places = torch.full((LAYERS, rings + HEADS * hot, *shape), torch.nan, device=device)
        self.host = torch.full((LAYERS, self.pages * HEADS, *shape), torch.nan, device=device)
        self.hit_counts = torch.zeros(2, dtype=torch.int64, device=device)
        whole = FetchList.create(HEADS, hot + 3, device, self.hit_counts)
        self.misses = replace(whole, source=whole.source[:, 3:], target=whole.target[:, 3:])  # of a part of the batch
        self.free = list(range(self.pages))
        self.lengths = torch.zeros(ROWS, dtype=torch.int64)
        self.starts = torch.zeros(ROWS, dtype=torch.int64)
        self.tables = torch.zeros(ROWS, 40, dtype=torch.int32)
        self.truth: list[Tensor] = [torch.empty(0)] * ROWS  # [layers, local tokens, heads, 2, D]
        self.live = [False] * ROWS
        self.late: list[Callable[[], None]] = []

    @property
    def grid(self) -> dict[str, int]:
        return {**self.placement.grid, "page_size": self.page}

    def local(self, row: int, length: int) -> int:
        grid = self.placement
        return int(grid.layout.local_length(length, grid.kvp_rank, grid.append_block, int(self.starts[row])))

    def full(self, row: int) -> int:
        return self.local(row, int(self.lengths[row])) // self.page

    def admit(self, row: int) -> None:
        """A prompt: its full pages go to the host, the unfinished one to the ring."""
        self.live[row] = True
        self.starts[row] = self.generator.randrange(self.placement.layout.kvp)
        self.lengths[row] = length = self.generator.randrange(1, 40)
        self.generator.shuffle(self.free)
        pages = [self.free.pop() for _ in range(28)]
        self.tables[row, : len(pages)] = torch.tensor(pages)
        held = self.local(row, length)
        truth = torch.randn(LAYERS, held, HEADS, 2, DIM)
        self.truth[row] = truth
        for column in range(-(-held // self.page)):
            block = truth[:, column * self.page : (column + 1) * self.page].permute(0, 2, 3, 1, 4)
            at = pages[column] * HEADS
            memory = self.host
            if (column + 1) * self.page > held:
                memory, at = self.places, (row * self.ring + column % self.ring) * HEADS
            memory[:, at : at + HEADS, :, : block.shape[3]] = block.to(self.device)
            self.hot.gpu_block_of[:, :, pages[column]] = NOT_RESIDENT

    def retire(self, row: int) -> None:
        """Nobody may read what a sequence leaves."""
        self.live[row] = False
        for page in self.tables[row, :28].tolist():
            self.host[:, page * HEADS : (page + 1) * HEADS] = torch.nan
            self.free.append(page)
        self.tables[row] = 0

    def step(self) -> None:
        """Appends tokens, lets every query read some pages of every head, takes some of the tokens."""
        T, rng = self.queries, self.generator
        positions = (self.lengths[:, None] + torch.arange(T)).flatten()
        starts = self.starts.repeat_interleave(T)
        live = torch.tensor(self.live).repeat_interleave(T)
        for row in range(ROWS):
            held = self.local(row, int(self.lengths[row]))
            if self.live[row]:
                more = self.local(row, int(self.lengths[row]) + T) - held
                new = torch.randn(LAYERS, more, HEADS, 2, DIM)
                self.truth[row] = torch.cat([self.truth[row][:, :held], new], 1)
                for i in range(held, held + more):
                    at = (row * self.ring + i // self.page % self.ring) * HEADS
                    self.places[:, at : at + HEADS, :, i % self.page] = new[:, i - held].to(self.device)
        for write in self.late:
            write()
        self.late = []
        read = self.choose(positions, live)
        for layer in range(LAYERS):
            self.attend(layer, read, positions, starts)
        accepted = torch.tensor([rng.randint(1, T) if self.live[row] else 0 for row in range(ROWS)])
        before, self.lengths = self.lengths, self.lengths + accepted
        self.wrote(before)

    def choose(self, positions: Tensor, live: Tensor) -> list[list[list[list[int]]]]:
        """Columns that each query reads of each layer's heads, some of them left out for a better rank's."""
        found = []
        self.held = torch.zeros(len(positions), dtype=torch.int32)
        for n, position in enumerate(positions.tolist()):
            row = n // self.queries
            pages = -(-self.local(row, position + 1) // self.page) if live[n] else 0
            last = self.generator.randint(0, min(self.full(row), pages))
            first = self.generator.randint(0, min(last, 2))
            count = self.generator.randint(0, min(last - first, 3))
            self.held[n] = pages
            found.append(
                [
                    [
                        [*range(first), *sorted(self.generator.sample(range(first, last), count)), *range(last, pages)]
                        for _ in range(HEADS)
                    ]
                    for _ in range(LAYERS)
                ]
            )
        return found

    def attend(self, layer: int, read: list[list[list[list[int]]]], positions: Tensor, starts: Tensor) -> None:
        N, width = len(read), 40
        table = torch.randint(-(2**31), 2**31 - 1, (N, HEADS, width)).int()
        hi = torch.zeros(N, dtype=torch.int32)
        for n in range(N):
            row = n // self.queries
            for h in range(HEADS):
                columns = read[n][layer][h]
                table[n, h, : len(columns)] = self.tables[row, columns]
                if columns:
                    hi[n] = self.local(row, int(positions[n]) + 1) - (int(self.held[n]) - len(columns)) * self.page
                    if self.generator.random() < 0.3 and columns[0] < self.full(row):
                        table[n, h, 0] = -1
        asked = table.clone()
        readers = QueryRanges(*(x.to(self.device) for x in (hi, self.held, positions, starts)), self.queries)
        found = table.to(self.device)
        one, hot = slice(layer, layer + 1), replace(self.hot.layer(layer), ring_pages=self.ring)
        if self.generator.random() < 0.5:  # a guess: what another layer reads
            guess = table.clone()
            for n, h in product(range(N), range(HEADS)):
                columns = read[n][1 - layer][h]
                guess[n, h, : len(columns)] = self.tables[n // self.queries, columns]
            misses = replace(self.misses, hit_counts=torch.zeros_like(self.hit_counts), is_prefetch=True)
            self.resolve(guess.to(self.device), readers, hot, misses, **self.grid)
            self.copy(self.host[one], self.places[one], self.misses)
        before = self.hit_counts.clone()
        self.resolve(found, readers, hot, self.misses, **self.grid)
        self.copy(self.host[one], self.places[one], self.misses)
        misses = int(self.misses.counts.sum())
        assert (self.hit_counts - before)[1] == misses
        for n in range(N):
            row = n // self.queries
            for h in range(HEADS):
                for j, column in enumerate(read[n][layer][h]):
                    place = int(found[n, h, j])
                    if asked[n, h, j] < 0:
                        assert place < 0
                        continue
                    tokens = self.truth[row][layer, column * self.page : (column + 1) * self.page, h]
                    tokens = tokens[: max(0, self.local(row, int(positions[n]) + 1) - column * self.page)]
                    block = self.places[layer, place, :, : len(tokens)].transpose(0, 1).cpu()
                    assert torch.equal(block, tokens), f"query {n}, head {h}, column {column}"

    def wrote(self, before: Tensor) -> None:
        lengths = (x.to(self.device) for x in (self.tables, self.starts, before, self.lengths))
        self.write(self.places, self.host, self.hot.gpu_block_of, *lengths, *self.most, 0, self.ring, **self.grid)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for row in range(ROWS):
                if self.live[row] and (self.lengths[row] > 60 or self.generator.random() < 0.15):
                    self.retire(row)
                elif not self.live[row] and self.generator.random() < 0.7:
                    self.admit(row)
            self.step()


KERNELS = resolve, copy_blocks, write_back
REFERENCES = reference, reference_copy, reference_write


@settings(max_examples=15, deadline=None)
@given(generators, st.integers(1, 5))
def test_what_is_read_is_what_was_written(generator: random.Random, queries: int) -> None:
    """With places enough for one choice and no more, or for most of what there is."""
    min_reads = ROWS * queries * 22
    Offload(REFERENCES, generator, torch.device("cpu"), queries, generator.choice([min_reads, min_reads + 40])).run(20)


@pytest.mark.parametrize("queries", [1, 4])
def test_kernels_read_what_was_written(queries: int, device: torch.device) -> None:
    Offload(KERNELS, random.Random(queries), device, queries, ROWS * queries * 22).run(8)


def without_write_back(offload: Offload) -> None:
    offload.write = lambda *args, **kwargs: None


def with_stale_places(offload: Offload) -> None:
    """A page that is written anew is still looked up where it was."""
    write = offload.write

    def keeping(places: Tensor, host: Tensor, place_of: Tensor, *args: Any, **kwargs: Any) -> None:
        write(places, host, place_of.clone(), *args, **kwargs)

    offload.write = keeping


def with_late_write_back(offload: Offload) -> None:
    """A page is written when the next step's tokens are in the rings already, and before anything is fetched."""
    write = offload.write
    offload.write = lambda *args, **kwargs: offload.late.append(lambda: write(*args, **kwargs))


def with_a_ring_too_short(offload: Offload) -> None:
    """Drafts run over into the page that holds what is certain."""
    offload.ring = 1


MISTAKES = [without_write_back, with_stale_places, with_late_write_back, with_a_ring_too_short]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_caught(mistake: Callable[[Offload], None]) -> None:
    offload = Offload(REFERENCES, random.Random(2), torch.device("cpu"), 4, ROWS * 4 * 22)
    mistake(offload)
    with pytest.raises(AssertionError, match="query"):
        offload.run(60)


@settings(max_examples=6, deadline=None)
@given(generators)
def test_kernel_and_reference_leave_the_same(generator: random.Random) -> None:
    """Tables, lists, counts, and every number of the state, over several choices with pages in common."""
    queries, rows, width, pages, ring = generator.choice([1, 3]), 2, 9, 60, 2
    heads, kvp, parts = generator.choice([1, 3]), generator.choice([1, 2]), generator.choice([1, 2, 4])
    devices, places = [torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.device("cpu")], 27 * queries
    hots = [ResidentBlocks.create(1, heads, pages, places, 12, ring, device) for device in devices]
    counts = [torch.zeros(2, dtype=torch.int64, device=device) for device in devices]
    lists = [FetchList.create(heads, places, device, counted) for device, counted in zip(devices, counts, strict=True)]
    grid = {"kvp": kvp, "kvp_rank": kvp - 1, "append_block": 4, "page_size": 4}
    layout = HelixLayout.create("helix", kvp)
    starts = torch.tensor([generator.randrange(kvp) for _ in range(rows)])
    for _ in range(6):
        lengths = torch.tensor([generator.randrange(0, 200) for _ in range(rows)])
        positions = (lengths[:, None] + torch.arange(queries)).flatten()
        token_starts = starts.repeat_interleave(queries)
        local = layout.local_length(positions + 1, kvp - 1, 4, token_starts)
        held = -(-local // (4 // parts))
        full = layout.local_length(lengths, kvp - 1, 4, starts).repeat_interleave(queries) // 4 * parts
        table = torch.full((rows * queries, heads, width), 99, dtype=torch.int32)
        hi = torch.zeros(rows * queries, dtype=torch.int32)
        for n in range(rows * queries):
            columns = int(min(held[n], generator.randrange(int(held[n] - full[n]), width)))
            hi[n] = max(0, int(local[n]) - (int(held[n]) - columns) * (4 // parts)) if columns else 0
            for h in range(heads):
                table[n, h, :columns] = torch.tensor(generator.sample(range(pages * parts), columns), dtype=torch.int32)
                if columns and generator.random() < 0.5:
                    table[n, h, 0] = -1
        tables = [table.to(device, copy=True) for device in devices]
        guess = generator.random() < 0.3
        for op, found, hot, misses in zip((resolve, reference), tables, hots, lists, strict=True):
            with pytest.MonkeyPatch.context() as patch:
                if not torch.cuda.is_available():
                    patch.setattr("kernels.dispatch.on_gpu", lambda t: True)
                readers = QueryRanges(
                    *(x.to(found.device) for x in (hi, held.int(), positions, token_starts)), queries, 1
                )
                where = grid | {"parts": parts, "part_stride": 2 * parts + 1}
                op(found, readers, hot.layer(0), replace(misses, is_prefetch=guess), **where)
        pairs = [tables, counts, [x.counts for x in lists]]
        pairs += [[getattr(hot, field.name) for hot in hots] for field in fields(ResidentBlocks)[:-2]]
        for h, count in enumerate(lists[0].counts.tolist()):
            pairs += [[x.source[h, :count] for x in lists], [x.target[h, :count] for x in lists]]
        assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in pairs)


# Whether a choice is a guess, the pages that are chosen, and those that have to be fetched.
TURNS = {
    # 3 takes 0's place, 0 takes 2's, 4 and 5 take 3's and 1's: a page of this choice is never given up.
    "the-least-recent-goes": [
        (False, [0, 1, 2], [0, 1, 2]), (False, [1], []), (False, [2, 3], [3]), (False, [0, 1], [0]),
        (False, [4, 0, 5], [4, 5]),
    ],
    # 3 takes 2's place and is not chosen: it goes for 4, and 0 stays. 5 is guessed and chosen: it has come already.
    "what-came-for-a-guess-goes-first": [
        (False, [0, 1, 2], [0, 1, 2]), (True, [1, 3], [3]), (False, [4, 1], [4]), (False, [0], []),
        (True, [5, 0], [5]), (False, [5, 0], []),
    ],
}  # fmt: skip


@pytest.mark.parametrize("turns", TURNS.values(), ids=TURNS)
def test_which_of_three_places_is_given_up(
    turns: list[tuple[bool, list[int], list[int]]], device: torch.device
) -> None:
    hot = ResidentBlocks.create(1, 1, 9, 3, 0, 1, device).layer(0)
    misses = FetchList.create(1, 3, device, torch.zeros(2, dtype=torch.int64, device=device))
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    grid = {"kvp": 1, "kvp_rank": 0, "append_block": 1, "page_size": 1}
    for guess, pages, fetched in turns:
        table = torch.tensor([[pages]], dtype=torch.int32, device=device)
        columns = torch.tensor([len(pages)], dtype=torch.int32, device=device)
        resolve(
            table, QueryRanges(columns, columns, zero + 9, zero, 1), hot, replace(misses, is_prefetch=guess), **grid
        )
        assert misses.source[0, : misses.counts[0]].tolist() == fetched
        assert hot.page_of[0, table[0, 0].long()].tolist() == pages
    asked, came = (sum(len(turn[i]) for turn in turns) for i in (1, 2))
    assert misses.hit_counts.tolist() == [asked - came, came]


@pytest.mark.parametrize(
    "lists, words, layers, programs", [(1, 16, 1, 1), (3, 20, 2, 4), (5, 9000, 1, 7), (2, 8448, 2, 3)]
)
def test_listed_blocks_are_copied(lists: int, words: int, layers: int, programs: int, device: torch.device) -> None:
    """And no others, for whatever number of programs and lists, some of them empty."""
    gen = torch.Generator().manual_seed(words)
    max_blocks = 6
    source = torch.randint(-(2**31), 2**31 - 1, (layers, lists * max_blocks, words), generator=gen, dtype=torch.int32)
    target = torch.zeros(layers, lists * max_blocks + 3, words, dtype=torch.int32)
    blocks = BlockList(
        torch.randperm(lists * max_blocks, generator=gen).int().view(lists, max_blocks),
        torch.randperm(lists * max_blocks + 3, generator=gen).int()[: lists * max_blocks].view(lists, max_blocks),
        torch.randint(0, max_blocks + 1, (lists,), generator=gen, dtype=torch.int32),
    )
    wanted = target.clone()
    for i, count in enumerate(blocks.counts.tolist()):
        wanted[:, blocks.target[i, :count].long()] = source[:, blocks.source[i, :count].long()]
    source_list, target_list = (F.pad(x, (1, 2), value=-1).to(device)[:, 1:-2] for x in (blocks.source, blocks.target))
    on_device = BlockList(source_list, target_list, blocks.counts.to(device))
    found = target.to(device)
    copy_blocks(source.to(device), found, on_device, programs)
    assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("words, page, width, last", [
    (288, 64, 40, None), (288, 64, 300, None), (288, 64, 300, 200), (288, 64, 40, 1), (128, 16, 100, 3),
    (4, 16, 70, None), (576, 1, 9, 9), (5000, 4, 3, 2),
])  # fmt: skip
@pytest.mark.parametrize("by_head", [False, True])
def test_selected_tokens_are_copied(
    words: int, page: int, width: int, last: int | None, by_head: bool, device: torch.device
) -> None:
    """Of each query all, or the last few; what lies beyond the count stays as it is, and its slots are arbitrary."""
    gen, pages, counts = torch.Generator().manual_seed(words), 7, [0, 1, width // 2, width]
    shape = (pages, words, page) if by_head else (pages, page, words)
    source = torch.randint(-(2**31), 2**31 - 1, shape, generator=gen, dtype=torch.int32)
    source = source.transpose(1, 2) if by_head else source
    slots = torch.randint(0, pages * page, (len(counts), width), generator=gen, dtype=torch.int32)
    target = torch.full((len(counts), width, words), -7, dtype=torch.int32)
    wanted = target.clone()
    for n, count in enumerate(counts):
        slots[n, count:] = 2**31 - 1
        for j in range(0 if last is None else max(count - last, 0), count):
            wanted[n, j] = source[int(slots[n, j]) // page, int(slots[n, j]) % page]
    found, numbers = target.to(device), torch.tensor(counts, dtype=torch.int32, device=device)
    fetch_tokens(source.to(device), found, slots.to(device), numbers, last)
    assert torch.equal(found.cpu(), wanted)
    reference_fetch(source, target, slots, torch.tensor(counts, dtype=torch.int32), last)
    assert torch.equal(target, wanted)


def fetched_behind_a_write(generator: random.Random, *waiting: ModuleType) -> bool:
    """Whether a page that is written to the host by one launch is what the next but one fetches, of three that overlap.

    Args:
        waiting: modules whose kernels wait for their predecessors.
    """
    streams, shape = Streams(1, *waiting), (1, 2, 4, 16)
    places = torch.cat([torch.randn(shape), torch.zeros(2, *shape[1:])])[None]  # a ring of one page, two hot places
    host = torch.zeros(1, 3, *shape[1:])
    hot = ResidentBlocks.create(1, 1, 3, 2, 1, 1, torch.device("cpu"))
    misses = FetchList.create(1, 2, torch.device("cpu"), torch.zeros(2, dtype=torch.int64))
    table, one = torch.tensor([[[2]]], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int64)
    grid = {"kvp": 1, "kvp_rank": 0, "append_block": 4, "page_size": 4}
    with streams.of(0):
        write_back(places, host, hot.gpu_block_of, table[0], zero, zero, zero + 4, 1, 0, 1, **grid)
        resolve(table, QueryRanges(4 * one, one, zero + 4, zero, 1), hot.layer(0), misses, **grid)
        copy_blocks(host, places, misses, programs=2)
    streams.run(generator)
    return int(table) == 1 and torch.equal(places[0, 1], places[0, 0])


MODULES = [sys.modules[f"kernels.offload.{name}"] for name in ("write_back", "resolve", "copy_blocks")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs on CPUs")
def test_a_fetch_waits_for_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that is left out is noticed."""
    monkeypatch.setattr("kernels.dispatch.on_gpu", lambda t: True)
    assert all(fetched_behind_a_write(random.Random(seed), *MODULES) for seed in range(10))
    for late in MODULES[1:]:
        waiting = [module for module in MODULES if module is not late]
        assert not all(fetched_behind_a_write(random.Random(seed), *waiting) for seed in range(40))
