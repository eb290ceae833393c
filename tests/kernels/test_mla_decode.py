"""mla_decode: kernel and reference against float64, over heads, pages, bounds and splits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.reference.mla_decode import mla_decode as reference
from tests.kernels.mla_oracle import LatentCase, make_latent_case
from tests.kernels.oracle import check

SHAPES = {
    "plain": dict(counts=[1, 1, 1], lengths=[40, 1, 17]),
    "empty-shards": dict(counts=[1, 1, 1], lengths=[0, 33, 0]),
    "all-empty": dict(counts=[1, 1], lengths=[0, 0]),
    "one-head": dict(counts=[1, 1], lengths=[70, 5], heads=1, page_size=48),
    "three-heads-verify-2": dict(counts=[2, 2], lengths=[37, 2], heads=3, page_size=1),
    "sixteen-heads-page-64": dict(counts=[1, 1], lengths=[130, 64], heads=16, page_size=64),
    "twenty-heads-verify-4": dict(counts=[4, 4], lengths=[66, 5], heads=20, page_size=64),
    "128-heads": dict(counts=[1, 1], lengths=[50, 9], heads=128, latent=16),
    "odd-dims": dict(counts=[3], lengths=[45], heads=5, latent=40, rope=24),
    "rope-as-wide": dict(counts=[1], lengths=[33], heads=2, latent=8, rope=8),
    "window": dict(counts=[1, 1, 1], lengths=[90, 20, 7], window=19),
    "window-verify": dict(counts=[4, 4], lengths=[90, 21], window=10, page_size=48),
    "verify-16": dict(counts=[16], lengths=[50], heads=6),
    "fewer-keys-than-queries": dict(counts=[4, 4], lengths=[2, 40]),
}


def run(op: Any, case: LatentCase, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    B = len(case.counts)
    out, lse = op(
        case.q.unflatten(0, (B, -1)), case.cache, case.block_table,
        case.lo.view(B, -1), case.hi.view(B, -1), case.scale, case.latent, **options,
    )  # fmt: skip
    return out.flatten(0, 1), lse.flatten(0, 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_reference(shape: str) -> None:
    case = make_latent_case(**SHAPES[shape])
    check(*run(reference, case), case)


@pytest.mark.parametrize("planted", ["one key left out", "one key too many", "scale", "lse", "no rope part"])
def test_planted_errors_are_caught(planted: str) -> None:
    case = make_latent_case([1, 1], [40, 23])
    expected = case.expected()
    q = case.q
    if planted == "one key left out":
        case.hi[0] -= 1
    if planted == "one key too many":
        case.hi[1] += 1
        case.cache[int(case.block_table[1, 1]), 23 - 16] = case.keys[1][0, 0]
    if planted == "scale":
        case.q = q * 1.001
    if planted == "no rope part":
        case.q = q.clone()
        case.q[..., case.latent :] = 0
    out, lse = run(reference, case)
    if planted == "lse":
        lse = lse + 1e-3
    with pytest.raises(AssertionError):
        check(out, lse, case, expected)
