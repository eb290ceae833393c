"""Fixed acceptance and block-reuse rates, for models with random weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.ranks.synthetic_kernels import repeat_blocks, synthetic_drafts
from benchmarks.schema import LabConfig
from comm.emulated import EmulatedTransport
from helix.attention.block_sparse import BlockSparseAttention
from helix.kv_placement import BlockBudget
from helix.speculation import Draft, Drafter
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.kv_cache import LayerCache
from helix.worker.model_runner import ModelRunner
from helix.worker.step import DecodeState, Step


def apply_synthetic(runner: ModelRunner, config: LabConfig) -> None:
    """Applies the rates that `bench` sets."""
    synthesize_acceptance(runner.drafter, config.bench.acceptance, config.seed, vocab_held(runner))
    repeat_selected_blocks(runner, config.bench.repeat)


def vocab_held(runner: ModelRunner) -> int:
    """Returns the number of tokens to draw random ones from: those whose embeddings are not zero.

    Of emulated ranks, that is rank 0's share. Tokens of absent ranks would all have the same hidden state: they would
    route to the same experts, and tie as queries of an indexer.
    """
    vocab = runner.model.spec.vocab
    return len(runner.layout.vocab_rows(0, vocab)) if isinstance(runner.comm, EmulatedTransport) else vocab


def synthesize_acceptance(drafter: Drafter, acceptance: float | None, seed: int, vocab: int) -> None:
    """Lets a drafter draft as usual, then replaces its proposals by tokens of a predetermined outcome.

    Args:
        acceptance: chance of each draft, given that those before it were accepted; None: the model decides.
    """
    if acceptance is None:
        return
    propose = drafter.propose

    def proposed(state: DecodeState, kind: DecodeGraphKey) -> Draft:
        propose(state, kind)
        tokens, outcome = synthetic_drafts(state.lengths[: kind.rows], kind.drafts, acceptance, seed, vocab)
        return Draft(tokens, forced_tokens=outcome)

    drafter.propose = proposed  # type: ignore[method-assign]


def repeat_selected_blocks(runner: ModelRunner, repeat: float | None) -> None:
    """Lets block-sparse steps select as usual, then read a share `repeat` of the last step's blocks; None: no-op."""
    if repeat is None:
        return
    policy = runner.policy
    assert isinstance(policy, BlockSparseAttention), "checked before"
    choose = policy.select_local

    def repeated(q: Tensor, cache: LayerCache, step: Step, budget: BlockBudget, *args: Any, **kwargs: Any) -> Tensor:
        table = choose(q, cache, step, budget, *args, **kwargs)
        if budget.topk:
            first, last, *_ = policy.ranges(step, budget)
            repeat_blocks(table, step.block_tables, first, last, step.positions, budget.topk, repeat)
        return table

    policy.select_local = repeated  # type: ignore[method-assign]
