"""Launches of `compile_sm90` that project rows, route them to experts, update states, and communicate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kernels.attention.kv_append import QKVTarget
from kernels.dense.embedding import embedding
from kernels.dense.gate_mul import gate_mul
from kernels.dense.linear import launch_sm90, linear, linear_send
from kernels.dense.qkv_append import qkv_append
from kernels.dense.rms_norm import rms_norm
from kernels.dense.rotary import angles
from kernels.dense.silu_mul import silu_mul
from kernels.gated_delta import DeltaInput, DeltaState, GatedDelta
from kernels.moe.experts import RoutedExperts
from kernels.moe.router import route
from kernels.peers.all_gather import all_gather
from kernels.peers.all_reduce_norm import all_reduce_norm
from kernels.peers.all_reduce_norm_long import all_reduce_norm_long
from kernels.peers.all_reduce_norm_rows import all_reduce_norm_rows
from kernels.peers.exchange import exchange
from kernels.peers.ll_protocol import SumTarget
from kernels.peers.reduce_scatter import reduce_scatter
from kernels.recurrent.gated_delta_prefill import gated_delta_prefill
from kernels.recurrent.gated_delta_step import gated_delta_step
from tests.kernels.launches import BF16, Launch, flags, fp32, general, i32, i64, launch, numbers, scaled

# Formats of scaled weights.
FORMS: dict[str, dict[str, Any]] = {
    "e4m3": dict(group=128),
    "e4m3-rows": dict(group=128, fp8_rows=True),
    "mxfp4": dict(group=32, kind="e2m1"),
    "nvfp4": dict(group=16, kind="e2m1"),
    "int4-32": dict(group=32, kind="int4"),
    "int4-zeros-64": dict(group=64, kind="int4", zeros=True),
    "int4-128": dict(group=128, kind="int4"),
    "int4-zeros-128": dict(group=128, kind="int4", zeros=True),
}


def all_of_them() -> Iterator[Launch]:
    """Yields all launches."""
    yield from rows()
    yield from projections()
    yield from experts()
    yield from states()
    yield from collectives()


def rows() -> Iterator[Launch]:
    """Yields norms and other ops on rows."""
    yield launch("norm", rms_norm, numbers(4, 4096), numbers(4096), 1e-6, numbers(4, 4096))
    yield launch("angles", angles, i64(4), fp32(64), 1.0, BF16)
    yield launch("embedding", embedding, i64(4), numbers(1000, 4096), 0)
    yield launch("silu-mul", silu_mul, numbers(4, 8192))
    yield launch("silu-mul-clamped", silu_mul, numbers(4, 8192), 7.0)
    for columns in (4096, 32, 1):
        yield launch(f"gate-mul-{columns}", gate_mul, numbers(4, 4096), numbers(4, columns))
    yield launch("gate-mul-softplus", gate_mul, numbers(4, 4096), numbers(4, 32), "softplus")


def target(two_shot: bool = False) -> SumTarget:
    """Returns the target of a split-K all-reduce."""
    return SumTarget(i64(8), i64(1), rank=3, pieces=512, slice_words=256, two_shot=two_shot)


def projections() -> Iterator[Launch]:
    """Yields projections of N rows; on SM90 with one, two and several programs that split the columns."""
    cache, scaled_heads = numbers(64, 64, 2, 128), scaled(1536, 4096, begin=64)
    for N in (1, 4):
        x, heads = numbers(N, 4096), (numbers(N, 64), numbers(N, 64), cache, cache, i64(N))
        yield general(f"linear-{N}", linear, x, numbers(6144, 4096), numbers(6144), gated=N == 4)
        yield general(f"qkv-append-{N}", qkv_append, x, numbers(1536, 4096), numbers(1536), *heads)
    yield general("linear-send", linear_send, numbers(1, 1024), numbers(4096, 1024), numbers(4096), target())
    for N, R, K in ((2, 6144, 4096), (16, 1536, 4096), (31, 12288, 4096)):
        x, weight, bias, out = numbers(N, K), numbers(R, K), numbers(R), numbers(N, R)
        yield launch(f"linear-{N}-sm90", launch_sm90, x, weight, bias, out, False)
        yield launch(f"linear-{N}-sm90-gated", launch_sm90, x, weight, bias, out[:, : R // 2].reshape(N, -1), True)
        yield launch(f"linear-{N}-sm90-send", launch_sm90, x, weight, bias, target(N == 2), False)
    for N, R, K in ((2, 6144, 4096), (16, 1536, 16384), (32, 12288, 4096), (128, 6144, 4096)):
        x, weight, bias, gated = numbers(N, K), scaled(R, K, begin=64), numbers(R), N in (2, 32, 128)
        out = numbers(N, R // 2 if gated else R)
        yield launch(f"linear-fp8-{N}-sm90", launch_sm90, x, weight, bias, out, gated)
        yield launch(f"linear-fp8-{N}-sm90-send", launch_sm90, x, weight, bias, target(N > 8), False)
    for N, R, K, form, begin in (
        (2, 6144, 4096, "mxfp4", 32), (16, 1536, 16384, "nvfp4", 0), (32, 6144, 4096, "int4-32", 0),
        (64, 6144, 4096, "nvfp4", 0), (64, 6144, 4096, "int4-128", 64), (128, 6144, 4096, "int4-zeros-64", 0),
        (8, 6144, 4096, "int4-zeros-128", 0), (128, 6144, 4096, "mxfp4", 0),
    ):  # fmt: skip
        x, weight, bias, out = numbers(N, K), scaled(R, K, begin=begin, **FORMS[form]), numbers(R), numbers(N, R)
        gated = N > 2
        name = f"linear-{form}-{N}-sm90"
        yield launch(name, launch_sm90, x, weight, bias, numbers(N, R // 2) if gated else out, gated)
        yield launch(f"{name}-send", launch_sm90, x, weight, bias, target(N > 8), False)
    to_heads = QKVTarget(numbers(4, 64), numbers(4, 64), i64(4), cache, cache, numbers(4, 8, 128))
    for kv, weight in (
        ("", numbers(1536, 4096)), ("-fp8", scaled_heads), ("-mxfp4", scaled(1536, 4096, **FORMS["mxfp4"]))
    ):  # fmt: skip
        yield launch(f"qkv-append{kv}-sm90", launch_sm90, numbers(4, 4096), weight, numbers(1536), to_heads, False)
    for N in (8, 256, 2048):
        given = numbers(N, 7168), scaled(2112, 7168, begin=64), numbers(2112)
        yield general(f"linear-fp8-{N}", linear, *given, gated=N == 256)


def routed(tokens: int, E: int, H: int, F: int, k: int, clamped: bool | str, form: str) -> RoutedExperts:
    """Returns E experts of width F on a rank, k per token, in bf16 or one of FORMS."""
    of = FORMS.get(form)
    gate_up, down = (numbers(E, *s) if of is None else scaled(E, *s, **of) for s in ((2 * F, H), (H, F)))
    clamps: dict[str, Any] = dict(clamp_at=7.0) if clamped else {}
    if clamped == "step":
        clamps |= dict(activation="swiglustep")
    elif clamped:
        clamps |= dict(gate_up_bias=numbers(E, 2 * F), down_bias=numbers(E, H))
    given = numbers(tokens, H), i32(tokens, k), fp32(tokens, k), gate_up, down, 0
    return RoutedExperts(*given, addend=numbers(tokens, H), **clamps)


def experts() -> Iterator[Launch]:
    """Yields routing and experts."""
    how = dict(groups=8, top_groups=4, group_score=2, scoring="sigmoid", normalize=True, shared_count=1)
    yield launch("route", route, fp32(4, 256), 8, bias=fp32(256), live=flags(4), **how)
    # Ranks of Qwen3-30B-A3B, gpt-oss-20b and Step-3.5; of DeepSeek-R1 in e4m3; of gpt-oss-120b.
    for E, H, F, k, clamped, form in (
        (128, 2048, 96, 8, False, "bf16"), (4, 2880, 2880, 4, True, "bf16"), (32, 7168, 2048, 8, False, "e4m3"),
        (16, 2880, 2880, 4, True, "mxfp4"), (36, 4096, 1280, 8, "step", "bf16"),
    ):  # fmt: skip
        for tokens in (4, 64, 8192):
            summand = routed(tokens, E, H, F, k, clamped, form)
            yield general(f"moe-{E}-{form}-{tokens}", summand.compute)
            if tokens < 8192:
                yield general(f"moe-{E}-{form}-{tokens}-send", summand.push, target(tokens == 64))
    for E, H, F, k, tokens, clamped, form in (
        (4, 2880, 2880, 4, 1, True, "bf16"), (64, 7168, 1024, 8, 8, False, "bf16"),
        (32, 7168, 2048, 8, 8, False, "e4m3"), (36, 4096, 1280, 8, 8, "step", "bf16"),
        (36, 4096, 1280, 8, 64, "step", "e4m3"), (32, 7168, 2048, 8, 128, False, "e4m3"),
        (8, 2880, 1440, 4, 128, True, "e4m3"), (512, 4096, 128, 10, 1, False, "e4m3"),
        (257, 6144, 256, 9, 4096, False, "e4m3"),
        (32, 2880, 2880, 4, 5, True, "mxfp4"), (32, 2880, 2880, 4, 128, True, "mxfp4"),
        (256, 7168, 256, 8, 4, False, "nvfp4"), (32, 7168, 2048, 8, 64, False, "nvfp4"),
        (48, 7168, 2048, 8, 8, False, "int4-32"), (48, 7168, 2048, 8, 128, False, "int4-32"),
        (16, 2048, 768, 8, 16, False, "int4-zeros-64"), (64, 4096, 1024, 10, 1, False, "int4-128"),
        (16, 2048, 768, 8, 64, False, "int4-zeros-128"), (32, 2880, 2880, 4, 8192, True, "mxfp4"),
        (32, 7168, 2048, 8, 8192, False, "nvfp4"), (48, 7168, 2048, 8, 8192, False, "int4-32"),
        (16, 2048, 768, 8, 8192, False, "int4-zeros-128"), (36, 4096, 1280, 8, 8192, "step", "e4m3"),
        (32, 7168, 2048, 8, 256, False, "e4m3-rows"), (256, 7168, 256, 8, 512, False, "e4m3-rows"),
        (32, 7168, 2048, 8, 256, False, "e4m3"), (256, 7168, 256, 8, 512, False, "e4m3"),  # two numbers an element
    ):  # fmt: skip
        summand = routed(tokens, E, H, F, k, clamped, form)
        yield launch(f"moe-{E}-{form}-{tokens}-sm90", summand.compute)
        if tokens <= 8 and not (form.startswith("int4") or form == "nvfp4"):
            yield launch(f"moe-{E}-{form}-{tokens}-sm90-send", summand.push, target(two_shot=H > 4096))


def states() -> Iterator[Launch]:
    """Yields state updates for six of Qwen3.5-27B's value heads over eight ranks, and all; rows and prompts."""
    for keys, values, most in ((2, 6, 1), (2, 6, 5), (16, 48, 5), (2, 6, 32)):
        C = 2 * keys * 128 + values * 128
        gated_delta = GatedDelta(numbers(4, C), fp32(values), fp32(values), numbers(128), 1e-6, keys, 3, 0)
        kept = DeltaState(
            fp32(8, values, 128, 128), numbers(8, most + 3, C), fp32(8, most, values, 256), fp32(8, most, values),
            i64(8),
        )  # fmt: skip
        chunk, step = (
            DeltaInput(*(numbers(N, columns) for columns in (C, 2 * values, 128 * values))) for N in (512, 4 * most)
        )
        rows = i64(4), i64(4 * most), numbers(4 * most, dtype=torch.bool)
        yield launch(f"delta-step-{values}-{most}", gated_delta_step, step, gated_delta, kept, *rows)
        if most == 5:
            drafted = DeltaInput(*(numbers(4, columns) for columns in (C, 2 * values, 128 * values)))
            row = i64(4), i64(4), numbers(4, dtype=torch.bool), 3
            yield launch(f"delta-step-{values}-drafted", gated_delta_step, drafted, gated_delta, kept, *row)
            prompts = i64(2), i64(512), i32(3)
            yield launch(f"delta-prefill-{values}", gated_delta_prefill, chunk, gated_delta, kept, *prompts)


def collectives() -> Iterator[Launch]:
    """Yields collectives over LL buffers and peer memory."""
    epoch, sizes = (i64(1), i32(1)), dict(rank=1, pieces=1024, spins=1000)
    x, weight, peers = numbers(4, 3584), numbers(3584), i64(2, 8)
    out = numbers(4, 8, 128), fp32(4, 8), numbers(4, 1, 128), i32(9)
    yield launch("exchange", exchange, *out, i64(8), (i64(1), i64(1)), i32(1), lanes=8, **sizes)
    for two_shot, phases in ((False, 7), (False, 6), (True, 7), (True, 6)):
        given = x, x, weight, 1e-6, peers, i64(1024), *epoch
        how = dict(two_shot=two_shot, phases=phases)
        yield launch(f"reduce-{two_shot}-{phases}", all_reduce_norm, *given, **how, **sizes)
    for width in (3584, 8192):
        row, norm_weight = numbers(4, width), numbers(width)
        given = row, row, norm_weight, 1e-6, peers, *epoch
        yield launch(f"reduce-rows-{width}", all_reduce_norm_rows, *given, rank=1, rows=256, spins=1000)
    given = x, x, weight, 1e-6, i64(4, 8), i32(1024), *epoch
    yield launch("reduce-long", all_reduce_norm_long, *given, rank=1, num_buffers=1024, spins=1000)
    yield launch("gather", all_gather, x, i64(8), *epoch, **sizes)
    yield launch("scatter", reduce_scatter, numbers(8, 4, 64), i64(8), *epoch, **sizes)
