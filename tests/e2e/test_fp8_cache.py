"""A cache in e4m3 gives the same tokens over grids, chunks, drafters and policies: what is read is what is stored."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from comm.loopback import LoopbackWorld, run_ranks
from helix.layout import HelixLayout
from helix.placement import BlockBudget
from helix.speculation import DraftBudget, SuffixDrafter
from tests.e2e.checkpoints import checkpoint, continuations
from tests.e2e.parity import Continuation, Result, SelfDrafts, Sparse, build_engine, check, generate
from tests.e2e.test_serve import KVP_2, Served, serve, turns

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


@pytest.mark.parametrize(
    "family, kv",
    [
        *product(("llama-llama3", "qwen3", "qwen2-windowed-tied", "gpt-oss"), ("fp8", "k16v8")),
        ("deepseek-v3-yarn", "fp8"),
        ("deepseek-v2-lite", "fp8"),
        *product(("glm-5-all",), ("fp8", "fp8_all")),  # choices of a few tokens would follow the last bits of sums
    ],
)
def test_grids_agree(family: str, kv: str) -> None:
    wanted = alone(family, kv)
    plain = continuations(checkpoint(family), (5, 90), 12)
    off = max((a.logits[0] - b.logits[0]).abs().max().item() for a, b in zip(wanted, plain, strict=True))
    assert 1e-4 < off < 2.0, f"numbers of three bits, {off} off"
    widest = 1 if family.startswith(("deepseek", "glm")) else 2  # of one latent
    for kvp, tpa in ((2, widest), (4, 1)):
        check(results(family, HelixLayout.create("helix", kvp, tpa), wanted, kv), wanted, TOLERANCE)


@pytest.mark.parametrize("family", ["qwen3", "deepseek-v3-yarn"])
def test_chunks_agree(family: str) -> None:
    """A chunk reads its own keys as they are stored."""
    wanted = alone(family, "fp8", prefill_chunk=128)
    for chunk in (7, 32):
        check(results(family, HelixLayout.create("helix", 2), wanted, "fp8", prefill_chunk=chunk), wanted, TOLERANCE)


DRAFTERS = [
    ("qwen3", SuffixDrafter(3, 4)),
    *(("qwen3", SelfDrafts(2, DraftBudget(policy, 0.2))) for policy in ("any", "quest")),
    ("deepseek-v3-yarn", SuffixDrafter(3, 4)),
    ("glm-5-all", SuffixDrafter(3, 4)),
]


@pytest.mark.parametrize("family, drafter", DRAFTERS)
def test_drafts_change_no_token(family: str, drafter: Any) -> None:
    wanted = alone(family, "fp8", lengths=(40, 300), new=16)
    for kvp in (1, 2):
        found = results(family, HelixLayout.create("helix", kvp), wanted, "fp8", drafter=drafter)
        check(found, wanted, TOLERANCE)


@pytest.mark.parametrize("family", ["qwen3", "deepseek-v3-yarn"])
def test_prefix_hits_change_no_token(family: str) -> None:
    first, second = turns(continuations(checkpoint(family), (40, 90), 12))

    def body(world: LoopbackWorld, rank: int) -> tuple[Served, Served]:
        comm, found = world.communicator(rank, KVP_2.kvp_group(rank)), []
        for caches in (False, True):
            e = build_engine(checkpoint(family), KVP_2, comm, 4, page_size=4, kv="fp8", prefix_cache=caches)
            found.append(serve(e, first, second))
        return found[0], found[1]

    (plain, hits), _ = run_ranks(2, body, timeout_s=120.0)
    assert hits.tokens == plain.tokens
    assert hits.cached["next 1"] > 80 and not any(plain.cached.values())


def test_block_sparse_reads_all_blocks_or_its_choice() -> None:
    """A budget of all blocks is dense attention; a smaller one agrees over grids."""
    whole = Sparse(BlockBudget(topk=40, sink_blocks=1, local_blocks=2, from_tokens=0))
    wanted = alone("qwen3", "fp8", lengths=(40, 300))
    check(results("qwen3", HelixLayout.create("helix", 2), wanted, "fp8", sparse=whole), wanted, TOLERANCE)
    few = replace(whole, budget=replace(whole.budget, topk=4))
    wanted = alone("qwen3", "fp8", lengths=(40, 300), sparse=few)
    check(results("qwen3", HelixLayout.create("helix", 2), wanted, "fp8", sparse=few), wanted, TOLERANCE)
