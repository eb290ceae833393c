"""What a prefill chunk takes beside the cache, and how long it may be."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from comm.loopback import LoopbackWorld, run_ranks
from helix.attention.dense import DenseAttention
from helix.engine.prefill_time import PrefillTime, doubling_depth
from helix.kv_placement import KVPlacement, PromptChunk
from helix.layers.specs import MAX_DEQUANTIZED_BYTES
from helix.layout import HelixLayout
from helix.models.decoder import Decoder
from helix.setup import buffers
from helix.setup.buffers import (
    EXPERTS_SHARE,
    MAX_CHUNK_TOKENS,
    SHARE,
    fitting_slots,
    gathered_bytes,
    max_chunk,
    sampling_bytes,
    token_buffers,
)
from helix.setup.engine import auto_snapshots
from helix.speculation import DraftBudget
from helix.speculation.sparse import SparseDrafter
from helix.worker import sampling
from helix.worker.kv_cache import KVCache
from helix.worker.kv_cache_spec import EngineSizes
from helix.worker.sampling import SamplingState
from helix.worker.step import DecodeState
from kernels.attention.dequantized_prefill import PIECE_BYTES
from kernels.tokens.reference import ALL_KEYS, Distribution
from launch.inputs.compose import compose_config
from launch.inputs.shapes import spec_of
from tests.sequences import new_request, with_windows


@pytest.mark.parametrize(
    "model, layout, numbers",
    [  # numbers of a token where a layer needs most, written out
        ("qwen2.5-7b", HelixLayout.create("helix", 2, 1), 4 * 3584 + 3 * 9472),
        # QKV of 7 + 2 heads made, sent and received; queries, output, and shares of 4 + 3 heads as two of 4, twice.
        ("qwen2.5-7b", HelixLayout.create("helix", 2, 4), 4 * 3584 + (3 * 9 + 2 * (7 + 8)) * 128),
        ("qwen2.5-7b", HelixLayout.create("helix", 8, 1), 4 * 3584 + (3 * 36 + 2 * (28 + 32)) * 128),
        ("qwen3-30b-a3b", HelixLayout.create("tp", 1, 2), 4 * 2048 + 8 * (384 + 2048) + 128),
    ],
    ids=str,
)
def test_buffers_of_a_token(model: str, layout: HelixLayout, numbers: int) -> None:
    assert token_buffers(spec_of(model), layout, 0, "bfloat16") == pytest.approx(1.25 * 2 * numbers, abs=1)


def test_keys_are_dequantized_in_pieces_of_the_reserved_size() -> None:
    assert MAX_DEQUANTIZED_BYTES == PIECE_BYTES


def test_gathered_sequences() -> None:
    """Latents of 576 and index keys of 128 numbers, twice, and an eighth of the latents to give (GLM-5.2)."""
    spec, bf16 = spec_of("glm-5.2"), "bfloat16"
    layout = HelixLayout.create("helix", 8)
    assert gathered_bytes(spec, layout, 8192, 64 << 10, bf16) == 2 * (64 << 10) * 2 * (2 * (576 + 128) + 72)
    max_gathered = gathered_bytes(spec, layout, 8192, 1 << 20, bf16)
    assert max_gathered == gathered_bytes(spec, layout, 8192, 1 << 30, bf16) < 3e9, "longer ones are not gathered"
    assert gathered_bytes(spec, HelixLayout.create("tp", 1, 8), 8192, 1 << 20, bf16) == 0
    assert gathered_bytes(spec_of("deepseek-r1"), layout, 8192, 1 << 20, bf16) == 0


@pytest.mark.parametrize(
    "model, weights, num_keys",
    [  # numbers that a token is multiplied with, as published, less embedding and head; and those for each key
        ("qwen2.5-7b", 7.62e9 - 2 * 152064 * 3584, 28 * 28 * 2 * 128),
        ("llama-3.1-70b", 70.6e9 - 2 * 128256 * 8192, 80 * 64 * 2 * 128),
        ("qwen3-30b-a3b", 3.35e9 - 2 * 151936 * 2048, 48 * 32 * 2 * 128),
        ("qwen3.5-27b", 27e9 - 2 * 248320 * 5120, 16 * 24 * 2 * 256),  # every fourth layer has keys
        ("gpt-oss-120b", 5.13e9 - 201088 * 2880, 18 * 64 * 2 * 64),  # every other layer has a window; no embedding
        ("deepseek-r1", 37e9 - 2 * 129280 * 7168, 61 * 128 * (192 + 128)),
    ],
)
def test_where_a_token_costs_twice(model: str, weights: float, num_keys: int) -> None:
    assert doubling_depth(spec_of(model)) == pytest.approx(weights / num_keys, rel=0.02)


def test_windows_cost_the_same_at_any_depth() -> None:
    spec = spec_of("qwen2.5-7b")
    assert doubling_depth(with_windows(spec, None, *[128] * 27)) == 28 * doubling_depth(spec)
    times = PrefillTime(doubling_depth(with_windows(spec, *[128] * 28)))
    assert times.work(1 << 20, (1 << 20) + 7) == 7 and times.tokens(1 << 20, 7.0) == 7


@given(st.integers(1, 1 << 24), st.integers(0, 1 << 38), st.booleans())
def test_chunks_leave_memory_to_the_cache(token_bytes: int, free: int, experts: bool) -> None:
    chunk, share = max_chunk(token_bytes, free, experts), EXPERTS_SHARE if experts else SHARE
    assert 1 <= chunk <= MAX_CHUNK_TOKENS and chunk.bit_count() == 1
    assert chunk == 1 or chunk * token_bytes * share <= free
    assert chunk == MAX_CHUNK_TOKENS or 2 * chunk * token_bytes * share > free


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["qwen2.5-7b", "qwen3-30b-a3b", "deepseek-v2-lite"])
def test_a_step_takes_no_more(model: str) -> None:
    """Peak memory of a chunk through two layers, beside what is there before it."""
    tokens, layout, device = 4096, HelixLayout.create(), torch.device("cuda")
    spec = spec_of(model)
    spec = replace(spec, layers=spec.layers[-2:])

    def body(world: LoopbackWorld, rank: int) -> int:
        comm = world.communicator(rank, [0])
        with torch.inference_mode():
            decoder = Decoder(spec, layout, comm, torch.bfloat16, device)
            for weight in decoder.weights.parameters:
                weight.normal_(std=0.02)
            placement = KVPlacement(layout, 0, 16, 64)
            cache = KVCache(
                spec.kv_cache_specs(layout, rank, "bfloat16"), placement, EngineSizes(1, pages=tokens // 64), device
            )
            state = DecodeState(1, tokens // 64, placement, device)
            pages, prompt = np.arange(tokens // 64, dtype=np.int32), np.zeros(tokens, dtype=np.int32)
            state.admit(new_request(0, 0, pages, tokens, prompt))
            step = state.prefill_step([PromptChunk(0, 0, torch.zeros(tokens, dtype=torch.int64))])
            decoder.hidden(cache, step, DenseAttention())
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            decoder.hidden(cache, step, DenseAttention())
            return torch.cuda.max_memory_allocated() - before

    [allocated_bytes] = run_ranks(1, body, timeout_s=120.0, device="cuda")
    assert allocated_bytes <= tokens * token_buffers(spec, layout, 0, "bfloat16")


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made, and the most that are alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.most, self._storages = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in (t for t in tree_leaves(made) if isinstance(t, torch.Tensor)):
            storage = tensor.untyped_storage()
            if (key := storage.data_ptr()) and key not in self._storages:
                self._storages.add(key)
                self.alive += storage.nbytes()
                weakref.finalize(storage, self._free, key, storage.nbytes())
        self.most = max(self.most, self.alive)
        return made

    def _free(self, key: int, count: int) -> None:
        self._storages.discard(key)
        self.alive -= count


@pytest.mark.parametrize("slots, queries, columns", [(8, 1, 50_000), (3, 5, 30_000), (16, 1, 40_000)])
def test_sampling_allocates_at_most_what_is_reserved(
    slots: int, queries: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Top-p, over all rows at once and some at a time; the logits count as well."""
    for elements in (1 << 24, queries * columns):
        monkeypatch.setattr(sampling, "FILTERED_ELEMENTS", elements)
        monkeypatch.setattr(buffers, "FILTERED_ELEMENTS", elements)
        logits = torch.randn(slots, queries, columns)
        state = SamplingState.create(slots * queries, "cpu")
        state.temperature.fill_(1)
        state.top_p.fill_(0.9)
        best, every = logits.amax(2).double(), torch.full((slots, queries), ALL_KEYS)
        p = Distribution(logits, best, every, state.temperature[:slots], state.min_p[:slots])
        with PeakBytes() as peak:
            sampling._last_kept_key(sampling._Weights(p), state, LoopbackWorld(1).communicator(0, [0]))
        reserved = sampling_bytes(slots, queries, columns, captured=False) - 8 * slots * columns
        bins = 10 * slots * queries * 2048 * 8  # counts and masses of two digits at a time, and their running sums
        assert logits.nbytes < logits.nbytes + peak.most <= reserved + bins


@pytest.mark.parametrize("budget", [DraftBudget(), DraftBudget(sparsity=0.3)])
@pytest.mark.parametrize(
    "model, mode, kvp, tpa",
    [
        ("gpt-oss-20b", "helix", 1, 1),
        ("gpt-oss-20b", "helix", 2, 1),
        ("gpt-oss-20b", "helix", 2, 2),
        ("deepseek-v2-lite", "helix", 2, 1),
        ("deepseek-v2-lite", "tp", 1, 2),
    ],
)
def test_tables_of_what_drafts_read(budget: DraftBudget, model: str, mode: str, kvp: int, tpa: int) -> None:
    """Their bytes are known before they are made, and those of scores."""
    layout, device, spec = HelixLayout.create(mode, kvp, tpa), torch.device("cpu"), spec_of(model)
    spec = replace(spec, layers=spec.layers[:3]) if "deepseek" in model else with_windows(spec, None, 128, None)

    def body(world: LoopbackWorld, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        comm = world.communicator(rank, layout.kvp_group(rank))
        decoder = Decoder(spec, layout, comm, torch.float32, torch.device("meta"))
        placement = KVPlacement(layout, layout.kvp_rank(rank), 16, 32)
        sizes = EngineSizes(5, 9000, drafts=3, pages=4)
        cache = KVCache(spec.kv_cache_specs(layout, rank, "float32"), placement, sizes, device)
        drafter = SparseDrafter(decoder, cache, sizes, budget, "own")
        assert drafter.selected is not None and drafter.scores is not None
        made = drafter.selected.tables.nbytes, drafter.scores.planes.nbytes // sizes.pages
        page = budget.page_bytes(spec, placement, rank, sizes.drafts, "float32")
        return made, (budget.table_bytes(spec, placement, rank, sizes), page)

    for made, counted in run_ranks(layout.world_size, body, timeout_s=60.0):
        assert made == counted


@pytest.mark.parametrize(
    "free, page_bytes, slot_bytes, slots",
    [(1000, 10, 0, 64), (1000, 10, 1, 32), (640, 10, 0, 64), (639, 10, 0, 32), (5, 10, 0, 1), (0, 0, 0, 1)],
)
def test_slots_that_memory_allows(free: int, page_bytes: int, slot_bytes: int, slots: int) -> None:
    """A power of two; what slots hold beside pages takes a sixteenth at most."""
    assert fitting_slots(free, page_bytes, slot_bytes) == slots


@pytest.mark.parametrize(
    "model, slots, capacity, snapshots",
    [  # of 4.7, 491 and 155 MB each, by hand
        ("gpt-oss-20b", 256, 100e9, 512),
        ("gpt-oss-20b", 2, 100e9, 8),
        ("gemma-3-27b", 256, 75e9, 9),
        ("gemma-3-27b", 256, 20e9, 8),
        ("qwen3.5-27b", 256, 75e9, 30),
        ("qwen2.5-7b", 16, 75e9, 32),  # of nothing
    ],
)
def test_snapshots_that_memory_allows(model: str, slots: int, capacity: float, snapshots: int) -> None:
    """Two for each row, in at most a sixteenth of the cache's memory, but at least 8."""
    comm, weights = SimpleNamespace(rank=0, all_gather_object=lambda one: [one]), SimpleNamespace(dtype=torch.bfloat16)
    decoder: Any = SimpleNamespace(spec=spec_of(model), comm=comm, weights=weights)
    placement, sizes = KVPlacement(HelixLayout.create(), 0, 16, 64), EngineSizes(slots)
    assert auto_snapshots(compose_config([]), decoder, placement, sizes, int(capacity)) == snapshots
