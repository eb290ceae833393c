"""A cache in e4m3 gives the same tokens over grids, chunks, drafters and policies: what is read is what is stored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from comm.loopback import LoopbackWorld, run_ranks
from helix.layout import HelixLayout
from helix.placement import BlockBudget
from helix.speculation import DraftBudget, NgramDrafter
from tests.e2e.checkpoints import checkpoint, continuations
from tests.e2e.parity import Continuation, Result, SelfDrafts, Sparse, build_engine, check, generate

# Sums of other orders, 1e-6 of a number, round one of 1e5 numbers to a neighbour in e4m3, 6% away; a key's or value's
# counts for less than 1e-2 in logits of size 1 to 20.
TOLERANCE = 5e-2


def results(family: str, layout: HelixLayout, wanted: list[Continuation], kv: str, **options: Any) -> list[Result]:
    def body(world: LoopbackWorld, rank: int) -> Result:
        comm = world.communicator(rank, layout.kvp_group(rank))
        return generate(build_engine(checkpoint(family), layout, comm, 16, kv=kv, **options), wanted)

    return run_ranks(layout.world_size, body, timeout_s=120.0)


def alone(
    family: str, kv: str, lengths: tuple[int, ...] = (5, 90), new: int = 12, **options: Any
) -> list[Continuation]:
    """Continuations by one rank, the oracle of several."""
    plain = continuations(checkpoint(family), lengths, new)
    (found,) = results(family, HelixLayout.create(), plain, kv, **options)
    return [
        replace(
            c, tokens=found.tokens[i], logits=torch.stack([found.logits[i, n] for n in range(len(found.tokens[i]))])
        )
        for i, c in enumerate(plain)
    ]


@pytest.mark.parametrize("kv", ["fp8", "k16v8"])
@pytest.mark.parametrize("family", ["llama-llama3", "qwen3", "qwen2-windowed-tied", "gpt-oss"])
def test_grids_agree(family: str, kv: str) -> None:
    wanted = alone(family, kv)
    plain = continuations(checkpoint(family), (5, 90), 12)
    off = max((a.logits[0] - b.logits[0]).abs().max().item() for a, b in zip(wanted, plain, strict=True))
    assert 1e-4 < off < 2.0, f"numbers of three bits, {off} off"
    for kvp, tpa in ((2, 1), (2, 2), (4, 1)):
        check(results(family, HelixLayout.create("helix", kvp, tpa), wanted, kv), wanted, TOLERANCE)


def test_chunks_agree() -> None:
    """A chunk reads its own keys as they are stored."""
    wanted = alone("qwen3", "fp8", prefill_chunk=128)
    for chunk in (7, 32):
        check(results("qwen3", HelixLayout.create("helix", 2), wanted, "fp8", prefill_chunk=chunk), wanted, TOLERANCE)


DRAFTERS = [NgramDrafter(3, 4), *(SelfDrafts(2, DraftBudget(policy, 0.2)) for policy in ("any", "quest"))]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_change_no_token(drafter: Any) -> None:
    wanted = alone("qwen3", "fp8", lengths=(40, 300), new=16)
    for kvp in (1, 2):
        found = results("qwen3", HelixLayout.create("helix", kvp), wanted, "fp8", drafter=drafter)
        check(found, wanted, TOLERANCE)


def test_block_sparse_reads_all_blocks_or_its_choice() -> None:
    """A budget of all blocks is dense attention; a smaller one agrees over grids."""
    whole = Sparse(BlockBudget(topk=40, sink_blocks=1, local_blocks=2, from_tokens=0))
    wanted = alone("qwen3", "fp8", lengths=(40, 300))
    check(results("qwen3", HelixLayout.create("helix", 2), wanted, "fp8", sparse=whole), wanted, TOLERANCE)
    few = replace(whole, budget=replace(whole.budget, topk=4))
    wanted = alone("qwen3", "fp8", lengths=(40, 300), sparse=few)
    check(results("qwen3", HelixLayout.create("helix", 2), wanted, "fp8", sparse=few), wanted, TOLERANCE)
