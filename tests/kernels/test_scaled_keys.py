"""Keys and values in e4m3: appended alike by every path, and attended as the numbers that they stand for."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention import flash_decode_fp8_sm90
from kernels.attention.flash_decode import flash_decode
from kernels.attention.flash_prefill import flash_prefill
from kernels.attention.kv_append import kv_append
from kernels.attention.reference import flash_decode as decode_reference
from kernels.attention.reference import flash_prefill as prefill_reference
from kernels.attention.reference import kv_append as append_reference
from kernels.dense.qkv_append import qkv_append
from kernels.paged_keys import KeyScores, PagedKeys
from kernels.scaled_keys import scales_of
from kernels.sparse.block_bounds import fold_blocks
from tests.kernels import test_flash_decode, test_flash_prefill
from tests.kernels.oracle import Case, check, make_case
from tests.pairs import params

E4M3 = torch.float8_e4m3fn
# The interpreter multiplies the bit patterns of bf16.
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def few(x: Tensor) -> tuple[Tensor, Tensor]:
    """Pages [pages, page_size, Hkv, D] in e4m3, and their scales [pages, Hkv, page_size]; NaN stays NaN."""
    scales = torch.where(x.isnan().any(-1), torch.nan, scales_of(x.nan_to_num()))
    return (x.float() / scales[..., None]).to(E4M3), scales.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def whole(x: Tensor) -> Tensor:
    """The numbers of keys [S, Hkv, D] after a round trip."""
    scales = scales_of(x)[..., None]
    return (x.float() / scales).to(E4M3).float() * scales


def stored(case: Case, kv: str, decades: bool = False) -> tuple[Case, PagedKeys]:
    """A case whose caches are e4m3, with its input of kernels; tokens' values are from 1e-6 to 1e2 with `decades`."""
    if decades:
        factor = 10 ** (torch.rand(case.v_cache.shape[:3], generator=torch.Generator().manual_seed(1)) * 8 - 6)
        wide = case.v_cache.float().cpu() * factor[..., None]
        values = []
        for i, v in enumerate(case.values):
            at = torch.arange(len(v))
            page = case.block_table[i].cpu()[at // case.v_cache.shape[1]].long()
            values.append(wide[page, at % case.v_cache.shape[1]])
        case = replace(case, v_cache=wide.to(case.v_cache), values=values)
    v, v_scale = few(case.v_cache)
    made = replace(case, values=[whole(x) for x in case.values])
    k, k_scale = case.k_cache.contiguous(), None
    if kv == "fp8":
        k, k_scale = few(case.k_cache)
        made = replace(made, keys=[whole(x) for x in case.keys])
    return made, replace(case.paged(), k=k, v=v, k_scale=k_scale, v_scale=v_scale)


def with_queries(keys: PagedKeys, B: int) -> PagedKeys:
    return replace(keys, lo=keys.lo.view(B, -1), hi=keys.hi.view(B, -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv", ["fp8", "k16v8"])
@pytest.mark.parametrize("op", [flash_decode, decode_reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("shape", test_flash_decode.SHAPES)
def test_decode(shape: str, op: Any, kv: str, dtype: torch.dtype, device: torch.device) -> None:
    case, keys = stored(make_case(**test_flash_decode.SHAPES[shape], dtype=dtype, device=device), kv)
    B = len(case.counts)
    out, lse = op(case.q.unflatten(0, (B, -1)), with_queries(keys, B))
    check(out.flatten(0, 1), lse.flatten(0, 1), case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv", ["fp8", "k16v8"])
@pytest.mark.parametrize("op", [flash_prefill, prefill_reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("shape", test_flash_prefill.SHAPES)
def test_prefill(shape: str, op: Any, kv: str, dtype: torch.dtype, device: torch.device) -> None:
    case, keys = stored(make_case(**test_flash_prefill.SHAPES[shape], dtype=dtype, device=device), kv)
    cu_q = torch.tensor([0, *case.counts], device=device).cumsum(0).int()
    check(*op(case.q, keys, cu_q, max(case.counts), max(len(k) for k in case.keys)), case)


@pytest.mark.parametrize(
    "shape, pages, kv",
    [
        # The interpreter takes a minute for many pieces of the largest.
        *params([*product([s for s in test_flash_prefill.SHAPES if s != "group-7"], (1, 3), ("fp8", "k16v8"))]),
        *(pytest.param("group-7", *case, marks=pytest.mark.slow) for case in product((1, 3), ("fp8", "k16v8"))),
    ],
)
def test_prefill_in_pieces(
    shape: str, pages: int, kv: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many pages of each segment at once; what was in their memory is NaN."""
    case, keys = stored(make_case(**test_flash_prefill.SHAPES[shape], device=device), kv)
    of_page = 2 * keys.k[0].numel() * torch.float32.itemsize
    monkeypatch.setattr("kernels.attention.unpacked_prefill.PIECE_BYTES", pages * len(case.counts) * of_page)
    empty = torch.Tensor.new_empty

    def poisoned(x: Tensor, *size: Any, **more: Any) -> Tensor:
        made = empty(x, *size, **more)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    cu_q = torch.tensor([0, *case.counts], device=device).cumsum(0).int()
    check(*flash_prefill(case.q, keys, cu_q, max(case.counts), max(len(k) for k in case.keys)), case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.0, 1e-7])
@pytest.mark.parametrize("op", [flash_decode, decode_reference], ids=["kernel", "reference"])
def test_queries_of_nearly_nothing(op: Any, size: float, dtype: torch.dtype, device: torch.device) -> None:
    """Heads without a query average the values that they read: they have no exponent by which to scale."""
    case, keys = stored(make_case([2, 2], [90, 33], heads=(6, 2), dtype=dtype, device=device), "fp8")
    case.q[1:, 2:] *= size
    out, lse = op(case.q.unflatten(0, (2, -1)), with_queries(keys, 2))
    check(out.flatten(0, 1), lse.flatten(0, 1), case)


@pytest.mark.parametrize("op", [flash_decode, decode_reference], ids=["kernel", "reference"])
def test_scales_over_decades(op: Any, device: torch.device) -> None:
    case, keys = stored(make_case([2, 2], [90, 33], heads=(6, 2), page_size=48, device=device), "fp8", decades=True)
    out, lse = op(case.q.unflatten(0, (2, -1)), with_queries(keys, 2))
    want, want_lse = case.expected()
    # Values of up to 400: 1e-5 of the largest.
    check(out.flatten(0, 1) / 400, lse.flatten(0, 1), case, (want / 400, want_lse))


@pytest.mark.parametrize("wrong", ["k_scale", "v_scale"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_wrong_scale_is_caught(wrong: str, dim: int, device: torch.device) -> None:
    """Scales of another page, head or slot."""
    case, keys = stored(make_case([1, 1], [90, 33], heads=(6, 2), device=device), "fp8", decades=True)
    planted = with_queries(replace(keys, **{wrong: getattr(keys, wrong).roll(1, dim).contiguous().nan_to_num(1.0)}), 2)
    out, _ = flash_decode(case.q.unflatten(0, (2, -1)), planted)
    want, _ = case.expected()
    assert not torch.allclose(out.flatten(0, 1).double().cpu() / 400, want / 400, atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv", ["fp8", "k16v8"])
@pytest.mark.parametrize("sms", [None, 1, 3])
@pytest.mark.parametrize(
    "shape",
    [
        dict(counts=[1, 1, 1], lengths=[700, 1, 129], heads=(28, 4), dim=128, page_size=64),
        dict(counts=[2, 2], lengths=[1500, 300], heads=(14, 2), dim=128, page_size=128),
        dict(counts=[1] * 40, lengths=[*range(0, 400, 10)], heads=(8, 1), dim=64, page_size=16),
        dict(counts=[4, 4], lengths=[600, 3], heads=(4, 1), dim=128, page_size=48, window=200, sinks=True),
        dict(counts=[1], lengths=[2000], heads=(16, 1), dim=128, page_size=100, window=900),
        dict(counts=[3, 3], lengths=[260, 1], heads=(2, 2), dim=64, page_size=64, sinks=True),
        dict(counts=[5, 5], lengths=[900, 6], heads=(8, 2), dim=128, page_size=64),
        dict(counts=[4, 4, 4], lengths=[333, 0, 2100], heads=(8, 1), dim=128, page_size=128, window=500, sinks=True),
        dict(counts=[4, 4], lengths=[140, 70], heads=(14, 2), dim=64, page_size=16),
    ],
    ids=str,
)
def test_decode_on_hopper(
    shape: dict[str, Any], sms: int | None, kv: str, dtype: torch.dtype, device: torch.device
) -> None:
    case, keys = stored(make_case(**shape, dtype=dtype, device=device), kv)
    B = len(case.counts)
    q, keys = case.q.unflatten(0, (B, -1)), with_queries(keys, B)
    assert flash_decode_fp8_sm90.fits(q, keys)
    found = [flash_decode(q, keys, sms=sms) for _ in range(2)]
    check(found[0][0].flatten(0, 1), found[0][1].flatten(0, 1), case)
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_values_in_fp16(dtype: torch.dtype, device: torch.device) -> None:
    """Weights far below the largest, of values of 0.01, are in fp16's range: many of them make the output."""
    case = make_case([1], [2000], heads=(4, 1), dim=128, page_size=64, dtype=dtype, device=device)
    case.q.zero_()
    case.q[..., 0] = 1.0
    factor = torch.where(torch.arange(2000) == 700, 70.0, 0.0)
    case.k_cache.zero_()
    case.v_cache.mul_(0.01)
    for i, (k, v) in enumerate(zip(case.keys, case.values, strict=True)):
        k.zero_()
        k[:, :, 0] = factor[:, None]
        v.mul_(0.01)
        at = torch.arange(2000)
        case.k_cache[case.block_table[i].cpu()[at // 64].long(), at % 64] = k.to(device)
    made, keys = stored(case, "fp8")
    out, lse = flash_decode(made.q[:, None], with_queries(keys, 1))
    check(
        out.flatten(0, 1) * 100,
        lse.flatten(0, 1),
        made,
        tuple(x * s for x, s in zip(made.expected(), (100, 1), strict=True)),
    )


@pytest.mark.parametrize("dim", [64, 80])
def test_pages_of_one_token(dim: int, device: torch.device) -> None:
    """Tables of slots, one a KV head, over the same scales."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    made = make_case([1, 1], [50, 21], heads=(4, 2), dim=dim, page_size=16, dtype=dtype, device=device)
    case, keys = stored(made, "fp8")
    slots = torch.arange(52, device=device)
    table = keys.table.clamp(0, len(keys.k) - 1).long()[:, slots // 16] * 16 + slots % 16
    single = replace(
        with_queries(keys, 2), k=keys.k.flatten(0, 1)[:, None], v=keys.v.flatten(0, 1)[:, None],
        table=table.int()[:, None].expand(-1, 2, -1).contiguous(),
    )  # fmt: skip
    for op in (flash_decode, decode_reference):
        out, lse = op(case.q[:, None], single)
        check(out.flatten(0, 1), lse.flatten(0, 1), case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kv", ["fp8", "k16v8"])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("N, many", [(6, 1024), (19, 0)], ids=["one a program", "several a program"])
def test_every_append_writes_the_same_bytes(
    N: int, many: int, norms: bool, kv: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's are the reference's, from 1e-6 to 1e2 and of zeros; other slots are not touched."""
    monkeypatch.setattr("kernels.attention.kv_append.MANY", many)
    D, q_heads, kv_heads, page = 80, 3, 2, 7
    gen = torch.Generator().manual_seed(N)
    qkv = torch.randn(N, q_heads + 2 * kv_heads, D, generator=gen) * 10 ** (torch.rand(N, 7, 1, generator=gen) * 8 - 6)
    qkv[1] = 0
    qkv = qkv.to(device, dtype)
    angle = torch.randn(N, D // 2, generator=gen)
    # Angles of the quadrant axes rotate exactly: rotations in another order of roundings would write other bytes.
    angle = (angle * 2).round() * (math.pi / 2)
    cos, sin = angle.cos().round().to(device, dtype), angle.sin().round().to(device, dtype)
    slots = torch.randperm(4 * page, generator=gen)[:N].to(device)
    slots[2] = -1
    gains = torch.ones(2, D, device=device, dtype=dtype)
    found = []
    for op in (kv_append, append_reference):
        kept = E4M3 if kv == "fp8" else dtype
        k = torch.full((4, page, kv_heads, D), 7.0, device=device).to(kept)
        v = torch.full((4, page, kv_heads, D), 7.0, device=device).to(E4M3)
        scales = [torch.full((4, kv_heads, page), 7.0, device=device) for _ in range(2)]
        given = scales[0] if kv == "fp8" else None, scales[1]
        q = op(qkv, cos, sin, k, v, slots, (gains[0], gains[1], 1e-5) if norms else None, given)
        found.append([q.float(), k.float(), v.float(), *scales])
    for name, mine, theirs in zip(("q", "keys", "values", "key scales", "value scales"), *found, strict=True):
        if norms and name in ("q", "keys", "key scales"):  # norms of another order of sums
            step = 2 if name == "key scales" else 0.14  # a neighbouring number of e4m3, or power of two
            assert ((mine - theirs).abs() <= step * theirs.abs() + 1e-2).all(), name
        else:
            assert torch.equal(mine, theirs), name


def test_a_projection_appends_the_same_bytes(device: torch.device) -> None:
    x, weight = torch.randn(3, 64, device=device), torch.randn(7 * 32, 64, device=device)
    cos, sin, slots = torch.ones(3, 16, device=device), torch.zeros(3, 16, device=device), torch.arange(3).to(device)
    found = []
    for fused in (True, False):
        k, v = torch.zeros(2, 1, 16, 2, 32, device=device).to(E4M3)
        scales = torch.zeros(1, 2, 16, device=device), torch.zeros(1, 2, 16, device=device)
        if fused:
            q = qkv_append(x, weight, None, cos, sin, k, v, slots, None, scales)
        else:
            q = append_reference((x @ weight.T).view(3, 7, 32), cos, sin, k, v, slots, None, scales)
        found.append(
            (q, k.float() * scales[0].transpose(1, 2)[..., None], v.float() * scales[1].transpose(1, 2)[..., None])
        )
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.14, atol=1e-3)  # at most a neighbouring number of e4m3


def test_bounds_are_those_of_what_is_stored(device: torch.device) -> None:
    keys = torch.randn(2, 3, 16, 2, 40, device=device)
    parts = [few(k) for k in keys]
    data, scales = torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
    plain = (data.float() * scales.transpose(2, 3)[..., None]).contiguous()
    table, start = torch.tensor([[2, 0, 1]], device=device).int(), torch.zeros(1, dtype=torch.int64, device=device)
    after = torch.tensor([48], device=device)
    made = []
    for k, s in ((data, scales), (plain, None)):
        bounds = torch.zeros(2, 3, 2, 2, 40, device=device)
        fold_blocks(k, s, bounds, table, start, start, after, 3, "bounds", kvp=1, kvp_rank=0, append_block=16)
        made.append(bounds)
    torch.testing.assert_close(*made, rtol=0, atol=0)


@pytest.mark.parametrize("rows", ["any", "ends"])
def test_scores_are_those_of_what_is_stored(rows: str, device: torch.device) -> None:
    case, keys = stored(make_case([3, 3], [66, 20], heads=(4, 2), device=device), "fp8")
    keys, q = with_queries(keys, 2), case.q.unflatten(0, (2, -1))
    pages = keys.k.shape[0]
    table = keys.table.clamp(0, pages - 1)
    found = []
    for op in (flash_decode, decode_reference):
        planes = torch.zeros(1, pages, 2, keys.page_size, device=device, dtype=torch.float16)
        op(q, keys, scores=KeyScores(planes, table, rows))
        found.append(planes.float())
    torch.testing.assert_close(*found, rtol=0, atol=2e-3)  # fp16 of scores of up to 2
