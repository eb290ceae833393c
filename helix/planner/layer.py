"""Phases of a decoder layer and their costs: bytes read, FLOPs, launches and messages of the slowest rank.

Assumptions: a step reads weights and KV from memory once; activations stay in GPU caches. Ranks hold whole heads,
columns and experts, and the largest share counts; KV is divided evenly. Routing is uniform and independent.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import numpy as np

from helix.config import LEAST_KEYS
from helix.layers.specs import AttentionSpec, GatedDeltaSpec, IndexerSpec, MLASpec, MLPSpec, MoESpec
from helix.models import DecoderSpec
from helix.planner.hardware import (
    DTYPE_BYTES,
    INTERPOLATED,
    QUANTIZED_KV,
    Array,
    Constant,
    Hardware,
    interpolate,
    sent_bytes,
)
from helix.planner.phases import Number, Phase, ceil_div, cheaper, experts_touched, faster, pipelined
from helix.planner.points import DP, HELIX, MEDHA, MODES, Options, Points, Sparse
from helix.worker.kv_cache_spec import LATENT_GROUP, score_planes

MAX_KERNEL_ROWS = 32  # more rows use cuBLAS, except for experts
SELECT_LAUNCHES = 5  # kernels/sparse/select_tokens.py
STORE_LAUNCHES, REUSE_LAUNCHES = 2, 9  # of an indexer's selection, and of all before drafts (StoredSelection.begin)
SCORE_BYTES, SLOT_BYTES = 2, 4
COUNTED_DIGITS, DIGIT_VALUES = 2, 256  # kernels/indexer/select_topk.py: digits with gathered counts, values of each
SCORE_READS, NUMBER_BYTES = 5, 4  # an indexer's scores are written once, and read by each launch of the selection


class Layer:
    """Costs of a layer's mixer and FFN over all points.

    Its attention is `DecoderSpec.attention`; `attentions` has the costs of the others.

    Args:
        drafting: whether the step is a draft step of self-speculation, instead of a verification step.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        hardware: Hardware,
        points: Points,
        length: int,
        options: Options,
        drafting: bool = False,
    ) -> None:
        self.spec, self.hardware, self.points, self.options = spec, hardware, points, options
        self.length = length
        sparse = options.sparse
        self.sparse = sparse if sparse is not None and length >= sparse.from_tokens else None
        p, s, each = points, options.speculation, 1 if drafting else options.step_tokens
        self.self_drafts = s if s is not None and s.sparsity is not None else None
        self.drafting = drafting
        self.single = each == 1
        self.sequences = ceil_div(p.batch, p.dp)
        self.rows = self.sequences * each  # rows per data-parallel group
        self.all_rows = p.batch * each  # rows per pipeline stage
        self._attend_as(spec.attention)
        self.rate = hardware.rate(options.arithmetic or options.weights)
        self.zeros = np.zeros(len(points))
        # Where rows are sent to the ranks of their experts and back; elsewhere every rank has all rows.
        self.dispatched = (p.mode == DP) & (options.dispatch == "selected")
        self.gathered = (p.mode == DP) & (options.dispatch == "all")

    @property
    def vocabulary_ranks(self) -> Array:
        """Ranks that share embedding and head; in the runtime's mode dp each has all rows."""
        return np.where(self.gathered, 1, self.points.ranks)

    def _attend_as(self, mixer: AttentionSpec | MLASpec) -> None:
        p, options, self.mixer = self.points, self.options, mixer
        self.q = ceil_div(mixer.q_heads, p.tpa)
        self.kv = ceil_div(mixer.kv_heads, p.tpa)
        self.o = np.where(p.mode == MEDHA, self.q, ceil_div(self.q, p.kvp))
        self.item = {"messages": DTYPE_BYTES[options.messages], **_kv_items(mixer, options.kv)}

    @property
    def attentions(self) -> list[tuple[Layer, int]]:
        """Lists the costs for each distinct attention of the model, with its number of layers."""
        found = []
        for mixer, count in self.spec.attentions.items():
            layer = copy(self)
            layer._attend_as(mixer)
            found.append((layer, count))
        return found

    # ---- phases

    def attention(self, window: int | None) -> list[Phase]:
        """Lists the phases from the layer's input to the all-reduce after its output projection."""
        return self._latent(window) if isinstance(self.mixer, MLASpec) else self._heads(window)

    def ffn(self, spec: MLPSpec | MoESpec) -> list[Phase]:
        """Lists the phases of the FFN, including its all-reduce."""
        return self._experts(spec) if isinstance(spec, MoESpec) else self._dense(spec)

    def kernel(
        self,
        name: str,
        weights: Number,
        rows: Number,
        *,
        kernels: Number = 1,
        flops: Number = None,
        kind: str = "weights",
        scaled: Number = 0,
        each: Number = None,
    ) -> Phase:
        """Returns the cost of a GEMM of `rows` rows with `weights` weights on this rank.

        Args:
            flops: None: 2 * rows * weights.
            kind: of the matrices, see `Options.stored`.
            scaled: rows of the matrices, which may have scales.
            each: rows that each matrix multiplies; None: all.
        """
        hw = self.hardware
        share = hw.share(self.options.stored(kind), kind == "experts", rows if each is None else each)
        flops = 2.0 * rows * weights if flops is None else flops
        phase = self._roofline_phase(name, self.weight_bytes(kind, weights, scaled), flops, kernels, share)
        if not hw.product_s:
            return phase
        fixed, level = interpolate(hw.product_s, rows)
        seconds = phase.seconds + kernels * (fixed - hw.kernel_s.value)
        return replace(phase, seconds=seconds, level=np.maximum(phase.level, level))

    def weight_bytes(self, kind: str, weights: Number, scaled: Number = 0) -> Number:
        """Returns the bytes of matrices of a kind, see `kernel`."""
        stored = self.options.stored(kind)
        return weights * stored.bytes + scaled * stored.row_bytes

    def _roofline_phase(
        self,
        name: str,
        read: Number,
        flops: Number = 0.0,
        kernels: Number = 1,
        share: Constant | None = None,
        rate: Constant | None = None,
    ) -> Phase:
        # Kernels that read at `share` of the read rate and compute at `rate`.
        hw, rate = self.hardware, rate or self.rate
        reached = hw.read_bytes_per_s.value * (share.value if share is not None else 1.0)
        work = np.maximum(read / reached, flops / rate.value)
        constants = (hw.read_bytes_per_s, rate, hw.kernel_s, *([share] if share is not None else []))
        seconds = work + kernels * hw.kernel_s.value
        return self._phase(name, seconds, *constants, read=read, flops=flops, launches=kernels)

    def _phase(
        self,
        name: str,
        seconds: Number,
        *constants: Constant,
        read: Number = 0.0,
        flops: Number = 0.0,
        launches: Number = 1,
    ) -> Phase:
        # `constants` determine the provenance.
        level, zeros = max(INTERPOLATED, *(constant.level for constant in constants)), self.zeros
        sums = zeros + seconds, zeros + read, zeros + flops, zeros, zeros + launches
        return Phase(name, *sums, zeros.astype(int) + level)

    def collective(self, name: str, op: str, width: Array, message: Array) -> Phase:
        latency, wire, level = self.hardware.collective_s(op, width, message)
        sent = np.where(width > 1, sent_bytes(op, width, message), 0.0)
        return Phase(name, latency + wire, self.zeros, self.zeros, sent, self.zeros + (width > 1), level)

    def row_bytes(self, rows: Number) -> Number:
        return rows * self.spec.hidden * self.item["messages"]

    def _heads(self, window: int | None) -> list[Phase]:
        d = self.head_dim
        numbers = self.inputs * (d * (self.q + 2 * self.kv) + self.gates)
        qkv = self.kernel("qkv", numbers, self.rows, kernels=1 + (self.gate_width > 0))
        attention, exchange = self._attend(window, self.kv * 2 * d, 2 * d, d)
        return [
            qkv,
            *self._block_scoring(window),
            *self._offload_fetches(window),
            attention,
            exchange,
            *self._output(d),
        ]

    def recurrent(self, spec: GatedDeltaSpec) -> list[Phase]:
        """Lists the phases of a recurrent layer, whose states a step reads and writes once.

        With self-speculation only the first draft step writes them.
        """
        p, s, heads, drafts = self.points, self.spec, self._state_heads(spec), self.self_drafts
        writes = 1.0 if drafts is None or not drafts.gamma else 1 / drafts.gamma if self.drafting else 0.0
        width = np.where(p.mode == MEDHA, p.tpa, p.ranks)
        return [
            self.kernel("qkv", s.hidden * self._state_rows(spec), self.rows),
            self._roofline_phase("states", (1 + writes) * self.sequences * self.state_bytes(spec)),
            self.kernel("output", s.hidden * heads * spec.value_dim, self.rows, kind="output", scaled=s.hidden),
            self.collective("output all-reduce", "all_reduce", width, self.row_bytes(self.rows)),
        ]

    def _state_heads(self, spec: GatedDeltaSpec) -> Array:
        # On the fullest rank.
        return ceil_div(spec.value_heads, self.points.ffn_ranks)

    def _state_channels(self, spec: GatedDeltaSpec) -> Array:
        # Rows of the input projection that the convolution reads: q, k and v.
        heads = self._state_heads(spec)
        keys = np.minimum(ceil_div(heads, spec.group) + (heads % spec.group > 0), spec.key_heads)
        return 2 * keys * spec.key_dim + heads * spec.value_dim

    def _state_rows(self, spec: GatedDeltaSpec) -> Array:
        # Rows of the input projection: also z and two gates per head.
        return self._state_channels(spec) + self._state_heads(spec) * (spec.value_dim + 2)

    def state_bytes(self, spec: GatedDeltaSpec) -> Array:
        return self._state_heads(spec) * spec.key_dim * spec.value_dim * 4

    def recent_bytes(self, spec: GatedDeltaSpec) -> tuple[Array, Array]:
        """Returns the bytes of a sequence's last tokens: those of the convolution, and of updates to its state.

        As in `GatedDeltaSpec.kv_cache_specs`.
        """
        tokens = self.options.step_tokens
        updates = self._state_heads(spec) * (spec.key_dim + spec.value_dim + 1) * 4
        return self._state_channels(spec) * (tokens + spec.conv - 1) * self.item["plain_kv"], tokens * updates

    def recurrent_bytes(self, spec: GatedDeltaSpec) -> Array:
        hidden, output = self.spec.hidden, self._state_heads(spec) * spec.value_dim
        inputs = self._state_rows(spec)
        return self.weight_bytes("weights", hidden * inputs, inputs) + self.weight_bytes(
            "output", hidden * output, hidden
        )

    @property
    def gate_width(self) -> int:
        """Output gates per query head, which take another GEMM; 0: there are none."""
        return self.mixer.gate_width if isinstance(self.mixer, AttentionSpec) else 0

    @property
    def gates(self) -> Number:
        """Number of gates that a rank computes: those of its heads after the exchange."""
        return self.o * self.gate_width

    def _latent(self, window: int | None) -> list[Phase]:
        # With the faster order of W_UV and exchange, and the faster way to compute queries.
        m, p = self.mixer, self.points
        assert isinstance(m, MLASpec)

        def attend(value: int, heads: Number) -> list[Phase]:
            attention, exchange = self._attend(window, m.entry, m.entry + m.latent, value)
            return [attention, exchange, self.kernel("values", heads * m.latent * m.value, self.rows, kind="other")]

        every, part, gathers = self._query_phases()
        query_phases = [b.where(gathers, a) for a, b in zip(every, part, strict=True)]
        attention_phases = cheaper(attend(m.latent, self.o), attend(m.value, self.q), p.kvp > 1)
        return [*query_phases, *attention_phases, *self._output(m.value)]

    def _query_phases(self) -> tuple[list[Phase], list[Phase], Array]:
        # Of all heads that a rank attends; of its part of them, with the exchange; and where the latter is faster.
        s, m, p = self.spec, self.mixer, self.points
        assert isinstance(m, MLASpec)

        def queries(heads: Number, width: Array) -> list[Phase]:
            # Queries of `heads` heads, gathered over `width` ranks.
            first = s.hidden * (m.entry + (m.q_rank or heads * m.query))
            projections = [self.kernel("qkv", first, self.rows)]
            projections += [self.kernel("query up", m.q_rank * heads * m.query, self.rows)] if m.q_rank else []
            projections.append(self.kernel("absorb", heads * m.nope * m.latent, self.rows, kind="other"))
            message = self.rows * self.q * m.entry * self.item["messages"]
            return [*projections, self.collective("gather queries", "all_gather", width, message)]

        every, part = queries(self.q, np.ones_like(p.kvp)), queries(ceil_div(self.q, p.kvp), p.kvp)
        allowed = (p.mode == HELIX) & (self.options.queries == "faster")
        return every, part, allowed & faster(part, every)

    def indexing(self) -> list[Phase]:
        """Lists the phases of one indexer: projections, scores of all tokens, and selection over the ranks.

        Draft steps reuse a selection, and only append keys.
        """
        m, p, hw = self.mixer, self.points, self.hardware
        if not self.spec.indexers:
            return []
        assert isinstance(m, MLASpec)
        (indexer,) = {*self.spec.indexers}
        if self.drafting:
            return [self.kernel("index", indexer.weights(self.spec.hidden, 0), self.rows, kernels=2)]
        heads, tokens = indexer.heads * indexer.width, self.length / p.kvp
        scanned = self.sequences * tokens * self.index_bytes(indexer)
        gathers = self.collective("choose tokens", "all_gather", p.kvp, self.rows * DIGIT_VALUES * NUMBER_BYTES * p.kvp)
        lists = self.collective("choose tokens", "all_gather", p.kvp, self.rows * (m.topk or 0) * 8.0 * p.kvp)
        # For single queries the scoring launch builds the first digit's histogram, and the one before zeroes it.
        reads, launches = (SCORE_READS - 1, COUNTED_DIGITS + 1) if self.single else (SCORE_READS, COUNTED_DIGITS + 3)
        kernels = self._roofline_phase("choose tokens", self.rows * tokens * reads * NUMBER_BYTES, kernels=launches)
        return [
            self.kernel("index", indexer.weights(self.spec.hidden, m.q_rank or 0), self.rows, kernels=3),
            self._roofline_phase("index scores", scanned, 2.0 * self.rows * tokens * heads, rate=hw.latent_flops),
            kernels.plus(gathers.times(COUNTED_DIGITS)).plus(lists),
        ]

    def index_bytes(self, indexer: IndexerSpec) -> float:
        return indexer.width + 4.0 if self.options.kv == "e4m3_all" else indexer.width * self.item["plain_kv"]

    def _block_selection(self, window: int | None) -> Sparse | None:
        return self.sparse if window is None else None

    def _visible_tokens(self, window: int | None) -> Array:
        # Tokens that a query may read on a rank.
        return min(window or self.length, self.length) / self.points.kvp

    def _read_tokens(self, window: int | None) -> Array:
        visible = self._visible_tokens(window)
        if self.drafting and window is None:
            return self.draft_keys()
        if isinstance(self.mixer, MLASpec) and self.mixer.topk is not None:
            return np.minimum(self.mixer.topk / self.points.kvp, visible)
        sparse = self._block_selection(window)
        return visible if sparse is None else np.minimum(sparse.blocks(self.points.kvp) * sparse.block, visible)

    def draft_keys(self) -> Array:
        """Returns the keys of a sequence that a draft reads on a rank, in layers without a window."""
        s, topk = self.self_drafts, self.topk
        assert s is not None and s.sparsity is not None
        kvp = self.points.kvp
        if topk is not None:
            return np.minimum((topk + s.gamma) / kvp, self.length / kvp)
        return np.minimum((np.maximum(s.sparsity * self.length, LEAST_KEYS) + s.tail) / kvp, self.length / kvp)

    @property
    def topk(self) -> int | None:
        """Tokens that indexers select per query; None: there are no indexers."""
        return self.mixer.topk if isinstance(self.mixer, MLASpec) else None

    def num_score_planes(self) -> Array:
        """Returns the score planes that verification writes in a layer without a window."""
        if self.topk is not None:
            return np.zeros_like(self.q)
        groups, each = np.unique(self.q // self.kv, return_inverse=True)
        width = self.mixer.head_dim if isinstance(self.mixer, AttentionSpec) else None
        planes = [score_planes(self.options.step_tokens, int(g), width, "bfloat16") for g in groups]
        return np.array(planes)[each]

    def key_selection(self) -> Phase:
        """Returns the cost of selecting the next drafts' keys in all layers at once, or of storing selections."""
        if self.topk is not None:
            indexers, stored = len(self.spec.indexers), self.sequences * self.options.step_tokens * self.topk
            kernels = STORE_LAUNCHES * indexers + REUSE_LAUNCHES
            return self._roofline_phase("select", 2.0 * indexers * stored * SLOT_BYTES, kernels=kernels)
        scores = self.num_score_planes() * self.sequences * self.kv * (self.length / self.points.kvp) * SCORE_BYTES
        read = scores * len(self.spec.full)
        price, rate = self.required_constant("select_s"), self.required_constant("select_bytes_per_s")
        return self._phase("select", price.value + read / rate.value, price, rate, read=read, launches=SELECT_LAUNCHES)

    def required_constant(self, name: str) -> Constant:
        """Returns a hardware constant for self-speculation; ValueError if unknown."""
        found: Constant | None = getattr(self.hardware, name)
        if found is None:
            raise ValueError(
                f"{name} is not known for {self.hardware.name}: add it to its description, or leave out "
                "speculation=sparse"
            )
        return found

    def _block_scoring(self, window: int | None) -> list[Phase]:
        sparse = self._block_selection(window)
        if sparse is None:
            return []
        hw = self.hardware
        price, each = hw.finding_s, hw.finding_sequence_s
        if price is None:
            raise ValueError(
                f"hardware {hw.name} has no finding_s, the cost of block selection: add it to its description, or use "
                "attention=dense"
            )
        kvp = self.points.kvp
        scored = sparse.scored(self.length, kvp) if sparse.topk else 0.0  # no selection, no scores
        bounds = self.sequences * 2 * self.kv * self.head_dim * scored
        fixed = self._phase("", price.value + (self.sequences * each.value if each is not None else 0.0), price)
        found = [
            self._roofline_phase("find blocks", bounds * self.item["plain_kv"], 0.0, 0, hw.bounds_share).plus(fixed)
        ]
        if sparse.choice == "global":  # score and index of each candidate block, sent to every other rank
            offered = self.rows * self.kv * sparse.topk * kvp * 8.0
            found.append(self.collective("offer blocks", "all_to_all", kvp, offered))
        return found

    def _offload_fetches(self, window: int | None) -> list[Phase]:
        # Selected blocks that are neither resident nor prefetched.
        offload, layers = self.options.offload, len(self.spec.full)
        if self._block_selection(window) is None or offload is None:
            return []
        return [self._fetch(1 - (offload.prefetch or 0.0) * self.num_prefetched_layers / layers)]

    @property
    def num_prefetched_layers(self) -> int:
        guesses = (
            self.sparse is not None and self.options.offload is not None and self.options.offload.prefetch is not None
        )
        return self.spec.windows[1:].count(None) if guesses else 0

    def prefetch(self) -> tuple[list[Phase], Array]:
        """Returns the cost of prefetch selections in all layers, and the seconds per step that the link is busy."""
        s = self.spec
        if not self.num_prefetched_layers:
            return [], self.zeros
        query = self.kernel("guess", s.hidden * self.head_dim * self.q, self.rows)
        guess = replace(query.plus(self._block_scoring(None)[0]), name="guess")
        busy = (
            len(s.full) * self._offload_fetches(None)[0].seconds + self.num_prefetched_layers * self._fetch(1.0).seconds
        )
        return [guess.times(self.num_prefetched_layers)], busy

    def _fetch(self, share: float) -> Phase:
        # Fetch of this share of a layer's selected blocks that are not resident.
        sparse, offload = self.sparse, self.options.offload
        assert sparse is not None and offload is not None
        rate, fixed = self.hardware.link_bytes_per_s, self.hardware.fetch_s
        if rate is None or fixed is None:
            raise ValueError(
                f"hardware {self.hardware.name} has no link_bytes_per_s or fetch_s, the cost of fetching from host "
                "memory: add them to its description (helix calibrate), or leave out kv.offload=host"
            )
        selected = np.minimum(
            ceil_div(sparse.touched_blocks, self.points.kvp) * sparse.block, self._visible_tokens(None)
        )
        tokens = share * (1 - offload.hit_rate) * selected
        fetched_bytes = self.rows * self.kv * tokens * 2 * self.head_dim * self.item["kv"]
        return self._phase("fetch", fixed.value + fetched_bytes / rate.value, rate, fixed, launches=2)

    def _attend(self, window: int | None, stored: Number, per_pair: int, value: int) -> tuple[Phase, Phase]:
        # Attention over this rank's shard, and the exposed part of the exchange. `stored`: values per token that this
        # rank reads; `per_pair`: multiplications per query head and token; `value`: values per head in a message.
        p, hw = self.points, self.hardware
        tokens = self._read_tokens(window)
        readers = (
            self.sequences if self._block_selection(window) is None else self.rows
        )  # each query selects its own blocks
        readers = self.rows if self.spec.indexers else readers  # or tokens
        read = readers * tokens * stored * self.item["kv" if window is None else "plain_kv"]
        flops = 2.0 * self.rows * tokens * self.q * per_pair
        quantized = self.options.kv in QUANTIZED_KV and window is None
        converts = hw.e4m3_share if quantized else {}
        share, rate = converts.get("k16v8" if self.options.kv == "k16v8" else "kv"), None
        if isinstance(self.mixer, MLASpec):
            share, rate, part = converts.get("latents", hw.latent_share), hw.latent_flops, converts.get("latent_flops")
            rate = rate.times(part.value) if rate and part else rate
        if self.drafting and window is None and self.topk is None:
            share = self.required_constant("gather_share")
        attention = self._roofline_phase("attention", read, flops, 1, share, rate)
        if self.self_drafts is not None and not self.drafting and window is None and self.topk is None:
            more = self.required_constant("collect_share")
            level = np.maximum(attention.level, more.level)
            attention = replace(attention, seconds=(1 + more.value) * attention.seconds, level=level)
        message = self.rows * self.q * (value * self.item["messages"] + 4)
        latency, wire, level = hw.collective_s("all_to_all", p.kvp, message)
        # Medha: all heads of a group go to one rank, which has the output projection, without overlap.
        wire = np.where(p.mode == MEDHA, wire * p.kvp, wire)
        data = attention.seconds - hw.kernel_s.value
        exposed = self.attention_and_exchange_s(data, latency, wire) - data
        sent = np.where(p.mode == MEDHA, message, sent_bytes("all_to_all", p.kvp, message)) * (p.kvp > 1)
        return attention, Phase("exchange", exposed, self.zeros, self.zeros, sent, self.zeros + (p.kvp > 1), level)

    def attention_and_exchange_s(self, data: Array, latency: Array, wire: Array) -> Array:
        """Returns the seconds of attention and exchange together, without the attention's kernel_s.

        Batched: one message for all sequences of a chunk. Its latency counts once, after the last chunk; HOP-B uses the
        best number of chunks, a power of two up to the batch, unless `Options.chunks` is set. Serial: one collective
        per sequence.

        Args:
            data: seconds of attention over the whole batch.
            latency, wire: seconds of the exchange of the whole batch.
        """
        o, batch, further_s = self.options, self.sequences, self.hardware.chunk_s.value
        hopb = (self.points.mode == HELIX) & o.hopb & (not self.drafting)
        if o.exchange == "serial":
            one = latency + wire / batch
            return np.where(hopb, pipelined(data / batch, one, batch), data + batch * one)
        counts = [2**i for i in range(1, int(np.max(batch)).bit_length())] if o.chunks is None else [o.chunks]
        best = data + wire
        for n in counts:
            cut = pipelined(data / n, wire / n, n) + (n - 1) * further_s
            cut = cut if o.chunks is not None else np.minimum(best, cut)
            best = np.where(hopb & (wire > 0) & (n <= batch), cut, best)
        return best + latency

    def _output(self, value: int) -> list[Phase]:
        p = self.points
        width = np.where(p.mode == MEDHA, p.tpa, p.kvp * p.tpa)
        return [
            self.kernel("output", self.o * value * self.spec.hidden, self.rows, kind="output", scaled=self.spec.hidden),
            self._all_reduce("output all-reduce", width, self.row_bytes(self.rows)),
        ]

    def _all_reduce(self, name: str, width: Array, message: Array) -> Phase:
        summed = self.collective(name, "all_reduce", width, message)
        hidden = np.isin(self.points.mode, [MODES.index(mode) for mode in self.options.overlap])
        return replace(summed, seconds=np.where(hidden, 0.0, summed.seconds))

    def _gather_rows(self) -> Phase:
        return self.collective("gather rows", "all_gather", self.points.dp, self.row_bytes(self.all_rows))

    @property
    def inputs(self) -> int:
        return (self.mixer.inputs if isinstance(self.mixer, AttentionSpec) else None) or self.spec.hidden

    def input_projection(self, width: int) -> list[Phase]:
        """Lists the phases of a draft layer's row-parallel input projection."""
        if not width:
            return []
        ranks = self.points.ranks
        summed = self.collective("join all-reduce", "all_reduce", ranks, self.row_bytes(self.rows))
        return [self.kernel("join", ceil_div(width, ranks) * self.spec.hidden, self.rows, kind="other"), summed]

    @property
    def head_dim(self) -> int:
        assert isinstance(self.mixer, AttentionSpec)
        return self.mixer.head_dim

    def _dense(self, spec: MLPSpec) -> list[Phase]:
        columns = self._columns("dense", spec.width, self.points.ffn_ranks)
        weights, scaled = self._gated(columns)
        product = self.kernel("ffn", weights, self.all_rows, kernels=2, kind="dense", scaled=scaled)
        return [self._gather_rows(), product, self._sum_rows()]

    def _sum_rows(self) -> Phase:
        # All-reduce of all rows; in the runtime's mode dp a reduce-scatter.
        ranks, message = self.points.ranks, self.row_bytes(self.all_rows)
        summed = self._all_reduce("ffn all-reduce", ranks, message)
        scattered = self.collective("ffn all-reduce", "all_gather", ranks, message)  # a reduce-scatter's bytes
        return scattered.where(self.gathered, summed)

    def _experts(self, m: MoESpec) -> list[Phase]:
        p, s = self.points, self.spec
        matrices, scaled = self._gated(self._columns("experts", m.width, p.tpf))
        touched = ceil_div(m.experts, p.ep) * experts_touched(m.experts, m.top_k, self.all_rows) / m.experts
        flops = 2.0 * self.all_rows * m.top_k * 3 * s.hidden * m.width / (p.tpf * p.ep)
        dispatched = self.dispatched
        dispatch_bytes = self.row_bytes(self.rows * np.minimum(m.top_k, p.ep))
        dispatch = self.collective("gather rows", "all_to_all", p.ranks, dispatch_bytes)
        routed = np.where(self.gathered, self.all_rows, self.rows)
        phases = [
            self.kernel("router", s.hidden * m.experts, routed, kind="other"),
            dispatch.where(dispatched, self._gather_rows()),
        ]
        read, scaled = touched * matrices, touched * scaled
        kernel_rows = np.minimum(self.all_rows, MAX_KERNEL_ROWS)
        pairs = self.all_rows * m.top_k / m.experts
        phases.append(
            self.kernel("experts", read, kernel_rows, kernels=2, flops=flops, kind="experts", scaled=scaled, each=pairs)
        )
        if m.shared_width:
            rows = np.where(dispatched, self.rows, self.all_rows)
            alike = self.options.stored("experts") == self.options.stored("shared_experts")
            fusable = alike & (self.options.shared == "routed") & (m.shared_width % m.width == 0)
            kernels = np.where(~dispatched & (p.ep == 1) & fusable, 0, 2)
            shared, scaled = self._gated(self._shared_columns(m))
            phase = self.kernel("shared experts", shared, rows, kernels=kernels, kind="shared_experts", scaled=scaled)
            phases.append(phase)
        selected = self.row_bytes(np.minimum(self.all_rows, self.all_rows * m.top_k / p.ep))
        expert_reduce = self.collective("expert all-reduce", "all_reduce", np.where(dispatched, p.tpf, 1), selected)
        combine = self.collective("ffn all-reduce", "all_to_all", p.ranks, dispatch_bytes)
        return [*phases, expert_reduce, combine.where(dispatched, self._sum_rows())]

    # ---- memory

    def attention_bytes(self) -> Array:
        s, m = self.spec, self.mixer
        if isinstance(m, AttentionSpec):
            rows = m.head_dim * (self.q + 2 * self.kv) + self.gates
            output = self.weight_bytes("output", s.hidden * self.o * m.head_dim, s.hidden)
            return self.weight_bytes("weights", self.inputs * rows, rows) + output
        queries = np.where(self._query_phases()[2], ceil_div(self.q, self.points.kvp), self.q) * m.query
        projections = s.hidden * ((m.q_rank or 0) + m.entry) + queries * (m.q_rank or s.hidden)
        rows = (m.q_rank or 0) + m.entry + queries
        output = self.weight_bytes("output", s.hidden * self.o * m.value, s.hidden)
        up = self.weight_bytes("other", self.q * (m.nope + m.value) * m.latent)
        return self.weight_bytes("weights", projections, rows) + output + up

    def ffn_bytes(self, spec: MLPSpec | MoESpec) -> Array:
        p = self.points
        if isinstance(spec, MLPSpec):
            return self.weight_bytes("dense", *self._gated(self._columns("dense", spec.width, p.ffn_ranks)))
        router = self.weight_bytes("other", self.spec.hidden * spec.experts)
        one = self.weight_bytes("experts", *self._gated(self._columns("experts", spec.width, p.tpf)))
        shared = self.weight_bytes("shared_experts", *self._gated(self._shared_columns(spec))) * bool(spec.shared_width)
        return router + ceil_div(spec.experts, p.ep) * one + shared

    def _gated(self, columns: Number) -> tuple[Number, Number]:
        # Weights and rows of gate, up and down matrices with this many columns of the FFN.
        hidden = self.spec.hidden
        return 3 * hidden * columns, 2 * columns + hidden

    def _columns(self, kind: str, width: int, ranks: Array) -> Array:
        # On the fullest rank; see `helix.layout.share`.
        block = self.options.stored(kind).block
        whole = (width % block == 0) & (width // block >= ranks)
        return np.where(whole, ceil_div(width // block, ranks) * block, ceil_div(width, ranks))

    def _shared_columns(self, spec: MoESpec) -> Array:
        # Per rank: like a dense FFN, or in mode dp (`chosen`) sharded within a group.
        p = self.points
        return self._columns("shared_experts", spec.shared_width, np.where(self.dispatched, p.tpa, p.ffn_ranks))

    def token_numbers(self) -> Array:
        """Returns the cached values per token and layer on the rank that stores it."""
        m = self.mixer
        return np.full(len(self.points), m.entry) if isinstance(m, MLASpec) else 2 * self.kv * m.head_dim


def _kv_items(mixer: AttentionSpec | MLASpec, kv: str) -> dict[str, float]:
    # Bytes per cached value, with scales; `plain_kv`: in windows, and of key bounds.
    if kv not in QUANTIZED_KV:
        return {"kv": DTYPE_BYTES[kv], "plain_kv": DTYPE_BYTES[kv]}
    quantized, plain = QUANTIZED_KV[kv], DTYPE_BYTES["bf16"]
    if isinstance(mixer, MLASpec):
        assert kv != "k16v8", "with latents, keys and values are the same data"
        groups = -(-mixer.latent // LATENT_GROUP)
        return {"kv": (mixer.latent + 4 * groups + plain * mixer.rope) / mixer.entry, "plain_kv": plain}
    return {"kv": (quantized * (1 + 4 / mixer.head_dim) + (2 - quantized) * plain) / 2, "plain_kv": plain}
