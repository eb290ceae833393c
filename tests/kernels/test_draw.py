"""gumbel_sample: kernel against the reference, over any split of the columns, and against broken and empty rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.tokens import best_token
from kernels.tokens import gumbel_sample as kernels
from kernels.tokens.reference import ALL_KEYS, DRAFT, TARGET, Distribution, best_of_ranks, descending_keys
from kernels.tokens.reference import gumbel_sample as reference
from kernels.tokens.uniform import gumbel, gumbel_bound

pytestmark = pytest.mark.usefixtures("few_programs")
FIRST = 1000  # id of the first column


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that take several rounds, and from a few hundred columns on rule some out."""
    monkeypatch.setattr(kernels, "BLOCK", 32)
    monkeypatch.setattr(kernels, "MANY", 1)
    monkeypatch.setattr(best_token, "PROGRAMS", 8)


def case(B: int, T: int, V: int, device: torch.device, seed: int = 0) -> tuple[Distribution, Tensor, Tensor, Tensor]:
    """Distributions in wider rows of NaN, each third greedy, with cutoffs; best tokens, seeds, positions."""
    g = torch.Generator().manual_seed(seed)
    wide = torch.full((B, T, V + 5), torch.nan)
    wide[..., 2 : V + 2] = torch.randn(B, T, V, generator=g)
    logits = wide.to(device)[..., 2 : V + 2]
    best, column = logits.max(-1)
    key = torch.full((B, T), ALL_KEYS, device=device)
    key[:, 0] = descending_keys(logits).sort(-1).values[:, 0, V // 2]
    temperature = (torch.arange(B) % 3).float().to(device)
    p = Distribution(logits, best.double(), key, temperature, torch.linspace(0, 0.02, B, device=device))
    seeds = torch.randint(0, 1 << 62, (B,), generator=g).to(device)
    positions = torch.randint(0, 1 << 40, (B, T), generator=g).to(device)
    return p, column + FIRST, seeds, positions


def tokens(*arguments: Tensor) -> list[int]:
    return best_of_ranks(torch.cat(arguments))[1].tolist()


def split(p: Distribution, at: int) -> tuple[Distribution, Distribution]:
    return replace(p, logits=p.logits[..., :at]), replace(p, logits=p.logits[..., at:])


@pytest.mark.parametrize("stream", [TARGET, DRAFT])
@pytest.mark.parametrize("B, T, V", [(1, 1, 70), (7, 3, 333), (5, 9, 64), (3, 2, 3)])
def test_any_split_draws_the_references_tokens(B: int, T: int, V: int, stream: int, device: torch.device) -> None:
    p, greedy, seed, positions = case(B, T, V, device)
    rest = greedy, seed, positions, stream
    wanted = tokens(reference(p, *rest, FIRST))
    assert tokens(kernels.gumbel_sample(p, *rest, FIRST)) == wanted
    assert [t for b, t in enumerate(wanted) if b // T % 3 == 0] == greedy[::3].flatten().tolist()
    for at in (1, V // 2, V - 1):
        a, b = split(p, at)
        assert tokens(kernels.gumbel_sample(a, *rest, FIRST), kernels.gumbel_sample(b, *rest, FIRST + at)) == wanted


def test_ranks_gather_equal_shapes(device: torch.device) -> None:
    p, greedy, seed, positions = case(4, 2, 300, device)
    shapes = {
        kernels.gumbel_sample(q, greedy, seed, positions, TARGET, FIRST).shape for at in (1, 150) for q in split(p, at)
    }
    assert len(shapes) == 1 and shapes.pop()[1:] == (8, 2)


def test_a_broken_row_has_no_token_and_is_alone(device: torch.device) -> None:
    p, greedy, seed, positions = case(6, 2, 90, device)
    wanted = tokens(kernels.gumbel_sample(p, greedy, seed, positions, TARGET, FIRST))
    best, broken = p.best.clone(), greedy.clone()
    for row, value in ((0, torch.nan), (2, torch.inf), (4, torch.nan)):  # greedy and drawn
        best[row, 1], broken[row, 1] = value, -1
    got = tokens(kernels.gumbel_sample(replace(p, best=best), broken, seed, positions, TARGET, FIRST))
    assert got == [-1 if i in (1, 5, 9) else t for i, t in enumerate(wanted)]


def test_planted_errors_show(device: torch.device) -> None:
    p, greedy, seed, positions = case(40, 2, 200, device)
    wanted = tokens(reference(p, greedy, seed, positions, TARGET, FIRST))
    others: list[tuple[Any, ...]] = [
        (p, greedy, seed + 1, positions, TARGET, FIRST),
        (p, greedy, seed, positions.flip(1).contiguous(), TARGET, FIRST),
        (p, greedy, seed, positions, DRAFT, FIRST),
        (p, greedy, seed, positions, TARGET, FIRST + 1),
        (replace(p, temperature=p.temperature * 2), greedy, seed, positions, TARGET, FIRST),
        (replace(p, last_key=p.last_key // 2), greedy, seed, positions, TARGET, FIRST),
    ]
    for arguments in others:
        assert tokens(kernels.gumbel_sample(*arguments)) != wanted


@triton.jit
def _noise_kernel(seed, out, bound, N: tl.constexpr):
    index = tl.program_id(0) * N + tl.arange(0, N).to(tl.int64)
    zero = tl.program_id(0) * 0
    tl.store(out + index, gumbel(tl.load(seed), zero, zero, index))
    tl.store(bound + index, gumbel_bound(tl.load(seed), zero, zero, index))


def test_a_bound_rules_out_no_noise(device: torch.device) -> None:
    """The bound is checked for 2^18 numbers, on a GPU for 2^24."""
    n = 1 << (24 if device.type == "cuda" else 18)
    exact, bound = torch.empty(n, dtype=torch.float64, device=device), torch.empty(n, device=device)
    _noise_kernel[n >> 14,](torch.tensor([7], device=device), exact, bound, N=1 << 14)
    over = bound.double() - exact
    assert over.min() > -1e-3 and over.median() < 1e-4 and over.mean() < 1e-4
    assert exact.max() > 12 and exact.min() < -2.3


@pytest.mark.gpu
def test_a_captured_draw_serves_other_positions() -> None:
    p, greedy, seed, positions = case(8, 9, 5000, torch.device("cuda"))
    kernels.gumbel_sample(p, greedy, seed, positions, TARGET, FIRST)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernels.gumbel_sample(p, greedy, seed, positions, TARGET, FIRST)
    for shift in (0, 1, 2):
        positions += shift
        graph.replay()
        assert tokens(captured) == tokens(reference(p, greedy, seed, positions, TARGET, FIRST))
