"""Snapshots of states in host memory: a hit there is, to the bit, what was computed."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comm.base import Communicator
from comm.loopback import LoopbackWorld, run_ranks
from comm.torch_dist import TorchDistCommunicator
from helix.engine.decision import Admission
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.placement import BlockBudget
from helix.speculation import SuffixDrafter
from tests.e2e.checkpoints import HYBRID_FAMILIES, checkpoint
from tests.e2e.parity import LOGIT_TOLERANCE, Sparse, build_engine
from tests.e2e.test_tiered import PAGE, prompts
from tests.pool import pool
from tests.sequences import generated_ids

ON_GPU, ON_HOST, NEW = 1, 3, 6
# Few blocks and few places, which steps with drafts use in full.
FEW = BlockBudget(sink_blocks=1, local_blocks=2, topk=2, from_tokens=0)
HOT = 30


@dataclass
class Rounds:
    """Outputs of each round of the same prompts, one after the other, and the rounds' admissions."""

    tokens: list[list[tuple[int, ...]]] = field(default_factory=list)
    logits: list[list[Tensor]] = field(default_factory=list)
    admitted: list[list[Admission]] = field(default_factory=list)


def rounds(path: Path, layout: HelixLayout, comm: Communicator, **options: Any) -> Rounds:
    """One rank's; the rounds are the same prompts, in the same order, so that the oldest snapshot is the next."""
    engine = build_engine(
        path, layout, comm, PAGE, page_size=PAGE, adaptive=False, snapshots=ON_GPU,
        **{"host_snapshots": ON_HOST, **options},
    )  # fmt: skip
    found, admit = Rounds(), engine.runner.admit

    def noted(*admissions: Admission) -> None:
        found.admitted[-1].extend(admissions)
        admit(*admissions)

    engine.runner.admit = noted  # type: ignore[method-assign]
    if engine.runner.graphs is None:
        engine.runner.observer = lambda slots, positions, rows: found.logits[-1].append(rows.cpu().clone())
    with closing(engine):
        for _ in range(3):
            for drawn in (found.tokens, found.logits, found.admitted):
                drawn.append([])  # type: ignore[attr-defined]
            for i, prompt in enumerate(prompts((60, 130, 90, 70))):
                found.tokens[-1] += generated_ids(engine, [Request(i, prompt, NEW)]).values()
    return found


def on_loopback(family: str, layout: HelixLayout, device: str = "cpu", **options: Any) -> Rounds:
    def body(world: LoopbackWorld, rank: int) -> Rounds:
        return rounds(checkpoint(family), layout, world.communicator(rank, layout.kvp_group(rank)), **options)

    return run_ranks(layout.world_size, body, timeout_s=120.0, device=device)[0]


def check(found: Rounds, stripe: int, tolerance: float = 0.0) -> None:
    first, *later = range(len(found.admitted))
    assert all(admission.state == -1 for admission in found.admitted[first])
    for i in later:
        depths = [(admission.length - 1) // stripe * stripe for admission in found.admitted[i]]
        assert [admission.resumes for admission in found.admitted[i]] == depths
        places = [admission.state for admission in found.admitted[i]]
        assert all(place < ON_GPU + ON_HOST for place in places) and sum(place >= ON_GPU for place in places) >= 3
        assert found.tokens[i] == found.tokens[first]
        assert len(found.logits[i]) == len(found.logits[first])
        for again, once in zip(found.logits[i], found.logits[first], strict=True):
            torch.testing.assert_close(again, once, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize(
    "family, mode, kvp, tpa",
    [
        ("qwen3.5-tied", "helix", 1, 1),
        ("qwen3.5-moe", "helix", 3, 1),
        ("qwen3-next", "helix", 2, 2),
        ("qwen3.5-moe", "medha", 2, 1),
    ],
)
def test_a_hit_in_host_memory_is_what_was_computed(family: str, mode: str, kvp: int, tpa: int) -> None:
    check(on_loopback(family, HelixLayout.create(mode, kvp, tpa)), PAGE * kvp)


@pytest.mark.parametrize("hot", [None, HOT])
def test_with_drafts_and_blocks(hot: int | None) -> None:
    """Keys may lie in host memory as well."""
    drafter, sparse = SuffixDrafter(3, 1), Sparse(FEW, hot=hot)
    found = on_loopback("qwen3.5-tied", HelixLayout.create("helix", 2), drafter=drafter, sparse=sparse)
    # Behind a hit, keys from host memory are cut into other pieces, whose sums are merged in another order.
    check(found, PAGE * 2, 0.0 if hot is None else LOGIT_TOLERANCE)


def test_what_has_no_room_goes() -> None:
    """Two of four snapshots are kept: the longest ones, which save most."""
    found = on_loopback("qwen3.5-tied", HelixLayout.create(), host_snapshots=1)
    assert found.tokens[0] == found.tokens[1] == found.tokens[2]
    assert {a.length for a in found.admitted[1] if a.state >= 0} <= {130, 90}
    assert all(a.state < 2 for a in found.admitted[1])


@pytest.mark.gpu
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_loopback_ranks_on_one_gpu(family: str) -> None:
    """Eager steps, over pinned memory."""
    check(on_loopback(family, HelixLayout.create("helix", 3), device="cuda"), PAGE * 3, LOGIT_TOLERANCE)


def captured_rank(rank: int, world_size: int, path: Path, dtype: torch.dtype) -> Rounds:
    layout = HelixLayout.create("helix", world_size)
    comm = TorchDistCommunicator(layout.kvp_groups(), torch.device("cuda", rank), timedelta(seconds=60))
    with closing(comm):
        return rounds(path, layout, comm, dtype=dtype)


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_steps(world: int, dtype: torch.dtype) -> None:
    task = captured_rank, checkpoint("qwen3.5-tied"), dtype
    check(pool(world, "nccl").run(*task, timeout_s=120.0)[0], PAGE * world)
