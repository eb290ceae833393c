"""What surrounds the layers of a step: placement, angles, the best token; kernel against reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helix.kv_placement import KVPlacement
from helix.layout import HelixLayout
from kernels.attention.placement import compute_slot_mapping, local_bounds
from kernels.dense.reference import angles as reference_angles
from kernels.dense.rotary import angles
from kernels.tokens import reference as reference_best
from kernels.tokens.best_token import best_of_rank, best_of_ranks, width_of

HOME = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.one_of(st.none(), st.integers(1, 40)), st.data())
def test_placement_is_the_layouts(kvp: int, block: int, page: int, window: int | None, data: Any) -> None:
    N = 140  # two programs
    layout = HelixLayout.create("helix", kvp)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    positions = torch.randint(0, 90, (N,), generator=generator)
    starts = torch.randint(0, kvp, (N,), generator=generator)
    live = torch.rand(N, generator=generator) < 0.8
    tables = torch.randint(0, 1000, (7, 91), generator=generator).int()
    rows = torch.randint(0, 7, (N,), generator=generator)
    for rank in range(kvp):
        plain = KVPlacement(layout, rank, block, page)
        grid = {"kvp": kvp, "kvp_rank": rank, "append_block": block}
        on = [t.to(HOME) for t in (positions, starts, live)]
        lo, hi = local_bounds(*on, **grid, window=window)
        wanted = [
            layout.local_bounds(int(p), rank, block, int(s), window) for p, s in zip(positions, starts, strict=True)
        ]
        assert lo.tolist() == [a for a, _ in wanted]
        assert hi.tolist() == [b if ok else a for (a, b), ok in zip(wanted, live.tolist(), strict=True)]
        slots = compute_slot_mapping(*on, tables.to(HOME), rows.to(HOME), **grid, page_size=page)
        expected = []
        for p, s, ok, row in zip(positions.tolist(), starts.tolist(), live.tolist(), rows.tolist(), strict=True):
            local = layout.token_slot(p, block)
            mine = layout.token_owner(p, block, s) == rank and ok
            expected.append(int(tables[row, local // page]) * page + local % page if mine else -1)
        assert slots.tolist() == expected
        assert plain.compute_slot_mapping(positions, starts, live, tables, rows).tolist() == expected


@pytest.mark.parametrize("half", [1, 5, 64])
def test_angles(half: int, device: torch.device) -> None:
    positions = torch.tensor([0, 1, 77, 131_071, 1_048_575], device=device)
    inv_freq = (1e6 ** -(torch.arange(half) / half)).to(device)
    inv_freq[half - half // 4 :] = 0.0  # dimensions that rest
    got, wanted = (op(positions, inv_freq, 1.2, torch.float32) for op in (angles, reference_angles))
    # The same fp32 angle; sines of large angles differ by their argument reduction, a few units of 2^-23.
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=0)
    resting = inv_freq == 0
    assert (got[0][:, resting] == 1).all() and (got[1][:, resting] == 0).all(), "not even the factor counts there"


@pytest.mark.parametrize("V", [1, 5, 2048, 5000])
def test_best_of_rank(V: int, device: torch.device) -> None:
    scores = torch.randint(-3, 3, (6, V), generator=torch.Generator().manual_seed(V)).float().to(device)  # many ties
    scores[1] = -torch.inf
    scores[2, V // 2] = torch.nan
    scores[3, V - 1] = torch.inf
    wide = torch.full((6, V + 3), 9.0, device=device)
    wide[:, :V] = scores
    pairs = best_of_rank(wide[:, :V], 40)
    assert pairs.dtype == torch.float64 and pairs.shape[1:] == (6, 2)
    best, tokens = reference_best.best_of_ranks(pairs)
    wanted, column = scores.double().max(1)
    assert torch.equal(best.nan_to_num(nan=99.0, neginf=-99.0), wanted.nan_to_num(nan=99.0, neginf=-99.0))
    assert tokens.tolist() == torch.where(wanted.isfinite(), column + 40, -1).tolist()


def test_best_of_ranks(device: torch.device) -> None:
    nan, inf = torch.nan, torch.inf
    values = torch.tensor([[1, 5, nan, 2, -inf], [1, 4, 3, inf, -inf], [0, 5, 7, 2, -inf]], dtype=torch.float64)
    ids = torch.arange(15, dtype=torch.float64).view(3, 5).flip(0)
    pairs = torch.stack([values, ids], -1).to(device)
    assert width_of(len(pairs), 1) == 4, "more than there are"
    best, tokens = best_of_ranks(pairs)
    wanted, expected = reference_best.best_of_ranks(pairs)
    assert tokens.tolist() == expected.tolist() == [5, 1, -1, -1, -1]
    assert torch.equal(best.nan_to_num(nan=99.0), wanted.nan_to_num(nan=99.0))
