"""What a choice of blocks keeps of dense attention, over budgets: measured from the queries and keys of dense steps.

One rank computes all of it, and also what several ranks would choose: a block's number says whose it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality.variants import STORED, rounded
from helix.attention.base import LayerAttention
from helix.attention.dense import DenseAttention
from helix.worker.kv_cache import LayerCache
from helix.worker.step import Step
from kernels.attention.split_kv import PartialAttention

SINK_TOKENS, LOCAL_TOKENS = 128, 512  # as block_sparse reads; of pages of 16 tokens quest reads one as sink
SHARED = {"pairs": 2, "fours": 4}  # neighbouring layers with one choice, by bounds
SCORES = ("bounds", "mean", "mean_std", *STORED, *SHARED)


def block_scores(q: Tensor, keys: Tensor, score: str) -> Tensor:
    """How promising blocks are to a KV head's queries, fp32 [n, Hkv, C].

    Args:
        q: [n, Hkv, group, D] fp32.
        keys: [n, C, page, Hkv, D], of C blocks, in the cache's dtype.
    """
    if score in ("mean", "mean_std"):
        k = keys.float()
        one, two = k.mean(2), k.std(2, correction=0) * (score == "mean_std")
        meets = q, q.abs()
    else:
        both = torch.stack((keys.amax(2), keys.amin(2)), -2).float()
        one, two = (rounded(both, score) if score in STORED else both).unbind(-2)
        meets = q.clamp(min=0), q.clamp(max=0)
    one, two = (x.to(keys.dtype).float() if score in ("mean", "mean_std") else x for x in (one, two))
    found = sum(torch.einsum("nhgd,nchd->nhgc", a, b) for a, b in zip(meets, (one, two), strict=True))
    assert isinstance(found, Tensor)
    return found.amax(2)


def local_choice(scores: Tensor, k: int, ranks: int) -> Tensor:
    """All ranks' own best ceil(k / ranks) blocks, where blocks go round: bool like `scores` [..., C]."""
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    for rank in range(ranks):
        mine = slice(rank, None, ranks)
        of_rank = scores[..., mine]
        best = of_rank.topk(min(-(-k // ranks), of_rank.shape[-1]), sorted=False).indices
        chosen[..., mine] = torch.zeros_like(of_rank, dtype=torch.bool).scatter_(-1, best, True)
    return chosen


def best_of(scores: Tensor, k: int) -> Tensor:
    """The k best, bool like `scores` [..., C]."""
    best = scores.topk(min(k, scores.shape[-1]), sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def _share(found: Tensor, of: Tensor) -> Tensor:
    return found.sum() / of.sum()


class RecallMeter(DenseAttention):
    """Attends densely, and adds up what choices of blocks would have kept of it, of every layer and KV head.

    All sequences have one length, all layers full attention, and there is one rank. Shares are of the weight that
    dense attention gives to keys, the mean over the query heads of a KV head.

    Args:
        budgets: keys that are chosen between sink and window.
        ranks: over which blocks go round.
    """

    def __init__(self, pages: Sequence[int], budgets: Sequence[int], ranks: Sequence[int]) -> None:
        self.pages = pages
        self.budgets = budgets
        self.ranks = ranks
        self.measured = 0
        self._layer = 0
        self._sums: defaultdict[tuple[Any, ...], float | Tensor] = defaultdict(float)
        self._leaders: dict[tuple[int, str], Tensor] = {}

    def prepare(self, step: Step, windows: set[int | None]) -> None:
        assert windows == {None} and step.placement.layout.kvp == 1
        super().prepare(step, windows)
        self._layer = 0

    def attend(self, q: Tensor, cache: LayerCache, step: Step, layer: LayerAttention) -> PartialAttention:
        length = int(step.positions[0]) + 1
        pages = step.block_tables[:, : -(-length // cache.keys.shape[1])].long()
        keys = cache.keys[pages].flatten(1, 2)[:, :length]  # [n, S, Hkv, D]
        heads = q.float().unflatten(1, (keys.shape[2], -1))  # [n, Hkv, group, D]
        weights = torch.einsum("nhgd,nshd->nhgs", heads * layer.scale, keys.float()).softmax(-1).mean(2)
        for page in self.pages:
            self._measure(heads, keys, weights, page)
        self._layer += 1
        self.measured += 1
        return super().attend(q, cache, step, layer)

    def _measure(self, q: Tensor, keys: Tensor, weights: Tensor, page: int) -> None:
        length = keys.shape[1]
        end = (length - 1) // page - LOCAL_TOKENS // page + 1  # candidates are blocks [1, end)
        between = slice(page, end * page)
        blocks = keys[:, between].unflatten(1, (-1, page))  # [n, C, page, Hkv, D]
        mass = weights[..., between].unflatten(-1, (-1, page)).sum(-1)  # [n, Hkv, C]
        fixed = 1 - mass.sum(-1)
        scores = {score: block_scores(q, blocks, score) for score in SCORES if score not in SHARED}
        for name, layers in SHARED.items():
            if self._layer % layers == 0:
                self._leaders[page, name] = scores["bounds"]
            scores[name] = self._leaders[page, name]

        def kept(chosen: Tensor) -> Tensor:
            return (fixed + (mass * chosen).sum(-1)).mean()

        self._add(("fixed", page), fixed.mean())
        for budget in self.budgets:
            k = budget // page
            best = best_of(mass, k)
            self._add(("best", page, budget), kept(best))
            whole = {score: best_of(found, k) for score, found in scores.items()}
            for score, chosen in whole.items():
                self._add(("kept", page, score, budget), kept(chosen))
                self._add(("layer", page, score, budget, self._layer), kept(chosen))
                self._add(("recall", page, score, budget), _share(chosen & best, best))
            for ranks in self.ranks:
                local = local_choice(scores["bounds"], k, ranks)
                self._add(("local", page, ranks, budget), kept(local))
                self._add(("same", page, ranks, budget), _share(local & whole["bounds"], whole["bounds"]))
                of_rank = [whole["bounds"][..., rank::ranks].sum(-1) for rank in range(ranks)]
                self._add(("most", page, ranks, budget), torch.stack(of_rank).amax(0).float().mean())

    def _add(self, key: tuple[Any, ...], value: Tensor) -> None:
        self._sums[key] = self._sums[key] + value.double()

    def mean(self, *key: Any) -> float:
        """The mean over all steps and layers of one sum, by what it is, page, score or ranks, and budget."""
        return float(self._sums[key]) / self.measured

    def rows(self) -> list[dict[str, Any]]:
        """Kind `recall`: of each page size and score, and of the best blocks; `ranks`: of each number of ranks."""
        found: list[dict[str, Any]] = []
        for page in self.pages:
            shared = {"page": page, "budgets": [*self.budgets], "fixed": self.mean("fixed", page)}
            best = self._over_budgets("best", page)
            found.append({"kind": "recall", "score": "best", **shared, "kept": best, "recall": [1.0] * len(best)})
            for score in SCORES:
                of_score: dict[str, Any] = {w: self._over_budgets(w, page, score) for w in ("kept", "recall")}
                of_score["kept_by_layer"] = [
                    [self.mean("layer", page, score, budget, layer) * self._layer for layer in range(self._layer)]
                    for budget in self.budgets
                ]
                found.append({"kind": "recall", "score": score, **shared, **of_score})
            for ranks in self.ranks:
                of_ranks = {what: self._over_budgets(what, page, ranks) for what in ("local", "same", "most")}
                of_ranks |= {"global": self._over_budgets("kept", page, "bounds"), "best": best}
                share = [-(-(budget // page) // ranks) for budget in self.budgets]
                found.append({"kind": "ranks", "score": "bounds", "ranks": ranks, **shared, "share": share, **of_ranks})
        return found

    def _over_budgets(self, *key: Any) -> list[float]:
        return [self.mean(*key, budget) for budget in self.budgets]
