"""Ways to choose the keys of drafts that the product does not have, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from comm.base import Communicator
from helix.attention.base import LayerAttention
from helix.attention.chosen import ChosenAttention, CollectingAttention
from helix.placement import KeyBudget
from helix.speculation import DraftBudget, SparseDrafter
from helix.speculation.sparse import SINK_TOKENS
from helix.worker.follower import Taken
from helix.worker.kv_cache import LayerCache
from helix.worker.score_pages import ScorePages
from helix.worker.step import Step
from kernels.attention.split_kv import PartialAttention
from kernels.sparse.draft_ranges import MILLION
from kernels.sparse.select_tokens import select_tokens

LEAST = torch.finfo(torch.float16).min


@dataclass(frozen=True)
class FixedBudget(DraftBudget):
    """The same number of keys, whatever the length.

    Attributes:
        fixed: keys of a sequence over all ranks.
    """

    fixed: int = 0

    def keys(self, kvp: int) -> KeyBudget:
        return KeyBudget(SINK_TOKENS, -(-self.fixed // kvp), 0, round(self.recent * MILLION))


def choose_by_queries(
    q: Tensor, cache: LayerCache, step: Step, scale: float, known: Tensor, counts: Tensor, table: Tensor, tail: int
) -> None:
    """Writes tables of the keys with the largest logits, the mean over the heads of a KV head, for one layer's queries.

    Args:
        q: [n, Hq, D].
        known, counts, table [1, n, heads, width], tail: as in `select_tokens`.
    """
    n, tables = len(known), step.block_tables
    keys = cache.keys[tables.long()].float()  # [n, P, page, Hkv, D]
    mean = q.float().unflatten(1, (keys.shape[3], -1)).mean(2) * scale
    scores = torch.einsum("nhd,npshd->nphs", mean, keys).half()
    pages = torch.arange(tables.numel(), dtype=torch.int32, device=q.device).view(tables.shape)
    none = torch.zeros(n, dtype=torch.int32, device=q.device)
    select_tokens(scores.flatten(0, 1)[None, None], pages, tables, known, counts, none, none, none.bool(), table, tail)


class OracleAttention(ChosenAttention):
    """Each query chooses by its own logits, as many keys of those that were known to the last choice."""

    def __init__(self, chosen: ChosenAttention, layers: list[int], tail: int) -> None:
        _, max_batch, heads, width = chosen.tables.shape
        super().__init__(layers, max_batch, heads, width, chosen.tables.device)
        self.tail = tail

    def attend(self, q: Tensor, cache: LayerCache, step: Step, layer: LayerAttention) -> PartialAttention:
        if layer.window is None:
            rows, place = slice(step.first, step.first + len(q)), self._places[cache.index]
            table = self.tables[place : place + 1, rows]
            choose_by_queries(q, cache, step, layer.scale, self.known[rows], self.counts[rows], table, self.tail)
        return super().attend(q, cache, step, layer)


def oracle(drafter: SparseDrafter) -> SparseDrafter:
    """The drafter, whose drafts choose for themselves."""
    assert drafter.chosen is not None
    drafter.chosen = drafter.policy = OracleAttention(drafter.chosen, drafter.model.spec.full, drafter.tail)
    return drafter


def logits_of(q: Tensor, cache: LayerCache, step: Step, scale: float) -> Tensor:
    """Returns the scores of a step's queries for each key [n, Hkv, T, group, S]; -inf for keys beyond its own."""
    n = len(step.block_tables)
    _, hi = (bound.view(n, -1) for bound in step.bounds(None))  # [n, T]
    keys = cache.keys[step.block_tables.long()].flatten(1, 2).float()  # [n, S, Hkv, D]
    of_heads = q.float().unflatten(0, (n, -1)).unflatten(2, (keys.shape[2], -1))  # [n, T, Hkv, group, D]
    x = torch.einsum("nthgd,nshd->nhtgs", of_heads * scale, keys)
    read = torch.arange(keys.shape[1], device=q.device) < hi[:, None, :, None, None]
    return x.masked_fill(~read, -torch.inf)


def leave(scores: ScorePages, index: int, slots: slice, score: Tensor, read: Tensor) -> None:
    """Leaves the scores [n, Hkv, S] of a layer's keys, in pages of which some key is `read` [n, S]."""
    left = scores.layer(index, slots)
    page = left.planes.shape[3]
    columns = read.unflatten(1, (-1, page)).any(2)
    left.planes[0][left.table[columns].long()] = score.half().unflatten(2, (-1, page)).transpose(1, 2)[columns]
    left.planes[1:] = 0


class WeighingAttention(CollectingAttention):
    """Leaves the logarithm of a key's softmax weight, the mean over heads and the sum over queries, as its score."""

    def __init__(self, scores: ScorePages, comm: Communicator) -> None:
        super().__init__(scores)
        self.comm = comm

    def attend(self, q: Tensor, cache: LayerCache, step: Step, layer: LayerAttention) -> PartialAttention:
        found = super().attend(q, cache, step, layer)
        if step.cu_q is not None or layer.window is not None:
            return found
        x = logits_of(q, cache, step, layer.scale)
        read = x > -torch.inf
        # Over all ranks: those of a kvp group, there being no others.
        total = self.comm.all_gather(x.logsumexp(-1, keepdim=True)).logsumexp(0)
        weights = torch.where(read, (x - total).exp(), 0).mean(3).sum(2)  # [n, Hkv, S]
        slots = slice(step.first, step.first + len(step.block_tables))
        leave(self.scores, cache.index, slots, weights.log().clamp(min=LEAST), read.any(3).any(2).any(1))
        return found


def by_weights(drafter: SparseDrafter, comm: Communicator) -> SparseDrafter:
    """The drafter, whose verification leaves weights."""
    assert drafter.scores is not None
    drafter.verification = WeighingAttention(drafter.scores, comm)
    return drafter


class RememberingAttention(CollectingAttention):
    """Keeps the mean over heads of what each query makes of each key [n, Hkv, T, S], by layers."""

    def __init__(self, scores: ScorePages) -> None:
        super().__init__(scores)
        self.logits: dict[int, Tensor] = {}

    def attend(self, q: Tensor, cache: LayerCache, step: Step, layer: LayerAttention) -> PartialAttention:
        if step.cu_q is None and layer.window is None:
            self.logits[cache.index] = logits_of(q, cache, step, layer.scale).mean(3)
        return super().attend(q, cache, step, layer)


class JudgingDrafter(SparseDrafter):
    """Chooses by the mean of the queries that count, which is known once it is known which drafts held.

    Attributes:
        counting: all; accepted: those whose drafts held; last: the last of these.
    """

    counting = "all"

    def judge(self, counting: str) -> JudgingDrafter:
        assert self.scores is not None
        self.counting, self.verification = counting, RememberingAttention(self.scores)
        return self

    def taken(self, step: Taken) -> None:
        assert self.scores is not None and isinstance(self.verification, RememberingAttention)
        held = (step.span.after - step.span.before - 1)[:, None]
        for index, x in self.verification.logits.items():
            query, read = torch.arange(x.shape[2], device=x.device), x.isfinite()
            if self.counting != "all":
                counts = query <= held if self.counting == "accepted" else query == held
                read = read & counts[:, None, :, None]
            score = torch.where(read, x, 0).sum(2) / x.shape[2]
            leave(self.scores, index, slice(0, len(x)), score, x.isfinite().any(2).any(1))
        super().taken(step)
