"""mla_prefill: kernel and reference against float64, over segments, chunks, windows and empty shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.attention import split_prefill
from kernels.mla.prefill import mla_prefill
from kernels.mla.reference import mla_prefill as reference
from tests.kernels.mla_oracle import LatentCase, make_latent_case
from tests.kernels.oracle import check, low_precision

MANY = [0 if i % 11 == 3 else 40 if i % 50 == 7 else 5 * i % 14 for i in range(150)]
SHAPES = {
    "whole-prompts": dict(counts=[33, 1, 16], lengths=[33, 1, 16]),
    "late-chunks": dict(counts=[20, 40], lengths=[150, 41], page_size=48),
    "empty-segment-between": dict(counts=[5, 0, 7], lengths=[9, 0, 70]),
    "shard-shorter-than-chunk": dict(counts=[40, 30], lengths=[12, 30]),
    "empty-shard": dict(counts=[30], lengths=[0]),
    "one-head": dict(counts=[19, 40], lengths=[64, 40], heads=1, page_size=1),
    "twenty-heads": dict(counts=[9], lengths=[130], heads=20, page_size=64),
    "128-heads": dict(counts=[5, 2], lengths=[31, 2], heads=128, latent=16),
    "window": dict(counts=[70, 9], lengths=[150, 9], window=23, page_size=100),
    "odd-dims": dict(counts=[17], lengths=[70], heads=3, latent=40, rope=24),
    "many-segments": dict(counts=MANY, lengths=MANY, heads=4, latent=16, rope=8),
}


def run(op: Any, case: LatentCase, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    cu_q = torch.tensor([0, *case.counts], device=case.q.device).cumsum(0).int()
    return op(case.q, case.paged(), cu_q, max(case.counts), max(1000, *map(len, case.keys)), **options)


@pytest.mark.parametrize("shape", SHAPES)
def test_reference(shape: str) -> None:
    case = make_latent_case(**SHAPES[shape])
    check(*run(reference, case), case)


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(shape: str, device: torch.device) -> None:
    case = make_latent_case(**SHAPES[shape], device=device)
    check(*run(mla_prefill, case), case)


@pytest.mark.parametrize("shape", SHAPES)
def test_split_keys(shape: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_prefill, "split_count", lambda items, tiles, slots: 3)
    case = make_latent_case(**SHAPES[shape], device=device)
    check(*run(mla_prefill, case), case)


@low_precision(mla_prefill, reference)
def test_low_precision(dtype: torch.dtype, op: Any, device: torch.device) -> None:
    case = make_latent_case([40, 9], [75, 9], heads=4, latent=128, rope=32, dtype=dtype, device=device)
    check(*run(op, case), case)


def test_round_robin_bounds(device: torch.device) -> None:
    """Bounds that stand still for a block of queries and then jump, as a rank of a larger kvp sees them."""
    case = make_latent_case([60], [40], device=device)
    steps = torch.arange(60) // 8
    case.hi = (steps // 2 * 8 + 4).clamp(max=40).int().to(device)
    case.lo = (case.hi - 16).clamp(min=0)
    check(*run(mla_prefill, case), case)


def test_writes_where_told(device: torch.device) -> None:
    case = make_latent_case([7, 4], [20, 0], device=device)
    out = torch.full((11, 6, 40), torch.nan, device=device)
    lse = torch.full((11, 6), torch.nan, device=device)
    run(mla_prefill, case, out=out[:, 1:5, :32], lse=lse[:, 1:5])
    check(out[:, 1:5, :32], lse[:, 1:5], case)
    assert out[:, [0, 5]].isnan().all() and out[..., 32:].isnan().all() and lse[:, [0, 5]].isnan().all()


def test_a_future_key_is_caught() -> None:
    case = make_latent_case([20], [20])
    expected = case.expected()
    case.hi[4] += 1
    out, lse = run(reference, case)
    with pytest.raises(AssertionError):
        check(out, lse, case, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("heads", [16, 20, 128])
def test_real_sizes(dtype: torch.dtype, page_size: int, heads: int) -> None:
    case = make_latent_case(
        [300, 29], [1500, 29], heads=heads, latent=512, rope=64, page_size=page_size, dtype=dtype, device="cuda"
    )
    check(*run(mla_prefill, case), case)
