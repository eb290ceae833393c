"""Rotary position embedding with the scalings of the supported families."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from helix.layers.specs import RopeSpec
from kernels.dense.rotary import angles


def frequencies(spec: RopeSpec) -> tuple[Tensor, float]:
    """Computes the inverse frequencies [D/2] fp32 and the factor on cos and sin.

    Source: llama3 from the Llama 3.1 release, yarn from https://arxiv.org/abs/2309.00071.
    """
    dim, s = spec.head_dim, spec.scaling
    plain = 1.0 / (spec.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if spec.kind == "default":
        return plain, 1.0
    if spec.kind == "linear":
        return plain / s["factor"], 1.0
    if spec.kind == "longrope":
        return plain / torch.tensor(s["divisors"]), s["attention_factor"]
    trained = s["original_max_position_embeddings"]
    if spec.kind == "llama3":
        # Long wavelengths are stretched by `factor`, short ones kept, the band between interpolated.
        turns = trained * plain / (2 * math.pi)
        keep = (turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
        keep = keep.clamp(0, 1)
        return (1 - keep) * plain / s["factor"] + keep * plain, 1.0
    return _yarn(spec, plain, trained)


def _yarn(spec: RopeSpec, plain: Tensor, trained: int) -> tuple[Tensor, float]:
    s, dim = spec.scaling, spec.head_dim

    def dimension(turns: float) -> float:
        # The dimension that makes `turns` turns over the trained context.
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(s.get("beta_fast") or 32), dimension(s.get("beta_slow") or 1)
    if s.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # If few dimensions turn, the band may end before it begins: then, as in transformers, none is kept.
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)

    factor = s.get("attention_factor")
    if factor is None:
        both = s.get("mscale") and s.get("mscale_all_dim")
        factor = spec.mscale(s["mscale"]) / spec.mscale(s["mscale_all_dim"]) if both else spec.mscale(1.0)
    return plain / s["factor"] * ramp + plain * (1 - ramp), float(factor)


@dataclass(frozen=True)
class Angles:
    """Rotary angles of a step's positions.

    Attributes:
        cos, sin: [N, D/2], in the model's dtype.
        query_scale: [N], factor on queries, or None.
    """

    cos: Tensor
    sin: Tensor
    query_scale: Tensor | None = None

    def rows(self, rows: slice) -> Angles:
        scale = None if self.query_scale is None else self.query_scale[rows]
        return Angles(self.cos[rows], self.sin[rows], scale)

    def scale_queries(self, q: Tensor) -> Tensor:
        """Multiplies queries [N, Hq, D] by their factor, in place."""
        return q if self.query_scale is None else q.mul_(self.query_scale[:, None, None])


def rope_row_order(head_dim: int, rotated: int) -> list[range]:
    """Lists the rows of a head in the kernels' order, which rotate row d against row d + head_dim / 2.

    Permuting queries and keys alike leaves scores unchanged.
    """
    if rotated == head_dim:
        return [range(head_dim)]
    half, middle = rotated // 2, (rotated + head_dim) // 2
    return [range(half), range(rotated, middle), range(half, rotated), range(middle, head_dim)]


class Rotary:
    """Rotary embedding: computes the angles of a step's positions once for all layers."""

    def __init__(self, spec: RopeSpec, dtype: torch.dtype, device: torch.device) -> None:
        inv_freq, self.factor = frequencies(spec)
        self.inv_freq = F.pad(inv_freq, (0, spec.unrotated // 2)).to(device)  # an angle of 0 rotates nothing
        self.dtype = dtype
        self.query_scale = spec.query_scale

    def angles(self, positions: Tensor) -> Angles:
        """Computes the angles of positions [N], in fp32, rounded to the model's dtype."""
        cos, sin = angles(positions, self.inv_freq, self.factor, self.dtype)
        if self.query_scale is None:
            return Angles(cos, sin)
        beta, trained = self.query_scale
        return Angles(cos, sin, (1 + beta * torch.log1p((positions // trained).float())).to(self.dtype))
