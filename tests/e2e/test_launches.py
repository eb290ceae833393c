"""Launches of a step behind its logits: nothing but the fused kernel behind the last gather over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from comm.base import Communicator
from comm.loopback import LoopbackWorld, run_ranks
from helix.config import HopBChunks
from helix.engine.core import Engine
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.sampling_params import SamplingParams
from helix.speculation import DraftBudget, SuffixDrafter
from kernels import dispatch
from tests.e2e.checkpoints import DEMO
from tests.e2e.parity import SelfDrafts, build_engine
from tests.kernels.quick_interpreter import quick
from tests.sequences import generated

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter runs")
GATHER, COMMIT = "all_gather", "_commit_kernel"
FREE = {"empty", "empty_like", "new_empty", "flatten", "unflatten", "lift_fresh"}  # no launches, as views


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    with quick():
        yield


class Launches(TorchDispatchMode):
    """Names of kernels, of collectives, and of torch's operations that are not part of them, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.counts = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if self.counts and not func.is_view and name not in FREE:
            self.names.append(name)
        return func(*args, **kwargs or {})

    @contextmanager
    def counted(self, on: bool) -> Iterator[None]:
        before, self.counts = self.counts, on
        try:
            yield
        finally:
            self.counts = before

    def named(self, name: str | None, run: Callable[..., Any]) -> Callable[..., Any]:
        """Counts calls under one name; None: under that of the kernel, the first argument."""

        def launched(*args: Any, **kwargs: Any) -> Any:
            if self.counts:
                self.names.append(name or args[0].fn.__name__)
            with self.counted(False):
                return run(*args, **kwargs)

        return launched

    def watch(
        self, patch: pytest.MonkeyPatch, comm: Communicator, collectives: Sequence[str], of: Any, name: str
    ) -> None:
        """Counts from now on what is launched within a method, each time anew."""
        for collective in collectives:
            patch.setattr(comm, collective, self.named(collective, getattr(comm, collective)))
        patch.setattr(GridExecutor, "__call__", self.named(None, GridExecutor.__call__))
        patch.setattr(dispatch, "on_gpu", lambda t: self.counts)
        run = getattr(of, name)

        def watched(*args: Any) -> Any:
            self.names.clear()
            with self.counted(True):
                return run(*args)

        patch.setattr(of, name, watched)


def made(comm: Communicator, slots: int, **options: Any) -> Engine:
    layout = HelixLayout.create("helix", comm.world_size)
    sizes: dict[str, Any] = {"page_size": 64, "max_length": 200, "max_batch": slots, "prefill_chunk": 256}
    return build_engine(DEMO, layout, comm, 16, **options, **sizes)


def launches_after_logits(
    comm: Communicator, patch: pytest.MonkeyPatch, drafter: Any, sampling: SamplingParams
) -> list[str]:
    """The launches of the last of some steps."""
    engine, launches = made(comm, 2, drafter=drafter, adaptive=False), Launches()
    launches.watch(patch, comm, (GATHER, "all_reduce"), engine.runner, "_complete")

    def mark(phase: str | None) -> None:
        launches.counts &= phase != "choose"  # what followers do is not the step's end

    patch.setattr(engine.runner, "mark", mark)
    with launches:
        generated(engine, [Request(i, list(range(5, 60)), 3, sampling=sampling) for i in range(2)])
    return launches.names


@pytest.mark.parametrize(
    "drafter, sampling, before",
    [
        (None, SamplingParams(), ["_best_of_rank_kernel"]),
        (SuffixDrafter(2, 3), SamplingParams(), ["_best_of_rank_kernel"]),
        (
            SuffixDrafter(2, 3),
            SamplingParams(temperature=1.0, seed=1),
            ["add", "_best_of_rank_kernel", GATHER, "_best_of_ranks_kernel", "full", "_gumbel_sample_kernel"],
        ),
        (
            SelfDrafts(2, DraftBudget("any", 1.0), noise="own"),
            SamplingParams(temperature=1.0, seed=1),
            [
                "add", "_best_of_rank_kernel", GATHER, "_best_of_ranks_kernel", "full", "zeros", "_kept_mass_kernel",
                "_kept_mass_kernel", "all_reduce", "_accept_kernel",
            ],
        ),
    ],
    ids=["plain", "greedy drafts", "the target's noise", "rejection"],
)  # fmt: skip
def test_one_launch_follows_the_gather(
    drafter: Any, sampling: SamplingParams, before: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(world: LoopbackWorld, rank: int) -> list[str]:
        return launches_after_logits(world.communicator(rank, (0,)), monkeypatch, drafter, sampling)

    assert run_ranks(1, body, timeout_s=300.0) == [[*before, GATHER, COMMIT]]


def attention_launches(
    comm: Communicator, patch: pytest.MonkeyPatch | None, chunks: HopBChunks, collective: str
) -> list[str]:
    """The launches of the first layer's attention, behind its queries, in the last of some steps."""
    engine, launches = made(comm, 4), Launches()
    engine.runner.hopb = chunks
    if patch is not None:
        launches.watch(patch, comm, (collective,), engine.runner.model.layers[0].mixer, "attend")
        patch.setattr(comm, "takes_sms", lambda *args: collective != "merge_states_exchange")
    with launches:
        generated(engine, [Request(i, list(range(5, 60)), 3) for i in range(4)])
    return launches.names


@pytest.mark.parametrize(
    "collective, exchange",
    [
        ("all_to_all", ["_merge_states_pack_kernel", "all_to_all", "_merge_states_kernel"]),  # of a library
        ("merge_states_exchange", ["merge_states_exchange"]),  # one kernel of ours
    ],
)
def test_a_chunk_adds_nothing_but_its_attention_and_its_exchange(
    collective: str, exchange: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(world: LoopbackWorld, rank: int) -> list[str]:
        patch = monkeypatch if rank == 0 else None
        return attention_launches(world.communicator(rank, (0, 1)), patch, 4, collective)

    assert run_ranks(2, body, timeout_s=300.0)[0] == ["_flash_decode_kernel", *exchange] * 4
