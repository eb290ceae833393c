"""Runs texts through a model under several attention policies, each from the end of one dense prefill.

A policy gets the true next tokens (teacher forcing), so that steps are judged one by one, or its own greedy tokens.
It overwrites what the policy before it appended.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from benchmarks.papers.policies import MeanQueries, fold_means
from benchmarks.quality.hit_meter import HitMeter
from benchmarks.quality.prefill import EvalSetup, prefilled, restart
from comm.base import Communicator
from comm.loopback import LoopbackWorld, run_ranks
from helix.attention.base import AttentionPolicy
from helix.attention.block_sparse import BlockSparseAttention
from helix.kv_placement import BlockBudget, KVPlacement
from helix.layout import HelixLayout
from helix.models.decoder import Decoder
from helix.worker.model_runner import ModelRunner
from helix.worker.sequence_observer import Span

Hits = dict[float, list[list[int]]]
AT_ONCE = 64  # prompts per batch: more would not be faster
DEADLINE_S = 6 * 3600.0
NEVER = 1e30  # pages without bounds get scores below all others, and finite


@dataclass(frozen=True)
class Policy:
    """What a step reads: all keys, or a budget of blocks of `page` tokens.

    Attributes:
        score: bounds, or the policies of benchmarks.papers.policies: mean (of keys) or mean_query (of queries too).
        choice: local or global selection over the ranks of a kvp group.
        frozen: pages that fill up after the prefill are never selected; with score=bounds only.
        attends: a policy made by the caller, for one rank, instead of the budget.
        resident_shares: shares of the texts' blocks that would be on the GPU, to count hits for.
        kv: auto, fp8 or k16v8, from the prefill on.
        activations: auto or fp8 in the prefill, as model.activations; fp8 needs weights in e4m3.
    """

    name: str
    budget: BlockBudget | None = None
    page: int = 128
    score: str = "bounds"
    choice: str = "local"
    frozen: bool = False
    attends: AttentionPolicy | None = None
    resident_shares: tuple[float, ...] = ()
    kv: str = "auto"
    activations: Literal["auto", "fp8"] = "auto"

    @property
    def keys(self) -> int | None:
        """Maximum keys that a query of a long sequence reads; None for all."""
        b = self.budget
        return None if b is None else (b.sink_blocks + b.local_blocks) * self.page + b.topk * (self.page // b.parts)


@dataclass(frozen=True)
class ForcedOutcome:
    """The result of a policy over all prompts.

    Attributes:
        logits: [n, steps, V] fp32 on the CPU, after the last prompt token and each later one but the last.
        blocks_read: mean blocks that a query read per KV head, over all ranks of a kvp group, as counted on the device;
            None if all keys were read.
        hits: by share of `policy.resident_shares` and layer: what `HitMeter.hits` counts, over all ranks.
    """

    policy: Policy
    logits: Tensor
    blocks_read: float | None
    hits: dict[float, list[list[int]]]


def run(
    setting: EvalSetup, prompts: Sequence[Tensor], steps: int, policies: Sequence[Policy], given: Tensor | None = None
) -> dict[str, ForcedOutcome]:
    """Runs each policy for `steps` steps after the same prompts; returns outcomes by name. Progress goes to stderr.

    Args:
        prompts: ids [length] int64 each; the last token is the input of the first step.
        given: true tokens [n, >= steps - 1] after the prompts; None: each policy decodes greedily.

    Raises:
        RuntimeError: a sparse policy read all blocks.
    """
    at_once = min(AT_ONCE, setting.fitting(max(map(len, prompts)) + steps))
    layout, batches = setting.layout, range(0, len(prompts), at_once)
    found: dict[str, list[tuple[Tensor, float | None, Hits]]] = {policy.name: [] for policy in policies}

    def rank(world: LoopbackWorld, index: int) -> None:
        comm = world.communicator(index, layout.kvp_group(index))
        for activations in dict.fromkeys(policy.activations for policy in policies):
            model = setting.load(comm, activations)
            alike = [policy for policy in policies if policy.activations == activations]
            for begin in batches:
                rows = slice(begin, begin + at_once)
                tokens = None if given is None else given[rows]
                for policy, logits, read, hits in _outcomes(model, layout, comm, prompts[rows], steps, alike, tokens):
                    if index == 0:
                        found[policy.name].append((logits, read, hits))
                        progress.advance(task)
            del model

    if setting.device == "cuda":
        torch.cuda.empty_cache()  # return an earlier run's memory
    with Progress(console=Console(file=sys.stderr)) as progress:
        task = progress.add_task(f"{len(prompts)} x {len(prompts[0])}", total=len(policies) * len(batches))
        run_ranks(layout.world_size, rank, DEADLINE_S, setting.device)
    outcomes = {}
    for policy in policies:
        parts = found[policy.name]
        reads = [read * len(logits) for logits, read, _ in parts if read is not None]
        read = sum(reads) / len(prompts) if reads else None
        outcome = ForcedOutcome(policy, torch.cat([p[0] for p in parts]), read, _summed([hits for *_, hits in parts]))
        _check(outcome, sum(-(-len(prompt) // policy.page) for prompt in prompts) / len(prompts))
        outcomes[policy.name] = outcome
    return outcomes


def _summed(counts: Sequence[Hits]) -> Hits:
    shares = [share for share in counts[0] if all(share in of for of in counts)]
    return {share: torch.tensor([of[share] for of in counts]).sum(0).tolist() for share in shares}


def _check(outcome: ForcedOutcome, blocks: float) -> None:
    policy, read = outcome.policy, outcome.blocks_read
    if policy.budget is not None and (read is None or read >= blocks):
        raise RuntimeError(
            f"{policy.name} read {read} of the {blocks:.1f} blocks of a text: a sparse policy must leave some out"
        )


@torch.inference_mode()
def _outcomes(
    model: Decoder,
    layout: HelixLayout,
    comm: Communicator,
    prompts: Sequence[Tensor],
    steps: int,
    policies: Sequence[Policy],
    given: Tensor | None,
) -> Iterator[tuple[Policy, Tensor, float | None, Hits]]:
    """Each policy with its logits and blocks read, grouped by the cache that they share."""
    room = max(map(len, prompts)) + steps
    max_length = max(room, model.spec.max_positions)  # compiles one set of kernels for texts of any length
    for (page, kv, parts), group in groupby(sorted(policies, key=_cache), key=_cache):
        placement = KVPlacement(layout, layout.kvp_rank(comm.rank), page, page)
        runner = prefilled(model, placement, comm, prompts, room, max_length, kv=kv, bounded=True, parts=parts)
        for policy in group:
            attends = _attention(policy, placement, max_length, comm) or runner.dense
            logits = _steps(runner, policy, attends, prompts, steps, given)
            read = None
            hits = _summed(comm.all_gather_object(attends.hits())) if isinstance(attends, HitMeter) else {}
            if isinstance(attends, BlockSparseAttention):
                rank_reads = comm.all_gather_object(attends.blocks_read() or 0.0)
                read = sum(rank_reads[rank] for rank in layout.kvp_group(0))
            yield policy, logits, read, hits
        del runner  # free it before the next cache is made


def _cache(policy: Policy) -> tuple[int, str, int]:
    return policy.page, policy.kv, 1 if policy.budget is None else policy.budget.parts


def _steps(
    runner: ModelRunner,
    policy: Policy,
    attends: AttentionPolicy,
    prompts: Sequence[Tensor],
    steps: int,
    given: Tensor | None,
) -> Tensor:
    """Logits [n, steps, V] of decode steps after the prompts."""
    state, cache, comm = runner.state, runner.cache, runner.comm

    def fold(span: Span) -> None:
        if policy.score != "bounds":
            fold_means(cache)
        else:
            cache.fold(span)

    restart(runner)
    n, device = len(prompts), comm.device
    rows = torch.arange(n, device=device)
    lengths = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
    tokens = torch.stack([prompt[-1] for prompt in prompts])
    if policy.budget is not None:
        assert cache.bounds is not None
        if policy.frozen:
            assert policy.score == "bounds"
            bound_limit = min(NEVER, torch.finfo(cache.bounds.dtype).max)
            cache.bounds[..., 0, :] = -bound_limit
            cache.bounds[..., 1, :] = bound_limit
        fold(state.span(n, torch.zeros_like(lengths), lengths, int(lengths.max())))
    logits = []
    for i in range(steps):
        state.activate(rows, tokens.to(device), lengths)
        hidden = runner.model.hidden(cache, state.decode_step(n), attends)
        logits.append(torch.cat(comm.all_gather_object(runner.model.logits(hidden).float().cpu()), 1))
        if not policy.frozen:
            fold(state.span(n, lengths, lengths + 1, 1))
        lengths = lengths + 1
        if i + 1 < steps:
            tokens = logits[-1].argmax(-1) if given is None else given[:, i]
    return torch.stack(logits, 1)


def _attention(policy: Policy, placement: KVPlacement, length: int, comm: Communicator) -> AttentionPolicy | None:
    if policy.budget is None:
        return policy.attends
    attention_args = placement, length, comm.device, comm if policy.choice == "global" else None
    if policy.resident_shares:
        return HitMeter(policy.resident_shares, policy.budget, *attention_args)
    return (MeanQueries if policy.score == "mean_query" else BlockSparseAttention)(policy.budget, *attention_args)
