"""Two processes that emulate ranks of a larger world: every message that a rank waits for comes, once, and whole."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.ranks.synthetic import vocab_held
from comm.emulated import EmulatedCommunicator, EmulatedTransport, rank_of
from comm.symm_mem import SymmMemCommunicator
from comm.torch_dist import TorchDistCommunicator
from helix.layout import HelixLayout
from kernels.attention.reference import merge_states
from tests.pool import pool

LAYOUTS = [(2, 2), (4, 4), (4, 2), (8, 8), (8, 4), (8, 2), (6, 3), (5, 5)]  # ranks, kvp


def in_worker(process: int, processes: int, kind: type[EmulatedTransport], world: int, kvp: int) -> list[Any]:
    """What a process gets from every collective, brought back to the CPU."""
    device = torch.device("cuda", process) if kind is EmulatedCommunicator else torch.device("cpu")
    groups = [tuple(range(first, first + kvp)) for first in range(0, world, kvp)]
    comm = kind(groups, device, timedelta(seconds=60))
    assert (comm.rank, comm.world_size) == (rank_of(process, processes, world), world) and comm.rank in comm.kvp_group
    shares = [2] * (kvp - 1) + [1]
    generator = torch.Generator().manual_seed(process)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    found = []
    for _ in range(3):
        found.append(comm.all_to_all(random(kvp, 5)))
        found.append(comm.all_gather(random(3, 4)))
        found.append(comm.all_reduce(random(3, 4)))
        found.append(comm.all_reduce_norm(random(3, 64), None, torch.ones(64, device=device), 1e-5)[1])
        found.append(comm.exchange(random(3, 2 * kvp - 1, 16), random(3, 2 * kvp - 1), shares))
        found.append(comm.all_reduce_norm(random(8, 2880), None, torch.ones(2880, device=device), 1e-5)[1])
        found.append(comm.reduce_scatter(random(world, 3, 4)))
        if processes == 1:  # all transports then take its own row W times; 120 rows divide by every W
            found.append(comm.all_reduce_norm(random(120, 3584), None, torch.ones(3584, device=device), 1e-5)[1])
    objects = comm.all_gather_object(process)
    comm.check()
    comm.close()
    return [*(tensor.cpu() for tensor in found), objects]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("world, kvp", LAYOUTS)
def test_over_gloo(world: int, kvp: int, processes: int) -> None:
    """The first collective of each kind, by what each process sent."""
    lanes = 2 * kvp - 1
    shapes = (kvp, 5), (3, 4), (3, 4), (3, 64), (3, lanes, 16), (3, lanes), (8, 2880), (world, 3, 4)
    sent = []
    for process in range(processes):
        generator = torch.Generator().manual_seed(process)
        sent.append([torch.randn(*shape, generator=generator) for shape in shapes])
    half = world // processes

    def parts(x: Tensor, other_x: Tensor, mine: int, theirs: int) -> list[Tensor]:
        """Part s comes from rank s: its own, that of the other emulated rank, or what the other sends to rank s."""
        return [x[s] if s == mine else other_x[mine if s == theirs else s] for s in range(len(x))]

    def padded(x: Tensor, empty: float) -> Tensor:
        """[kvp, rows, 2, ...]: the heads of each rank, of two lanes each, where the last rank owns one head."""
        beside = torch.full_like(x[:, :1], empty)
        return torch.cat([x, beside], 1).unflatten(1, (kvp, 2)).movedim(1, 0)

    for p, found in enumerate(pool(processes, "gloo").run(in_worker, EmulatedTransport, world, kvp)):
        other = processes - 1 - p
        (messages, x, y, rows, out, lse, _, scattered), other_sent = sent[p], sent[other]
        rank, peer = p * half, other * half
        mine, theirs = rank % kvp, peer % kvp
        assert torch.equal(found[0], torch.stack(parts(messages, other_sent[0], mine, theirs)))
        assert torch.equal(found[1], torch.stack([x if r == rank else other_sent[1] for r in range(world)]))
        torch.testing.assert_close(found[2], y + (world - 1) * other_sent[2])
        torch.testing.assert_close(found[3], rows + (world - 1) * other_sent[3])
        # A rank that owns one head more than the destination of a message meant for it receives an empty lane.
        outs, logs = (
            torch.stack(parts(padded(a, empty), padded(b, empty), mine, theirs))
            for a, b, empty in ((out, other_sent[4], 0.0), (lse, other_sent[5], -torch.inf))
        )
        wanted, _ = merge_states(outs, logs, out=None, out_lse=None)
        own = 2 if mine < kvp - 1 else 1
        torch.testing.assert_close(found[4], wanted[:, :own], atol=2**-19, rtol=0)
        torch.testing.assert_close(found[6], sum(parts(scattered, other_sent[7], rank, peer)), atol=2**-19, rtol=0)
        assert found[-1] == [min(r // half, processes - 1) for r in range(world)]


@pytest.mark.parametrize(
    "world, rows, hidden, real, played",
    [
        (8, 1, 3584, "one_shot", "one_shot"),
        (8, 4, 4096, "one_shot", "one_shot"),  # 32 KiB a rank
        (8, 8, 3584, "two_shot", "two_shot"),
        (4, 8, 4096, "one_shot", "one_shot"),  # 64 KiB a rank
        (8, 5, 7168, "two_shot", "one_shot"),  # 70 pieces: some ranks own one more than others
        (8, 8, 2880, "two_shot", "one_shot"),  # the last piece of a row is smaller
        (8, 128, 3584, "rows", "rows"),  # more pieces than boxes
        (8, 100, 3584, "rows", None),  # some ranks own one row more than others
        (6, 252, 3584, "rows", "rows"),
        (6, 253, 3584, "long", None),  # more rows than boxes, in groups of which one is smaller
        (8, 8192, 3584, "long", "long"),
        (4, 264, 3584, "long", None),  # 66 groups
        (2, 128, 16384, "long", "long"),
        (2, 128, 16386, None, None),  # a row that is longer than its box
        (2, 1 << 19, 3584, None, None),  # more groups than boxes take turns for
        (1, 1, 3584, None, None),
    ],
)
def test_how_rows_are_added_up(world: int, rows: int, hidden: int, real: str | None, played: str | None) -> None:
    """Who plays ranks takes one shot where a piece that comes for another rank would not be like its own."""
    x = torch.empty(rows, hidden, dtype=torch.bfloat16)
    for kind, wanted in ((SymmMemCommunicator, real), (EmulatedCommunicator, played)):
        comm = object.__new__(kind)
        comm.world_size = world
        assert comm._sum_algo(x) == wanted


@pytest.mark.parametrize("processes", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (1, 2)])
@pytest.mark.parametrize("world, kvp", LAYOUTS)
def test_between_gpus_as_over_gloo(world: int, kvp: int, processes: int) -> None:
    plain = pool(processes, "gloo").run(in_worker, EmulatedTransport, world, kvp)
    gpus = pool(processes, "nccl").run(in_worker, EmulatedCommunicator, world, kvp)
    for ours, theirs in zip(gpus, plain, strict=True):
        assert ours[-1] == theirs[-1]
        for a, b in zip(ours[:-1], theirs[:-1], strict=True):
            torch.testing.assert_close(a, b, atol=2**-17, rtol=0)  # fp32 sums of up to eight terms, in another order


@pytest.mark.parametrize("kind, share", [(EmulatedTransport, 8), (TorchDistCommunicator, 1)])
def test_benchmarks_draw_tokens_that_have_embeddings(kind: type[TorchDistCommunicator], share: int) -> None:
    layout, comm = HelixLayout.create("helix", 2, 4), object.__new__(kind)
    runner = SimpleNamespace(layout=layout, comm=comm, model=SimpleNamespace(spec=SimpleNamespace(vocab=1600)))
    assert vocab_held(runner) == 1600 // share and max(layout.vocab_rows(0, 1600)) < 200  # type: ignore[arg-type]
