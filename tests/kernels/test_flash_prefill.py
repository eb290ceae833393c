"""flash_prefill: kernel and reference against float64, over segments, chunks, windows and empty shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.flash_prefill import flash_prefill
from kernels.reference.flash_prefill import flash_prefill as reference
from tests.kernels.oracle import Case, check, make_case

SHAPES = {
    "whole-prompts": dict(counts=[33, 1, 16], lengths=[33, 1, 16]),
    "late-chunks": dict(counts=[20, 40], lengths=[150, 41], page_size=48),
    "empty-segment-between": dict(counts=[5, 0, 7], lengths=[9, 0, 70]),
    "shard-shorter-than-chunk": dict(counts=[40, 30], lengths=[12, 30]),
    "empty-shard": dict(counts=[30], lengths=[0]),
    "group-7": dict(counts=[19, 40], lengths=[64, 40], heads=(14, 2), dim=80, page_size=1),
    "group-16": dict(counts=[20], lengths=[31], heads=(16, 1), dim=128),
    "window": dict(counts=[70, 9], lengths=[150, 9], window=23, page_size=100),
    "sinks": dict(counts=[20, 3, 5], lengths=[150, 0, 5], heads=(6, 2), sinks=True),
    "sinks-window": dict(counts=[70, 9], lengths=[150, 4], window=23, page_size=100, sinks=True),
    "dim-256": dict(counts=[17], lengths=[70], heads=(2, 2), dim=256),
    "dim-8": dict(counts=[20], lengths=[20], heads=(5, 1), dim=8),
}


def run(op: Any, case: Case, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    cu_q = torch.tensor([0, *case.counts], device=case.q.device).cumsum(0).int()
    return op(
        case.q, case.k_cache, case.v_cache, case.block_table, cu_q, max(case.counts),
        case.lo, case.hi, case.scale, sinks=case.sinks, **options,
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_reference(shape: str) -> None:
    case = make_case(**SHAPES[shape])
    check(*run(reference, case), case)


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(shape: str, device: torch.device) -> None:
    case = make_case(**SHAPES[shape], device=device)
    check(*run(flash_prefill, case), case)


# Triton's interpreter multiplies the bit patterns of bf16: the kernel takes bf16 on a GPU alone.
LOW = [
    pytest.param(
        op, dtype, id=f"{name}-{dtype}", marks=[pytest.mark.gpu] * (name == "kernel" and dtype is torch.bfloat16)
    )
    for name, op in (("kernel", flash_prefill), ("reference", reference))
    for dtype in (torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize("op, dtype", LOW)
def test_low_precision(dtype: torch.dtype, op: Any, device: torch.device) -> None:
    case = make_case([40, 9], [75, 9], heads=(8, 2), dim=128, dtype=dtype, device=device)
    check(*run(op, case), case)


def test_round_robin_bounds(device: torch.device) -> None:
    """Bounds that stand still for a block of queries and then jump, as a rank of a larger kvp sees them."""
    case = make_case([60], [40], device=device)
    steps = torch.arange(60) // 8
    case.hi = (steps // 2 * 8 + 4).clamp(max=40).int().to(device)
    case.lo = (case.hi - 16).clamp(min=0)
    check(*run(flash_prefill, case), case)


def test_writes_where_told(device: torch.device) -> None:
    case = make_case([7, 4], [20, 0], device=device)
    out = torch.full((11, 6, 64), torch.nan, device=device)
    lse = torch.full((11, 6), torch.nan, device=device)
    run(flash_prefill, case, out=out[:, 1:5], lse=lse[:, 1:5])
    check(out[:, 1:5], lse[:, 1:5], case)
    assert out[:, [0, 5]].isnan().all() and lse[:, [0, 5]].isnan().all()


def test_a_future_key_is_caught() -> None:
    case = make_case([20], [20])
    expected = case.expected()
    case.hi[4] += 1
    out, lse = run(reference, case)
    with pytest.raises(AssertionError):
        check(out, lse, case, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads, dim", [((32, 8), 128), ((28, 4), 128), ((8, 1), 64), ((4, 2), 256)])
@pytest.mark.parametrize("sinks", [False, True])
def test_long(dtype: torch.dtype, heads: tuple[int, int], dim: int, sinks: bool) -> None:
    shape: dict[str, Any] = dict(heads=heads, dim=dim, page_size=64, dtype=dtype, sinks=sinks, device="cuda")
    case = make_case([300, 129], [3000, 129], **shape)
    check(*run(flash_prefill, case), case)
