"""Blocks of bytes: what kernels write and read in them is what they write and read in tensors of their own."""

from __future__ import annotations

from dataclasses import replace
from math import pi
from typing import Any

import pytest
import torch
from torch import Tensor

from helix.worker.blocks import BlockShape
from helix.worker.keeps import dtype_name, keys_and_values
from kernels.attention.flash_decode import flash_decode
from kernels.attention.flash_prefill import flash_prefill
from kernels.attention.kv_append import kv_append
from kernels.attention.reference import flash_decode as decode_reference
from kernels.attention.reference import flash_prefill as prefill_reference
from kernels.attention.reference import kv_append as append_reference
from kernels.paged_keys import PagedKeys
from kernels.sparse.block_bounds import fold_blocks
from tests.kernels.oracle import Case, check, make_case
from tests.kernels.test_scaled_keys import DTYPES, stored, with_queries

FORMATS = ["auto", "k16v8", "fp8"]
BOTH = pytest.mark.parametrize("kv", FORMATS)
NAMES = {"keys": "k", "values": "v", "key_scales": "k_scale", "value_scales": "v_scale"}
# Pages whose scales end between multiples of 16 bytes, tokens of one page in several tiles, and the usual page.
CASES = {
    "odd": dict(counts=[2, 2], lengths=[90, 33], heads=(6, 2), dim=48, page_size=7),
    "small": dict(counts=[1, 1], lengths=[50, 21], heads=(4, 4), dim=64, page_size=16),
    "usual": dict(counts=[3, 3], lengths=[300, 129], heads=(7, 1), dim=128, page_size=128),
}


def shape_of(heads: int, dim: int, dtype: torch.dtype, kv: str, page_size: int) -> BlockShape:
    return BlockShape.of([keys_and_values(heads, dim, dtype_name(dtype), kv, None)], page_size)


def made(name: str, kv: str, dtype: torch.dtype, device: torch.device) -> tuple[Case, PagedKeys, BlockShape]:
    case = make_case(**CASES[name], dtype=dtype, device=device)  # type: ignore[arg-type]
    case, keys = stored(case, kv) if kv != "auto" else (case, case.paged())
    _, page_size, heads, dim = keys.k.shape
    return case, keys, shape_of(heads, dim, dtype, kv, page_size)


def in_blocks(keys: PagedKeys, block: BlockShape) -> tuple[Tensor, PagedKeys]:
    """Returns blocks with the same numbers, NaN in between, and views of them."""
    pages, heads = len(keys.k), block.heads
    memory = torch.full((pages * heads, block.words), -1, dtype=torch.int32, device=keys.k.device)
    views = block.pages(memory)
    for name, view in views.items():
        view.copy_(getattr(keys, NAMES[name]))
    found: dict[str, Any] = {NAMES[name]: view for name, view in views.items()}
    return memory, replace(keys, **found)


def at_places(memory: Tensor, keys: PagedKeys, block: BlockShape) -> PagedKeys:
    """Returns the same keys, each block under every head; tables say which, and name no page behind the last key."""
    heads, lanes = block.heads, torch.arange(block.heads, device=memory.device)
    found: dict[str, Any] = {NAMES[name]: x for name, x in block.under_every_head(memory).items()}
    table = keys.table[:, None] * heads + lanes[None, :, None]
    return replace(keys, **found, table=torch.where(keys.table[:, None] < 2**20, table, -1).int().contiguous())


@BOTH
def test_parts_lie_in_order(kv: str) -> None:
    """Keys come first, then values, then scales, at multiples of 16 bytes; in bf16, as [2, page_size, D]."""
    block = shape_of(3, 24, torch.bfloat16, kv, 5)
    memory = torch.zeros(6, block.words, dtype=torch.int32)
    views = block.pages(memory)
    scales = {"auto": [], "k16v8": ["value_scales"], "fp8": ["key_scales", "value_scales"]}
    assert [*views] == ["keys", "values", *scales[kv]]
    begins = [x.data_ptr() - memory.data_ptr() for x in views.values()]
    assert begins == sorted(begins) and all(x % 16 == 0 for x in (*begins, block.bytes))
    for i, x in enumerate(views.values()):
        for of_page in x.view(torch.uint8) if x.dtype != torch.float32 else x:
            assert of_page.eq(0).all(), "nothing overlaps"
            of_page.fill_(i + 1)
    if kv == "auto":
        plain = memory.view(torch.bfloat16).view(2, 3, 2, 5, 24)
        assert torch.equal(plain[:, :, 0].transpose(1, 2), views["keys"])
        assert torch.equal(plain[:, :, 1].transpose(1, 2), views["values"])


@pytest.mark.parametrize("dtype", DTYPES)
@BOTH
@pytest.mark.parametrize("op", [flash_decode, decode_reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_decode(name: str, op: Any, kv: str, dtype: torch.dtype, device: torch.device) -> None:
    """Blocks are pages of all heads, or places of which each head reads its own."""
    case, keys, block = made(name, kv, dtype, device)
    memory, paged = in_blocks(with_queries(keys, len(case.counts)), block)
    for found in (paged, at_places(memory, paged, block)):
        out, lse = op(case.q.unflatten(0, (len(case.counts), -1)), found)
        check(out.flatten(0, 1), lse.flatten(0, 1), case)


@pytest.mark.parametrize("dtype", DTYPES)
@BOTH
@pytest.mark.parametrize("op", [flash_prefill, prefill_reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_prefill(name: str, op: Any, kv: str, dtype: torch.dtype, device: torch.device) -> None:
    case, keys, block = made(name, kv, dtype, device)
    cu_q = torch.tensor([0, *case.counts], device=device).cumsum(0).int()
    _, paged = in_blocks(keys, block)
    out, lse = op(case.q, paged, cu_q, max(case.counts), max(len(k) for k in case.keys))
    check(out, lse, case)


@pytest.mark.parametrize("wrong", ["V_APART", "SCALE_NEXT", "SCALE_HEAD"])
def test_a_wrong_stride_is_caught(wrong: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case, keys, block = made("odd", "k16v8", torch.float32, device)
    _, paged = in_blocks(with_queries(keys, 2), block)
    shape = paged.shape
    assert shape["V_APART"] == 4 and shape["SCALE_NEXT"] == 2 * block.words, "numbers of four bytes and of one"
    planted = shape | {wrong: {"V_APART": 1, "SCALE_NEXT": shape["SCALE_HEAD"], "SCALE_HEAD": 0}[wrong]}
    monkeypatch.setattr(PagedKeys, "shape", planted)
    monkeypatch.setattr(PagedKeys, "check_cache", lambda keys, dtype: None)
    out, lse = flash_decode(case.q.unflatten(0, (2, -1)), paged)
    with pytest.raises(AssertionError):
        check(out.flatten(0, 1), lse.flatten(0, 1), case)


@pytest.mark.parametrize("dtype", DTYPES)
@BOTH
@pytest.mark.parametrize("N, many", [(6, 1024), (19, 0)], ids=["one a program", "several a program"])
def test_append(
    N: int, many: int, kv: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte of the blocks is what the reference writes, and between their parts nothing is written."""
    monkeypatch.setattr("kernels.attention.kv_append.MANY", many)
    D, heads, page = 80, 2, 7
    gen = torch.Generator().manual_seed(N)
    qkv = (torch.randn(N, 7, D, generator=gen) * 10 ** (torch.rand(N, 7, 1, generator=gen) * 8 - 6)).to(device, dtype)
    # Angles of the quadrant axes rotate exactly: rotations in another order of roundings would write other bytes.
    angle = (torch.randn(N, D // 2, generator=gen) * 2).round() * (pi / 2)
    cos, sin = angle.cos().round().to(device, dtype), angle.sin().round().to(device, dtype)
    slots = torch.randperm(4 * page, generator=gen)[:N].to(device)
    slots[2] = -1
    block = shape_of(heads, D, dtype, kv, page)
    found = []
    for op in (kv_append, append_reference):
        memory = torch.full((4 * heads, block.words), -1, dtype=torch.int32, device=device)
        kept = block.pages(memory)
        scales = kept.get("key_scales"), kept.get("value_scales")
        q = op(qkv, cos, sin, kept["keys"], kept["values"], slots, None, scales)
        found.append((q, memory))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))
    assert (found[0][1] != -1).any()


@BOTH
def test_bounds(kv: str, device: torch.device) -> None:
    block = shape_of(2, 40, torch.float32, kv, 16)
    memory = torch.full((2, 3 * 2, block.words), -1, dtype=torch.int32, device=device)
    kept = block.pages(memory)
    kept["keys"].copy_(torch.randn(2, 3, 16, 2, 40, device=device))
    scales, plain = kept.get("key_scales"), kept["keys"].float()
    if scales is not None:
        scales.copy_(
            torch.tensor([0.25, 2.0, 8.0], device=device)[torch.arange(192, device=device) % 3].view(2, 3, 2, 16)
        )
        plain = plain * scales.transpose(2, 3)[..., None]
    table, start = torch.tensor([[2, 0, 1]], device=device).int(), torch.zeros(1, dtype=torch.int64, device=device)
    bounds = torch.full((2, 3, 2, 2, 40), torch.nan, device=device)
    where = {"kvp": 1, "kvp_rank": 0, "append_block": 16}
    fold_blocks(kept["keys"], scales, bounds, table, start, start, start + 48, 3, "bounds", **where)
    assert torch.equal(bounds, torch.stack([plain.amax(2), plain.amin(2)], 3))
