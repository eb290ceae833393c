"""Attention that reads shared prefixes once, against attention in which each sequence reads its own pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helix.attention.base import LayerAttention, slice_step
from helix.attention.dense import DenseAttention
from helix.engine.scheduler_output import SharedPrefix
from helix.kv_placement import KVPlacement
from helix.layout import HelixLayout
from helix.worker.kv_cache import LayerCache
from helix.worker.step import DecodeState, Step
from kernels.scaled_keys import store

PREFIXES = {  # of six rows; row 4 is inactive
    "one": (SharedPrefix((0, 1, 2, 3, 5), 0, 3),),
    "one after another": (SharedPrefix((0, 1, 2, 3, 5), 0, 2), SharedPrefix((1, 3), 2, 4)),
    "apart": (SharedPrefix((0, 2), 0, 1), SharedPrefix((1, 5), 0, 3)),
}


def state_of(device: torch.device, prefixes: tuple[SharedPrefix, ...], page: int, rank: int) -> DecodeState:
    """Returns rank `rank` of two's state: rows of 5 pages and a part, whose first pages are shared."""
    state = DecodeState(6, 7, KVPlacement(HelixLayout.create(kvp=2), rank, page, page), device)
    state.block_tables.copy_(torch.arange(42, device=device).view(6, 7))
    for prefix in prefixes:
        columns = slice(prefix.begin, prefix.end)
        state.block_tables[list(prefix.slots), columns] = state.block_tables[prefix.slots[0], columns].clone()
    state.lengths.copy_(10 * page + torch.tensor([0, 1, page, page + 3, 2, 2 * page - 1], device=device))
    state.limits.fill_(1 << 20)
    state.active.copy_(torch.arange(6, device=device) != 4)
    state.set_prefixes(prefixes)
    return state


def close(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], live: Tensor, tolerance: float) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x[live].float(), y[live].float(), rtol=tolerance, atol=tolerance)


def both(q: Tensor, cache: LayerCache, state: DecodeState, layer: LayerAttention, queries: int, count: int) -> None:
    """Compares a step with `count` shared prefixes with one without, whole and in two HOP-B chunks."""
    drafts = torch.zeros(6, queries - 1, dtype=torch.int64, device=q.device) if queries > 1 else None
    if drafts is not None:
        drafts[3, -1] = -1  # not live
    policy, steps = DenseAttention(), [state.decode_step(6, drafts, prefixes=n) for n in (0, count)]
    for step in steps:
        policy.prepare(step, {layer.window})
    q[~steps[0].live] = torch.nan
    alone = attend(policy, q, cache, steps[0], layer)
    tolerance = 1e-5 if q.dtype == torch.float32 else 2e-2
    together = attend(policy, q, cache, steps[1], layer)
    close(together, alone, steps[0].live, tolerance)
    for part in (slice(0, 2 * queries), slice(2 * queries, 6 * queries)):
        cut = attend(policy, q[part], cache, slice_step(steps[1], part), replace(layer, chunk=1))
        close(cut, (together[0][part], together[1][part]), steps[0].live[part], tolerance)


def attend(
    policy: DenseAttention, q: Tensor, cache: LayerCache, step: Step, layer: LayerAttention
) -> tuple[Tensor, Tensor]:
    out, lse = policy.attend(q, cache, step, layer).merge_states()
    return out.clone(), lse.clone()


def types() -> list[object]:
    gpu = pytest.mark.gpu
    return [torch.float32, pytest.param(torch.bfloat16, marks=gpu)]


@pytest.mark.parametrize("dtype", types())
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "name, padded, queries, heads, sinks, fp8",
    [
        ("one", 1, 1, (7, 1, 128), False, False),
        ("one", 1, 4, (14, 2, 128), False, False),  # 24 queries of 7 heads: two tiles
        ("one", 1, 5, (7, 1, 128), False, False),  # 30 queries: tiles of 15
        ("one after another", 2, 1, (8, 2, 64), True, False),
        ("apart", 2, 7, (24, 1, 16), False, False),  # tiles of two prefixes and padding; 14 queries take three of 5
        ("apart", 4, 1, (32, 2, 64), True, True),  # 96 rows; two prefixes and two empty ones
    ],
)
def test_keys_and_values(
    device: torch.device,
    dtype: torch.dtype,
    rank: int,
    name: str,
    padded: int,
    queries: int,
    heads: tuple[int, int, int],
    sinks: bool,
    fp8: bool,
) -> None:
    torch.manual_seed(1)
    (q_heads, kv_heads, dim), page = heads, 16 if dtype == torch.float32 else 64  # of Hopper's kernels: whole tiles
    state = state_of(device, PREFIXES[name], page, rank)
    shape = 42, page, kv_heads, dim
    tensors = {part: torch.randn(shape, dtype=dtype, device=device) for part in ("keys", "values")}
    if fp8:
        where = torch.arange(42 * page, device=device)
        for part in ("keys", "values"):
            values = tensors[part].flatten(0, 1)
            tensors[part] = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
            tensors[f"{part[:-1]}_scales"] = torch.empty(42, kv_heads, page, device=device)
            store(values, tensors[part], tensors[f"{part[:-1]}_scales"], where)
    layer = LayerAttention(None, dim**-0.5, sinks=torch.randn(q_heads, device=device) if sinks else None)
    q = torch.randn(6 * queries, q_heads, dim, dtype=dtype, device=device)
    both(q, LayerCache(0, tensors, torch.empty(0)), state, layer, queries, padded)


@pytest.mark.parametrize("dtype", types())
@pytest.mark.parametrize(
    "name, padded, queries, heads, width",
    [
        ("one", 1, 1, 16, (32, 16)),
        ("one after another", 2, 3, 16, (32, 16)),
        pytest.param("one", 1, 1, 16, (512, 64), marks=pytest.mark.gpu),
        pytest.param("apart", 2, 2, 128, (512, 64), marks=pytest.mark.gpu),
    ],
)
def test_latents(
    device: torch.device,
    dtype: torch.dtype,
    name: str,
    padded: int,
    queries: int,
    heads: int,
    width: tuple[int, int],
) -> None:
    torch.manual_seed(2)
    (latent, rope), page = width, 64
    state = state_of(device, PREFIXES[name], page, 0)
    latents = torch.randn(42, page, latent + rope, dtype=dtype, device=device)
    q = torch.randn(6 * queries, heads, latent + rope, dtype=dtype, device=device)
    layer = LayerAttention(None, (latent + rope) ** -0.5, latent=latent)
    both(q, LayerCache(0, {"latents": latents}, torch.empty(0)), state, layer, queries, padded)
