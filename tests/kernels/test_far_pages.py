"""Pages whose elements have numbers beyond 2^31, as in caches of many millions of tokens, are read and written.

A kernel gives the same bits for the same pages, wherever they are. Memory that no kernel touches is never committed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.attention.flash_decode import decode_parts, flash_decode
from kernels.attention.flash_prefill import flash_prefill
from kernels.attention.kv_append import kv_append
from kernels.indexer.append import index_append
from kernels.indexer.scores import index_scores
from kernels.mla.append import mla_append
from kernels.mla.decode import mla_decode
from kernels.mla.prefill import mla_prefill
from kernels.offload.fetch_tokens import fetch_tokens
from kernels.paged_keys import KeyScores, PagedKeys
from kernels.sparse.block_bounds import fold_blocks

PAGES, PAGE, ROWS = 3, 16, 4
FP8 = torch.float8_e4m3fn
Far = Callable[[Tensor], Tensor]
Op = Callable[[torch.device, Far, int], tuple[Tensor, ...]]


def far(pages: Tensor, first: int) -> Tensor:
    """Copies pages to where the numbers of their elements exceed int32, as pages `first` and on."""
    memory = torch.empty(first + len(pages), *pages.shape[1:], dtype=pages.dtype, device=pages.device)
    memory.view(torch.uint8)[first:] = pages.view(torch.uint8)
    return memory


def first_of(entry: int) -> int:
    """Returns the first page whose elements are beyond 2^31, for pages of `entry` elements a token."""
    return -(-(1 << 31) // (PAGE * entry))


def normal(device: torch.device, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def ints(device: torch.device, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def slots(device: torch.device, first: int) -> Tensor:
    return torch.tensor([3 + first * PAGE, 17 + first * PAGE, -1, 40 + first * PAGE], device=device)


def bounds(device: torch.device) -> tuple[Tensor, Tensor]:
    return ints(device, 0, 5)[:, None], ints(device, PAGE + 7, 2 * PAGE)[:, None]


def table(device: torch.device, first: int) -> Tensor:
    return ints(device, 2, 0, 1, 2).view(2, 2) + first


def heads(device: torch.device, moved: Far, first: int, dtype: torch.dtype = torch.float16) -> PagedKeys:
    k, v = (moved(normal(device, PAGES, PAGE, 2, 64).roll(i, 0).to(dtype)) for i in range(2))
    keys = PagedKeys(k, v, table(device, first), *bounds(device), 0.1)
    if dtype != FP8:
        return keys
    k_scale, v_scale = (moved(normal(device, PAGES, 2, PAGE, dtype=torch.float32).abs()) for _ in range(2))
    return replace(keys, k_scale=k_scale, v_scale=v_scale)


def latents(device: torch.device, moved: Far, first: int) -> PagedKeys:
    k = moved(normal(device, PAGES, PAGE, 128 + 16))
    return PagedKeys(k, k[..., :128], table(device, first), *bounds(device), 0.1)


def decode(device: torch.device, moved: Far, first: int) -> tuple[Tensor, ...]:
    return flash_decode(normal(device, 2, 1, 4, 64), heads(device, moved, first))


def decode_fp8(device: torch.device, moved: Far, first: int) -> tuple[Tensor, ...]:
    return flash_decode(normal(device, 2, 1, 4, 64), heads(device, moved, first, FP8))


def decode_with_scores(device: torch.device, moved: Far, first: int) -> tuple[Tensor, ...]:
    planes = torch.zeros(1, 4, 2, PAGE, dtype=torch.float16, device=device)
    scores = KeyScores(planes, ints(device, 0, 1, 2, 3).view(2, 2), "any")
    found = decode_parts(normal(device, 2, 1, 4, 64), heads(device, moved, first), scores=scores)
    return *found.merge_states(), planes


def prefill(device: torch.device, moved: Far, first: int) -> tuple[Tensor, ...]:
    keys = heads(device, moved, first)
    keys = replace(keys, lo=ints(device, 0, 0, 5), hi=ints(device, PAGE + 6, PAGE + 7, 2 * PAGE))
    return flash_prefill(normal(device, 3, 4, 64), keys, ints(device, 0, 2, 3), 2, 2 * PAGE)


def decode_latents(device: torch.device, moved: Far, first: int) -> tuple[Tensor, ...]:
    return mla_decode(normal(device, 2, 1, 4, 144), latents(device, moved, first))


def selected_latents(device: torch.device, moved: Far, first: int) -> tuple[Tensor, ...]:
    cache = moved(normal(device, PAGES, PAGE, 144)).flatten(0, 1).unsqueeze(1)
    slots = ints(device, 3, 20, 33, 1, 47, 0).view(2, 3) + first * PAGE
    keys = PagedKeys(cache, cache[..., :128], slots, ints(device, 0, 0)[:, None], ints(device, 3, 2)[:, None], 0.1)
    return mla_decode(normal(device, 2, 1, 4, 144), keys)


def prefill_latents(device: torch.device, moved: Far, first: int) -> tuple[Tensor, ...]:
    keys = latents(device, moved, first)
    keys = replace(keys, lo=ints(device, 0, 0, 5), hi=ints(device, PAGE + 6, PAGE + 7, 2 * PAGE))
    return mla_prefill(normal(device, 3, 4, 144), keys, ints(device, 0, 2, 3), 2, 2 * PAGE)


def append(device: torch.device, moved: Far, first: int) -> tuple[Tensor, ...]:
    k, v = (moved(torch.zeros(PAGES, PAGE, 2, 64, dtype=torch.float16, device=device)) for _ in range(2))
    angles = normal(device, 2, ROWS, 32, dtype=torch.float32)
    q = kv_append(normal(device, ROWS, 8, 64), *angles, k, v, slots(device, first))
    return q, k[first:], v[first:]


def append_latents(device: torch.device, moved: Far, first: int) -> tuple[Tensor, ...]:
    cache = moved(torch.zeros(PAGES, PAGE, 144, dtype=torch.float16, device=device))
    angles, weight = normal(device, 2, ROWS, 8, dtype=torch.float32), normal(device, 128)
    q, w_uk = normal(device, ROWS, 4, 48), normal(device, 4, 32, 128)
    found = mla_append(q, normal(device, ROWS, 144), *angles, weight, 1e-6, w_uk, cache, slots(device, first))
    return found, cache[first:]


def append_index_keys(device: torch.device, moved: Far, first: int) -> tuple[Tensor, ...]:
    cache = moved(torch.zeros(PAGES, PAGE, 128, dtype=torch.float16, device=device))
    angles, q = normal(device, 2, ROWS, 32, dtype=torch.float32), normal(device, ROWS, 4, 128)
    norm = normal(device, 128), normal(device, 128)
    index_append(q, normal(device, ROWS, 128), *angles, *norm, 1e-6, cache, slots(device, first))
    return q, cache[first:]


def scores_of_index_keys(device: torch.device, moved: Far, first: int) -> tuple[Tensor, ...]:
    scores = torch.zeros(2, 2 * PAGE, dtype=torch.float32, device=device)
    cache, weights = moved(normal(device, PAGES, PAGE, 128)), normal(device, 2, 4, dtype=torch.float32)
    hi = ints(device, PAGE + 7, 2 * PAGE)
    index_scores(normal(device, 2, 4, 128), weights, cache, table(device, first), hi, None, 1, scores)
    return (scores,)


def fold(device: torch.device, moved: Far, first: int) -> tuple[Tensor, ...]:
    keys = moved(normal(device, PAGES, PAGE, 2, 64))
    folded = torch.zeros(len(keys), 2, 2, 64, dtype=torch.float16, device=device)
    lengths = (torch.tensor(x, device=device) for x in ([0, 0], [0, 0], [2 * PAGE, PAGE + 3]))
    grid = {"kvp": 1, "kvp_rank": 0, "append_block": PAGE}
    fold_blocks(keys[None], None, folded[None], table(device, first), *lengths, 3, **grid)
    return (folded[first:],)


def fetch(device: torch.device, moved: Far, first: int) -> tuple[Tensor, ...]:
    cache = moved(normal(device, PAGES, PAGE, 144)).view(torch.int32)
    target = torch.zeros(2, 3, 72, dtype=torch.int32, device=device)
    fetch_tokens(cache, target, ints(device, 3, 20, 33, 1, 47, 0).view(2, 3) + first * PAGE, ints(device, 3, 2))
    return (target,)


OPS: list[tuple[Op, int]] = [
    (decode, 128), (decode_fp8, 128), (decode_with_scores, 128), (prefill, 128), (decode_latents, 144),
    (selected_latents, 144), (prefill_latents, 144), (append, 128), (append_latents, 144), (append_index_keys, 128),
    (scores_of_index_keys, 128), (fold, 128), (fetch, 144),
]  # fmt: skip


@pytest.mark.parametrize("op, entry", OPS, ids=[op.__name__ for op, _ in OPS])
def test_far_pages_are_pages(op: Op, entry: int, device: torch.device) -> None:
    first = first_of(entry)
    near = op(device, lambda pages: pages, 0)
    assert any(found.abs().sum() > 0 for found in near)
    for found, wanted in zip(op(device, lambda pages: far(pages, first), first), near, strict=True):
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
