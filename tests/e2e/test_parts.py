"""Steps that choose parts of blocks give what each rank gives that masks dense attention part by part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from helix.attention.base import LayerAttention
from helix.attention.dense import DenseAttention
from helix.engine.core import Engine
from helix.layout import HelixLayout
from helix.placement import BlockBudget
from helix.worker.kv_cache import LayerCache
from helix.worker.step import Step
from kernels.attention.split_kv import PartialAttention
from tests.e2e.checkpoints import checkpoint
from tests.e2e.parity import Sparse
from tests.e2e.test_block_sparse import KINDS, PAGE, SLOW, Tokens, captured_rank, dense, tokens
from tests.pool import pool

BUDGET = BlockBudget(sink_blocks=1, local_blocks=2, topk=9, from_tokens=0, parts=4, candidates=4)


class MaskedParts(DenseAttention):
    """A rank's dense attention with the keys of parts masked that are not chosen, judged by the keys themselves."""

    def __init__(self, budget: BlockBudget) -> None:
        self.budget = budget
        self.from_tokens = budget.from_tokens

    def attend(self, q: Tensor, cache: LayerCache, step: Step, layer: LayerAttention) -> PartialAttention:
        if step.cu_q is not None or layer.window is not None:
            return super().attend(q, cache, step, layer)
        N, q_heads = q.shape[:2]
        group = q_heads // cache.keys.shape[2]
        out, lse = torch.zeros_like(q), torch.full((N, q_heads), -torch.inf)
        layout, rank = step.placement.layout, step.placement.kvp_rank
        for n in range(N):
            position, start = int(step.positions[n]), int(step.starts[n])
            committed = int(step.positions[n // step.max_q * step.max_q])
            own = [t for t in range(position + 1) if layout.token_owner(t, PAGE, start) == rank]
            own = own if step.live[n] else []
            pages = step.block_tables[n // step.max_q].long()
            keys, values = (x[pages].flatten(0, 1)[: len(own)] for x in (cache.keys, cache.values))  # [S, Hkv, D]
            for h in range(keys.shape[1]):
                of_group = slice(h * group, (h + 1) * group)
                read = self.read(q[n, of_group], keys[:, h], own, position, committed)
                scores = q[n, of_group] @ keys[read, h].T * layer.scale
                if layer.sinks is not None:
                    scores = torch.cat([scores, layer.sinks[of_group, None]], 1)
                if scores.shape[1]:
                    lse[n, of_group] = scores.logsumexp(-1)
                    out[n, of_group] = scores.softmax(-1)[:, : len(read)] @ values[read, h]
        return PartialAttention(out, lse)

    def read(self, q: Tensor, keys: Tensor, own: list[int], position: int, committed: int) -> Tensor:
        """Places of the keys that one KV head's queries read, of this rank's tokens `own`."""
        b = self.budget
        begin, end = b.sink_blocks * PAGE, min((position // PAGE - b.local_blocks + 1) * PAGE, committed)
        slots = torch.arange(len(own))
        blocks = [x for x in slots.split(PAGE) if len(x) == PAGE and begin <= own[x[0]] and own[x[-1]] < end]
        if position + 1 < b.from_tokens or not blocks:
            return slots
        anyway = sorted({*slots.tolist()} - {*torch.cat(blocks).tolist()})

        def best(of: list[Tensor], count: int) -> list[Tensor]:
            def bound(x: Tensor) -> float:
                k = keys[x]
                return float(torch.maximum(q[:, None] * k.amax(0), q[:, None] * k.amin(0)).sum(-1).max())

            chosen = sorted(range(len(of)), key=lambda i: (-bound(of[i]), i))[:count]
            return [of[i] for i in sorted(chosen)]

        parts = [part for block in best(blocks, b.candidates) for part in block.split(PAGE // b.parts)]
        return torch.cat([torch.tensor(anyway, dtype=torch.int64), *best(parts, b.topk)]).sort().values


@cache
def wanted(family: str, layout: HelixLayout, budget: BlockBudget) -> Tokens:
    def masks(engine: Engine) -> None:
        engine.runner.policy = MaskedParts(budget.over(layout.kvp))

    return tokens(family, layout, None, masks)


def parts(budget: BlockBudget = BUDGET) -> Sparse:
    return Sparse(budget, choice="local")


@pytest.mark.parametrize(
    "kvp, tpa",
    [
        pytest.param(world // tpa, tpa, marks=[] if (world // tpa, tpa) in ((1, 1), (3, 1), (2, 2)) else [SLOW])
        for world in range(1, 9)
        for tpa in (1, 2, 4)
        if world % tpa == 0
    ],
)
def test_grids(kvp: int, tpa: int) -> None:
    layout = HelixLayout.create("helix", kvp, tpa)
    found = tokens("qwen2", layout, parts())
    assert found == wanted("qwen2", layout, BUDGET) != dense("qwen2")


def test_with_a_learned_sink_and_windows() -> None:
    layout = HelixLayout.create("helix", 2)
    assert tokens("gpt-oss", layout, parts()) == wanted("gpt-oss", layout, BUDGET) != dense("gpt-oss")


@pytest.mark.parametrize("drafts", [3, pytest.param(8, marks=SLOW)])
def test_drafts_change_no_token(drafts: int) -> None:
    layout = HelixLayout.create("helix", 2)
    assert tokens("qwen2", layout, parts(), drafts=drafts) == wanted("qwen2", layout, BUDGET)


def test_short_sequences_read_everything() -> None:
    layout, budget = HelixLayout.create("helix", 2), replace(BUDGET, from_tokens=140)
    assert tokens("qwen2", layout, parts(budget)) == wanted("qwen2", layout, budget)


def test_all_parts_of_all_blocks_are_everything() -> None:
    everything = replace(BUDGET, topk=100, candidates=30)
    assert tokens("qwen2", HelixLayout.create("helix", 2), parts(everything)) == dense("qwen2")


def a_candidate_less(engine: Engine) -> None:
    policy = engine.runner.policy
    policy.budget = replace(policy.budget, candidates=policy.budget.candidates - 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("tamper", [a_candidate_less])
def test_mistakes_are_caught(tamper: Callable[[Engine], None]) -> None:
    layout = HelixLayout.create("helix", 2)
    assert tokens("qwen2", layout, parts(), tamper) != wanted("qwen2", layout, BUDGET)


@pytest.mark.parametrize("kvp, hot", [(1, 64), pytest.param(3, 64, marks=SLOW)])
@pytest.mark.parametrize("ahead", [False, True])
def test_from_host_memory(ahead: bool, kvp: int, hot: int) -> None:
    """Parts of blocks that come from the host, with few places for them, give the same tokens."""
    layout = HelixLayout.create("helix", kvp)
    sparse = Sparse(BUDGET, choice="local", hot=hot, ahead=ahead)
    for drafts in (0, 3):
        assert tokens("qwen2", layout, sparse, drafts=drafts) == wanted("qwen2", layout, BUDGET)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen2", "gpt-oss"])
def test_loopback_ranks_on_one_gpu(family: str) -> None:
    """Eager steps of the kernels against the masked oracle."""
    for layout in (HelixLayout.create("helix", kvp, tpa) for kvp, tpa in ((1, 1), (3, 1), (2, 2))):
        assert tokens(family, layout, parts(), device="cuda") == wanted(family, layout, BUDGET), layout


@pytest.mark.parametrize("kind, world", KINDS)
@pytest.mark.parametrize("drafts", [0, 3])
def test_captured_steps(drafts: int, kind: type, world: int) -> None:
    """One graph serves all lengths, with and without drafts, dense and sparse sequences in one batch."""
    for budget in (BUDGET, replace(BUDGET, from_tokens=140)):
        task = captured_rank, checkpoint("qwen2"), kind, parts(budget), drafts, torch.float32
        found = pool(world, "nccl").run(*task, timeout_s=120.0)[0]
        assert found == [wanted("qwen2", HelixLayout.create("helix", world), budget)] * 3
