"""Rotary position embedding with the scalings of the supported families."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dense.rotary import angles

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")  # besides those needed


@dataclass(frozen=True)
class RopeSpec:
    """Parameters of the rotary embedding.

    Attributes:
        kind: one of ROPE_TYPES.
        theta: base of the frequencies.
        head_dim: number of rotated dimensions, a head's first.
        scaling: the kind's own parameters, named as in a Hugging Face config; those of other kinds are left out.
        resting: number of a head's further dimensions, which are not rotated.
        query_scale: (b, n): queries at position p grow by a factor 1 + b ln(1 + floor(p / n)); None: they do not.
    """

    kind: str
    theta: float
    head_dim: int
    scaling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    resting: int = 0
    query_scale: tuple[float, int] | None = None

    @classmethod
    def from_config(cls, config: Any, head_dim: int, partial: bool = False, layers: str | None = None) -> RopeSpec:
        """Reads `rope_parameters` of a transformers config object, which collects all spellings.

        Args:
            partial: whether the family may rotate a part of a head alone, `partial_rotary_factor`.
            layers: type of the layers, where parameters differ by it; None: they do not.

        Raises:
            ValueError: a kind or a parameter is not supported, missing or out of range.
        """
        parameters = dict(config.rope_parameters if layers is None else config.rope_parameters[layers])
        theta, kind = parameters.pop("rope_theta"), parameters.pop("rope_type")
        if kind not in ROPE_TYPES:
            raise ValueError(f"RoPE scaling {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        share = parameters.pop("partial_rotary_factor", None)
        rotated = head_dim if share is None else rotated_of(head_dim, share)
        if rotated < head_dim and not partial:
            raise ValueError("partial rotary embedding (partial_rotary_factor below 1) is not supported")
        trained = "original_max_position_embeddings"
        if kind == "yarn" and parameters.get("factor") is None and parameters.get(trained):
            parameters["factor"] = config.max_position_embeddings / parameters[trained]
        needed = {
            "linear": ["factor"],
            "llama3": ["factor", "low_freq_factor", "high_freq_factor", trained],
            "yarn": ["factor", trained],
        }.get(kind, [])
        if missing := [name for name in needed if parameters.get(name) is None]:
            raise ValueError(f"RoPE scaling {kind!r} in config.json lacks {', '.join(missing)}")
        optional = [n for n in ("beta_fast", "beta_slow", "attention_factor") if parameters.get(n)]
        numbers = {"rope_theta": theta} | {name: parameters[name] for name in [*needed, *optional]}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"config.json: RoPE's {name}={value!r} must be a positive number")
        if kind == "llama3" and parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
            raise ValueError("config.json: RoPE's low_freq_factor must be below high_freq_factor")
        if kind == "yarn" and theta <= 1:
            raise ValueError(f"config.json: RoPE's rope_theta={theta!r} must be above 1")
        used = {*needed, *(YARN if kind == "yarn" else () if kind == "default" else ("mscale_all_dim",))}
        used |= {"llama_4_scaling_beta", trained} if "llama_4_scaling_beta" in parameters else set()
        scaling = {name: value for name, value in parameters.items() if name in used}
        return cls(kind, float(theta), rotated, scaling, head_dim - rotated)

    def frequencies(self) -> tuple[Tensor, float]:
        """Computes the inverse frequencies [D/2] fp32 and the factor on cos and sin.

        Source: llama3 from the Llama 3.1 release, yarn from https://arxiv.org/abs/2309.00071.
        """
        dim, s = self.head_dim, self.scaling
        plain = 1.0 / (self.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
        if self.kind == "default":
            return plain, 1.0
        if self.kind == "linear":
            return plain / s["factor"], 1.0
        trained = s["original_max_position_embeddings"]
        if self.kind == "llama3":
            # Long wavelengths are stretched by `factor`, short ones kept, the band between interpolated.
            turns = trained * plain / (2 * math.pi)
            keep = (turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
            keep = keep.clamp(0, 1)
            return (1 - keep) * plain / s["factor"] + keep * plain, 1.0
        return self._yarn(plain, trained)

    def _yarn(self, plain: Tensor, trained: int) -> tuple[Tensor, float]:
        s, dim = self.scaling, self.head_dim

        def dimension(turns: float) -> float:
            """Computes the dimension whose wavelength makes `turns` turns over the trained context."""
            return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension(s.get("beta_fast") or 32), dimension(s.get("beta_slow") or 1)
        if s.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        # Where few dimensions turn, the band may end before it begins: then, as in transformers, none is kept.
        ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)

        factor = s.get("attention_factor")
        if factor is None:
            both = s.get("mscale") and s.get("mscale_all_dim")
            factor = self.mscale(s["mscale"]) / self.mscale(s["mscale_all_dim"]) if both else self.mscale(1.0)
        return plain / s["factor"] * ramp + plain * (1 - ramp), float(factor)

    def mscale(self, weight: float) -> float:
        """Computes YaRN's correction of the attention's temperature for a context stretched by `factor`."""
        stretch = self.scaling["factor"]
        return 1.0 if stretch <= 1 else 0.1 * weight * math.log(stretch) + 1.0


@dataclass(frozen=True)
class Angles:
    """Effect of positions on the queries and keys of a step.

    Attributes:
        cos, sin: [N, D/2] of the angles of rotation, in the model's dtype.
        query_scale: [N], factor on queries; None: there is none.
    """

    cos: Tensor
    sin: Tensor
    query_scale: Tensor | None = None

    def of(self, rows: slice) -> Angles:
        """Returns the effect on some of the rows."""
        scale = None if self.query_scale is None else self.query_scale[rows]
        return Angles(self.cos[rows], self.sin[rows], scale)

    def scaled(self, q: Tensor) -> Tensor:
        """Multiplies queries [N, Hq, D] by their factor, in place."""
        return q if self.query_scale is None else q.mul_(self.query_scale[:, None, None])


def rotated_of(head_dim: int, share: Any) -> int:
    """Returns the number of a head's rotated dimensions, from `partial_rotary_factor`.

    Raises:
        ValueError: it is no even number of dimensions.
    """
    known = isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1
    rotated = int(head_dim * share) if known else 0
    if rotated < 2 or rotated % 2:
        raise ValueError(f"config.json: partial_rotary_factor={share!r} of head_dim={head_dim} must be an even number")
    return rotated


def paired(head_dim: int, rotated: int) -> list[range]:
    """Lists the rows of a head in the order of the kernels, which rotate row d against row d + head_dim / 2.

    The same permutation of queries and keys leaves scores unchanged.
    """
    if rotated == head_dim:
        return [range(head_dim)]
    half, middle = rotated // 2, (rotated + head_dim) // 2
    return [range(half), range(rotated, middle), range(half, rotated), range(middle, head_dim)]


class Rotary:
    """Rotary embedding: angles of a step's positions, computed once and shared by all layers."""

    def __init__(self, spec: RopeSpec, dtype: torch.dtype, device: torch.device) -> None:
        inv_freq, self.factor = spec.frequencies()
        self.inv_freq = F.pad(inv_freq, (0, spec.resting // 2)).to(device)  # an angle of 0 rotates nothing
        self.dtype = dtype
        self.query_scale = spec.query_scale

    def angles(self, positions: Tensor) -> Angles:
        """Computes the angles of positions [N], in fp32, rounded to the model's dtype."""
        cos, sin = angles(positions, self.inv_freq, self.factor, self.dtype)
        if self.query_scale is None:
            return Angles(cos, sin)
        beta, trained = self.query_scale
        return Angles(cos, sin, (1 + beta * torch.log1p((positions // trained).float())).to(self.dtype))
