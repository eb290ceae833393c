"""per_head_linear: kernel and reference against float64, strided as MLA has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.mla.per_head_linear import MAX_ROWS, per_head_linear
from kernels.mla.reference import per_head_linear as reference

OPS = pytest.mark.parametrize("op", [per_head_linear, reference], ids=["kernel", "reference"])


def case(
    rows: int, heads: int, wide: int, narrow: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x out of wider heads, W_UV as a transposed view of kv_b_proj, and where the result goes in other heads."""
    gen = torch.Generator().manual_seed(rows + heads)
    x = torch.randn(rows, heads, wide + 3, generator=gen).to(dtype).to(device)[..., 3:]
    stored = torch.randn(heads, 5 + narrow, wide, generator=gen).to(dtype).to(device)
    out = torch.full((rows, heads, narrow + 7), torch.nan, dtype=dtype, device=device)
    return x, stored[:, 5:].mT, out


@OPS
@pytest.mark.parametrize(
    "rows, heads, wide, narrow", [(1, 4, 40, 24), (3, 1, 16, 130), (16, 5, 100, 33), (0, 2, 8, 8), (2, 0, 8, 8)]
)
def test_equals_float64(op: Any, rows: int, heads: int, wide: int, narrow: int, device: torch.device) -> None:
    x, weight, room = case(rows, heads, wide, narrow, torch.float32, device)
    out = room[..., :narrow]
    got = op(x, weight, out)
    assert got.data_ptr() == out.data_ptr()
    want = torch.einsum("nha,hab->nhb", x.double(), weight.double())
    # Sums of at most 100 products of values up to 4, each rounded by 2^-24.
    torch.testing.assert_close(got.double(), want, atol=100 * 16 * 2**-24, rtol=0)
    assert room[..., narrow:].isnan().all()


def test_a_neighbouring_heads_matrix_is_caught(device: torch.device) -> None:
    x, weight, _ = case(2, 3, 16, 16, torch.float32, device)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(per_head_linear(x, weight.roll(1, 0)), torch.einsum("nha,hab->nhb", x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, MAX_ROWS, MAX_ROWS + 1, 64])
@pytest.mark.parametrize("heads, wide, narrow", [(4, 512, 128), (32, 512, 128), (16, 128, 512), (3, 512, 192)])
def test_bf16_at_real_sizes(rows: int, heads: int, wide: int, narrow: int) -> None:
    x, weight, room = case(rows, heads, wide, narrow, torch.bfloat16, torch.device("cuda"))
    got = per_head_linear(x, weight, room[..., :narrow])
    want = torch.einsum("nha,hab->nhb", x.double(), weight.double())
    # One rounding to bf16 of the result, 2^-9 of values up to 6 sqrt(512).
    torch.testing.assert_close(got.double(), want, atol=6 * 512**0.5 * 2**-9, rtol=0)
