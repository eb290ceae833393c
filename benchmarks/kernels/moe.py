"""Times the routed experts of a rank, routing included: `helix bench moe`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from benchmarks.runner import Benchmark, Given, Part, Row
from benchmarks.timer import ROTATED, seconds
from kernels.moe.experts import RoutedExperts
from kernels.moe.router import Scoring, route
from kernels.reference.experts import moe as reference


@dataclass(frozen=True)
class Experts:
    """All experts of a layer; of them, a rank of a tpf x ep grid holds 1 / ep, and of each 1 / tpf of its columns.

    With ep = 1 those that `shared_count` are chosen, shared ones, are among them.
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


MODELS = [
    Experts("Qwen3-30B-A3B", 128, 8, 2048, 768),
    Experts("gpt-oss-20b", 32, 4, 2880, 2880, "top_softmax", clamped=True),
    Experts("DeepSeek-R1", 256, 8, 7168, 2048, "sigmoid", 8, 4, shared_count=1),
    Experts("DeepSeek-V2-Lite", 64, 6, 2048, 1408, shared_count=2),
]
GRIDS = [(8, 1), (4, 2), (2, 4), (1, 8)]
TOKENS = (1, 2, 4, 8, 16, 32, 64)
INPUTS = 32  # at least, each with a choice of experts of its own


@torch.inference_mode()
def measure(given: Given, model: Experts, grid: tuple[int, int], tokens: int) -> list[Row]:
    """One rank's layer in microseconds, over inputs and weights that rotate, beside the bytes that it has to read."""
    device, (tpf, ep) = given.device, grid
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shared_count = model.shared_count if ep == 1 else 0
    E, F, H = model.experts // ep + shared_count, model.width // tpf, model.hidden
    scoring: dict[str, Any] = dict(
        scoring=model.scoring, normalise=model.scoring != "top_softmax", shared_count=shared_count
    )
    if model.groups > 1:
        bias = torch.zeros(model.experts, device=device)
        scoring |= dict(groups=model.groups, top_groups=model.top_groups, group_score=2, bias=bias)
    expert_bytes = (3 * H * F + model.clamped * (2 * F + H)) * dtype.itemsize
    expected = (shared_count + (E - shared_count) * (1 - (1 - model.top_k / model.experts) ** tokens)) * expert_bytes
    # Copies of all weights, of which each input touches a part; and several times as many inputs where that part hangs
    # on chance: a rank that holds few experts has no pair at times, or twice as many as at the mean.
    shards = min(48, -(-ROTATED // int(expected))) if device.type == "cuda" else 1
    copies = shards * -(-INPUTS // shards) if device.type == "cuda" else 1

    def normal(*shape: int, fan_in: int = 1) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype) * fan_in**-0.5

    xs = [normal(tokens, H) for _ in range(copies)]
    logits = [torch.randn(tokens, model.experts, device=device) for _ in range(copies)]
    weights = [(normal(E, 2 * F, H, fan_in=H), normal(E, H, F, fan_in=F)) for _ in range(shards)]
    clamps: dict[str, Any] = dict(gate_up_bias=None, down_bias=None, clamp_at=None)
    if model.clamped:
        clamps = dict(gate_up_bias=normal(E, 2 * F), down_bias=normal(E, H), clamp_at=7.0)
    options = clamps | dict(total_experts=model.experts + shared_count, shared_count=shared_count)

    def ours(i: int) -> torch.Tensor:
        chosen = route(logits[i], model.top_k, **scoring)
        return RoutedExperts(xs[i], *chosen, *weights[i % shards], 0, **options).compute()

    chosen = [route(score, model.top_k, **scoring) for score in logits]
    wanted = reference(xs[0], *chosen[0], *weights[0], 0, **clamps, addend=None).float()
    error = float((ours(0).float() - wanted).norm() / wanted.norm().clamp(min=1e-6))
    # Four roundings to bf16 here or there, of 2^-9 each.
    assert error < 2e-2, f"moe is off by {error:.1e} of its norm at {model.name}, {tpf} x {ep}, {tokens} tokens"
    touched = sum(len(ids[ids < E].unique()) for ids, _ in chosen) / copies
    row = {
        "kind": "moe",
        "model": model.name,
        "tpf": tpf,
        "ep": ep,
        "tokens": tokens,
        "always": shared_count,
        "experts": touched,
        "bytes": touched * expert_bytes,
        "us": seconds(ours, copies, device) * 1e6,
        "route_us": seconds(lambda i: route(logits[i], model.top_k, **scoring), copies, device) * 1e6,
        "bar_us": touched * expert_bytes / 4.2e12 * 1e6 + 8,
    }
    return [row]


def cases(given: Given) -> Iterable[tuple[Experts, tuple[int, int], int]]:
    """All models, grids of eight ranks and batches."""
    return product(MODELS, GRIDS, TOKENS) if given.gpu else [(Experts("tiny", 8, 2, 32, 16), (1, 2), 3)]


BENCHMARK = Benchmark(
    "a rank's routed experts beside the bytes of those that are touched, on one GPU",
    __doc__,
    (Part(cases, measure, "model tpf ep tokens experts us route_us bar_us us/bar_us"),),
)
