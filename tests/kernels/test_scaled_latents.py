"""Latents in e4m3: appended as the reference appends them, and attended as the numbers that they stand for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.attention import split_prefill
from kernels.mla import decode_common_sm90
from kernels.mla.append import mla_append
from kernels.mla.decode import mla_decode
from kernels.mla.prefill import mla_prefill
from kernels.reference.mla_append import mla_append as append_reference
from kernels.reference.mla_decode import mla_decode as decode_reference
from kernels.reference.mla_prefill import mla_prefill as prefill_reference
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
    for name, mine, theirs in zip(("latents", "scales", "ropes"), *found, strict=True):
        assert torch.equal(mine, theirs), name


def test_hopper_takes_latents_of_queries_dtype_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    case = make_latent_case([1], [3], latent=512, rope=64, heads=128, page_size=64, dtype=torch.bfloat16)
    few = FewBitsCase.of(case)
    assert not decode_common_sm90.fits(case.q[:, None], few.paged(1).k, 512)


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
