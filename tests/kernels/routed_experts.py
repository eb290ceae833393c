"""Cases of routed experts and their results in float64, for tests of the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.moe.experts import RoutedExperts
from kernels.moe.router import route
from kernels.scaled import ScaledMatrix, groups


@dataclass
class Case:
    """Arguments of `moe`; what nobody may read is NaN."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: Any  # Tensor or ScaledMatrix
    down: Any
    first: int = 0
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    clamp_at: float | None = None
    addend: Tensor | None = None
    shared_count: int = 0

    @property
    def experts(self) -> RoutedExperts:
        return RoutedExperts(**{field.name: getattr(self, field.name) for field in fields(self)})

    def result(self) -> Tensor:
        return self.experts.compute()

    def expected(self) -> Tensor:
        """[N, H] float64 on the CPU, one pair of a token and an expert at a time."""
        x, weights, local = self.x.double(), self.weights.double(), self.ids - self.first
        out = torch.zeros_like(x) if self.addend is None else self.addend.double()
        for e in range(len(self.gate_up)):
            pairs = (local == e).nonzero().tolist()
            if not pairs:
                continue
            both = self.gate_up[e], self.down[e]
            gate_up, down = ((w.unpacked() if isinstance(w, ScaledMatrix) else w).double() for w in both)
            for n, slot in pairs:
                gate, up = (gate_up @ x[n] + (0 if self.gate_up_bias is None else self.gate_up_bias[e])).chunk(2)
                if self.clamp_at is None:
                    h = gate / (1 + (-gate).exp()) * up
                else:
                    gate, up = gate.clamp(max=self.clamp_at), up.clamp(-self.clamp_at, self.clamp_at)
                    h = gate / (1 + (-1.702 * gate).exp()) * (up + 1)
                out[n] += weights[n, slot] * (down @ h + (0 if self.down_bias is None else self.down_bias[e]))
        return out.cpu()


def make_case(
    N: int, k: int, E: int, H: int, F: int, *,
    experts: int | None = None, first: int = 0, clamped: bool = False, addend: bool = False,
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0,
) -> Case:  # fmt: skip
    """Random tokens that choose k different ones of `experts` (all local if None), of which E from `first` are here."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int, behind: int = 0, scale: float = 1.0) -> Tensor:
        wide = torch.full((shape[0] + behind, *shape[1:]), torch.nan)
        wide[: shape[0]] = torch.randn(shape, generator=gen) * scale
        return wide.to(device, dtype)[: shape[0]]

    x = torch.full((N, H + 3), torch.nan)
    x[:, :H] = torch.randn(N, H, generator=gen)
    ids = torch.stack([torch.randperm(experts or E, generator=gen)[:k] for _ in range(N)]) if N else torch.zeros(0, k)
    return Case(
        x.to(device, dtype)[:, :H],
        ids.int().to(device),
        torch.rand(N, k, generator=gen).to(device),
        normal(E, 2 * F, H, behind=1, scale=max(H, 1) ** -0.5),
        normal(E, H, F, behind=1, scale=max(F, 1) ** -0.5),
        first,
        *((normal(E, 2 * F, behind=1), normal(E, H, behind=1), 1.5) if clamped else (None, None, None)),
        normal(N, H, behind=1) if addend else None,
    )


def scaled(like: Tensor, packed: bool, group: int, begin: int, seed: int = 0) -> ScaledMatrix:
    """Weights of the size of `like` [E, R, K]: e4m3 with scales from 1e-6 to 1e2, or e2m1 with powers of two.

    Behind the last expert stand NaN, in numbers and in scales.
    """
    device = like.device
    gen = torch.Generator(device).manual_seed(seed)
    (E, R, K), size = like.shape, like.shape[2] ** -0.5
    shape = E + 1, groups(begin, K, group), R
    if packed:
        data = torch.randint(256, (E + 1, R, K // 2), generator=gen, dtype=torch.uint8, device=device)
        top = round(math.log2(size)) - 1
        scales = (torch.randint(-20, top + 1, shape, generator=gen, device=device) + 127).to(torch.uint8)
        scales[:, ::2] = top + 127  # so that most weights count
        scales[E] = 255
    else:
        scales = 10 ** (torch.rand(shape, generator=gen, device=device) * 8 - 6)
        each = scales.mT[..., (begin + torch.arange(K, device=device)) // group]
        weights = torch.randn(E + 1, R, K, generator=gen, device=device) * size
        data = (weights / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        data.view(torch.uint8)[E], scales[E] = 0x7F, torch.nan
    return ScaledMatrix(data[:E], scales[:E], group, begin)


def scaled_case(case: Case, packed: bool, group: int = 0, begins: tuple[int, int] = (0, 0)) -> Case:
    """The case with other weights, in groups of 128 or 32 columns that begin so far before the first column."""
    group = group or (32 if packed else 128)
    gate_up = scaled(case.gate_up, packed, group, begins[0])
    down = scaled(case.down, packed, group, begins[1], seed=1)
    return replace(case, gate_up=gate_up, down=down)


def check(out: Tensor, case: Case) -> None:
    """Compares with float64.

    Tolerances: fp32 sums of up to a few hundred terms of size 1/sqrt(terms), twice in a row, and over experts: a few
    units of 2^-24 of values up to 10. In bf16 the two halves, the activations and an expert's output may each be
    rounded, and the result is: five times half a unit, 2^-9, of values up to 6.
    """
    wanted = case.expected()
    assert out.dtype == case.x.dtype and out.shape == wanted.shape
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 30 * 2**-9, torch.float16: 30 * 2**-12}[out.dtype]
    torch.testing.assert_close(out.double().cpu(), wanted, atol=tolerance, rtol=0)


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def poisoned(*shape: int, **options: Any) -> Tensor:
        t = empty(*shape, **options)
        return t.fill_(torch.nan) if t.is_floating_point() else t

    monkeypatch.setattr(torch, "empty", poisoned)


def check_layers_in_a_graph(case: Case, experts: int, k: int) -> None:
    """Each reads what the one before wrote, in one workspace: however they overlap, the bits are the same."""
    logits = torch.randn(12, len(case.x), experts, device="cuda")
    ys = torch.empty(12, *case.x.shape, device="cuda", dtype=torch.bfloat16)

    def layers(between: Any) -> None:
        x = case.x
        for scores, y in zip(logits, ys, strict=True):
            ids, weights = route(scores, k, normalise=True)
            x = replace(case, x=x, ids=ids, weights=weights).result()
            between()
            y.copy_(x)
            between()

    layers(torch.cuda.synchronize)
    wanted = ys.clone()
    assert not wanted.isnan().any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers(lambda: None)
    for _ in range(50):
        ys.fill_(torch.nan)
        graph.replay()
        assert torch.equal(ys, wanted)
