"""Block-sparse decode, apart from rows of parity.yaml: who reads what in one batch, and bf16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from comm.loopback import LoopbackWorld, run_ranks
from comm.symm_mem import SymmMemCommunicator
from comm.torch_dist import TorchDistCommunicator
from helix.engine.core import Engine
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.placement import BlockBudget
from helix.speculation import SuffixDrafter
from tests.e2e.checkpoints import checkpoint
from tests.e2e.masked import Masked
from tests.e2e.parity import Sparse, build_engine
from tests.pool import pool
from tests.sequences import generated_ids

PAGE = 16
BUDGET = BlockBudget(sink_blocks=1, local_blocks=4, topk=5, from_tokens=0)
LENGTHS = (7, 60, 260, 128, 33)
NEW_TOKENS = 18

Tokens = dict[int, tuple[int, ...]]


def prompts(lengths: Sequence[int] = LENGTHS) -> list[tuple[int, ...]]:
    gen = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(0, 257, (n,), generator=gen).tolist()) for n in lengths]


def generate(engine: Engine) -> Tokens:
    requests = [Request(i, prompt, NEW_TOKENS) for i, prompt in enumerate(prompts())]
    return generated_ids(engine, requests)


def tokens(
    family: str,
    layout: HelixLayout,
    sparse: Sparse | None,
    tamper: Callable[[Engine], None] = lambda engine: None,
    *,
    drafts: int = 0,
    **options: Any,
) -> Tokens:
    def body(world: LoopbackWorld, rank: int) -> Tokens:
        comm = world.communicator(rank, layout.kvp_group(rank))
        drafter = SuffixDrafter(drafts, 1) if drafts else None
        engine = build_engine(
            checkpoint(family), layout, comm, PAGE, page_size=PAGE, sparse=sparse, drafter=drafter, adaptive=False,
            **options,
        )  # fmt: skip
        tamper(engine)
        with closing(engine):
            return generate(engine)

    return run_ranks(layout.world_size, body, timeout_s=120.0)[0]


@cache
def wanted(family: str, budget: BlockBudget) -> Tokens:
    def masks(engine: Engine) -> None:
        engine.runner.policy = Masked(budget)

    return tokens(family, HelixLayout.create(), None, masks)


@cache
def dense(family: str) -> Tokens:
    return tokens(family, HelixLayout.create(), None)


def test_short_sequences_read_everything_whoever_shares_the_batch() -> None:
    budget = replace(BUDGET, from_tokens=140)
    found = tokens("qwen2", HelixLayout.create("helix", 2), Sparse(budget))
    assert found == wanted("qwen2", budget)
    for i, length in enumerate(LENGTHS):
        count = max(0, 140 - length)  # the i-th new token is drawn by a query that sees `length + i` tokens
        assert found[i][:count] == dense("qwen2")[i][:count], length
    assert found[2] != dense("qwen2")[2]


SHORT_WINDOW = replace(BUDGET, local_blocks=1)


def captured_rank(
    rank: int,
    world_size: int,
    path: Path,
    kind: type[TorchDistCommunicator],
    sparse: Sparse,
) -> list[Tokens]:
    """Tokens in bf16 of a run whose steps are captured as they come, and of two that replay them."""
    layout = HelixLayout.create("helix", world_size)
    comm = kind(layout.kvp_groups(), torch.device("cuda", rank), timedelta(seconds=60))
    engine = build_engine(path, layout, comm, PAGE, page_size=PAGE, sparse=sparse, dtype=torch.bfloat16)
    assert engine.runner.graphs is not None
    found = [generate(engine) for _ in range(3)]
    engine.close()
    comm.close()
    return found


@pytest.mark.parametrize(
    "kind, world",
    [
        pytest.param(TorchDistCommunicator, 1, marks=pytest.mark.gpu, id="nccl-1"),
        *(pytest.param(kind, 2, marks=pytest.mark.gpu(2)) for kind in (TorchDistCommunicator, SymmMemCommunicator)),
    ],
)
def test_all_blocks_is_dense_in_bf16(kind: type[TorchDistCommunicator], world: int) -> None:
    everything = Sparse(replace(BUDGET, topk=40), choice="local")
    nothing = Sparse(replace(BUDGET, from_tokens=10_000), choice="local")  # dense throughout
    task = captured_rank, checkpoint("qwen2"), kind
    sparse, plain = (pool(world, "nccl").run(*task, policy, timeout_s=120.0)[0] for policy in (everything, nothing))
    assert sparse == plain
