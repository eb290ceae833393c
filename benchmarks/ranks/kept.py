"""Drafts and blocks that are kept at a set rate, whatever the model says: those of random weights mean nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.ranks.kept_kernels import repeat_blocks, synthetic_drafts
from benchmarks.schema import LabConfig
from helix.attention.block_sparse import BlockSparseAttention
from helix.placement import BlockBudget
from helix.speculation import Draft, Drafter
from helix.worker.graph_keys import StepKind
from helix.worker.kv_cache import LayerCache
from helix.worker.model_runner import ModelRunner
from helix.worker.step import DecodeState, Step


def keep(runner: ModelRunner, config: LabConfig) -> None:
    """Keeps drafts and blocks at the rates that `bench` sets."""
    keep_drafts(runner.drafter, config.bench.acceptance, config.seed, runner.model.spec.vocab)
    keep_blocks(runner, config.bench.repeat)


def keep_drafts(drafter: Drafter, acceptance: float | None, seed: int, vocab: int) -> None:
    """Lets a drafter draft as ever, and other tokens, of a set fate, take the place of what it proposes.

    Args:
        acceptance: chance of each draft, given that those before it were kept; None: the model decides.
    """
    if acceptance is None:
        return
    propose = drafter.propose

    def proposed(state: DecodeState, kind: StepKind) -> Draft:
        propose(state, kind)
        tokens, outcome = synthetic_drafts(state.lengths[: kind.rows], kind.drafts, acceptance, seed, vocab)
        return Draft(tokens, outcome=outcome)

    drafter.propose = proposed  # type: ignore[method-assign]


def keep_blocks(runner: ModelRunner, repeat: float | None) -> None:
    """Lets block-sparse steps choose as ever, and then read a set share `repeat` of the last step's blocks.

    None: what was chosen is read.
    """
    if repeat is None:
        return
    policy = runner.policy
    assert isinstance(policy, BlockSparseAttention), "checked before"
    choose = policy.promising

    def chosen(q: Tensor, cache: LayerCache, step: Step, budget: BlockBudget, *given: Any, **more: Any) -> Tensor:
        table = choose(q, cache, step, budget, *given, **more)
        if budget.topk:
            first, last, *_ = policy.ranges(step, budget)
            repeat_blocks(table, step.block_tables, first, last, step.positions, budget.topk, repeat)
        return table

    policy.promising = chosen  # type: ignore[method-assign]
