"""What only one kernel of attention shows: its shape of a launch, which cases it takes, and bytes as they are stored.

Results are compared by `tests/kernels/test_suite.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.attention import flash_decode as decode_module
from kernels.attention import flash_decode_many_rows_sm90, flash_prefill_sm90, split_prefill
from kernels.attention.dequantized_prefill import dequantize_latent_rows
from kernels.attention.flash_decode import decode_parts, flash_decode
from kernels.attention.flash_prefill import flash_prefill
from kernels.attention.paged_tiles import tile_shape
from kernels.attention.reference import flash_decode as reference
from kernels.attention.split_kv import UnmergedAttention
from kernels.attention.split_prefill import split_count
from kernels.mla import decode_common_sm90
from kernels.mla.decode import mla_decode
from kernels.paged_keys import PagedKeys
from kernels.scaled_keys import dequantize_latents
from tests.kernels.cases_attention import PROMPTS, SHAPES, rows_of
from tests.kernels.cases_latents import DEEPSEEK, WIDE
from tests.kernels.cases_scores import straddling
from tests.kernels.oracle import block_shape, make_case, make_latents


def test_two_programs_on_each_multiprocessor(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(**SHAPES["plain"], dtype=torch.float16, device=device)
    if device.type == "cpu":
        monkeypatch.setattr(decode_module, "sm_count", lambda device: 8)
    count = decode_module.sm_count(device)
    for sms in (None, count - 4):
        parts = decode_parts(*rows_of(case), sms=sms)
        assert isinstance(parts, UnmergedAttention) and parts.programs == 2 * (sms or count)
        case.check(*parts.merge_states())


@pytest.mark.parametrize("op", [flash_decode, reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("page_size", [16, 48])
def test_all_pages_for_each_head_are_the_table_bit_for_bit(op: Any, page_size: int, device: torch.device) -> None:
    case = make_case([1, 1, 1], [331, 0, 47], heads=(6, 2), page_size=page_size, device=device)
    options = {"sms": 3} if op is flash_decode else {}
    each = replace(case, store=replace(case.store, table=case.store.table[:, None].expand(-1, 2, -1).contiguous()))
    for mine, theirs in zip(each.run(op, **options), case.run(op, **options), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("rows", ["ends", "any"])
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.gpu) for n in range(4, 60))])
def test_groups_that_straddle_append_blocks(seed: int, rows: str, device: torch.device) -> None:
    for n in range(1 if device.type == "cpu" else 10):
        case = straddling(seed, n, rows, device)
        case.check(*case.run(flash_decode))


@pytest.mark.parametrize(
    "items, tiles, slots, at_most",
    [
        (56, 4096, 132, 1.05),  # 256 queries of 28 / 4 heads behind 512K keys
        (24, 512, 132, 1.10),  # 100 queries behind 64K
        (24, 4096, 132, 1.03),
        (2, 8192, 132, 1.10),
        (224, 512, 132, 1.08),  # 1,024 queries
        (1792, 512, 132, 1.05),  # 8,192
        *((*sizes, 132, None) for sizes in ((24, 2), (24, 0), (132, 4096), (264, 64))),
    ],
)
def test_splits_leave_few_programs_idle(items: int, tiles: int, slots: int, at_most: float | None) -> None:
    """Tiles of keys that the busiest slot gets, beside an even share of all; None: no splits, which would not pay."""
    splits = split_count(items, tiles, slots)
    busiest = -(-items * splits // slots) * -(-tiles // splits)
    assert splits == 1 if at_most is None else busiest <= at_most * items * tiles / slots


@pytest.mark.parametrize("shape", ["group-7", "whole-prompts", "dim-256"])
def test_splits_are_chosen_for_the_tiles_that_run(
    shape: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile more than was counted would be a round more of programs."""
    seen: list[int] = []
    monkeypatch.setattr(split_prefill, "split_count", lambda items, tiles, slots: seen.append(items) or 1)
    case = make_case(**PROMPTS[shape], prefill=True, device=device)
    case.run(flash_prefill)
    q_heads, kv_heads = case.q.shape[1], case.store.k.shape[2]
    block = tile_shape(max(case.counts) * q_heads // kv_heads, 64, case.q.shape[2], case.q.dtype)["BLOCK_M"]
    tiles = sum(-(-count * q_heads // kv_heads // block) for count in case.counts) * kv_heads
    assert [tiles] <= seen <= [tiles + (len(case.counts) - 1) * kv_heads]


@pytest.mark.gpu
def test_long_chunks_take_the_kernel_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    launch = flash_prefill_sm90.launch
    monkeypatch.setattr(flash_prefill_sm90, "launch", lambda *args: (launched.append(args), launch(*args)))
    shape: dict[str, Any] = dict(heads=(32, 8), dim=128, page_size=64, dtype=torch.bfloat16, device="cuda")
    for queries in (767, 768):
        case = make_case([queries], [1600], prefill=True, **shape)
        case.check(*case.run(flash_prefill))
    assert [len(args[0]) for args in launched] == [768]


@pytest.mark.parametrize("wrong", ["V_APART", "SCALE_NEXT", "SCALE_HEAD"])
def test_a_wrong_stride_shows(wrong: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    shape: dict[str, Any] = dict(heads=(6, 2), dim=48, page_size=7, kv="k16v8", layout="blocks", device=device)
    case = make_case([2, 2], [90, 33], **shape)
    strides, words = case.paged(2).shape, block_shape(case.store, torch.float32).words
    assert strides["V_APART"] == 4 and strides["SCALE_NEXT"] == 2 * words, "numbers of four bytes and of one"
    planted = strides | {wrong: {"V_APART": 1, "SCALE_NEXT": strides["SCALE_HEAD"], "SCALE_HEAD": 0}[wrong]}
    monkeypatch.setattr(PagedKeys, "shape", planted)
    monkeypatch.setattr(PagedKeys, "check_cache", lambda keys, dtype: None)
    with pytest.raises(AssertionError):
        case.check(*case.run(flash_decode))


# ---- what the kernels for Hopper take


@pytest.mark.parametrize(
    "change, fits",
    [
        ({}, True),
        ({"dtype": torch.float16, "page_size": 192}, True),
        ({"max_q": 6143}, False),
        ({"max_k": 1535}, False),
        ({"max_q": 100, "max_k": 16 << 10}, True),
        ({"max_q": 100, "max_k": (16 << 10) - 1}, False),
        ({"max_q": 32, "max_k": 16 << 10}, False),  # a program of one group reads the keys once as well
        ({"dim": 64}, False),
        ({"dim": 256}, True),
        ({"dtype": torch.float32}, False),
        ({"page_size": 96}, False),
        ({"scale": 0.0}, False),
        ({"scale": -1.0}, False),
        ({"capability": (8, 0)}, False),
        ({"capability": (10, 0)}, False),
        ({"kv_heads": 1}, False),  # of two: the slots of the rest lie between
        ({"layout": "blocks"}, True),
    ],
    ids=str,
)
def test_prompts_that_fit_hopper(change: dict[str, Any], fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = dict(max_q=6144, max_k=1536, scale=0.1, kv_heads=2, capability=(9, 0))
    given |= dict(dim=128, dtype=torch.bfloat16, page_size=64) | change
    max_q, max_k, scale, kv_heads, capability = (
        given.pop(name) for name in ("max_q", "max_k", "scale", "kv_heads", "capability")
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    case = make_case([2], [3], heads=(4, 2), **given)
    keys = replace(case.paged(), k=case.store.k[:, :, :kv_heads], v=case.store.v[:, :, :kv_heads], scale=scale)
    assert flash_prefill_sm90.fits(case.q, keys, max_q, max_k) == fits


@pytest.mark.parametrize(
    "change, fits",
    [
        ({}, True),
        ({"heads": 3}, True),
        ({"dtype": torch.float16}, True),
        ({"dtype": torch.float32}, False),
        ({"page_size": 192}, True),
        ({"page_size": 96}, False),
        ({"latent": 448, "rope": 128}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_latents_that_fit_hopper(kv: str, change: dict[str, Any], fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    case = make_latents([1], [3], kv=kv, **dict(heads=32, dtype=torch.bfloat16, page_size=64) | DEEPSEEK | change)
    assert decode_common_sm90.fits(*rows_of(case)) == fits


def test_rows_that_hopper_leaves_to_the_general_kernel(device: torch.device) -> None:
    q, keys = rows_of(make_case([12], [100], heads=(7, 1), dim=128, page_size=64, dtype=torch.float16, device=device))
    for rows in (q[:, :9], torch.cat([q, q], 1)):
        assert not flash_decode_many_rows_sm90.fits(rows, keys)
    assert not flash_decode_many_rows_sm90.fits(q.float(), keys)
    assert not flash_decode_many_rows_sm90.fits(q, replace(keys, table=keys.table[:, None]))


# ---- bytes of e4m3


@pytest.mark.parametrize("shape", ["a-ragged-group", "three-groups-page-64"])
def test_whole_latents(shape: str, device: torch.device) -> None:
    """Numbers times powers of two: exact."""
    keys = make_latents(**WIDE[shape], kv="fp8", device=device).store
    assert keys.k_scale is not None and keys.rope is not None
    wanted = torch.cat((dequantize_latents(keys.k, keys.k_scale), keys.rope), -1)
    found = dequantize_latent_rows(keys.k, keys.k_scale, keys.rope)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)  # of what nobody wrote


@pytest.mark.gpu  # the interpreter reads e4m3's NaN as 480
def test_nan_of_a_latent_in_e4m3_comes_out() -> None:
    case = make_latents([1], [20], kv="fp8", device="cuda")
    case.store.k[case.store.table[0, 0].long(), 3, 5] = torch.tensor(torch.nan).to(case.store.k.dtype)
    assert case.run(mla_decode)[0].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64])
def test_hopper_reads_bytes_as_they_are(heads: int) -> None:
    """All 254 numbers of e4m3 in each column, and a key alone: its value comes out as it is stored."""
    case = make_latents(
        [1] * 4, [300] * 4, heads=heads, page_size=64, dtype=torch.bfloat16, kv="fp8", device="cuda", **DEEPSEEK
    )
    latents, scales = case.store.k, case.store.k_scale
    assert scales is not None
    codes = torch.arange(latents.shape[0] * 64 * 512, device="cuda").view(-1, 64, 512) % 254
    codes = (codes + (codes >= 127).int()).to(torch.uint8)  # without the two NaN: 127, and 255 is not reached
    latents.copy_(codes.view(torch.float8_e4m3fn))
    scales.copy_(2.0 ** ((torch.arange(scales.numel(), device="cuda") % 23).view(scales.shape) - 11))
    stood = latents.float() * scales.mT.repeat_interleave(128, -1)
    for at in (0, 63, 64, 200, 299):
        case.lo.fill_(at)
        case.hi.fill_(at + 1)
        out, _ = case.run(mla_decode)
        page = case.store.table[:, at // 64].long()
        assert torch.equal(out, stood[page, at % 64][:, None].expand_as(out).to(out))
