"""What only one kernel of projections shows; results are compared by `tests/kernels/test_suite.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from benchmarks.kernels.linear import MATRICES
from kernels.dense import linear_fp8_sm90, linear_packed_sm90, linear_sm90
from kernels.dense.linear import linear
from kernels.scaled import quantize_fp8
from tests.kernels.cases_dense import scaled
from tests.kernels.cases_experts import scaled as scaled_like
from tests.kernels.suite import check_in_a_graph


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [linear_sm90, linear_fp8_sm90])
@pytest.mark.parametrize("split", [3, 4])
def test_layers_in_a_graph(split: int, kernel: Any, device: torch.device) -> None:
    generator, K = torch.Generator().manual_seed(0), 2048
    gate, down = (
        torch.randn(rows, K, generator=generator).div(K**0.5).to(device, torch.bfloat16) for rows in (2 * K, K)
    )
    if kernel is linear_fp8_sm90:
        gate, down = quantize_fp8(gate), quantize_fp8(down)
    x = torch.randn(8, K, generator=generator).to(device, torch.bfloat16)
    ys = x.new_empty(20, *x.shape)

    def layers(between: Callable[[], None]) -> None:
        for i, y in enumerate(ys):
            weight, gated = (gate, True) if i % 2 else (down, False)
            kernel.launch(ys[i - 1] if i else x, weight, None, y, gated, split)
            between()

    check_in_a_graph(layers, ys)


def test_splits() -> None:
    """One program an SM of a small matrix, two of one that is streamed."""
    assert linear_sm90.split_of(1152, 3584, False, 132) == 2
    assert linear_sm90.split_of(1792, 4096, True, 132) == 4
    assert linear_sm90.split_of(19008, 3584, False, 132) == 1
    assert linear_sm90.split_of(64, 48, False, 132) == 1
    # Where powers of two would leave more than a third of the SMs idle:
    assert linear_sm90.split_of(1280, 8192, False, 132) == 6
    assert linear_sm90.split_of(2368, 3584, True, 132) == 3


@pytest.mark.parametrize("sms", [78, 132])
def test_no_program_without_a_step(sms: int) -> None:
    shapes = [*product(range(1, 9000, 61), (16, 48, 432, 2880, 4112, 8192, 53248), (False, True))]
    for R, K, gated in shapes + [(m.rows, m.columns, m.gated) for m in MATRICES]:
        split = linear_sm90.split_of(R, K, gated, sms)
        assert K % (16 * split) == 0 or split <= -(-K // 128)


@pytest.mark.gpu
def test_hopper_does_not_take(device: torch.device) -> None:
    x = torch.randn(4, 512, device=device, dtype=torch.bfloat16)
    for rows, columns, begin in ((40, 512, 8), (40, 504, 0), (40, 512, 0)):
        weight = scaled(rows, columns, begin, device)
        assert linear_fp8_sm90.fits(x[:, :columns], weight) == ((columns, begin) == (512, 0))
    assert not linear_fp8_sm90.fits(x, weight, 20), "pairs are interleaved by eights"
    assert not linear_fp8_sm90.fits(x, weight.rows(8, 40)), "its scales are apart"
    assert not linear_fp8_sm90.fits(x.float(), weight)


@pytest.mark.gpu
def test_hopper_takes_packed_weights_with_aligned_rows(device: torch.device) -> None:
    x = torch.randn(4, 512, device=device, dtype=torch.bfloat16)
    for rows, form in ((48, ("e2m1", 32)), (40, ("e2m1", 16)), (40, ("int4", 128)), (44, ("int4", 32))):
        weight = scaled_like(torch.empty(1, rows, 512, device=device), *form, 0)[0]
        assert linear_packed_sm90.fits(x, weight) == (rows * weight.scales.itemsize % 16 == 0), "rows of scales"
        assert not linear_packed_sm90.fits(x, weight, 15), "a thread's rows are neighbors"
        assert linear_packed_sm90.fits(x, weight, 24) == (rows % 8 == 0 and weight.scales.itemsize == 2), "16 bytes"
        assert not linear_packed_sm90.fits(x.half(), weight)
    weight = scaled_like(torch.empty(1, 48, 512, device=device), "int4", 64, 0)[0]
    assert linear_packed_sm90.fits(x, weight)
    weight = replace(weight, scales=weight.scales.half())
    assert not linear_packed_sm90.fits(x, weight), "fp16 would be rounded twice"


@pytest.mark.parametrize("slots", [132, 264, 396])
def test_programs_share_packed_tiles(slots: int) -> None:
    for tiles, steps, columns in product(range(1, 400, 7), (1, 2, 5, 14, 112), (128, 256)):
        programs = linear_packed_sm90.programs_of(tiles, steps, columns, slots)
        assert programs <= slots and (2 * tiles > slots or programs <= tiles * min(16, steps))


@pytest.mark.gpu
@pytest.mark.parametrize("begin", [0, 64, None])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("N, R, K", [(1, 3584, 448), (1, 1152, 3584), (2, 2368, 3584), (8, 576, 7168), (32, 4096, 1792),
                                     (64, 1280, 8192), (300, 2112, 7168), (2049, 1536, 2048)])  # fmt: skip
def test_matrices_of_models(N: int, R: int, K: int, gated: bool, begin: int | None, device: torch.device) -> None:
    weight = scaled(2 * R if gated else R, K, begin, device)
    weight.scales.fill_(1e-4 / K**0.5)
    x = torch.randn(N, K, device=device, dtype=torch.bfloat16)
    wanted = x.double() @ weight.dequantize(torch.float64).T
    if gated:
        gate, up = wanted.chunk(2, 1)
        wanted = gate * torch.sigmoid(gate) * up
    # Sums are rounded once, a gate's factors and their product: units of 2^-8 of values far below their terms' sizes.
    assert (linear(x, weight, gated=gated).double() - wanted).norm() <= 6e-3 * wanted.norm()
