"""Merge and exchange in one kernel: what the merge and then the exchange give, with ranks that share one device."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from kernels.attention.flash_decode import decode_parts
from kernels.attention.split_kv import LARGE, UnmergedAttention
from kernels.peers.exchange import IN_GROUP, PIECE_WORDS, exchange
from kernels.peers.merge_exchange import merge_exchange
from tests.kernels.oracle import make_case
from tests.kernels.test_collectives import PIECES, Ranks
from tests.pairs import params

# Of each: queries, keys of the ranks' sequences, heads, head dim, shares of the heads.
SHAPES = {
    "plain": dict(count=1, lengths=[[40, 70], [17, 33]], heads=(4, 2), dim=64, shares=[2, 2]),
    "group-7-of-three": dict(count=1, lengths=[[90], [65], [129]], heads=(7, 1), dim=80, shares=[3, 2, 2]),
    "empty-shard-and-share": dict(count=1, lengths=[[50, 0], [0, 0]], heads=(5, 1), dim=96, shares=[5, 0]),
    "drafts": dict(count=3, lengths=[[66, 40], [70, 3]], heads=(4, 2), dim=64, shares=[2, 2]),
    "large-parts": dict(count=8, lengths=[[66], [40]], heads=(4, 1), dim=128, shares=[2, 2]),
    "sinks": dict(count=2, lengths=[[130], [31]], heads=(6, 2), dim=64, shares=[3, 3], sinks=True),
    "dim-256-of-four": dict(count=1, lengths=[[100], [64], [33], [1]], heads=(4, 1), dim=256, shares=[1, 1, 1, 1]),
}
PROGRAMS = 1, 3, 40


def parts_of(shape: str, rank: int, sms: int, dtype: torch.dtype, device: torch.device) -> UnmergedAttention:
    """A rank's attention, before its merge; its workspace is its own."""
    s = SHAPES[shape]
    lengths = s["lengths"][rank]
    case = make_case(
        counts=[s["count"]] * len(lengths), lengths=lengths, heads=s["heads"], dim=s["dim"], seed=rank,
        sinks=s.get("sinks", False) and rank == 0, dtype=dtype, device=device,
    )  # fmt: skip
    q = case.q.unflatten(0, (len(lengths), -1))
    out, lse = torch.full_like(q, torch.nan), q.new_full(q.shape[:3], torch.nan, dtype=torch.float32)
    parts = decode_parts(q, case.paged(len(lengths)), out=out, lse=lse, sms=sms)
    assert isinstance(parts, UnmergedAttention)
    return UnmergedAttention(**{**parts.__dict__, "part": parts.part.clone(), "part_lse": parts.part_lse.clone()})


@pytest.mark.parametrize(
    "shape, sms, dtype",
    [
        *params([*product(SHAPES, PROGRAMS, (torch.float32, torch.float16))]),
        *(pytest.param(*case, torch.bfloat16, marks=pytest.mark.gpu) for case in product(SHAPES, PROGRAMS)),
    ],
)
def test_as_one_after_the_other(shape: str, sms: int, dtype: torch.dtype, device: torch.device) -> None:
    shares, dim = SHAPES[shape]["shares"], SHAPES[shape]["dim"]
    W = len(shares)
    starts = torch.tensor([0, *shares]).cumsum(0).to(device, torch.int32)
    each = [parts_of(shape, r, sms, dtype, device) for r in range(W)]
    assert (each[0].part[0].numel() >= LARGE) == (shape == "large-parts")
    N = each[0].out.shape[0] * each[0].out.shape[1]

    def run(ranks: Ranks, rank: int, push: bool, fused: bool) -> Tensor:
        result = torch.full((N, shares[rank], dim), torch.nan, device=device, dtype=dtype)
        given = (starts, ranks.peers, (ranks.counts[rank][0], ranks.counts[rank][1]), ranks.status[rank])
        options = dict(rank=rank, lanes=max(shares), pieces=PIECES, spins=3, push=push, wait=not push)
        if fused:
            return merge_exchange(each[rank], result, *given, **options)
        return exchange(*merged[rank], result, *given, **options)

    found = []
    for fused in (True, False):  # first without the merge, which would complete `out`
        ranks = Ranks(W, 2 * W * PIECES * PIECE_WORDS, device)
        merged = [] if fused else [parts.merge() for parts in each]
        for _ in range(3 if shape == "plain" else 1):  # two tags take turns
            for r in range(W):
                run(ranks, r, True, fused)
            results = [run(ranks, r, False, fused) for r in range(W)]
        assert ranks.gave_up() == [0] * W
        found.append(torch.cat(results, 1))
    # Sums of the same parts in another order, each side rounded once more before it is sent: units of values up to 4.
    tolerance = {torch.float32: 2**-20, torch.float16: 2**-8, torch.bfloat16: 2**-5}[dtype]
    torch.testing.assert_close(*found, atol=tolerance, rtol=0)
    assert not found[0].isnan().any()


def test_a_rank_that_does_not_come_is_named(device: torch.device) -> None:
    parts = parts_of("plain", 0, 2, torch.float32, device)
    ranks = Ranks(2, 2 * 2 * PIECES * PIECE_WORDS, device)
    starts = torch.tensor([0, 2, 4], dtype=torch.int32, device=device)
    result = torch.zeros(2, 2, 64, device=device)
    merge_exchange(
        parts, result, starts, ranks.peers, (ranks.counts[0][0], ranks.counts[0][1]),
        ranks.status[0], rank=0, lanes=2, pieces=PIECES, spins=3,
    )  # fmt: skip
    assert ranks.gave_up() == [IN_GROUP + 2, 0] and result.isnan().all()
