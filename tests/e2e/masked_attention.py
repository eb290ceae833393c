"""References: dense attention under a mask, for attention that selects keys; and a model that is a table."""

from __future__ import annotations

import torch
from torch import Tensor

from helix.attention.base import LayerAttention
from helix.attention.dense import DenseAttention
from helix.kv_placement import BlockBudget
from helix.models.decoder import Decoder
from helix.worker.kv_cache import LayerCache
from helix.worker.step import Step
from kernels.attention.split_kv import PartialAttention


class MaskedAttention(DenseAttention):
    """A rank's dense attention with the keys of unselected blocks or subblocks masked.

    On one rank it selects over the whole sequence; on several, each selects from its own keys by its own budget.
    """

    def __init__(self, budget: BlockBudget) -> None:
        self.budget = budget
        self.from_tokens = budget.from_tokens

    def attend(self, q: Tensor, cache: LayerCache, step: Step, layer: LayerAttention) -> PartialAttention:
        """Attends, for each query, to the keys it selects."""
        if step.cu_q is not None or layer.window is not None:
            return super().attend(q, cache, step, layer)
        N, q_heads = q.shape[:2]
        group = q_heads // cache.keys.shape[2]
        out, lse = torch.zeros_like(q), torch.full((N, q_heads), -torch.inf, device=q.device)
        layout, rank, block = step.placement.layout, step.placement.kvp_rank, step.placement.append_block
        for n in range(N):
            position, start = int(step.positions[n]), int(step.starts[n])
            committed = int(step.positions[n // step.max_q * step.max_q])
            if not step.live[n]:
                continue
            tokens = torch.arange(position + 1)
            local_tokens = tokens[layout.token_owner(tokens, block, start) == rank].tolist()
            pages = step.block_tables[n // step.max_q].long()
            keys, values = (
                x[pages].flatten(0, 1)[: len(local_tokens)] for x in (cache.keys, cache.values)
            )  # [S, Hkv, D]
            for h in range(keys.shape[1]):
                group_heads = slice(h * group, (h + 1) * group)
                read = self.selected_keys(
                    q[n, group_heads], keys[:, h], local_tokens, position, committed, cache.keys.shape[1]
                )
                scores = q[n, group_heads] @ keys[read, h].T * layer.scale
                if layer.sinks is not None:
                    scores = torch.cat([scores, layer.sinks[group_heads, None]], 1)
                if scores.shape[1]:
                    lse[n, group_heads] = scores.logsumexp(-1)
                    out[n, group_heads] = scores.softmax(-1)[:, : len(read)] @ values[read, h]
        return PartialAttention(out, lse)

    def selected_keys(
        self, q: Tensor, keys: Tensor, local_tokens: list[int], position: int, committed: int, page: int
    ) -> Tensor:
        """Returns the slots that one KV head's queries read, among this rank's tokens `local_tokens`."""
        b = self.budget
        begin, end = b.sink_blocks * page, min((position // page - b.local_blocks + 1) * page, committed)
        slots = torch.arange(len(local_tokens), device=keys.device)
        blocks = [
            x for x in slots.split(page) if len(x) == page and begin <= local_tokens[x[0]] and local_tokens[x[-1]] < end
        ]
        if position + 1 < b.from_tokens or not blocks:
            return slots
        anyway = sorted({*slots.tolist()} - {*torch.cat(blocks).tolist()})

        def best(of: list[Tensor], count: int) -> list[Tensor]:
            k = keys[torch.stack(of)]  # [n, P, D]
            products = q * k.amax(1)[:, None], q * k.amin(1)[:, None]  # [n, G, D]
            promised = torch.maximum(*products).sum(-1).amax(1)
            first = promised.sort(descending=True, stable=True).indices[:count]
            return [of[i] for i in sorted(first.tolist())]

        if b.parts > 1:
            blocks = [part for block in best(blocks, b.candidates) for part in block.split(page // b.parts)]
        return (
            torch.cat([torch.tensor(anyway, dtype=torch.int64, device=keys.device), *best(blocks, b.topk)])
            .sort()
            .values
        )


def reads_table(model: Decoder, table: Tensor) -> None:
    """Replaces a model by a table: logits of a token are its row."""
    columns = table[:, model.embedding.rows.start : model.embedding.rows.stop]
    model.states = lambda cache, step, policy: (step.tokens, step.tokens)  # type: ignore[assignment,method-assign]
    model.last_states = lambda cache, step, policy: step.tokens[step.cu_q[1:] - 1]  # type: ignore[method-assign]
    model.logits = lambda tokens: columns[tokens]  # type: ignore[method-assign]
