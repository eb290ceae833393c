"""Merge straight into messages: what the merge and then the copies of the reference give."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from kernels.attention.merge_states_pack import merge_states_pack
from kernels.attention.reference import merge_states_pack as reference
from kernels.attention.split_kv import PartialAttention
from tests.kernels.test_merge_exchange import PROGRAMS, SHAPES, parts_of


def messages(shares: list[int], N: int, dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Poisoned messages, strided: in the gaps between them nothing may be written."""
    K, lanes = len(shares), max(shares)
    wide = torch.full((K, N + 1, lanes, dim), torch.nan, dtype=dtype, device=device)
    return wide, torch.full((K, N + 1, lanes + 1), torch.nan, device=device)


def error(shape: str, sms: int, dtype: torch.dtype, device: torch.device, before: int = 0) -> float:
    """The largest difference of outputs and LSEs, of all ranks' messages.

    A planted error: every destination gets the heads of the one so many `before` it.
    """
    shares, dim = SHAPES[shape]["shares"], SHAPES[shape]["dim"]
    starts = torch.tensor([0, *shares]).cumsum(0).to(device, torch.int32)
    worst = 0.0
    for rank in range(len(shares)):
        parts = parts_of(shape, rank, sms, dtype, device)
        N, lanes = parts.lse.shape[:-1].numel(), max(shares)
        wide, wide_lse = messages(shares, N, dim, dtype, device)
        to_out, to_lse = wide[:, :N], wide_lse[:, :N, :lanes]
        merge_states_pack(parts, to_out, to_lse, shares, starts - before * starts[1])
        assert wide[:, N:].isnan().all() and wide_lse[:, N:].isnan().all() and wide_lse[..., lanes:].isnan().all()
        out, lse = parts.merge_states()
        wanted, wanted_lse = torch.empty_like(to_out), torch.empty_like(to_lse)
        reference(out, lse, wanted, wanted_lse, shares)
        assert not to_out.isnan().any() and torch.equal(to_lse == -torch.inf, wanted_lse == -torch.inf)
        to_lse[wanted_lse == -torch.inf] = wanted_lse[wanted_lse == -torch.inf] = 0
        assert not to_lse.isnan().any()
        off = to_out.float() - wanted.float(), to_lse - wanted_lse
        worst = max(worst, *(float(x.abs().max()) for x in off))
    return worst


WAYS = [*product(PROGRAMS, (torch.float32, torch.float16))]
CASES = [
    *((shape, *WAYS[i % len(WAYS)]) for i, shape in enumerate(SHAPES)),
    *(
        pytest.param(*case, marks=pytest.mark.gpu)
        for case in product(SHAPES, PROGRAMS, (torch.float32, torch.float16, torch.bfloat16))
    ),
]
# The same sums of the same parts, in fp32, in slices of another width: a unit of outputs and LSEs up to 8, rounded once
# to the output's dtype.
TOLERANCE = {torch.float32: 2**-20, torch.float16: 2**-8, torch.bfloat16: 2**-5}


@pytest.mark.parametrize("shape, sms, dtype", CASES)
def test_as_the_merge_and_then_copies(shape: str, sms: int, dtype: torch.dtype, device: torch.device) -> None:
    assert error(shape, sms, dtype, device) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dim", [24, 128, 512])
@pytest.mark.parametrize("apart", [1, 2])
@pytest.mark.parametrize("shares", [[3, 2], [5], [9, 9, 9, 8], [1, 0, 1]], ids=str)
def test_partials_that_are_merged_are_copied(shares: list[int], apart: int, dim: int, device: torch.device) -> None:
    """To the bit, out of strided tensors; lanes beyond a destination's heads are an empty shard."""
    heads, N, lanes = sum(shares), 3, max(shares)
    out = torch.randn(N, heads, apart * dim + 8, device=device)[..., : apart * dim : apart]
    lse = torch.randn(heads, N, device=device).T
    starts = torch.tensor([0, *shares]).cumsum(0).to(device, torch.int32)
    wide, wide_lse = messages(shares, N, dim, torch.float32, device)
    merge_states_pack(PartialAttention(out, lse), wide[:, :N], wide_lse[:, :N, :lanes], shares, starts)
    assert wide[:, N:].isnan().all() and wide_lse[:, N:].isnan().all() and wide_lse[..., lanes:].isnan().all()
    wanted, wanted_lse = (torch.full_like(x, torch.nan) for x in (wide, wide_lse))
    reference(out, lse, wanted[:, :N], wanted_lse[:, :N, :lanes], shares)
    torch.testing.assert_close(wide, wanted, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(wide_lse, wanted_lse, atol=0, rtol=0, equal_nan=True)


def test_a_head_of_another_destination_is_caught(device: torch.device) -> None:
    with pytest.raises(AssertionError):
        assert error("drafts", 3, torch.float32, device, before=1) <= TOLERANCE[torch.float32]
