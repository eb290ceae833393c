"""qkv_append: as a projection in float64, rotated; each token goes where its slot says, and nothing else is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention.kv_append import HeadSlots
from kernels.dense import linear_fp8_sm90, linear_sm90
from kernels.dense.qkv_append import fuses, on_hopper, qkv_append
from kernels.scaled import Matrix, as_tensor, quantised
from tests.kernels.test_kv_append import expected


class Case:
    """Arguments of `qkv_append`, the cache around the slots NaN; `few`: weights in e4m3."""

    def __init__(
        self,
        N: int,
        q_heads: int,
        kv_heads: int,
        D: int,
        K: int,
        biased: bool,
        dtype: torch.dtype,
        device: Any,
        few: bool = False,
    ) -> None:
        gen = torch.Generator().manual_seed(N + K)
        heads, pages, page = q_heads + 2 * kv_heads, 5, 16
        self.q_heads, self.kv_heads, self.D = q_heads, kv_heads, D
        self.x = torch.randn(N, 2 * K, generator=gen).to(device, dtype)[:, :K]
        weight = torch.randn(heads * D, K, generator=gen).div(K**0.5).to(device, dtype)
        self.weight: Matrix = quantised(weight) if few else weight
        self.bias = torch.randn(heads * D, generator=gen).to(device, dtype) if biased else None
        angle = torch.randn(N, D // 2, generator=gen) * 100
        self.cos, self.sin = angle.cos().to(device, dtype), angle.sin().to(device, dtype)
        # Layers of one cache: pages are apart from each other.
        self.cache = torch.full((pages, 3, page, kv_heads, D), torch.nan, dtype=dtype, device=device)
        slots = torch.randperm(pages * page, generator=gen)[:N]
        if N > 2:
            slots[1] = -1
        self.slots = slots.to(device)

    @property
    def arguments(self) -> tuple[Any, ...]:
        caches = self.cache[:, 0], self.cache[:, 2]
        return self.x, self.weight, self.bias, self.cos, self.sin, *caches, self.slots

    def check(self, q: Tensor, eps: float) -> None:
        y = self.x.double() @ as_tensor(self.weight, torch.float64).double().T + (
            0 if self.bias is None else self.bias.double()
        )
        # Rounded as a projection's output, so that what is left are sums of another order and the rotation's rounding.
        y = y.to(q.dtype).view(len(q), -1, self.D)
        first_value = self.q_heads + self.kv_heads
        turned = expected(y[:, :first_value], self.cos, self.sin, None, 0.0)
        # A unit in the last place of each of two values of up to 8 that are turned (1.4 of it), and of the result.
        close = dict(atol=8 * 2.4 * eps, rtol=0.0)
        torch.testing.assert_close(q.double().cpu(), turned[:, : self.q_heads], **close)
        keys, values = turned[:, self.q_heads :], y[:, first_value:].double().cpu()
        left = self.cache.double().cpu()
        for n, slot in enumerate(self.slots.tolist()):
            if slot >= 0:
                page, at = divmod(slot, left.shape[2])
                torch.testing.assert_close(left[page, 0, at], keys[n], **close)
                torch.testing.assert_close(left[page, 2, at], values[n], **close)
                left[page, 0, at] = left[page, 2, at] = torch.nan
        assert left.isnan().all(), "nothing else is written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "N, q_heads, kv_heads, D, K",
    [
        (1, 4, 2, 64, 100),
        (3, 3, 1, 80, 511),
        (2, 1, 1, 2, 33),
        (4, 2, 1, 256, 64),
        (1, 7, 1, 6, 1100),
        (9, 3, 1, 8, 40),
    ],
)
def test_projects_rotates_and_writes_slots(
    N: int, q_heads: int, kv_heads: int, D: int, K: int, biased: bool, dtype: torch.dtype, device: Any
) -> None:
    case = Case(N, q_heads, kv_heads, D, K, biased, dtype, device)
    # fp32: sums of up to 1,100 terms of size 1 / sqrt(K) in another order.
    case.check(qkv_append(*case.arguments), 2**-21 if dtype == torch.float32 else torch.finfo(dtype).eps)


def test_few_rows_take_one_launch(device: Any) -> None:
    case = Case(4, 2, 1, 64, 32, True, torch.float16, device)
    assert fuses(case.x, case.weight, 64)
    assert not fuses(case.x, case.weight.T.contiguous().T, 64), "rows of a weight have to be contiguous"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize(
    "N, q_heads, kv_heads, D, K",
    [
        (2, 7, 1, 128, 3584),
        (8, 16, 2, 128, 8192),
        (5, 16, 2, 64, 2880),
        (17, 3, 1, 256, 1040),
        (32, 1, 1, 64, 64),
        (70, 7, 1, 128, 1040),
    ],
)
def test_hopper(
    N: int, q_heads: int, kv_heads: int, D: int, K: int, few: bool, biased: bool, dtype: torch.dtype, device: Any
) -> None:
    few = few or N > 32
    eps, kernel = torch.finfo(dtype).eps, linear_fp8_sm90 if few else linear_sm90
    case = Case(N, q_heads, kv_heads, D, K, biased, dtype, device, few)
    assert on_hopper(case.x, case.weight, D)
    case.check(qkv_append(*case.arguments), eps)
    for split in (1, 2, 3, 4, 8):
        if split <= -(-K // (256 if few and N <= 16 else 128)):
            case = Case(N, q_heads, kv_heads, D, K, biased, dtype, device, few)
            to = HeadSlots.of(case.x, q_heads + 2 * kv_heads, *case.arguments[3:])
            # So little shared memory that slots are filled again.
            kernel.launch(case.x, case.weight, case.bias, to, False, split, 60)
            case.check(to.q, eps)


@pytest.mark.parametrize("N", [1, 4])
def test_normalised_heads_are_appended_after_the_projection(N: int, device: Any) -> None:
    case = Case(N, 3, 1, 16, 32, False, torch.float32, device)
    gains = torch.full((16,), 2.0, device=device)
    q = qkv_append(*case.arguments, (gains, gains, 1e-6))
    heads = (case.x @ case.weight.T).view(N, -1, 16)[:, :3]
    torch.testing.assert_close(q.double().cpu(), expected(heads, case.cos, case.sin, gains, 1e-6), atol=1e-4, rtol=0)
