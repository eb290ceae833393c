"""The exchange beyond the conformance table: any shares, planted errors, messages, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from comm.base import Communicator, pack_partials, partial_views
from comm.loopback import LoopbackWorld, run_ranks
from kernels.attention.split_kv import PartialAttention
from tests.dist.ranks import exchange_error, on_ranks


def check_planted(comm: Communicator, what: str) -> float:
    if what == "a shifted LSE":
        return exchange_error(comm, torch.bfloat16, 15, [4, 3], lse_shift=0.1 * comm.kvp_rank)[0]
    comm.all_to_all = lambda send: send  # type: ignore[method-assign]
    return exchange_error(comm, torch.bfloat16, 15, [4, 4])[0]


@pytest.mark.parametrize("what", ["a shifted LSE", "an identity in place of the all-to-all"])
@pytest.mark.parametrize("transport", ["loopback", "gloo"])
def test_planted_errors_are_seen(transport: str, what: str) -> None:
    errors = on_ranks(transport, 2, 2, check_planted, what)
    assert all(error > 1 for error in errors), errors


@given(
    N=st.integers(0, 4),
    shares=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_exchange_with_any_shares(N: int, shares: list[int], dtype: torch.dtype) -> None:
    K = len(shares)
    for error, _ in on_ranks("loopback", K, K, exchange_error, dtype, N, shares):
        assert error <= 1


@given(
    N=st.integers(0, 3),
    shares=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    head_dim=st.sampled_from([1, 5, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_messages_hold_each_share_then_padding(N: int, shares: list[int], head_dim: int, dtype: torch.dtype) -> None:
    heads = sum(shares)
    out = torch.arange(1, 1 + N * heads * head_dim).view(N, heads, head_dim).to(dtype)
    lse = torch.arange(N * heads).view(N, heads).float()
    send = pack_partials(PartialAttention(out, lse), shares, torch.tensor([0, *shares]).cumsum(0).int())
    to_out, to_lse = partial_views(send, N, max(shares), head_dim, dtype)
    assert send.is_contiguous() and send.shape[0] == len(shares) and send.shape[1] % 64 == 0
    payload = N * max(shares) * (head_dim * dtype.itemsize + 4)
    assert payload <= send.shape[1] < payload + 128, "one message: no more than the payload and two gaps"
    assert send.shape[1] > 0
    assert to_out.storage_offset() == 0 and to_lse.storage_offset() % 16 == 0
    for k, (h, end) in enumerate(zip(shares, torch.tensor(shares).cumsum(0).tolist(), strict=True)):
        assert torch.equal(to_out[k, :, :h], out[:, end - h : end])
        assert torch.equal(to_lse[k, :, :h], lse[:, end - h : end])
        assert (to_out[k, :, h:] == 0).all() and (to_lse[k, :, h:] == -torch.inf).all()


@pytest.mark.parametrize(
    "out, lse, shares, message",
    [
        (torch.zeros(2, 4), torch.zeros(2, 4), [2, 2], r"out must be a floating-point \[N, heads, D\]"),
        (torch.zeros(2, 4, 3, dtype=torch.int64), torch.zeros(2, 4), [2, 2], "torch.int64"),
        (torch.zeros(2, 4, 3), torch.zeros(2, 3), [2, 2], r"lse must be torch.float32 \[2, 4\].*got.*\[2, 3\]"),
        (torch.zeros(2, 4, 3), torch.zeros(2, 4, dtype=torch.bfloat16), [2, 2], "got torch.bfloat16"),
        (torch.zeros(2, 4, 3), torch.zeros(2, 4), [2, 1], r"shares \[2, 1\].*the 4 heads"),
        (torch.zeros(2, 4, 3), torch.zeros(2, 4), [5, -1], r"shares \[5, -1\] must be >= 0"),
        (torch.zeros(2, 4, 3), torch.zeros(2, 4), [4], r"shares \[4\] must have one entry for each rank .*\(0, 1\)"),
    ],
)
def test_exchange_says_what_does_not_fit(out: Tensor, lse: Tensor, shares: list[int], message: str) -> None:
    def body(world: LoopbackWorld, rank: int) -> None:
        with pytest.raises(ValueError, match=message):
            world.communicator(rank, (0, 1)).exchange(out, lse, shares)

    run_ranks(2, body)
