"""Cases of `compile_sm90` of routing and experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton

from kernels.moe.experts import (
    _down_few_kernel,
    _down_kernel,
    _gate_up_few_kernel,
    _gate_up_kernel,
    _sum_kernel,
    few_tiles,
    tiles_of,
    way_of,
)
from kernels.moe.experts_many_sm90 import _experts_many_kernel
from kernels.moe.experts_scaled_sm90 import _moe_scaled_sm90_kernel, parts_of, stages_of
from kernels.moe.experts_sm90 import _moe_sm90_kernel
from kernels.moe.pair_order import _count_pairs_kernel, _place_pairs_kernel
from kernels.moe.router import _route_kernel
from kernels.peers.mailbox import sum_shape


def expert_cases() -> Iterator[tuple[str, torch.dtype, Any, dict[str, Any], dict[str, int]]]:
    """Routing, pairs by expert, and experts by each algorithm."""
    bf16, fp32 = torch.bfloat16, torch.float32
    choice = {"TOP_K": 8, "GROUPS": 8, "TOP_GROUPS": 4, "BLOCK_G": 8, "BLOCK_E": 32, "BLOCK_K": 16, "PDL": True}
    choice |= {"EXPERTS": 256, "GROUP_SCORE": 2, "SCORING": "sigmoid", "BIAS": True, "NORMALISE": True, "ALWAYS": 1}
    yield "route", fp32, _route_kernel, choice, {"num_warps": 1}
    yield from moe_cases(bf16, 128, 2048, 96, 8, False)  # ranks of Qwen3-30B-A3B and gpt-oss-20b
    yield from moe_cases(bf16, 4, 2880, 2880, 4, True)
    yield from moe_cases(fp32, 5, 33, 7, 2, True)
    yield from moe_cases(bf16, 32, 7168, 2048, 8, False, 128)  # of DeepSeek-R1; by channels; of gpt-oss-120b
    yield from moe_cases(bf16, 128, 2048, 96, 8, False, 2048)
    yield from moe_cases(bf16, 16, 2880, 2880, 4, True, 32)
    for E, H, F, k, tokens, clamped, scaled, begin in (
        (4, 2880, 2880, 4, 1, True, False, 0),
        (32, 2880, 360, 4, 8, True, False, 0),
        (64, 7168, 1024, 8, 8, False, False, 0),
        (32, 7168, 2048, 8, 8, False, True, 0),
        (32, 2880, 352, 4, 1, True, True, 64),
    ):
        shape = {"EXPERTS": E, "H": H, "F": F, "TOP_K": k, "BLOCK_P": max(32, tokens * k), "CLAMPED": clamped}
        for gate in (True, False):
            extra = {"GATE": gate, "BIAS": clamped, "PLUS": not gate} | ({"addend": None} if gate else {})
            begin = 0 if gate else begin
            groups = (
                {"GROUPS": triton.cdiv(begin + (H if gate else F), 128)} if scaled else {"GROUPS": 0, "scales": None}
            )
            extra |= groups | {"GROUP": 128, "BEGIN": begin}
            plain = sum_shape(None) | {"peers": None, "turns": None}
            yield "moe-sm90", bf16, _moe_sm90_kernel, shape | extra | plain, {"num_warps": 4}
            if not gate:
                world = {"RANKS": 8, "PIECES": 512, "SIZE": 256, "TWO_SHOT": H > 4096, "out": None}
                yield "moe-sm90-send", bf16, _moe_sm90_kernel, shape | extra | world, {"num_warps": 4}
    for function in (_count_pairs_kernel, _place_pairs_kernel):
        sizes = {"BLOCK": 1024, "BINS": 512, "PDL": True}
        yield "pair-order", bf16, function, sizes, {"num_warps": 8}
    for E, H, F, k, begin in ((257, 6144, 256, 9, 0), (32, 7168, 2048, 8, 64)):  # of GLM-5.2, DeepSeek-R1
        shape = {"TOP_K": k, "BLOCK_E": triton.next_power_of_2(max(E, 128)), "GROUP": 128}
        for gated, R, K in ((True, 2 * F, H), (False, H, F)):
            groups = {"GROUPS": triton.cdiv(begin + K, 128), "BEGIN": begin}
            sizes = {"R": R, "K": K, "GATED": gated} | groups
            yield "experts-many", bf16, _experts_many_kernel, shape | sizes, {"num_warps": 4}
    for E, H, F, k, tokens, columns, clamped, group, begin in (
        (128, 2048, 768, 8, 40, 8, False, 128, 0),  # of Qwen3-30B-A3B, DeepSeek-R1; of gpt-oss-20b
        (32, 7168, 2048, 8, 128, 16, False, 128, 0),
        (8, 2880, 1440, 4, 128, 32, True, 128, 96),
        (512, 4096, 128, 10, 1, 8, False, 128, 0),  # of Qwen3.5-397B and GLM-5.2, whose tokens are few
        (257, 6144, 256, 9, 4, 8, False, 128, 0),
        (32, 2880, 2880, 4, 5, 8, True, 32, 0),
        (32, 2880, 2880, 4, 40, 16, True, 32, 0),
        (32, 2880, 2880, 4, 128, 32, True, 32, 0),
    ):
        least, lists = (32, 0) if tokens <= columns else (128, 3)
        shape = {"EXPERTS": E, "H": H, "F": F, "TOP_K": k, "BLOCK_P": max(least, triton.next_power_of_2(tokens * k))}
        shape |= {"COLUMNS": columns, "STAGES": stages_of(columns, group == 32), "LISTS": lists, "CLAMPED": clamped}
        shape["PARTS"] = parts_of(columns, group == 32)
        for gate in (True, False):
            groups = triton.cdiv(begin * (not gate) + (H if gate else F), group)
            extra = {"GATE": gate, "BIAS": clamped, "GROUP": group, "GROUPS": groups, "BEGIN": begin * (not gate)}
            name = "moe-scaled-sm90" + "-few" * (lists == 0)
            yield name, bf16, _moe_scaled_sm90_kernel, shape | extra, {"num_warps": 4}


def moe_cases(
    dtype: torch.dtype, E: int, H: int, F: int, k: int, clamped: bool, group: int = 0
) -> Iterator[tuple[str, torch.dtype, Any, dict[str, Any], dict[str, int]]]:
    """E experts of width F on a rank, k a token; few tokens, some and many; in e4m3, or in e2m1 by groups of 32."""
    shape = {"EXPERTS": E, "H": H, "F": F, "BIAS": clamped, "PDL": True}
    shape |= {"GROUP": group, "BEGIN": 0} if group else {"GROUP": 1, "GROUPS": 0, "BEGIN": 0, "scales": None}
    of_h, of_f = ({"GROUPS": triton.cdiv(columns, group)} if group else {} for columns in (H, F))
    run = {0: 8, 32: 32}.get(group, 16)
    stored = {0: dtype, 32: torch.uint8}.get(group, torch.float8_e4m3fn)
    name = {0: "moe", 32: "moe-mxfp4"}.get(group, "moe-fp8")
    gate, slots = {"TOP_K": k, "CLAMPED": clamped}, {"TOP_K": k, "BLOCK_S": k, "PLUS": True}
    alone = sum_shape(None) | {"peers": None, "turns": None}
    world = {"RANKS": 8, "PIECES": 512, "SIZE": 256, "out": None}
    for tokens in (1, 4):
        tile, down_tile = few_tiles(tokens, F, run, run)
        options, down_options = ({"num_warps": t.pop("num_warps")} for t in (tile, down_tile))
        yield f"{name}-few", dtype, _gate_up_few_kernel, shape | of_h | gate | tile, options
        for to in (alone, world | {"TWO_SHOT": True}, world | {"TWO_SHOT": False}):
            yield f"{name}-few", dtype, _down_few_kernel, shape | of_f | slots | down_tile | to, down_options
    for tokens in (64, 512, 8192):
        way = way_of(tokens, k, E)
        tile, down_tile = tiles_of(way, tokens * k, E, F, H, dtype, touched=E / 132, weights=stored)
        options, down_options = ({"num_warps": t.pop("num_warps")} for t in (tile, down_tile))
        find = {"BLOCK_P": 1 if tokens > 64 else tokens * k, "BLOCK_E": 256}
        find |= {"SORTED": tokens > 64, "ALWAYS": int(k > 4)}
        yield f"{name}-{tokens}", dtype, _gate_up_kernel, shape | of_h | gate | find | tile, options
        yield f"{name}-{tokens}", dtype, _down_kernel, shape | of_f | find | down_tile, down_options
    total = {"TOP_K": k, "EXPERTS": E, "H": H, "BLOCK": 1024, "PLUS": True, "PDL": True}
    for to in (alone, world | {"TWO_SHOT": True}, world | {"TWO_SHOT": False}):
        yield "moe-sum", dtype, _sum_kernel, total | to, {"num_warps": 4}
