"""Indexer of DeepSeek sparse attention (DSA): selects the tokens that an MLA query reads.

    score of token t = sum over index heads h of w_h relu(q_h . k_t)         the topk best are read, or all if fewer

    norm(q_a x) --> wq_b [N, H_I, D_I] --> RoPE ------------> scores of this rank's tokens --> topk over all ranks
    x --> wk [N, D_I] --> LayerNorm, RoPE, append                ^                                     |
    x --> weights_proj [N, H_I] ---------------------------------+           cache slots of the tokens [N, topk]

Index keys are stored in the latents' pages, on the same ranks. Every rank computes the queries of all index heads,
which are few. Omitted: the published models' positive factors on scores, which do not change the selection, and the
rotation by a Hadamard matrix, which leaves products unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from helix.layers.linear import ColumnParallel, Rows
from helix.layers.rotary import Angles
from helix.layers.specs import MAX_SCORES, MLASpec
from helix.layers.weights import ModelShard
from helix.worker.kv_cache import LayerCache
from helix.worker.row_shard import all_gather_rows, gather_some_rows, gathered
from helix.worker.step import SELECTED, Step
from kernels.indexer.append import index_append
from kernels.indexer.keys import DIGITS
from kernels.indexer.reference import Shard
from kernels.indexer.scores import index_scores
from kernels.indexer.select_topk import FEW_ROWS, PLANES, index_topk

NORM_EPS = 1e-6  # of the keys' norm, whatever rms_norm_eps is


class Indexer:
    """Indexer of an MLA layer, replicated on every rank."""

    def __init__(self, shard: ModelShard, attention: MLASpec, name: str) -> None:
        weights, spec = shard.weights, attention.indexer
        assert spec is not None and attention.q_rank and attention.topk, "indexers read the queries' latent"
        self.comm, self.spec, self.topk = shard.comm, spec, attention.topk
        total = spec.heads * spec.width
        rows = [part for h in range(spec.heads) for part in spec.rows(h * spec.width)]
        self.queries = ColumnParallel(weights, attention.q_rank, [Rows(f"{name}.wq_b", total, part) for part in rows])
        keys = [Rows(f"{name}.wk", spec.width, part) for part in spec.rows(0)]
        head_weights = Rows(f"{name}.weights_proj", spec.heads, range(spec.heads))
        self.down = ColumnParallel(weights, attention.hidden, [*keys, head_weights])
        self.norm_weight, self.bias = weights.parameter(spec.width), weights.parameter(spec.width)
        for parameter, kind in ((self.norm_weight, "weight"), (self.bias, "bias")):
            begin = 0
            for part in spec.rows(0):
                to = parameter[begin : (begin := begin + len(part))]
                weights.bind(to, f"{name}.k_norm.{kind}", (spec.width,), part)

    def __call__(self, x: Tensor, latents: Tensor, angles: Angles, cache: LayerCache, step: Step) -> None:
        """Appends index keys to the cache, and selects tokens for this layer and the layers that share its selection.

        Sets `step.selected`, and stores the selection in the cache if drafts reuse it. Prefill steps of short sequences
        read all tokens and select none, nor do steps without attention (`step.selects`).

        Args:
            x: [N, H], the layer's normalized input; if row-sharded, this rank's rows.
            latents: [N, q_rank], the queries' normalized latents, of the same rows.
        """
        spec, slots, shard = self.spec, step.slot_mapping(None), step.row_shard
        k, weights = self.down(x, exact=True).split([spec.width, spec.heads], 1)  # fp32
        reads_all = shard is None and step.cu_q is not None and step.max_k * step.placement.layout.kvp <= self.topk
        reads_all = reads_all and not cache.over_link
        q = self.queries(latents).view(len(x), spec.heads, spec.width) if step.selects and not reads_all else None
        # For few single queries, the scoring kernel also builds the histogram of the selection.
        digit_counts = None
        if q is not None and shard is None and step.max_q == 1 and len(q) <= FEW_ROWS:
            digit_counts = torch.empty(PLANES, len(q), DIGITS, dtype=torch.int32, device=q.device)

        def append(
            q: Tensor | None, k: Tensor, angles: Angles, slots: Tensor, tensors: Mapping[str, Tensor] = cache.tensors
        ) -> None:
            # Writes keys, and rotates queries, if any.
            q = latents.new_empty(len(k), 0, spec.width) if q is None else q
            to, norm = (
                (tensors["index_keys"], slots, tensors.get("index_scales")),
                (self.norm_weight, self.bias, NORM_EPS),
            )
            index_append(q, k, angles.cos, angles.sin, *norm, *to, digit_counts)

        if shard is not None:
            assert q is not None
            all_keys, tensors = all_gather_rows(shard, self.comm, k), gathered(shard, cache, self.cache_names(cache))
            append(None, all_keys, angles, slots)
            append(None, all_keys, angles, shard.slots, tensors)
            append(q, k, angles.rows(shard.local), torch.full_like(slots[shard.local], -1))
            runs = {name: data.flatten(0, 1).unflatten(0, (-1, shard.run_length)) for name, data in tensors.items()}
            shard.step.shared[SELECTED] = self._select(q, weights, runs, None, shard.step)
            if spec.stored_topk:
                rows, lasts = step.last_tokens()
                q, weights = (gather_some_rows(shard, self.comm, part, rows) for part in (q, weights))
                self._store(self._select(q, weights, cache.tensors, None, lasts), cache, lasts)
            return
        append(q, k, angles, slots)
        if (micro_batch := step.micro_batch) is not None:  # the second reads what the first writes in the same stage
            micro_batch.record("index keys", x.device) if micro_batch.first else micro_batch.wait("index keys")
        if q is not None:
            step.shared[SELECTED] = self._select(q, weights, cache.tensors, digit_counts, step)
        if not spec.stored_topk or not step.selects:
            return
        if step.cu_q is None:
            assert step.selected is not None
            self._store(step.selected, cache, step)
        else:
            rows, lasts = step.last_tokens()
            found = _all_tokens(lasts, self.topk) if reads_all else tuple(part[rows] for part in step.selected or ())
            self._store(found, cache, lasts)

    def _store(self, selection: tuple[Tensor, ...], cache: LayerCache, step: Step) -> None:
        # The selections of all rows of a decode step; in prefill, of sequences' last rows, as each one's first row.
        slots, _, counts = selection
        n, width = len(step.slots), slots.shape[1]
        to, counts_to = cache.tensors["selected"], cache.tensors["num_selected"]
        if step.cu_q is None:
            at = slice(step.first, step.first + n)
            to[at, : step.max_q, :width] = slots.view(n, step.max_q, width)
            counts_to[at, : step.max_q] = counts.view(n, step.max_q)
            return
        # Repeat a sequence in place of those without tokens; without any, nothing changes.
        rows = torch.where(step.live, torch.arange(n, device=slots.device), step.live.int().argmax())
        req_indices, live = step.slots[rows], step.live[rows]
        to[req_indices, 0, :width] = torch.where(live[:, None], slots[rows], to[req_indices, 0, :width])
        counts_to[req_indices, 0] = torch.where(live, counts[rows], counts_to[req_indices, 0])

    def cache_names(self, cache: LayerCache) -> list[str]:
        return [name for name in ("index_keys", "index_scales") if name in cache.tensors]

    def _select(
        self, q: Tensor, weights: Tensor, tensors: Mapping[str, Tensor], digit_counts: Tensor | None, step: Step
    ) -> tuple[Tensor, ...]:
        # Queries [N, H_I, D_I], some rows at a time; returns `Step.selected`.
        keys, scales = tensors["index_keys"], tensors.get("index_scales")
        tables, (lo, hi), owners = step.block_tables, step.bounds(None), step.owners()
        columns = tables.shape[1] * keys.shape[1]
        if step.cu_q is not None:
            columns = min(columns, -(-step.max_k // 128) * 128)
        each = step.max_q if step.cu_q is None else 1
        max_rows = max(1, MAX_SCORES // (columns * each)) * each
        shard = self._shard(step)
        parts = []
        for begin in range(0, len(q), max_rows):
            part = slice(begin, begin + max_rows)
            cu_q, owner, pages = None, None, tables
            if step.cu_q is None or owners is None:
                pages = tables[begin // each : (begin + max_rows) // each]
            else:
                cu_q, owner = step.cu_q.clamp(begin, begin + max_rows) - begin, owners[part]
            scores = torch.empty(len(q[part]), columns, dtype=torch.float32, device=q.device)
            counts = None if digit_counts is None else digit_counts[:, part]
            key_args = keys, pages, hi[part], cu_q, min(step.max_q, max_rows)
            index_scores(q[part], weights[part], *key_args, scores, scales, counts)
            row_args = step.positions[part], step.starts[part], hi[part], pages, owner
            max_tokens = step.placement.max_tokens(tables)
            parts.append(index_topk(scores, *row_args, self.topk, max_tokens, shard, counts))
        slots, num_selected = parts[0] if len(parts) == 1 else (torch.cat(found) for found in zip(*parts, strict=True))
        return slots, lo, num_selected  # lo is 0: there is no window

    def _shard(self, step: Step) -> Shard:
        placement = step.placement
        gather = None
        if placement.layout.kvp > 1:  # with MLA, a kvp group of several ranks is the world, as all_gather requires
            gather = self.comm.gather_in_group if step.micro_batch is not None else self.comm.all_gather
        return Shard(**placement.grid, page_size=placement.page_size, gather=gather)


def _all_tokens(step: Step, topk: int) -> tuple[Tensor, ...]:
    # `Step.selected` of sequences of at most `topk` tokens.
    page, tables, (lo, hi) = step.placement.page_size, step.block_tables, step.bounds(None)
    local = torch.arange(min(topk, tables.shape[1] * page), device=tables.device)
    return tables[:, local // page] * page + (local % page).int(), lo, hi
