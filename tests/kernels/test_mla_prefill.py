"""mla_prefill: kernel and reference against float64, over segments, chunks, windows and empty shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.reference.mla_prefill import mla_prefill as reference
from tests.kernels.mla_oracle import LatentCase, make_latent_case
from tests.kernels.oracle import check

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
}


def run(op: Any, case: LatentCase, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    cu_q = torch.tensor([0, *case.counts], device=case.q.device).cumsum(0).int()
    return op(
        case.q, case.cache, case.block_table, cu_q, max(case.counts),
        case.lo, case.hi, case.scale, case.latent, **options,
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_reference(shape: str) -> None:
    case = make_latent_case(**SHAPES[shape])
    check(*run(reference, case), case)


def test_a_future_key_is_caught() -> None:
    case = make_latent_case([20], [20])
    expected = case.expected()
    case.hi[4] += 1
    out, lse = run(reference, case)
    with pytest.raises(AssertionError):
        check(out, lse, case, expected)
