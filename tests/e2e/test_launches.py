"""Launches of a step behind its logits: nothing but the fused kernel behind the last gather over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from comm.base import Communicator
from comm.loopback import LoopbackWorld, run_ranks
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.sampling_params import SamplingParams
from helix.speculation import DraftBudget, SuffixDrafter
from helix.worker.model_runner import ComputedStep
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


def behind_logits(comm: Communicator, patch: pytest.MonkeyPatch, drafter: Any, sampling: SamplingParams) -> list[str]:
    """The launches of the last of some steps."""
    layout = HelixLayout.create("helix", comm.world_size)
    sizes: dict[str, Any] = {"page_size": 64, "max_length": 200, "max_batch": 2, "prefill_chunk": 256}
    engine = build_engine(DEMO, layout, comm, 16, drafter=drafter, adaptive=False, **sizes)
    launches = Launches()
    for name in (GATHER, "all_reduce"):
        patch.setattr(comm, name, launches.named(name, getattr(comm, name)))
    patch.setattr(GridExecutor, "__call__", launches.named(None, GridExecutor.__call__))
    patch.setattr(dispatch, "on_gpu", lambda t: launches.counts)
    complete = engine.runner._complete

    def counted(computed: ComputedStep, kind: Any) -> Tensor:
        launches.names.clear()
        with launches.counted(True):
            return complete(computed, kind)

    def mark(phase: str | None) -> None:
        launches.counts &= phase != "choose"  # what followers do is not the step's end

    patch.setattr(engine.runner, "_complete", counted)
    patch.setattr(engine.runner, "mark", mark)
    with launches:
        generated(engine, [Request(i, list(range(5, 60)), 6, sampling=sampling) for i in range(2)])
    return launches.names


@pytest.mark.parametrize(
    "drafter, sampling, before",
    [
        (None, SamplingParams(), ["_best_of_rank_kernel"]),
        (SuffixDrafter(2, 3), SamplingParams(), ["_best_of_rank_kernel"]),
        (
            SuffixDrafter(2, 3),
            SamplingParams(temperature=1.0, seed=1),
            ["add", "_best_of_rank_kernel", GATHER, "_best_of_ranks_kernel", "full", "_draw_kernel"],
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
        return behind_logits(world.communicator(rank, (0,)), monkeypatch, drafter, sampling)

    assert run_ranks(1, body, timeout_s=120.0) == [[*before, GATHER, COMMIT]]


def of_attention(comm: Communicator, patch: pytest.MonkeyPatch | None, chunks: str, collective: str) -> list[str]:
    """The launches of the first layer's attention, behind its queries, in the last of some steps."""
    layout = HelixLayout.create("helix", comm.world_size)
    sizes: dict[str, Any] = {"page_size": 64, "max_length": 200, "max_batch": 4, "prefill_chunk": 256}
    engine = build_engine(DEMO, layout, comm, 16, **sizes)
    engine.runner.hopb = chunks
    launches = Launches()
    if patch is not None:
        patch.setattr(comm, collective, launches.named(collective, getattr(comm, collective)))
        patch.setattr(comm, "takes_sms", lambda *args: collective != "merge_exchange")
        patch.setattr(GridExecutor, "__call__", launches.named(None, GridExecutor.__call__))
        patch.setattr(dispatch, "on_gpu", lambda t: launches.counts)
        mixer = engine.runner.model.layers[0].mixer
        attend = mixer.attend  # type: ignore[attr-defined]

        def counted(*args: Any) -> Tensor:
            launches.names.clear()
            with launches.counted(True):
                found: Tensor = attend(*args)
            return found

        patch.setattr(mixer, "attend", counted)
    with launches:
        generated(engine, [Request(i, list(range(5, 60)), 4) for i in range(4)])
    return launches.names


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize(
    "collective, exchange",
    [
        ("all_to_all", ["_merge_messages_kernel", "all_to_all", "_lse_combine_kernel"]),  # of a library
        ("merge_exchange", ["merge_exchange"]),  # one kernel of ours
    ],
)
def test_a_chunk_adds_nothing_but_its_attention_and_its_exchange(
    collective: str, exchange: list[str], chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(world: LoopbackWorld, rank: int) -> list[str]:
        patch = monkeypatch if rank == 0 else None
        return of_attention(world.communicator(rank, (0, 1)), patch, str(chunks), collective)

    assert run_ranks(2, body, timeout_s=120.0)[0] == ["_flash_decode_kernel", *exchange] * chunks
