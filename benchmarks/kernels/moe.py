"""Times the routed experts of a rank, routing included: `helix bench moe`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, cast

import torch

from benchmarks.cases import cases as listed
from benchmarks.runner import BenchContext, Row
from benchmarks.timer import ROTATED, read_ceiling, seconds
from helix.layout import share
from kernels.moe.experts import RoutedExperts
from kernels.moe.reference import moe as reference
from kernels.moe.router import Scoring, route
from kernels.scaled import PACKED_BLOCK, Kind, ScaledMatrix, groups

Stored = Literal["bf16", "fp8", "mxfp4", "nvfp4", "int4-32", "int4-128"]


@dataclass(frozen=True)
class Experts:
    """A layer's experts. A rank of a tpf x ep grid holds 1 / ep of them, and 1 / tpf of the columns of each.

    With ep = 1 the `shared_count` shared experts, which every token selects, are among them.
    """

    name: str
    experts: int
    top_k: int
    hidden: int
    width: int
    scoring: Scoring = "softmax"
    groups: int = 1
    top_groups: int = 1
    clamped: bool = False
    shared_count: int = 0


ALL = {case[0]: Experts(*case) for case in listed("moe")}
MODELS = [*ALL.values()][:4]
FEW_BITS: list[tuple[Experts, Stored]] = [(ALL[name], stored) for name, stored in listed("moe-few-bits")]
GRIDS = [(8, 1), (4, 2), (2, 4), (1, 8)]
TOKENS = (1, 2, 4, 8, 16, 32, 64)
CHUNK = 8192  # tokens of a prefill
PACKED_TOKENS = (1, 8, 32, 64, 256, 1024, CHUNK)
GROUPS = (1, 2, 3, 5, 7, 9, 12, 20, 28, 40)  # tokens that one step verifies: of one sequence, of four
INPUTS = 32  # minimum number of inputs, each with its own expert selection


def columns_of(model: Experts, tpf: int, stored: Stored) -> int:
    """Returns how many columns of an expert the first of `tpf` ranks has: whole blocks of packed ones, as in layers."""
    return len(share(model.width, tpf, 0, 1 if stored in ("bf16", "fp8") else PACKED_BLOCK))


def random_weight(stored: Stored, E: int, R: int, K: int, ctx: BenchContext) -> torch.Tensor | ScaledMatrix:
    """Draws random expert weights, scaled so that outputs have the magnitude of inputs."""
    device = ctx.device
    if stored not in ("bf16", "fp8"):
        kind: Kind = "int4" if stored.startswith("int4") else "e2m1"
        group = {"mxfp4": 32, "nvfp4": 16, "int4-32": 32, "int4-128": 128}[stored]
        data = torch.randint(-(1 << 31), 1 << 31, (E, R, K // 8), device=device, dtype=torch.int32)
        shape, rows = (E, groups(0, K, group), R), None
        if stored == "mxfp4":
            scales = torch.full(shape, 125 - round(math.log2(K) / 2), device=device, dtype=torch.uint8)
        elif stored == "nvfp4":  # 16 to 240 times a row's scale
            scales = torch.randint(104, 136, shape, device=device, dtype=torch.uint8)
            rows = torch.full((E, R), K**-0.5 / 300, device=device)
        else:
            scales = ((0.5 + torch.rand(shape, device=device)) * K**-0.5 / 5).bfloat16()
        return ScaledMatrix(data, scales, group, kind=kind, row_scales=rows)
    normal = torch.randn(E, R, K, device=device, dtype=torch.bfloat16 if ctx.gpu else torch.float32)
    if stored == "bf16":
        return normal * K**-0.5
    scales = (0.5 + torch.rand(E, groups(0, K, 128), R, device=device)) * K**-0.5
    return ScaledMatrix(normal.to(torch.float8_e4m3fn), scales, 128)


@torch.inference_mode()
def measure(
    ctx: BenchContext, model: Experts, grid: tuple[int, int], tokens: int, stored: Stored = "bf16"
) -> list[Row]:
    """Times one rank's layer over rotating inputs and weights, in microseconds, with the bytes that it has to read."""
    device, (tpf, ep) = ctx.device, grid
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shared_count = model.shared_count if ep == 1 else 0
    E, F, H = model.experts // ep + shared_count, columns_of(model, tpf, stored), model.hidden
    scoring: dict[str, Any] = dict(
        scoring=model.scoring, normalize=model.scoring != "top_softmax", shared_count=shared_count
    )
    if model.groups > 1:
        bias = torch.zeros(model.experts, device=device)
        scoring |= dict(groups=model.groups, top_groups=model.top_groups, group_score=2, bias=bias)
    expert_bytes = model.clamped * (2 * F + H) * dtype.itemsize
    for rows, columns in ((2 * F, H), (H, F)):
        one = random_weight(stored, 1, rows, columns, ctx)
        expert_bytes += one.bytes if isinstance(one, ScaledMatrix) else one.numel() * one.itemsize
    expected = (shared_count + (E - shared_count) * (1 - (1 - model.top_k / model.experts) ** tokens)) * expert_bytes
    # Copies of all weights, of which each input touches a part; and several times as many inputs, since that part
    # varies: a rank with few experts may get no token, or twice the mean.
    shards = min(48, -(-ROTATED // int(expected))) if device.type == "cuda" else 1
    copies = shards * -(-INPUTS // shards) if device.type == "cuda" else 1

    def normal(*shape: int, fan_in: int = 1) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype) * fan_in**-0.5

    xs = [normal(tokens, H) for _ in range(copies)]
    logits = [torch.randn(tokens, model.experts, device=device) for _ in range(copies)]
    weights = [(random_weight(stored, E, 2 * F, H, ctx), random_weight(stored, E, H, F, ctx)) for _ in range(shards)]
    clamps: dict[str, Any] = dict(gate_up_bias=None, down_bias=None, clamp_at=None)
    if model.clamped:
        clamps = dict(gate_up_bias=normal(E, 2 * F), down_bias=normal(E, H), clamp_at=7.0)
    options = clamps | dict(total_experts=model.experts + shared_count, shared_count=shared_count)

    def ours(i: int) -> torch.Tensor:
        routing = route(logits[i], model.top_k, **scoring)
        return RoutedExperts(xs[i], *routing, *weights[i % shards], 0, **options).compute()

    routing = [route(score, model.top_k, **scoring) for score in logits]
    wanted = reference(xs[0], *routing[0], *weights[0], 0, **clamps, activation="swigluoai", addend=None).float()
    error = float((ours(0).float() - wanted).norm() / wanted.norm().clamp(min=1e-6))
    # Four roundings to bf16 on either side, 2^-9 each.
    case = f"{model.name}, {tpf} x {ep}, {tokens} tokens, {stored}"
    assert error < 2e-2, f"moe is off by {error:.1e} of its norm at {case}"
    touched = sum(len(ids[ids < E].unique()) for ids, _ in routing) / copies
    row = {
        "kind": "moe",
        "model": model.name if stored == "bf16" else f"{model.name} in {stored}",
        "tpf": tpf,
        "ep": ep,
        "tokens": tokens,
        "always": shared_count,
        "experts": touched,
        "bytes": touched * expert_bytes,
        "us": seconds(ours, copies, device) * 1e6,
        "route_us": seconds(lambda i: route(logits[i], model.top_k, **scoring), copies, device) * 1e6,
        "bar_us": touched * expert_bytes / 4.2e12 * 1e6 + 8,
        "inherent_us": touched * expert_bytes / read_ceiling(device) * 1e6,
    }
    return [row]


def cases(ctx: BenchContext) -> Iterable[tuple[Experts, tuple[int, int], int]]:
    """Returns all models, grids of eight ranks and batches."""
    if not ctx.gpu:
        return [(Experts("tiny", 8, 2, 32, 16), (1, 2), 3)]
    return product([model for model in MODELS if _is_chosen(model, ctx)], GRIDS, TOKENS)


def verified_cases(ctx: BenchContext) -> Iterator[tuple[Experts, tuple[int, int], int, Stored]]:
    """Yields groups of drafts on one GPU with evenly spread routing: the cost of reading the experts they touch."""
    if ctx.gpu:
        of = [(MODELS[0], "bf16"), (MODELS[0], "fp8"), (MODELS[1], "bf16"), (MODELS[1], "mxfp4")]
        for (model, stored), tokens in product(of, GROUPS):
            if _is_chosen(model, ctx):
                yield model, (1, 1), tokens, cast(Stored, stored)
    else:
        yield Experts("tiny", 8, 2, 32, 16), (1, 1), 3, "bf16"


def few_bits_cases(ctx: BenchContext) -> Iterator[tuple[Experts, tuple[int, int], int, Stored]]:
    """Yields bf16 and low-bit weights, for whole experts and slices, with a prefill chunk last."""
    tiny: list[tuple[Experts, Stored]] = [(Experts("tiny", 8, 2, 64, 64), "fp8")]
    for model, few in FEW_BITS if ctx.gpu else tiny:
        if _is_chosen(model, ctx) or not ctx.gpu:
            first = not ctx.gpu or (model, few) == next(pair for pair in FEW_BITS if pair[0] == model)
            for grid in ((1, 8), (8, 1)):
                for tokens in (1, 4, 8, 16, 32, CHUNK) if ctx.gpu else (3,):
                    if first:
                        yield model, grid, tokens, "bf16"
                    yield model, grid, tokens, few


def packed_cases(ctx: BenchContext) -> Iterator[tuple[Experts, tuple[int, int], int, Stored]]:
    """Yields a rank's whole experts, in bf16 and packed, for few tokens and for many."""
    if not ctx.gpu:
        yield Experts("tiny", 8, 2, 64, 64), (1, 2), 3, "nvfp4"
        return
    for name, stored, ranks in listed("moe-packed"):
        for tokens, weights in product(PACKED_TOKENS, ("bf16", stored)):
            yield ALL[name], (1, ranks), tokens, cast(Stored, weights)


def _is_chosen(model: Experts, ctx: BenchContext) -> bool:
    return ctx.models is None or model.name in ctx.models


NAMES = tuple(dict.fromkeys(model.name for model in (*MODELS, *(model for model, _ in FEW_BITS))))
