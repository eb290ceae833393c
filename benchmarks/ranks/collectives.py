"""Times the collectives of a decode step, inside a job (`bench=comm`).

Each is checked against torch.distributed's, then timed as CUDA-graph replays of many in a row;
each iteration counts as its slowest rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.timer import in_a_row, slowest
from comm.base import Communicator
from comm.emulated import EmulatedTransport
from comm.symm_mem import MAX_ONE_SHOT_BYTES
from comm.torch_dist import TorchDistCommunicator
from helix.layout import share
from kernels.peers.all_reduce_norm import SLICE_WORDS
from launch.job.task import JobResult, Task

DIM, HIDDEN = 128, 4096
EXCHANGES = [(1, 8), (4, 8), (16, 8), (64, 8), (128, 8)]  # tokens, heads of each rank
NORMS = [(1, 1024), *((tokens, HIDDEN) for tokens in (1, 2, 4, 8, 16, 64, 128, 256))]  # tokens, hidden
LONG = [(tokens, HIDDEN) for tokens in (1024, 4096, 16384)]  # also, on a GPU
GATHERS = [1, 8, 64]  # tokens
IN_A_ROW, ROUNDS = 20, 30
TARGETS = {("exchange", 32 << 10): 6.0, ("exchange", 128 << 10): 8.0, ("all_reduce_norm", 32 << 10): 7.0}


def run(task: Task) -> JobResult:
    """Measures the collectives of a job."""
    return {"collectives": time_collectives(task.comm)}, 0


def time_collectives(comm: TorchDistCommunicator) -> list[dict[str, Any]]:
    """Times each collective in microseconds, by this communicator and by torch.distributed. Collective."""
    rows = []
    bf16 = torch.bfloat16
    K = len(comm.kvp_group)
    emulated = isinstance(comm, EmulatedTransport)
    library = EmulatedTransport if emulated else TorchDistCommunicator
    for tokens, heads in EXCHANGES:
        shares = [len(share(heads, K, k)) for k in range(K)]
        out = torch.randn(tokens, heads, DIM, device=comm.device, dtype=bf16)
        given = out, torch.randn(tokens, heads, device=comm.device), shares
        messages = out.new_zeros(K, tokens * max(shares) * DIM)
        rows.append(
            _row(
                comm, "exchange", out, partial(comm.exchange, *given), partial(library.exchange, comm, *given),
                partial(comm.all_to_all, messages),
            )
        )  # fmt: skip
    for tokens, hidden in [*NORMS, *(LONG if comm.device.type == "cuda" else [])]:
        x = torch.randn(tokens, hidden, device=comm.device, dtype=bf16).mul_(0.1)
        if emulated and x.numel() * x.element_size() * comm.world_size > MAX_ONE_SHOT_BYTES:
            # Emulated owners sum different slices: the result is known only if all slices are equal.
            width = SLICE_WORDS * 4 // x.element_size()
            x = torch.linspace(-0.2, 0.2, width, device=comm.device).to(bf16).repeat(tokens, hidden // width)
        norm = torch.zeros_like(x), torch.ones(hidden, device=comm.device, dtype=bf16), 1e-5
        # The library's sum is in place: copying its input every time would count.
        sums = torch.zeros_like(x)
        ours = partial(_first, comm.all_reduce_norm, x, *norm)
        rows.append(
            _row(
                comm, "all_reduce_norm", x, ours,
                partial(_first, library.all_reduce_norm, comm, sums, *norm), partial(comm.all_reduce, sums),
                check=partial(_first, library.all_reduce_norm, comm, x.clone(), *norm),
            )
        )  # fmt: skip
    for tokens in GATHERS:
        pair = torch.randn(tokens, 2, device=comm.device, dtype=torch.float64)
        theirs = partial(library.all_gather, comm, pair)
        rows.append(_row(comm, "all_gather", pair, partial(comm.all_gather, pair), theirs, theirs))
    return rows


def _first(run: Callable[..., tuple[Tensor, Tensor]], *given: Any) -> Tensor:
    return run(*given)[0]


def _row(
    comm: TorchDistCommunicator, op: str, x: Tensor, ours: Callable[[], Tensor], theirs: Callable[[], Tensor],
    bare: Callable[[], Tensor], check: Callable[[], Tensor] | None = None,
) -> dict[str, Any]:  # fmt: skip
    a, b = ours(), (check or theirs)()
    # Both sum in fp32; the library may round in between and again at the end: units of values up to 16.
    error = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
    assert error < 0.5, f"{op} differs from torch.distributed's by {error}"
    size = x.numel() * x.element_size()
    limits = [limit for (name, limit) in TARGETS if name == op and size <= limit]
    times = {
        "symm": microseconds(comm, ours),
        "nccl": microseconds(comm, theirs),
        "nccl_bare": microseconds(comm, bare),
    }
    row: dict[str, Any] = {"op": op, "ranks": comm.world_size, "message_bytes": size}
    for name, (p50, p90) in times.items():
        counts = name == "symm" or not isinstance(comm, EmulatedTransport)  # two processes do not show NCCL's time
        row |= {f"{name}_us": p50 if counts else None, f"{name}_p90_us": p90 if counts else None}
    return row | {"bar_us": TARGETS[op, min(limits)] if limits else None}


def microseconds(comm: Communicator, run: Callable[[], Any], eager: int = 5) -> tuple[float, float]:
    """Returns p50 and p90 of one call over rounds of `IN_A_ROW`, each the slowest rank's; `eager` calls on a CPU."""
    if comm.device.type != "cuda":
        seconds = in_a_row(run, eager, comm.device)
    else:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        comm.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(IN_A_ROW):
                run()
        comm.barrier()
        graph.replay()  # absorbs the skew between the ranks' hosts
        seconds = [s / IN_A_ROW for s in in_a_row(graph.replay, ROUNDS, comm.device)]
        graph.reset()
    p50, p90 = (float(q) * 1e6 for q in torch.tensor(slowest(comm, seconds)).quantile(torch.tensor([0.5, 0.9])))
    return p50, p90
