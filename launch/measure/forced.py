"""The same text through the same model under several attention policies, each step given the true tokens before it.

One dense prefill serves all policies: each goes on from its end, and what another has appended is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from comm.base import Communicator
from helix.attention.base import AttentionPolicy
from helix.attention.block_sparse import BlockSparseAttention
from helix.kv_cache import BlockBudget, KVCache, Placement, pages_for_tokens
from helix.layout import HelixLayout
from helix.loading import Checkpoint, read_config
from helix.model_runner import ModelRunner
from helix.models import Decoder, spec_from_config
from helix.sampling import SamplingParams
from helix.scheduler import Admission

CHUNK = 1024  # prompt tokens of one prefill step


@dataclass(frozen=True)
class Policy:
    """What a step reads: all keys, or by a budget of blocks of `page` tokens.

    Attributes:
        choice: local or global, over the ranks of a kvp group.
    """

    name: str
    budget: BlockBudget | None = None
    page: int = 128
    score: str = "bounds"
    choice: str = "local"

    @property
    def keys(self) -> int | None:
        """Keys that a query of a long sequence reads, at most; None for all."""
        b = self.budget
        return None if b is None else (b.sink_blocks + b.local_blocks + b.topk) * self.page


def load(path: Path, layout: HelixLayout, comm: Communicator, dtype: torch.dtype) -> Decoder:
    """This rank's part of a checkpoint."""
    checkpoint = Checkpoint(path)
    model = Decoder(checkpoint.with_head(spec_from_config(read_config(path))), layout, comm, dtype, comm.device)
    checkpoint.load(model.weights)
    return model


@torch.inference_mode()
def forced_logits(
    model: Decoder,
    layout: HelixLayout,
    comm: Communicator,
    texts: Tensor,
    steps: int,
    policies: list[Policy],
    advance: Callable[[int], None] = lambda done: None,
) -> Iterator[tuple[Policy, Tensor, float | None]]:
    """Under each policy, the logits behind each of the last `steps` tokens of each text; a collective call.

    Args:
        texts: ids [n, length] int64, the same on every rank; all but the last `steps` tokens and one are prefilled.
        advance: called with the steps that are done, of all policies.

    Yields:
        The policy, its logits [n, steps, V] fp32 on the CPU, and blocks that a query has read of each KV head, over all
        ranks of a kvp group, as counted on the device; None where all keys were read. Policies of one page size come
        one after the other, in their order.
    """
    n, length = texts.shape
    prefix = length - steps - 1
    done = 0
    for page, group in groupby(sorted(policies, key=lambda policy: policy.page), key=lambda policy: policy.page):
        runner = _prefilled(model, layout, comm, texts[:, :prefix], length, page)
        state, cache, placement = runner.state, runner.cache, runner.placement
        tables, starts = state.block_tables[:n], state.starts[:n]
        rows = torch.arange(n, device=comm.device)
        for policy in group:
            attends = _attention(policy, placement, length, comm) or runner.dense
            lengths = torch.full_like(rows, prefix)
            if policy.budget is not None:
                cache.score = policy.score
                cache.fold(placement, tables, starts, torch.zeros_like(lengths), lengths, prefix)
            logits = []
            for i in range(steps):
                state.activate(rows, texts[:, prefix + i].to(comm.device), lengths)
                hidden = model.hidden(cache, state.decode_step(n), attends)
                shards = comm.all_gather_object(model.logits(hidden).float().cpu())
                logits.append(torch.cat(shards, 1))
                cache.fold(placement, tables, starts, lengths, lengths + 1, 1)
                lengths = lengths + 1
                done += 1
                advance(done)
            read = None
            if isinstance(attends, BlockSparseAttention):
                of_ranks = comm.all_gather_object(attends.blocks_read() or 0.0)
                read = sum(of_ranks[rank] for rank in layout.kvp_group(0))
            yield policy, torch.stack(logits, 1), read


def _attention(policy: Policy, placement: Placement, length: int, comm: Communicator) -> AttentionPolicy | None:
    if policy.budget is None:
        return None
    over_all = comm if policy.choice == "global" else None
    return BlockSparseAttention(policy.budget, policy.score, placement, length, comm.device, over_all)


def _prefilled(
    model: Decoder, layout: HelixLayout, comm: Communicator, prompts: Tensor, length: int, page: int
) -> ModelRunner:
    """A runner whose cache holds `prompts` [n, prefix], a slot each, with room for `length` tokens of each."""
    n, prefix = prompts.shape
    placement = Placement(layout, layout.kvp_rank(comm.rank), page, page)
    pages = pages_for_tokens(layout, n * length, page, page, n)
    entries = model.spec.entries(layout, comm.rank)
    cache = KVCache(model.spec.layers, pages, page, entries, model.weights.dtype, comm.device, "bounds")
    runner = ModelRunner(model, layout, comm, cache, placement, max_batch=n, max_length=length)
    for slot in range(n):
        runner.admit(Admission(slot, slot, (), slot % layout.kvp, length, length, SamplingParams()))
        for begin in range(0, prefix, CHUNK):
            chunk = prompts[slot, begin : begin + CHUNK]
            model.hidden(cache, runner.state.prefill_step([(slot, begin, chunk)]), runner.dense)
    return runner
