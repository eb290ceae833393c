"""Lookups of Gluon programs in a few expert ids, here run on NumPy's numbers, and the programs' runs of steps."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.dense import split_k_reduce_sm90
from kernels.moe import expert_lookup_sm90, experts_scaled_sm90, experts_sm90
from kernels.moe.expert_lookup_sm90 import active_experts, nth_expert, pairs_with, slots
from kernels.moe.experts_scaled_sm90 import BLOCK_K, are_few

Ints = NDArray[np.int32]


@dataclass
class Pointer:
    """A pointer to ids, or several."""

    ids: Ints
    at: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.ids, self.at + offset)


def load(pointer: Pointer, mask: Any, other: int) -> Ints:
    """Reads where the mask allows, and no further."""
    found = np.full(mask.shape, other, np.int32)
    found[mask] = pointer.ids[pointer.at[mask]]
    return found


def popcount(x: Any) -> Any:
    return np.vectorize(lambda value: (int(value) & 0xFFFFFFFF).bit_count(), otypes=[np.int32])(x)


@pytest.fixture(autouse=True)
def language(monkeypatch: pytest.MonkeyPatch) -> None:
    gl = SimpleNamespace(
        arange=lambda start, stop, layout=None: np.arange(start, stop, dtype=np.int32),
        load=load, where=np.where, full_like=np.full_like, reduce_or=np.bitwise_or.reduce, max=np.max,
        static_range=range, minimum=min, maximum=max, num_warps=lambda: 4,
    )  # fmt: skip
    for module in (expert_lookup_sm90, experts_sm90, experts_scaled_sm90, split_k_reduce_sm90):
        monkeypatch.setattr(module, "gl", gl)
    monkeypatch.setattr(expert_lookup_sm90, "_alike", lambda size, warps: None)
    monkeypatch.setattr(expert_lookup_sm90, "_popcount", popcount)
    monkeypatch.setattr(split_k_reduce_sm90, "LEVELS", split_k_reduce_sm90.LEVELS.value)
    monkeypatch.setattr(experts_scaled_sm90, "BLOCK_K", BLOCK_K.value)


def choices(N: int, k: int, experts: int, skewed: bool) -> Ints:
    """Different experts for each token; if skewed, the same for all."""
    rng = np.random.default_rng(N * 100 + k)
    ids = np.stack([rng.permutation(experts)[:k] for _ in range(N)]).astype(np.int32)
    return ids[np.zeros(N, int)] if skewed else ids


RANKS = [
    (9, 257, 0, 257, 6144, 256), (8, 256, 64, 64, 7168, 512), (8, 256, 224, 32, 7168, 2048), (1, 8, 2, 3, 512, 192),
    (4, 32, 0, 32, 2880, 2880), (10, 512, 31, 65, 2048, 512), (1, 64, 60, 4, 512, 192), (8, 8, 0, 8, 256, 224),
]  # fmt: skip


@pytest.mark.parametrize(
    "N, skewed, k, experts, first, E, H, F",
    [
        *((N, (N == 3) ^ i % 2, *rank) for i, rank in enumerate(RANKS) for N in (3, 8)),
        *((N, False, *RANKS[-1]) for N in (1, 2)),
    ],
)
def test_programs_find_their_experts_and_pairs(
    N: int, skewed: bool, k: int, experts: int, first: int, E: int, H: int, F: int
) -> None:
    """Runs of all programs, one behind the other, are the steps of all tiles, in order of experts, with all pairs."""
    ids = choices(N, k, experts, skewed)
    if N == 3:
        ids[1] = -1  # a token that is nobody's
    P, columns, programs, parts = N * k, 8, 3 * 132, 2
    assert are_few(N, P, columns, programs) and not are_few(columns + 1, P, columns, programs)
    local = ids - first
    touched = np.unique(local[(local >= 0) & (local < E)])
    block_p = max(32, 1 << (P - 1).bit_length())
    places, count = active_experts.fn(Pointer(ids.ravel()), P, first, E, block_p)
    assert count == len(touched)
    assert [int(nth_expert.fn(places, j, E)) for j in range(count)] == touched.tolist()
    token = np.arange(columns, dtype=np.int32)
    of = slots.fn(Pointer(ids.ravel()), token, N, k)
    for gate, rows in product((True, False), (64, 128)):
        width, tiles = (H, -(-2 * F // rows)) if gate else (F, -(-H // rows))
        steps = range(0, width, parts * BLOCK_K.value)
        wanted = [(tile, int(e), column) for e in touched for tile in range(tiles) for column in steps]
        found = []
        for program in range(programs):
            begin, end, *_ = split_k_reduce_sm90.share_of.fn(count * tiles, len(steps), program, programs)
            first_block = begin // (len(steps) * tiles)
            two = [nth_expert.fn(places, first_block + i, E) for i in range(2)]
            for at in range(begin, end):
                tile, block, column = experts_scaled_sm90.locate.fn(at, first_block, gate, H, F, 0, parts, rows)
                assert 0 <= block < 2
                found.append((tile, int(experts_scaled_sm90.select_pair.fn(block, two, True, columns)), column))
        assert found == wanted
    for e in touched:
        pair = pairs_with.fn(of, token, e + first, k)
        assert pair[pair >= 0].tolist() == np.flatnonzero(local == e).tolist()


def test_no_expert_here() -> None:
    ids = np.array([-1, 5, 99, 300], np.int32)
    places, count = active_experts.fn(Pointer(ids), 4, 6, 40, 32)
    assert count == 0 and all((place == -1).all() for place in places)
    assert split_k_reduce_sm90.share_of.fn(0, 24, 7, 396)[:2] == (0, 0)
