"""Self-speculation with sparse attention: the target drafts over few keys, which its own verification selects.

A draft step is a forward pass of the target over the selected keys and all newer ones. Verification overwrites the KV
of drafts. It also scores every key by its queries, and these scores select the keys of the next drafts, in all layers
at once (Vegas, arXiv:2602.07223, section 3). Each rank selects among its own keys.

In models with indexers (DSA), drafts reuse what verification's indexers selected for the last token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from helix.attention.base import AttentionPolicy
from helix.attention.block_sparse import BlockSparseAttention
from helix.attention.selected import ScoringAttention, SelectedAttention, StoredSelection
from helix.config import LEAST_KEYS, MAX_SELECTED, SpeculationConfig
from helix.engine.scheduler_output import BlockTableUpdate, NewRequest
from helix.kv_placement import BlockBudget, KeyBudget, KVPlacement
from helix.layers.specs import AttentionSpec
from helix.layout import HelixLayout
from helix.models import DecoderSpec
from helix.models.decoder import Decoder
from helix.packages import import_object
from helix.speculation.base import Draft, Drafter
from helix.speculation.draft_sampler import DraftSampler
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.kv_cache import KVCache
from helix.worker.kv_cache_spec import EngineSizes, dtype_name, score_planes
from helix.worker.score_pages import ScorePages, score_bytes
from helix.worker.sequence_observer import PrefillCommitted, RequestReleased, StepCommitted
from helix.worker.step import DecodeState
from kernels.sparse.draft_ranges import MILLION
from kernels.sparse.select_tokens import select_tokens

SINK_TOKENS = 4  # first tokens of a sequence, always read
# Verification queries that score a key: the maximum over any, or the mean of first and last. None: no scores, the
# latest keys are selected.
SCORED_QUERIES = {"any": "any", "c2q": "ends", "window": None}


@dataclass(frozen=True)
class DraftBudget:
    """Which keys drafts read.

    Attributes:
        policy: one of SCORED_QUERIES (keys are selected before drafts); quest: each draft selects blocks by bounds; or
            an import path of a function that makes the drafts' attention.
        sparsity: share of a rank's keys of a sequence that is read.
        recent: share of that for the first and the latest keys, regardless of score.
        reach: a key's score is the maximum of its own and the `reach` preceding ones.
        heads: each: each KV head selects its own keys; all: the KV heads of a rank share one selection.
    """

    policy: str = SpeculationConfig.policy
    sparsity: float = SpeculationConfig.sparsity
    recent: float = SpeculationConfig.recent
    reach: int = SpeculationConfig.reach
    heads: str = SpeculationConfig.heads

    def num_tables(self, spec: DecoderSpec, layout: HelixLayout, rank: int) -> int:
        """Returns the number of tables of selected keys in a layer on a rank."""
        return 1 if self.heads == "all" else len(layout.kv_heads(rank, spec.attention.kv_heads))

    def keys(self, kvp: int) -> KeyBudget:
        """Returns the budget of each of `kvp` ranks, for its own keys."""
        share, latest = round(self.sparsity * MILLION), round(self.recent * MILLION)
        return KeyBudget(SINK_TOKENS, -(-LEAST_KEYS // kvp), share, latest)

    def blocks(self, page_size: int, kvp: int, max_length: int, drafts: int) -> BlockBudget:
        """Returns the budget in blocks over all ranks, of a sequence of `max_length` tokens, for policy=quest.

        Raises:
            ValueError: a query cannot select that many.
        """
        total = max(-(-round(self.sparsity * max_length) // page_size), -(-LEAST_KEYS // page_size))
        # Pages with drafts have no key bounds yet, and are always read.
        local = max(1 + -(-drafts // page_size), round(self.recent * total))
        topk = max(0, total - local - 1)
        if -(-topk // kvp) > MAX_SELECTED:
            raise ValueError(
                f"{topk} blocks of kv.page_size={page_size} tokens over {kvp} ranks are more than the {MAX_SELECTED} "
                "that a query can select on each: set a larger kv.page_size or a lower speculation.sparsity"
            )
        return BlockBudget(1, local, topk, 0)

    def reuses(self, spec: DecoderSpec) -> bool:
        """Returns whether drafts read what indexers selected in verification."""
        return self.policy == "any" and bool(spec.indexers)

    def planes(self, spec: DecoderSpec, layout: HelixLayout, rank: int, queries: int, dtype: str) -> int:
        """Returns the score planes per layer on a rank, for verification of `queries` queries per sequence."""
        if SCORED_QUERIES.get(self.policy) is None or spec.indexers:
            return 0
        spec_attention = spec.attention
        heads = rank, spec_attention.q_heads, spec_attention.kv_heads
        group = len(layout.q_heads(*heads)) // len(layout.kv_heads(rank, spec_attention.kv_heads))
        width = spec_attention.head_dim if isinstance(spec_attention, AttentionSpec) else None
        return score_planes(queries, group, width, dtype)

    def columns(self, placement: KVPlacement, max_length: int, drafts: int) -> int:
        """Returns the columns of a table: selected keys of a sequence of `max_length` tokens, and newer ones."""
        capacity = placement.stripes.pages_for(max_length + drafts) * placement.page_size
        return int(self.keys(placement.layout.kvp).num_keys(torch.tensor(capacity))) + tail(drafts)

    def table_bytes(self, spec: DecoderSpec, placement: KVPlacement, rank: int, sizes: EngineSizes) -> int:
        if self.policy not in SCORED_QUERIES or self.reuses(spec):
            return 0
        tables = self.num_tables(spec, placement.layout, rank)
        columns = self.columns(placement, sizes.length, sizes.drafts)
        return len(spec.full) * sizes.slots * tables * columns * torch.int32.itemsize

    def page_bytes(self, spec: DecoderSpec, placement: KVPlacement, rank: int, drafts: int, dtype: str) -> int:
        """Returns the bytes of a page of scores on a rank, over all layers with scores."""
        planes = self.planes(spec, placement.layout, rank, 1 + drafts, dtype)
        heads = len(placement.layout.kv_heads(rank, spec.attention.kv_heads))
        return score_bytes(len(spec.full), planes, heads, placement.page_size)


def tail(drafts: int) -> int:
    """Returns the number of keys newer than the candidates: accepted drafts, and drafts of this step."""
    return 2 * drafts + 1


class SparseDrafter(Drafter):
    """Drafts with the target itself, over selected keys.

    Args:
        model, cache: the target's.
        noise: shared: drafts are sampled with the target's noise, so that tokens are the same as without drafts; own:
            with independent noise, verified by rejection sampling.
    """

    wants_prefill_events = True

    def __init__(self, model: Decoder, cache: KVCache, sizes: EngineSizes, budget: DraftBudget, noise: str) -> None:
        super().__init__(sizes.drafts)
        placement, device, layers = cache.placement, cache.device, model.spec.full
        layout = placement.layout
        self.model, self.comm, self.cache, self.placement = model, model.comm, cache, placement
        self.budget, self.noise = budget, noise
        self.tail = tail(self.limit)
        self.keys = budget.keys(layout.kvp)
        self.selected: SelectedAttention | None = None
        self.stored: StoredSelection | None = None
        self.scores: ScorePages | None = None
        self.selects = budget.policy not in SCORED_QUERIES  # indexers select for drafts, too
        self.policy: AttentionPolicy
        heads = len(layout.kv_heads(self.comm.rank, model.spec.attention.kv_heads))
        if budget.policy == "quest":
            blocks = budget.blocks(placement.page_size, layout.kvp, sizes.length, self.limit)
            self.policy = BlockSparseAttention(blocks, placement, sizes.length, device)
        elif budget.policy not in SCORED_QUERIES:
            self.policy = import_object("speculation.policy", budget.policy)(cache, sizes)
        elif budget.reuses(model.spec):
            self.policy = self.stored = StoredSelection(cache, model.spec.selecting_layers, self.limit)
        else:
            width = budget.columns(placement, sizes.length, self.limit)
            tables = budget.num_tables(model.spec, layout, self.comm.rank)
            self.policy = self.selected = SelectedAttention(layers, sizes.slots, tables, width, device)
            # Used if there are no scores.
            self._no_scores = torch.empty(
                len(layers), 1, 1, heads, placement.page_size, dtype=torch.float16, device=device
            )
            self._flags = torch.tensor([[False], [True]], device=device).expand(-1, sizes.slots).contiguous()
        if (rows := SCORED_QUERIES.get(budget.policy)) and not model.spec.indexers:
            shape = len(layers), self._planes(1 + self.limit), sizes.pages, heads, placement.page_size
            planes = torch.empty(shape, dtype=torch.float16, device=device)
            capacity = placement.stripes.pages_for(sizes.length + self.limit)
            pages = torch.zeros(sizes.slots, capacity, dtype=torch.int32, device=device)
            self.scores = ScorePages(layers, planes, pages, rows)
            self.verify_policy = ScoringAttention(self.scores, self._planes)
        self.has_own_pages = self.scores is not None

    def _planes(self, queries: int) -> int:
        layout, dtype = self.placement.layout, dtype_name(self.model.weights.dtype)
        return self.budget.planes(self.model.spec, layout, self.comm.rank, queries, dtype)

    def admit(self, *admissions: NewRequest) -> None:
        if self.scores is not None:
            for admission in admissions:
                self.scores.grow(admission.slot, len(admission.pages))

    def write_tables(self, *tables: BlockTableUpdate) -> None:
        if self.scores is not None:
            for table in tables:
                self.scores.grow(table.slot, table.column + len(table.pages))

    def release(self, *released: RequestReleased) -> None:
        if self.scores is not None:
            for one in released:
                self.scores.release(one.slot)

    def on_prefill(self, chunk: PrefillCommitted) -> None:
        span, live = chunk.span, torch.ones_like(chunk.span.after, dtype=torch.bool)
        for i, prompt in enumerate(chunk.prompts):
            at, slot = slice(i, i + 1), prompt.slot
            self._select(slice(slot, slot + 1), span.tables[at], span.starts[at], span.after[at] - 1, live[at], 0)

    def catch_up(self, state: DecodeState) -> None:
        every = slice(0, len(state.active))
        self._select(every, state.block_tables, state.starts, state.lengths - 1, state.active, 0)

    def observes_step(self, kind: DecodeGraphKey) -> bool:
        return kind.drafts > 0 and self.selected is not None

    def propose(self, state: DecodeState, kind: DecodeGraphKey) -> Draft:
        rows, drafts = kind.rows, kind.drafts
        tokens, draft_steps = state.tokens[:rows], state.draft_steps(rows, drafts)
        if self.stored is not None:
            self.stored.begin(state, rows)
        self.policy.prepare(draft_steps.joint, set(self.model.spec.windows))
        sampler = DraftSampler(self.model.logits, self.model.embedding.rows, self.comm, self.noise == "shared", kind)
        for n in range(drafts):
            step = replace(draft_steps.step(n, tokens), selects=self.selects)
            hidden = self.model.hidden(self.cache, step, self.policy)
            if n == 0:
                self.cache.on_draft(step.live)
            tokens = sampler.sample(hidden, state, step.positions + 1)
        return sampler.draft()

    def on_step(self, step: StepCommitted) -> None:
        # Select up to the last token, at `before`: drafts after it may have been rejected.
        span, slots = step.span, slice(0, step.kind.rows)
        self._select(slots, span.tables, span.starts, span.before, step.live, 1 + step.kind.drafts)

    def _select(
        self,
        slots: slice,
        tables: Tensor,
        starts: Tensor,
        positions: Tensor,
        live: Tensor,
        queries: int,
    ) -> None:
        # Selects keys among the tokens up to `positions` [n] of the sequences in `slots`, for all layers. `queries`:
        # number of verified queries that wrote scores; 0: no scores, the latest keys are selected.
        if self.selected is None:
            return
        fresh = not queries or self.scores is None
        num_candidates, counts, sinks, recent = self.placement.draft_ranges(positions, starts, live, self.keys)
        self.selected.num_candidates[slots], self.selected.counts[slots] = num_candidates, counts
        scores, score_tables = self._no_scores, tables
        if not fresh and self.scores is not None:
            scores, score_tables = self.scores.planes[:, : self._planes(queries)], self.scores.tables[slots]
        select_tokens(
            scores, score_tables, tables, num_candidates, counts, sinks, recent, self._flags[int(fresh)][slots],
            self.selected.tables[:, slots], self.tail, reach=self.budget.reach,
        )  # fmt: skip
