"""Cases of `compile_sm90` of layers that keep a state: steps of one row and of several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton

from kernels.dense.sigmoid_mul import _sigmoid_mul_kernel
from kernels.recurrent.gated_delta_prefill import (
    COLUMNS,
    _chunks_kernel,
    _gated_norm_kernel,
    _inputs_kernel,
    _systems_kernel,
)
from kernels.recurrent.gated_delta_step import TWO_ON_AN_SM, _gated_delta_step_kernel


def recurrent_cases() -> Iterator[tuple[str, torch.dtype, Any, dict[str, Any], dict[str, int]]]:
    """Six value heads of Qwen3.5-27B over eight ranks, and all of them."""
    bf16, fp32 = torch.bfloat16, torch.float32
    heads = {"DK": 128, "DV": 128, "BLOCK_K": 128, "BLOCK_V": 128, "W": 4, "GROUP": 3, "FIRST": 0}
    for dtype, keys, values, rows, most, registers in (
        (bf16, 2, 6, 1, 1, None), (bf16, 2, 6, 5, 5, None), (bf16, 16, 48, 1, 1, TWO_ON_AN_SM),
        (bf16, 16, 48, 1, 5, TWO_ON_AN_SM), (bf16, 16, 48, 5, 5, TWO_ON_AN_SM), (bf16, 2, 6, 32, 32, None),
        (fp32, 2, 6, 1, 1, None),
    ):  # fmt: skip
        of = heads | {
            "KEYS": keys,
            "VALUES": values,
            "ROWS": rows,
            "RING": most + 3,
            "SYSTEM": min(triton.next_power_of_2(most), 8),
            "WORK": 384 + triton.cdiv(2 * min(triton.next_power_of_2(most), 8) + 2, 4) * 4,
            "MOST": most,
            "BLOCK_W": 4,
            "PDL": True,
        }
        of |= {"BLOCK_R": triton.next_power_of_2(most)}
        yield f"delta-step-{rows}", dtype, _gated_delta_step_kernel, of, {"num_warps": 8, "maxnreg": registers}
    for dtype, key, value in ((bf16, 128, 128), (fp32, 128, 128), (bf16, 20, 40)):  # kinds of tiles alike and not
        of = {"DK": key, "DV": value, "BLOCK_K": triton.next_power_of_2(key), "BLOCK_V": triton.next_power_of_2(value)}
        of |= {"KEYS": 16, "VALUES": 48}
        rows, groups = {"W": 4, "RING": 8}, {"GROUP": 3, "FIRST": 0}
        step = (
            of
            | rows
            | groups
            | {"ROWS": 5, "MOST": 5, "BLOCK_W": 4, "BLOCK_R": 8, "SYSTEM": 8, "WORK": key + 2 * value + 20, "PDL": True}
        )
        yield "delta-step-5", dtype, _gated_delta_step_kernel, step, {"num_warps": 8}
        one = {"BLOCK_S": 1, "n": 1} if key == 20 else {"BLOCK_S": 8}
        yield "delta-inputs", dtype, _inputs_kernel, of | rows | one, {"num_warps": 8, "maxnreg": 128}
        yield "delta-systems", dtype, _systems_kernel, of | groups | one, {"num_warps": 4}
        part = of | rows | groups | {"BLOCK_W": 4, "BLOCK_V": COLUMNS}
        for stages in (2, 3)[: 1 + (dtype is bf16)]:
            yield "delta-chunks", dtype, _chunks_kernel, part, {"num_warps": 4, "num_stages": stages}
        norm = {"VALUES": 48, "DV": value, "BLOCK_H": 16, "BLOCK_V": of["BLOCK_V"]}
        yield "gated-norm", dtype, _gated_norm_kernel, norm, {"num_warps": 4}
    for each in (False, True):
        yield "sigmoid-mul", bf16, _sigmoid_mul_kernel, {"EACH": each, "BLOCK": 1024, "PDL": True}, {"num_warps": 4}
