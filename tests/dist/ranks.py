"""Checks that run inside a rank and see only a `Communicator`, on every transport."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comm.base import Communicator
from comm.loopback import run_ranks
from comm.symm_mem import SymmMemCommunicator
from comm.torch_dist import TorchDistCommunicator
from tests.pool import pool

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float64)
SHAPES = ((), (5,), (3, 7), (0, 4))

Check = Callable[..., Any]


def kvp_groups(world_size: int, kvp: int) -> list[tuple[int, ...]]:
    return [tuple(range(first, first + kvp)) for first in range(0, world_size, kvp)]


def in_worker(rank: int, world_size: int, kind: type[TorchDistCommunicator], kvp: int, check: Check, *args: Any) -> Any:
    device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else "cpu"
    comm = kind(kvp_groups(world_size, kvp), device, timedelta(seconds=20))
    result = check(comm, *args)
    comm.close()
    return result


def on_ranks(transport: str, world_size: int, kvp: int, check: Check, *args: Any) -> list[Any]:
    """Results of `check(comm, *args)` on every rank."""
    if transport == "loopback":
        groups = kvp_groups(world_size, kvp)
        return run_ranks(world_size, lambda world, rank: check(world.communicator(rank, groups[rank // kvp]), *args))
    kind = SymmMemCommunicator if transport == "symm_mem" else TorchDistCommunicator
    return pool(world_size, "gloo" if transport == "gloo" else "nccl").run(in_worker, kind, kvp, check, *args)


CASES = [
    *[("loopback", *case) for case in ((1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (4, 4), (6, 3), (8, 4), (8, 8))],
    *[("gloo", *case) for case in ((1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (4, 4))],
    *[pytest.param("nccl", *case, marks=pytest.mark.gpu(case[0])) for case in ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4))],
    *[
        pytest.param("symm_mem", *case, marks=pytest.mark.gpu(case[0]))
        for case in ((2, 1), (2, 2), (4, 2), (4, 4), (8, 4), (8, 8))
    ],
]
every_case = pytest.mark.parametrize("transport, world_size, kvp", CASES)


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Draws a rank's input: random, different on each rank, negative too."""
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.int64:
        return torch.randint(-(2**55), 2**55, shape, generator=generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(100).to(dtype)


def check_all_to_all(comm: Communicator) -> None:
    K = len(comm.kvp_group)
    for dtype in (*DTYPES, torch.uint8):
        for shape in SHAPES:
            # Element values name the source and the destination: 10 * source + destination.
            send = (10 * comm.kvp_rank + torch.arange(K)).view(K, *(1 for _ in shape)).expand(K, *shape)
            send = send.to(comm.device, dtype).contiguous()
            received = comm.all_to_all(send)
            expected = (10 * torch.arange(K) + comm.kvp_rank).view(K, *(1 for _ in shape)).expand(K, *shape)
            assert received.dtype == dtype and torch.equal(received.cpu(), expected.to(dtype))
    for wrong in (torch.zeros(K + 1, 2), torch.zeros(2, K).t()):
        if wrong.shape[0] != K or not wrong.is_contiguous():  # K = 1 has no strided [K, 2]
            with pytest.raises(AssertionError, match="all_to_all needs a contiguous"):
                comm.all_to_all(wrong.to(comm.device))


def balanced(heads: int, K: int) -> list[int]:
    return [heads // K + (k < heads % K) for k in range(K)]
