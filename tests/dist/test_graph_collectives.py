"""Collectives in CUDA graphs: exact sums over ten thousand replays, and recovery from one that gave up."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from comm.base import Communicator
from comm.partial import PartialProjection
from comm.symm_mem import SymmMemCommunicator
from kernels.attention.flash_decode import decode_parts
from kernels.moe.experts import RoutedExperts
from kernels.paged_keys import PagedKeys
from tests.dist.ranks import balanced, on_ranks


def replay(
    comm: Communicator, step: Callable[..., None], sizes: Sequence[tuple[int, ...]], replays: int, late: float
) -> None:
    """Runs a step of each size once, then captured, in one random order on all ranks, of which one may be late."""
    graphs = []
    for size in sizes:
        step(*size)
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], capture_error_mode="thread_local"):
            step(*size)
    same, own = random.Random(0), random.Random(comm.rank)
    for _ in range(replays):
        if own.random() < late:
            torch.cuda._sleep(own.randrange(2_000_000))  # up to a millisecond
        same.choice(graphs).replay()
    torch.cuda.synchronize()
    comm.check()
    for graph in graphs:
        graph.reset()


def check_replays(comm: Communicator, replays: int) -> int:
    """Wrong elements over many replays of graphs of several sizes, a random rank late now and then."""
    K, H, D, F = len(comm.kvp_group), 3584, 128, 384
    shares = balanced(2 * K + 1, K)
    number = torch.zeros((), dtype=torch.int64, device=comm.device)
    wrong = torch.zeros((), dtype=torch.int64, device=comm.device)
    weight = torch.ones(H, dtype=torch.bfloat16, device=comm.device)
    columns = torch.arange(H, device=comm.device) % 64
    gate_up = torch.randn(2, 2 * F, H, dtype=torch.bfloat16, device=comm.device) / 8
    down = torch.randn(2, H, F, dtype=torch.bfloat16, device=comm.device) / 8
    picks = torch.eye(64, dtype=torch.bfloat16, device=comm.device)[columns]  # a projection that copies

    def value(rank: int, *shape: int) -> Tensor:
        """Small integers that bf16 holds, as do their sums over 8 ranks; another in each place, step and rank."""
        place = torch.arange(torch.Size(shape).numel(), device=comm.device).view(shape)
        return (7 * number + 3 * place + 5 * rank) % 29

    def step(N: int) -> None:
        number.add_(1)
        total = comm.all_reduce_norm(value(comm.rank, N, H).bfloat16(), None, weight, 1e-5)[1]
        wrong.add_((total != sum(value(r, N, H) for r in range(comm.world_size))).sum())
        gathered = comm.all_gather(value(comm.rank, N, 2))
        wrong.add_((gathered != torch.stack([value(r, N, 2) for r in range(comm.world_size)])).sum())
        summed = comm.reduce_scatter(
            torch.stack([value(comm.rank + to, N, 64) for to in range(comm.world_size)]).bfloat16()
        )
        wrong.add_((summed != sum(value(r + comm.rank, N, 64) for r in range(comm.world_size))).sum())
        # Equal weights of a power of two of ranks: the mean is exact.
        out = value(comm.rank, N, 2 * K + 1, D).bfloat16()
        result = comm.exchange(out, torch.zeros(out.shape[:2], device=comm.device), shares)
        first = sum(shares[: comm.kvp_rank])
        wanted = sum(value(r, N, 2 * K + 1, D) for r in comm.kvp_group) / K
        wanted = wanted[:, first : first + shares[comm.kvp_rank]].bfloat16()
        wrong.add_((result != wanted).sum())
        # Queries of zero weigh all keys alike, and a sequence's are all the same page: attention gives its values.
        values = value(comm.rank, N, 1, 2 * K + 1, D).bfloat16().expand(-1, 64, -1, -1).contiguous()
        table = torch.arange(N, dtype=torch.int32, device=comm.device)[:, None].expand(-1, 3).contiguous()
        bounds = table.new_zeros(N, 1), table.new_full((N, 1), 192)
        parts = decode_parts(torch.zeros_like(out)[:, None], PagedKeys(values, values, table, *bounds, 1.0))
        wrong.add_((comm.merge_states_exchange(parts, shares) != wanted).sum())
        projection = PartialProjection(value(comm.rank, N, 64).bfloat16(), picks, None)
        total = comm.all_reduce_norm(projection, torch.zeros_like(total), weight, 1e-5)[1]
        wrong.add_((total != sum(value(r, N, 64) for r in range(comm.world_size))[:, columns]).sum())
        # Experts that send their sums, and the same added up as a tensor.
        x, first = value(comm.rank, N, H).bfloat16() / 64, value(comm.rank, N, 1)
        ids = torch.cat([first % 4, (first + 1) % 4], 1).int()
        chosen = RoutedExperts(x, ids, ids.float(), gate_up, down, comm.rank % 3)  # some have no token here
        total, wanted = (
            comm.all_reduce_norm(parts, torch.zeros_like(total), weight, 1e-5)[1]
            for parts in (chosen, chosen.compute())
        )
        wrong.add_((total != wanted).sum())

    replay(comm, step, [(1,), (2,), (7,), (16,), (40,)], replays, late=0.01)
    assert int(number) == replays + 5
    return int(wrong)


@pytest.mark.parametrize(
    "transport, world_size, kvp, replays",
    [
        pytest.param("nccl", 2, 2, 100, marks=pytest.mark.gpu(2)),
        *(
            pytest.param("symm_mem", *case, 10_000, marks=pytest.mark.gpu(case[0]))
            for case in ((2, 2), (4, 2), (4, 4), (8, 8))
        ),
    ],
)
@pytest.mark.timeout(200)
def test_many_replays(transport: str, world_size: int, kvp: int, replays: int) -> None:
    assert on_ranks(transport, world_size, kvp, check_replays, replays) == [0] * world_size


def check_long(comm: Communicator, replays: int) -> int:
    """Wrong elements over many sums of long chunks, of several widths, with steps between and a rank late at times."""
    assert isinstance(comm, SymmMemCommunicator)
    shapes = (257, 3584), (5001, 3584), (3000, 8192), (1500, 16384), (3, 3584)
    number = torch.zeros((), dtype=torch.int64, device=comm.device)
    wrong = torch.zeros((), dtype=torch.int64, device=comm.device)

    def step(N: int, H: int) -> None:
        number.add_(1)
        place = torch.arange(N * H, device=comm.device).view(N, H)
        parts = [((7 * number + 3 * place + 5 * r) % 29).bfloat16() for r in range(comm.world_size)]
        residual, weight = (place % 17).bfloat16(), torch.ones(H, dtype=torch.bfloat16, device=comm.device)
        y, total = comm.all_reduce_norm(parts[comm.rank].clone(), residual, weight, 1e-5)
        wanted = sum(parts) + residual  # integers that bf16 holds
        wrong.add_((total != wanted).sum())
        squares = wanted.float().square().mean(1, keepdim=True)
        # Rounded to bf16 once, and the square root's own error.
        wrong.add_(
            ((y.float() - wanted.float() * (squares + 1e-5).rsqrt()).abs() > 2**-7 * y.float().abs() + 1e-6).sum()
        )

    for shape in shapes:
        rows = torch.empty(shape, dtype=torch.bfloat16, device=comm.device)
        assert comm._sum_algo(rows) == ("long" if len(rows) > 3 else "one_shot")
    replay(comm, step, shapes, replays, late=0.05)
    assert int(number) == replays + len(shapes)
    return int(wrong)


@pytest.mark.parametrize(
    "world_size, kvp", [pytest.param(*case, marks=pytest.mark.gpu(case[0])) for case in ((2, 1), (4, 1), (8, 1))]
)
@pytest.mark.timeout(200)
def test_sums_of_long_chunks(world_size: int, kvp: int) -> None:
    assert on_ranks("symm_mem", world_size, kvp, check_long, 500) == [0] * world_size


def check_recovery(comm: Communicator) -> str:
    """Rank 1 leaves a collective out; what rank 0 is told, and that all is well after a reset."""
    assert isinstance(comm, SymmMemCommunicator)
    comm._spins = 100_000
    x = torch.full((3,), comm.rank, dtype=torch.int32, device=comm.device)
    comm.all_gather(x)
    message = ""
    if comm.rank == 0:
        comm.all_gather(x)
        with pytest.raises(RuntimeError) as error:
            comm.check()
        message = str(error.value)
        with pytest.raises(RuntimeError, match="for rank 1 "):
            comm.check(wait=False)
    comm.reset()
    torch.cuda._sleep(1_000_000_000)  # half a second and more
    comm.check(wait=False)
    assert not torch.cuda.current_stream().query(), "a look at what has ended must not wait for the rest"
    comm.check()
    for _ in range(3):
        assert comm.all_gather(x)[:, 0].tolist() == [0, 1]
    return message


@pytest.mark.gpu(2)
def test_a_rank_that_stays_away_is_named_and_a_reset_recovers() -> None:
    assert "for rank 1 " in on_ranks("symm_mem", 2, 2, check_recovery)[0]
