"""Latents in e4m3: appended as the reference appends them, and attended as the numbers that they stand for."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from kernels.attention import split_prefill
from kernels.attention.unpacked_prefill import whole_latents
from kernels.mla import decode_common_sm90
from kernels.mla.append import mla_append
from kernels.mla.decode import mla_decode
from kernels.mla.prefill import mla_prefill
from kernels.mla.reference import mla_append as append_reference
from kernels.mla.reference import mla_decode as decode_reference
from kernels.mla.reference import mla_prefill as prefill_reference
from kernels.scaled_keys import unpacked_latents
from tests.kernels import test_mla_decode, test_mla_prefill
from tests.kernels.mla_oracle import FewBitsCase, make_latent_case
from tests.kernels.oracle import check

E4M3 = torch.float8_e4m3fn
# The interpreter multiplies the bit patterns of bf16.
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
DECODE = pytest.mark.parametrize("op", [mla_decode, decode_reference], ids=["kernel", "reference"])
PREFILL = pytest.mark.parametrize("op", [mla_prefill, prefill_reference], ids=["kernel", "reference"])
WIDE = {
    "two-groups": dict(counts=[1, 1], lengths=[90, 33], latent=256, heads=3),
    "a-ragged-group": dict(counts=[2, 2], lengths=[90, 33], latent=136, heads=20, page_size=48),
    "three-groups-page-64": dict(counts=[1], lengths=[130], latent=384, heads=2, page_size=64),
}


@pytest.mark.parametrize("dtype", DTYPES)
@DECODE
@pytest.mark.parametrize("shape", [*test_mla_decode.SHAPES, *WIDE])
def test_decode(shape: str, op: Any, dtype: torch.dtype, device: torch.device) -> None:
    settings = (test_mla_decode.SHAPES | WIDE)[shape]
    case = FewBitsCase.of(make_latent_case(**settings, dtype=dtype, device=device))
    check(*test_mla_decode.run(op, case), case)


@pytest.mark.parametrize("dtype", DTYPES)
@PREFILL
@pytest.mark.parametrize("shape", [*test_mla_prefill.SHAPES, *WIDE])
def test_prefill(shape: str, op: Any, dtype: torch.dtype, device: torch.device) -> None:
    settings = (test_mla_prefill.SHAPES | WIDE)[shape]
    case = FewBitsCase.of(make_latent_case(**settings, dtype=dtype, device=device))
    check(*test_mla_prefill.run(op, case), case)


MANY_PIECES = "one-head", "128-heads"  # the interpreter takes seconds for pieces of a page


@pytest.mark.parametrize(
    "shape, pages",
    [
        pytest.param(shape, pages, marks=[pytest.mark.slow] if pages == 1 and shape in MANY_PIECES else [])
        for shape, pages in product(test_mla_prefill.SHAPES, (1, 3))
    ],
)
def test_prefill_in_pieces(shape: str, pages: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many pages of each segment at once."""
    case = FewBitsCase.of(make_latent_case(**test_mla_prefill.SHAPES[shape], device=device))
    of_page = case.paged().k[0].numel() * 4 + case.paged().rope[0].numel() * 4
    monkeypatch.setattr("kernels.attention.unpacked_prefill.PIECE_BYTES", pages * len(case.counts) * of_page)
    check(*test_mla_prefill.run(mla_prefill, case), case)


@pytest.mark.parametrize("shape", ["a-ragged-group", "three-groups-page-64"])
def test_whole_latents(shape: str, device: torch.device) -> None:
    """Numbers times powers of two: exact."""
    keys = FewBitsCase.of(make_latent_case(**WIDE[shape], device=device)).paged()
    assert keys.k_scale is not None and keys.rope is not None
    wanted = torch.cat((unpacked_latents(keys.k, keys.k_scale), keys.rope), -1)
    found = whole_latents(keys.k, keys.k_scale, keys.rope)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)  # of what nobody wrote


def test_split_keys(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_prefill, "split_count", lambda items, tiles, slots: 3)
    case = FewBitsCase.of(make_latent_case([20, 40], [150, 41], page_size=48, device=device))
    check(*test_mla_prefill.run(mla_prefill, case), case)


@pytest.mark.parametrize("sms", [1, 7, 50])
def test_sms(sms: int, device: torch.device) -> None:
    case = FewBitsCase.of(make_latent_case(**WIDE["a-ragged-group"], device=device))
    check(*test_mla_decode.run(mla_decode, case, sms=sms), case)


@DECODE
def test_scales_over_decades(op: Any, device: torch.device) -> None:
    case = FewBitsCase.of(make_latent_case([1, 1], [90, 33], latent=300, page_size=48, device=device), decades=True)
    check(*test_mla_decode.run(op, case), case)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_wrong_scale_is_caught(dim: int, device: torch.device) -> None:
    """Scales of another page, group or slot."""
    case = FewBitsCase.of(make_latent_case([1, 1], [90, 33], latent=300, device=device), decades=True)
    latents, scales, ropes = case.planes
    planted = replace(case, planes=(latents, scales.roll(1, dim).nan_to_num(1.0).contiguous(), ropes))
    with pytest.raises(AssertionError):
        check(*test_mla_decode.run(mla_decode, planted), case)


@pytest.mark.parametrize(
    "op, plane",
    [
        pytest.param(mla_decode, 0, marks=pytest.mark.gpu),  # the interpreter reads e4m3's NaN as 480
        (mla_decode, 1),
        (mla_decode, 2),
        *((decode_reference, plane) for plane in range(3)),
    ],
)
def test_nan_in_a_key_that_is_read_surfaces(op: Any, plane: int, device: torch.device) -> None:
    case = FewBitsCase.of(make_latent_case([1], [20], device=device))
    page = int(case.block_table[0, 0])
    if plane == 1:
        case.planes[1][page, 0, 3] = torch.nan
    else:
        case.planes[plane][page, 3, 5] = torch.tensor(torch.nan).to(case.planes[plane].dtype)
    assert test_mla_decode.run(op, case)[0].isnan().any()


def test_repeats_bitwise(device: torch.device) -> None:
    case = FewBitsCase.of(make_latent_case([3, 3], [90, 31], heads=6, latent=136, device=device))
    first, second = (test_mla_decode.run(mla_decode, case, sms=5) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("latent, rope", [(32, 8), (40, 24), (136, 64), (512, 64)])
@pytest.mark.parametrize("rows", [6, 19])
def test_appends_the_bytes_of_the_reference(
    rows: int, latent: int, rope: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Sizes from 1e-4 to 1e2 in each group, and zeros; other slots are not touched."""
    heads, nope, page, pages = 3, 16, 7, 4
    gen = torch.Generator().manual_seed(latent)
    q = torch.randn(rows, heads, nope + rope, generator=gen).to(device, dtype)
    # Of one size: the mean square is 1 in any order of summation, and the norm changes nothing.
    kv = torch.ones(rows, latent + rope) * torch.randint(0, 2, (rows, latent + rope), generator=gen).sub(0.5).sign()
    kv[1, :latent] = 0
    kv = kv.to(device, dtype)
    groups = torch.arange(latent) // 128
    gain = torch.randn(latent, generator=gen) * 10.0 ** (groups * 2 - 4)
    gain = gain.to(device, dtype)
    # Angles of the quadrant axes rotate exactly: rotations in another order of roundings would write other bytes.
    angle = (torch.randn(rows, rope // 2, generator=gen) * 2).round() * (math.pi / 2)
    cos, sin = angle.cos().round().to(device, dtype), angle.sin().round().to(device, dtype)
    w_uk = torch.randn(heads, nope, latent, generator=gen).to(device, dtype)
    slots = torch.randperm(pages * page, generator=gen)[:rows].to(device)
    slots[2] = -1
    found = []
    for op in (mla_append, append_reference):
        # Layers of one cache: pages are apart from each other.
        latents = torch.full((pages, 2, page, latent), 7.0, device=device).to(E4M3)[:, 1]
        scales = torch.full((pages, -(-latent // 128), page), 7.0, device=device)
        ropes = torch.full((pages, 2, page, rope), 7.0, dtype=dtype, device=device)[:, 1]
        op(q, kv, cos, sin, gain, 1e-20, w_uk, latents, slots, scales, ropes)
        found.append([latents.float(), scales, ropes])
        untouched = torch.ones(pages * page, dtype=torch.bool, device=device)
        untouched[slots[slots >= 0]] = False
        for plane in (latents.float(), scales.mT, ropes):
            assert (plane.reshape(pages * page, -1)[untouched] == 7).all()
        written = slots[slots >= 0]
        stood = (latents.float() * scales.mT.repeat_interleave(128, -1)[..., :latent]).reshape(pages * page, -1)
        want = (kv[:, :latent].float() * gain.float())[slots >= 0]
        # Three bits after the first: half a unit in the last place is 2^-4 of a number, or of the scale's 2^-9.
        most = torch.stack([x.abs().amax(-1) for x in want.split(128, -1)], -1).repeat_interleave(128, -1)[:, :latent]
        assert ((stood[written] - want).abs() <= want.abs() * 2**-4 * 1.01 + most * 2**-17).all()
    # A GPU divides by other numbers than powers of two, and takes roots, with an error: fp32 alone shows it.
    exact = dtype != torch.float32 or latent & (latent - 1) == 0
    for name, mine, theirs in zip(("latents", "scales", "ropes"), *found, strict=True):
        if exact or name == "ropes":
            assert torch.equal(mine, theirs), name
        else:  # at most a neighbouring number of e4m3, or power of two
            assert ((mine - theirs).abs() <= (1 if name == "scales" else 0.14) * theirs.abs() + 1e-6).all(), name


@pytest.mark.parametrize("shape", test_mla_decode.ON_HOPPER)
def test_what_fits_hopper(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    settings = dict(page_size=64, dtype=torch.bfloat16) | test_mla_decode.ON_HOPPER[shape]
    case = FewBitsCase.of(make_latent_case(**settings, latent=512, rope=64))
    B = len(case.counts)
    assert decode_common_sm90.fits(case.q.unflatten(0, (B, -1)), case.paged(B))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", test_mla_decode.ON_HOPPER)
def test_on_hopper(shape: str) -> None:
    settings = dict(page_size=64, dtype=torch.bfloat16) | test_mla_decode.ON_HOPPER[shape]
    made = make_latent_case(**settings, latent=512, rope=64, device="cuda")
    test_mla_decode.check_on_hopper(FewBitsCase.of(made, decades=made.q.dtype == torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64])
def test_hopper_reads_bytes_as_they_are(heads: int) -> None:
    """All 254 numbers of e4m3 in each column, and a key alone: its value comes out as it is stored."""
    case = make_latent_case(
        [1] * 4, [300] * 4, heads=heads, latent=512, rope=64, page_size=64, dtype=torch.bfloat16, device="cuda"
    )
    few = FewBitsCase.of(case)
    latents, scales, _ = few.planes
    codes = torch.arange(latents.shape[0] * 64 * 512, device="cuda").view(-1, 64, 512) % 254
    codes = (codes + (codes >= 127).int()).to(torch.uint8)  # without the two NaN: 127, and 255 is not reached
    latents.copy_(codes.view(E4M3))
    scales.copy_(2.0 ** ((torch.arange(scales.numel(), device="cuda") % 23).view(scales.shape) - 11))
    stood = latents.float() * scales.mT.repeat_interleave(128, -1)
    for at in (0, 63, 64, 200, 299):
        few.lo.fill_(at)
        few.hi.fill_(at + 1)
        out, _ = test_mla_decode.run(mla_decode, few)
        page = few.block_table[:, at // 64].long()
        assert torch.equal(out, stood[page, at % 64][:, None].expand_as(out).to(out))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("heads, count", [(16, 1), (16, 2), (20, 3), (64, 1), (128, 1), (128, 4), (1, 16)])
def test_real_sizes(dtype: torch.dtype, page_size: int, heads: int, count: int) -> None:
    settings = dict(latent=512, rope=64, page_size=page_size, dtype=dtype, device="cuda")
    case = FewBitsCase.of(make_latent_case([count] * 4, [5000, 0, 333, count], heads=heads, **settings), decades=True)
    check(*test_mla_decode.run(mla_decode, case), case)
    case = FewBitsCase.of(make_latent_case([300, 29], [1500, 29], heads=heads, **settings), decades=True)
    check(*test_mla_prefill.run(mla_prefill, case), case)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_one_graph_serves_every_length(heads: int) -> None:
    """With bounds that are read early."""
    case = FewBitsCase.of(
        make_latent_case(
            [1, 1, 1], [700, 3, 250], heads=heads, latent=512, rope=64, page_size=64, dtype=torch.bfloat16,
            device="cuda",
        )
    )  # fmt: skip
    q, keys = case.q.unflatten(0, (3, -1)), case.paged(3)
    mla_decode(q, keys, early=True)  # compiled before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = mla_decode(q, keys, early=True)
    for bounds in ([1, 0, 64], [65, 1, 0], [512, 2, 128], [700, 3, 250]):
        keys.hi.copy_(torch.tensor(bounds, device="cuda")[:, None])
        case.hi = keys.hi.flatten().clone()
        graph.replay()
        check(out.flatten(0, 1), lse.flatten(0, 1), case)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size, heads", [(64, 16), (64, 128), (16, 128)])
def test_offsets_beyond_2_to_the_31(page_size: int, heads: int) -> None:
    """The last pages of 2^32 numbers hold what is written and read."""
    pages = (1 << 32) // (page_size * 512) + 1
    case = FewBitsCase.of(
        make_latent_case(
            [1], [100], heads=heads, latent=512, rope=64, page_size=page_size, dtype=torch.bfloat16, device="cuda"
        )
    )
    planes = tuple(torch.zeros(pages, *plane.shape[1:], dtype=plane.dtype, device="cuda") for plane in case.planes)
    for i in range(-(-100 // page_size)):
        for to, plane in zip(planes, case.planes, strict=True):
            to[pages - 1 - i] = plane[int(case.block_table[0, i])]
        case.block_table[0, i] = pages - 1 - i
    case = replace(case, planes=planes)
    check(*test_mla_decode.run(mla_decode, case), case)
    check(*test_mla_prefill.run(mla_prefill, case), case)
    kv, zero = torch.randn(2, 576, device="cuda").bfloat16(), torch.zeros(2, 32, dtype=torch.bfloat16, device="cuda")
    q, w_uk = torch.randn(2, 16, 192, device="cuda").bfloat16(), torch.randn(16, 128, 512, device="cuda").bfloat16()
    gain, slots = torch.ones_like(kv[0, :512]), torch.tensor([pages * page_size - 1, 5], device="cuda")
    for plane in planes:
        plane.zero_()
    mla_append(q, kv, zero + 1, zero, gain, 1e-6, w_uk, planes[0], slots, *planes[1:])
    assert torch.equal(planes[2][-1, -1], kv[0, 512:]) and torch.equal(planes[2][0, 5], kv[1, 512:])
    assert planes[1].mT.reshape(-1, 4).any(-1).nonzero().flatten().tolist() == [5, pages * page_size - 1]
    assert planes[0].view(torch.int64).view(-1, 64).any(-1).nonzero().flatten().tolist() == [5, pages * page_size - 1]
