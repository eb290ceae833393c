"""Placement and capacity against a round-robin append written out token by token."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from helix.engine.scheduler_output import BlockTableUpdate
from helix.kv_placement import KVPlacement, PromptChunk
from helix.layout import HelixLayout
from helix.models import DecoderSpec
from helix.sampling_params import SamplingParams
from helix.worker.kv_cache import (
    KVCache,
    free_bytes,
    ring,
    slot_bytes,
    snapshot_bytes,
    with_bounds,
    without_long_rings,
)
from helix.worker.kv_cache_spec import EngineSizes, KVCacheSpec, page_bytes
from helix.worker.sequence_observer import PrefillCommitted
from helix.worker.step import PLACEHOLDER_TOKEN_ID, DecodeState
from kernels.tokens.commit import Candidates
from launch.inputs.shapes import load_spec
from tests.sequences import new_request, with_windows

blocks, widths, page_sizes = st.integers(1, 20), st.integers(1, 5), st.integers(1, 20)


def append_all(length: int, kvp: int, block: int, start: int) -> list[list[int]]:
    """Positions that each rank holds, in its local order, by appending one token after the other."""
    held: list[list[int]] = [[] for _ in range(kvp)]
    owner, filled = start, 0
    for position in range(length):
        if filled == block:
            owner, filled = (owner + 1) % kvp, 0
        held[owner].append(position)
        filled += 1
    return held


def placement(kvp: int, rank: int, block: int, page_size: int) -> KVPlacement:
    return KVPlacement(HelixLayout.create("helix", kvp), rank, block, page_size)


@given(st.integers(0, 150), widths, blocks, page_sizes, st.data())
def test_slots_follow_the_local_order(length: int, kvp: int, block: int, page_size: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, kvp - 1))
    held = append_all(length, kvp, block, start)
    positions = torch.arange(length)
    starts = torch.full((length,), start)
    written: set[int] = set()
    for rank in range(kvp):
        p = placement(kvp, rank, block, page_size)
        count = p.stripes.pages_for(length)
        pages = torch.randperm(count + 3)[: max(count, 1)]
        slots = p.compute_slot_mapping(
            positions, starts, torch.ones(length, dtype=torch.bool), pages.int().expand(length, -1)
        ).tolist()
        for local, position in enumerate(held[rank]):
            assert slots[position] == int(pages[local // page_size]) * page_size + local % page_size
            written.add(position)
        assert sum(s >= 0 for s in slots) == len(held[rank])
    assert len(written) == length


@given(st.integers(0, 150), widths, blocks, st.one_of(st.none(), st.integers(1, 60)), st.data())
def test_bounds_are_causality_and_window(
    position: int, kvp: int, block: int, window: int | None, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, kvp - 1))
    held = append_all(position + 40, kvp, block, start)
    for rank in range(kvp):
        lo, hi = placement(kvp, rank, block, 16).bounds(
            torch.tensor([position]), torch.tensor([start]), torch.tensor([True]), window
        )
        reads = [p for p in held[rank] if p <= position and (window is None or p > position - window)]
        assert held[rank][int(lo) : int(hi)] == reads
        assert lo.dtype == hi.dtype == torch.int32


@example([2, 25, 22], 5, 2, 5)  # a page more than blocks rounded up would say
@given(st.lists(st.integers(1, 80), min_size=1, max_size=5), widths, blocks, page_sizes)
def test_planned_pages_hold_any_split_of_the_tokens(lengths: list[int], kvp: int, block: int, page_size: int) -> None:
    stripes = placement(kvp, 0, block, page_size).stripes
    assert sum(map(stripes.pages_for, lengths)) <= stripes.pages_for_all(sum(lengths), len(lengths))


@pytest.mark.parametrize("entries, bounded", [([(1, 8), (1, 8)], True), ([(12,)], False)])
def test_pages_are_copied_in_all_layers(entries: list[tuple[int, ...]], bounded: bool) -> None:
    names = ("keys", "values") if len(entries) == 2 else ("latents",)
    kept = tuple(KVCacheSpec(name, entry, "float32") for name, entry in zip(names, entries, strict=True))
    cache_specs = with_bounds([kept, kept], "float32") if bounded else [kept, kept]
    placement = KVPlacement(HelixLayout.create(), 0, 4, 4)
    cache = KVCache(cache_specs, placement, EngineSizes(1, pages=5), torch.device("cpu"))
    tensors = cache.tensors
    for tensor in tensors:
        tensor.normal_()
    before = [tensor.clone() for tensor in tensors]
    cache.copy_pages(
        torch.tensor([3, 0], dtype=torch.int32), torch.tensor([1, 3], dtype=torch.int32)
    )  # 3 has a new owner
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old[:, [0, 3, 2, 0, 4]])
    assert cache.bytes_per_token == 2 * sum(math.prod(entry) for entry in entries) * 4


def test_free_memory_is_read() -> None:
    assert free_bytes(torch.device("cpu")) > 1 << 20


def array(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def state(kvp: int, rank: int, batch: int = 3) -> DecodeState:
    return DecodeState(batch, 4, placement(kvp, rank, 2, 4), torch.device("cpu"))


def test_a_step_appends_for_active_rows_of_this_rank_alone() -> None:
    for rank in range(2):
        s = state(2, rank)
        for row, start in ((0, 0), (1, 1), (2, 0)):
            s.admit(new_request(row, start, array([10 * row + i for i in range(4)]), 16, array([])))
        s.activate(torch.tensor([0, 1]), torch.tensor([7, 8]), torch.tensor([5, 4]))
        step = s.decode_step(3)
        # Position 5: block 2 of rank (2 + 0) % 2 = 0, its slot 3. Position 4: block 2 of rank (2 + 1) % 2 = 1, slot 2.
        assert step.slot_mappings[None].tolist() == ([0 * 4 + 3, -1, -1] if rank == 0 else [-1, 10 * 4 + 2, -1])
        assert step.tokens[:2].tolist() == [7, 8] and step.positions[:2].tolist() == [5, 4]
        lo, hi = step.bounds(None)
        assert hi.tolist() == ([4, 2, 0] if rank == 0 else [2, 3, 0]) and lo.tolist() == [0, 0, 0]
        assert step.bounds(None)[1] is step.bounds(None)[1], "one set of bounds serves all layers"


class Operations(TorchDispatchMode):
    """Counter of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_several_sequences_come_grow_and_leave_at_once() -> None:
    """The state is that of one after the other, in hardly more operations than for one."""
    states = [state(2, 1, batch=8) for _ in range(2)]
    few, many = Operations(), Operations()
    come = [
        new_request(row, row % 2, array([10 * row, 10 * row + 1]), 16 + row, array([]), sampling=params)
        for row, params in enumerate([SamplingParams(seed=i, temperature=i / 4, top_k=i) for i in range(8)])
    ]
    grow = [BlockTableUpdate(row, 2, array([70 + row])) for row in range(8)]
    for one, table in zip(come, grow, strict=True):
        states[0].admit(one)
        states[0].write_tables(table)
    with few:
        states[0].admit(come[3])
    with many:
        states[1].admit(*come)
    states[0].write_tables(grow[3])
    states[1].write_tables(*grow)
    assert many.count <= few.count + 2  # to bring their numbers in order
    for s in states:
        s.activate(torch.arange(8), torch.arange(8), torch.full((8,), 3))
    for row in (1, 5, 6):
        states[0].release(states[0].release_event(row))
    states[1].release(*(states[1].release_event(row) for row in (6, 1, 5)))
    for name in ("starts", "limits", "active", "block_tables", "_starts"):
        assert torch.equal(*(torch.as_tensor(getattr(s, name)) for s in states)), name
    assert torch.equal(states[0].sampling.real, states[1].sampling.real)
    assert torch.equal(states[0].sampling.integer, states[1].sampling.integer)
    assert states[0].block_tables[4].tolist() == [40, 41, 74, 0]


def commit(s: DecodeState, sampled: Tensor, drafts: Tensor | None = None) -> list[list[int]]:
    """The tokens taken where these [B, 1 + n] are drawn."""
    tokens = sampled.flatten().double()
    return s.commit(len(sampled), Candidates(torch.stack((0 * tokens, tokens), -1)[None]), drafts)[0].tolist()


def test_commit_grows_active_rows_alone() -> None:
    s = state(1, 0)
    s.admit(new_request(1, 0, array([0, 1]), 16, array([])))
    s.activate(torch.tensor([1]), torch.tensor([7]), torch.tensor([5]))
    assert commit(s, torch.tensor([[1], [2], [3]])) == [[PLACEHOLDER_TOKEN_ID], [2], [PLACEHOLDER_TOKEN_ID]]
    assert s.tokens.tolist() == [0, 2, 0] and s.lengths.tolist() == [0, 6, 0]
    s.release(s.release_event(1))
    commit(s, torch.tensor([[4], [5], [6]]))
    assert s.tokens.tolist() == [0, 2, 0] and s.lengths.tolist() == [0, 6, 0]


def test_drafts_hold_up_to_the_first_that_was_not_drawn_and_to_the_limit() -> None:
    s = DecodeState(4, 4, placement(1, 0, 2, 4), torch.device("cpu"), history=16)
    rows = torch.arange(3)
    for row, limit in enumerate((15, 15, 7)):
        s.admit(new_request(row, 0, array([0, 1]), limit, array([row, 50, 51])))
    s.activate(rows, torch.tensor([60, 61, 62]), torch.tensor([3, 3, 5]))
    drafts = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    sampled = torch.tensor([[1, 9, 3, 4], [9, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    accepted = commit(s, sampled, drafts)
    assert accepted == [
        [1, 9, PLACEHOLDER_TOKEN_ID, PLACEHOLDER_TOKEN_ID],
        [9, *[PLACEHOLDER_TOKEN_ID] * 3],
        [1, 2, PLACEHOLDER_TOKEN_ID, PLACEHOLDER_TOKEN_ID],
        [PLACEHOLDER_TOKEN_ID] * 4,
    ]
    assert s.lengths.tolist() == [5, 4, 7, 0] and s.tokens.tolist() == [9, 9, 2, 0]
    assert s.history[0, :6].tolist() == [0, 50, 51, 60, 1, 9] and s.history[1, :5].tolist() == [1, 50, 51, 61, 9]
    assert commit(s, sampled, drafts)[2] == [PLACEHOLDER_TOKEN_ID] * 4, "the third is at its limit"
    assert s.lengths.tolist() == [7, 5, 7, 0]


def test_a_step_with_drafts_appends_each_where_it_would_stand() -> None:
    s = state(2, 0)
    s.admit(new_request(0, 0, array([3, 1, 2, 0]), 16, array([])))
    s.activate(torch.tensor([0]), torch.tensor([7]), torch.tensor([1]))
    step = s.decode_step(2, torch.tensor([[8, 9, 10], [0, 0, 0]]))
    assert step.tokens[:4].tolist() == [7, 8, 9, 10] and step.positions[:4].tolist() == [1, 2, 3, 4]
    # Blocks of two tokens: 0 and 1 on rank 0, 2 and 3 on rank 1, 4 on rank 0; its page 3 is the sequence's first.
    assert step.slot_mappings[None].tolist() == [3 * 4 + 1, -1, -1, 3 * 4 + 2, -1, -1, -1, -1]
    assert step.bounds(None)[1].tolist() == [2, 2, 2, 3, 0, 0, 0, 0] and step.max_q == 4


def test_drafts_beyond_a_rows_limit_are_padding() -> None:
    s = state(1, 0)
    for row, limit in enumerate((16, 4, 16)):
        s.admit(new_request(row, 0, array([4 * row, 4 * row + 1, 4 * row + 2, 4 * row + 3]), limit, array([])))
    s.activate(torch.arange(3), torch.tensor([7, 7, 7]), torch.tensor([2, 2, 2]))
    s.draft_limits[2] = 2
    drafts = s.within_limits(torch.tensor([[8, 9, 10], [8, 9, 10], [8, 9, 10]]))
    # The second row takes two more tokens at most: a draft and the one behind it.
    assert drafts.tolist() == [[8, 9, 10], [8, -1, -1], [8, 9, -1]]
    step = s.decode_step(3, drafts)
    assert step.live.view(3, 4).tolist() == [[True] * 4, [True, True, False, False], [True, True, True, False]]
    slots, hi = step.slot_mappings[None].view(3, 4), step.bounds(None)[1].view(3, 4)
    assert ((slots == -1) == ~step.live.view(3, 4)).all() and hi.tolist()[1:] == [[3, 4, 0, 0], [3, 4, 5, 0]]
    sampled = torch.tensor([[8, 9, 10, 11]] * 3)
    assert commit(s, sampled, drafts) == [
        [8, 9, 10, 11],
        [8, 9, PLACEHOLDER_TOKEN_ID, PLACEHOLDER_TOKEN_ID],
        [8, 9, 10, PLACEHOLDER_TOKEN_ID],
    ]


def test_a_prefill_step_is_the_chunks_in_a_row() -> None:
    s = state(1, 0)
    s.admit(new_request(0, 0, array([3, 1]), 16, array([])))
    s.admit(new_request(2, 0, array([2, 0]), 16, array([])))
    step = s.prefill_step([PromptChunk(2, 4, torch.tensor([40, 41])), PromptChunk(0, 0, torch.tensor([1, 2, 3]))])
    assert step.tokens.tolist() == [40, 41, 1, 2, 3] and step.positions.tolist() == [4, 5, 0, 1, 2]
    assert step.cu_q is not None and step.cu_q.tolist() == [0, 2, 5] and step.max_q == 3
    assert step.block_tables[:, :2].tolist() == [[2, 0], [3, 1]]
    assert step.slot_mappings[None].tolist() == [0 * 4 + 0, 1, 3 * 4 + 0, 13, 14]


@pytest.mark.parametrize("kvp, tpa", [(1, 1), (8, 1), (2, 4)])
def test_windows_free_their_memory(kvp: int, tpa: int) -> None:
    """Half of gpt-oss-20b's layers have a window of 128: 20 GB hold nearly twice the tokens, beside 32 rings."""
    layout = HelixLayout.create("helix", kvp, tpa)
    spec, room, page = load_spec("gpt-oss-20b"), 20 << 30, 16
    whole = with_windows(spec, *[None] * len(spec.layers))
    placement = KVPlacement(layout, 0, 16, page)

    def tokens(spec: DecoderSpec) -> int:
        cache_specs = spec.kv_cache_specs(layout, 0, "bfloat16")
        left = room - slot_bytes(cache_specs, placement, EngineSizes(32, chunk=4096))
        return left // sum(page_bytes(kept, page) for kept in cache_specs)

    assert 1.9 < tokens(spec) / tokens(whole) < 2


@pytest.mark.parametrize("kvp", [1, 4])
@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-3-27b", "qwen3.5-27b"])
def test_a_snapshot_takes_as_much_as_a_sequence_and_overlaps_nothing(name: str, kvp: int) -> None:
    """In a slot's own memory, that is without the prompt's chunk and rows that only a step reads."""
    layout = HelixLayout.create("helix", kvp)
    cache_specs = without_long_rings(load_spec(name).kv_cache_specs(layout, 0, "bfloat16"))
    place, sizes = KVPlacement(layout, 0, 16, 16), EngineSizes(2, chunk=64, snapshots=3)
    one = [slot_bytes(cache_specs, place, replace(sizes, snapshots=n + 1)) for n in range(2)]
    assert 0 <= snapshot_bytes(cache_specs, place, sizes) - (one[1] - one[0]) < 16
    few = [next(specs for specs in cache_specs if not all(k.is_paged for k in specs))]
    cache = KVCache(few, place, replace(sizes, pages=1), torch.device("cpu"))
    for tensor in cache.tensors:
        tensor.fill_(7)
    (group,) = cache.groups
    for n, slot in enumerate((0, 1, -3, -2, -1)):
        for spec in group.kv_cache_specs:
            if spec.in_snapshots:
                of_slot = cache._of_slot(group.tensors[spec.name], spec, slot)
                assert (of_slot == 7).all(), "another one has written here"
                of_slot.fill_(n)
    chunk = place.chunk_pages(64, 2)
    for spec in group.kv_cache_specs:
        if spec.window is not None:
            begin = 2 * cache.rings[spec.window]
            assert (group.tensors[spec.name][:, begin : begin + chunk] == 7).all(), "a snapshot lies in a chunk's pages"


def test_long_windows_stay_in_pages() -> None:
    """Two layers with a window of 4,096 and of 1,024: the first has entries for all tokens, the second a ring."""
    layout = HelixLayout.create()
    spec = with_windows(load_spec("gpt-oss-20b"), 4096, 1024)
    cache_specs = without_long_rings(spec.kv_cache_specs(layout, 0, "bfloat16"))
    cache = KVCache(cache_specs, KVPlacement(layout, 0, 16, 16), EngineSizes(2, chunk=64, pages=3), torch.device("cpu"))
    assert cache.rings.keys() == {1024} and cache.recomputed_tokens == 1023
    assert cache.layer(0).keys.shape[:2] == (3, 16) and len(cache.layer(1).keys) > 2 * 64


@given(st.integers(0, 300), widths, blocks, page_sizes, st.integers(1, 70), st.integers(1, 8))
def test_a_ring_holds_what_a_step_reads_and_writes(
    position: int, kvp: int, block: int, page_size: int, window: int, rows: int
) -> None:
    """No two local pages of the span share a page of the ring."""
    for rank in range(kvp):
        place = placement(kvp, rank, block, page_size)
        for start in range(kvp):
            lo = place.local_length(max(position - window + 1, 0), start)
            hi = place.local_length(position + rows, start)
            assert hi == lo or (hi - 1) // page_size - lo // page_size < ring(place, window, rows)


@example(0, 6, 1, 4, 4)  # half of the last page is not written
@given(st.integers(0, 40), st.integers(1, 40), widths, blocks, page_sizes)
def test_a_ring_gets_a_chunks_tokens_and_no_memory_that_the_chunk_did_not_write(
    begin: int, count: int, kvp: int, block: int, page_size: int
) -> None:
    """A prompt that skips tokens after this chunk reads slots of its ring that no chunk has written."""
    for rank in range(kvp):
        place, sizes, window = placement(kvp, rank, block, page_size), EngineSizes(2, chunk=count), 7
        specs = [(KVCacheSpec("keys", (), "float32", window=window),)]
        cache = KVCache(specs, place, sizes, torch.device("cpu"))
        s = DecodeState(2, place.stripes.pages_for(begin + count), place, torch.device("cpu"), rings=cache.rings)
        keys, pages = cache.layer(0).keys.fill_(torch.nan), cache.rings[window]
        request = new_request(1, 0, array([]), begin + count, array([]))
        cache.admit(request)
        s.admit(request)
        prompts = [PromptChunk(1, begin, torch.zeros(count, dtype=torch.int64))]
        step = s.prefill_step(prompts)
        owned = step.slot_mappings[window] >= 0
        keys.view(-1)[step.slot_mappings[window][owned]] = step.positions[owned].float()
        cache.on_prefill(PrefillCommitted(prompts, s.prompts_span(prompts), s.parts(prompts)))
        of_ring = keys[pages : 2 * pages].flatten()
        assert of_ring.isfinite().all()
        recent = step.positions[owned & (step.positions > begin + count - window)]
        assert of_ring[place.layout.local_length(recent, rank, block, 0) % len(of_ring)].tolist() == recent.tolist()
