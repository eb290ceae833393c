"""Merge and exchange in one kernel: what the merge and then the exchange give, with ranks that share one device."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kernels.attention.flash_decode import decode_parts
from kernels.attention.split_kv import LARGE, UnmergedAttention
from kernels.peers.exchange import GROUP_RANK_OFFSET, exchange
from kernels.peers.merge_states_exchange import merge_states_exchange
from tests.kernels.oracle import make_case
from tests.kernels.peers import Exchange
from tests.pairwise import params

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
DTYPES = torch.float32, torch.float16


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
        *params([*product(SHAPES, PROGRAMS[1:], DTYPES), *product(("plain", "drafts"), PROGRAMS[:1], DTYPES)]),
        *(pytest.param(*case, torch.bfloat16, marks=pytest.mark.gpu) for case in product(SHAPES, PROGRAMS)),
    ],
)
def test_as_one_after_the_other(shape: str, sms: int, dtype: torch.dtype, device: torch.device) -> None:
    shares = SHAPES[shape]["shares"]
    each = [parts_of(shape, r, sms, dtype, device) for r in range(len(shares))]
    assert (each[0].part[0].numel() >= LARGE) == (shape == "large-parts")
    found = []
    for op in (merge_states_exchange, exchange):  # first without the merge, which would complete `out`
        ranks = Exchange(shares, device)
        given = [(parts,) if op is merge_states_exchange else parts.merge_states() for parts in each]
        for _ in range(3 if shape == "plain" else 1):  # two tags take turns
            for push in (True, False):
                results = [
                    ranks.run(r, given[r], each[r].out.flatten(0, 1), op, push=push, wait=not push)
                    for r in range(ranks.count)
                ]
        assert ranks.timeouts() == [0] * ranks.count
        found.append(torch.cat(results, 1))
    # Sums of the same parts in another order, each side rounded once more before it is sent: units of values up to 4.
    tolerance = {torch.float32: 2**-20, torch.float16: 2**-8, torch.bfloat16: 2**-5}[dtype]
    torch.testing.assert_close(*found, atol=tolerance, rtol=0)
    assert not found[0].isnan().any()


def test_a_rank_that_does_not_come_is_named(device: torch.device) -> None:
    parts, ranks = parts_of("plain", 0, 2, torch.float32, device), Exchange([2, 2], device)
    result = ranks.run(0, (parts,), parts.out.flatten(0, 1), merge_states_exchange)
    assert ranks.timeouts() == [GROUP_RANK_OFFSET + 2, 0] and result.isnan().all()
