"""Layer shapes as data: what a layer caches per sequence, and what it costs.

Free of torch: the planner reads specs, too. `helix.models.layer` builds modules from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

from helix.layout import HelixLayout
from helix.worker.kv_cache_spec import KVCacheSpec, keys_and_values, latents

MAX_DEQUANTIZED_BYTES = 1 << 27  # of keys and values at a time: PIECE_BYTES of kernels.attention.dequantized_prefill
MAX_EXPANDED_BYTES = 1 << 27  # of expanded keys and values at a time
MAX_SCORES = 1 << 26  # an indexer's at once (256 MiB): longer prefill steps select for some rows at a time
MXFP4_BLOCK = 32  # values of the last dimension that share one scale
GATHER_SPEEDUP = 2  # bytes of sequences gathered in the time of exchanging one byte of queries and outputs
ROPE_TYPES = ("default", "linear", "llama3", "longrope", "yarn")
# Optional parameters, by kind.
OPTIONAL = {
    "default": [],
    "yarn": ["factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"],
    "longrope": ["factor", "attention_factor"],
}
NO_NUMBERS = ("truncate", "long_factor", "short_factor")
ZERO_IS_DEFAULT = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")


@dataclass(frozen=True)
class RopeSpec:
    """Parameters of the rotary embedding.

    Attributes:
        kind: one of ROPE_TYPES.
        theta: base of the frequencies.
        head_dim: number of rotated dimensions, the first ones of a head.
        scaling: parameters of this kind, named as in a Hugging Face config.
        unrotated: number of a head's other dimensions.
        query_scale: (b, n): queries at position p are scaled by 1 + b ln(1 + floor(p / n)); None: they are not.
    """

    kind: str
    theta: float
    head_dim: int
    scaling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    unrotated: int = 0
    query_scale: tuple[float, int] | None = None

    @classmethod
    def from_config(cls, config: Any, head_dim: int, partial: bool = False, layers: str | None = None) -> RopeSpec:
        """Reads `rope_parameters` of a transformers config object, which collects all spellings.

        Args:
            partial: whether the family supports `partial_rotary_factor`.
            layers: layer type, if parameters depend on it.

        Raises:
            ValueError: a kind or a parameter is not supported, missing or out of range.
        """
        given = config.rope_parameters if layers is None else (config.rope_parameters or {}).get(layers)
        if not isinstance(given, Mapping):
            raise ValueError(f"RoPE has no parameters for layers with {layers}")
        parameters = dict(given)
        theta, kind = parameters.pop("rope_theta", None), parameters.pop("rope_type", "default")
        if kind not in ROPE_TYPES:
            remedy = ""
            if kind == "dynamic":  # the frequencies, and with them cached keys, change with the longest sequence
                remedy = (
                    "; its frequencies depend on the batch: set rope_type=yarn with original_max_position_embeddings"
                )
            raise ValueError(f"RoPE scaling {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}{remedy}")
        share = parameters.pop("partial_rotary_factor", None)
        rotated = head_dim if share is None else rotated_dims(head_dim, share)
        if rotated < head_dim and not partial:
            raise ValueError("partial rotary embedding (partial_rotary_factor below 1) is not supported")
        trained = "original_max_position_embeddings"
        needed = {
            "linear": ["factor"],
            "llama3": ["factor", "low_freq_factor", "high_freq_factor", trained],
            "yarn": [trained],
            "longrope": ["long_factor", "short_factor", trained],
        }.get(kind, [])
        if missing := [name for name in needed if parameters.get(name) is None]:
            raise ValueError(f"RoPE scaling {kind!r} in config.json lacks {', '.join(missing)}")
        used = [*needed, *OPTIONAL.get(kind, ["mscale_all_dim"])]
        numbers = {"rope_theta": theta} | {n: parameters[n] for n in used if parameters.get(n) is not None}
        for name, value in numbers.items():
            if name in NO_NUMBERS or (value == 0 and name in ZERO_IS_DEFAULT):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1 << 63:
                raise ValueError(f"config.json: RoPE's {name}={value!r} must be a positive number below 2^63")
        logarithm = {"yarn": "rope_theta", "longrope": trained}.get(kind)  # its logarithm is a divisor
        if logarithm is not None and numbers[logarithm] <= 1:
            raise ValueError(f"config.json: RoPE's {logarithm}={numbers[logarithm]!r} must be above 1")
        if kind == "longrope":
            return cls(kind, float(theta), rotated, _longrope(parameters, config, rotated), head_dim - rotated)
        if kind == "yarn" and parameters.get("factor") is None:
            parameters["factor"] = config.max_position_embeddings / parameters[trained]
        if kind == "llama3" and parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
            raise ValueError("config.json: RoPE's low_freq_factor must be below high_freq_factor")
        used += ["llama_4_scaling_beta", trained] if "llama_4_scaling_beta" in parameters else []
        scaling = {name: value for name, value in parameters.items() if name in used}
        return cls(kind, float(theta), rotated, scaling, head_dim - rotated)

    def mscale(self, weight: float) -> float:
        """Returns YaRN's attention temperature correction for a context stretched by `factor`."""
        stretch = self.scaling["factor"]
        return 1.0 if stretch <= 1 else 0.1 * weight * math.log(stretch) + 1.0


def _longrope(parameters: dict[str, Any], config: Any, rotated: int) -> dict[str, Any]:
    """Reads LongRoPE (https://arxiv.org/abs/2402.13753): the divisors of all frequencies and the factor on cos and sin.

    transformers takes `short_factor` for sequences of up to `original_max_position_embeddings`, so that the keys of a
    sequence that grows beyond change. Here, as in vLLM, the model's context decides for all sequences.
    """
    trained, context = parameters["original_max_position_embeddings"], config.max_position_embeddings
    name = "long_factor" if context > trained else "short_factor"
    divisors = parameters[name]
    known = isinstance(divisors, list) and all(type(d) in (int, float) and 0 < d < math.inf for d in divisors)
    if not known or len(divisors) != rotated // 2:
        raise ValueError(
            f"config.json: RoPE's {name}={divisors!r:.100} must be a list of {rotated // 2} positive numbers, one for "
            "each pair of rotated dimensions"
        )
    stretch = parameters.get("factor") or context / trained
    attention = parameters.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(stretch) / math.log(trained)) if stretch > 1 else 1.0
    return {"divisors": tuple(map(float, divisors)), "attention_factor": float(attention)}


def rotated_dims(head_dim: int, share: Any) -> int:
    """Returns the number of rotated dimensions of a head; ValueError unless it is even and positive."""
    known = isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1
    rotated = int(head_dim * share) if known else 0
    if rotated < 2 or rotated % 2:
        raise ValueError(f"config.json: partial_rotary_factor={share!r} of head_dim={head_dim} must be an even number")
    return rotated


class MixerSpec(Protocol):
    """Shape of a layer's mixer (attention or recurrent); hashable."""

    @property
    def is_attention(self) -> bool:
        """Whether queries read keys of the sequence."""

    @property
    def window(self) -> int | None:
        """Sliding window in tokens; None for full attention, or no attention."""

    @property
    def weights(self) -> int:
        """Number of weights in all projections, over all ranks."""

    @property
    def multiplications(self) -> int:
        """Multiplications of a token's queries with one key and value, over all heads."""

    def kv_cache_specs(self, layout: HelixLayout, rank: int, dtype: str, kv: str = "auto") -> tuple[KVCacheSpec, ...]:
        """Lists what the layer caches on a rank; `dtype` is the model's (a name), `kv` is kv.dtype."""

    def activations_per_token(self, layout: HelixLayout, rank: int) -> int:
        """Returns the activations per token of a prefill step on a rank."""

    def largest_matrix(self, layout: HelixLayout, rank: int) -> int:
        """Returns the elements of a rank's largest projection."""


@dataclass(frozen=True)
class GateSpec:
    """Gate that scales the output of attention before the output projection.

    Attributes:
        name: of its projection; None: part of q_proj, where each head's gate follows its query.
        per_head: whether a head has one gate, instead of one per element.
    """

    name: str | None = None
    function: Literal["sigmoid", "softplus"] = "sigmoid"
    per_head: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """Shape of a layer's attention in the checkpoint.

    Attributes:
        qk_norm: whether queries and keys are normalized; `norm_over`: per head, or over all heads.
        rotated: number of rotated dimensions, the first ones of a head; None: all.
        fused: whether queries, keys and values share one matrix.
        multiplier: factor on q.k; None: head_dim^-0.5.
        gate: gate on the output; None: there is none.
        inputs: input width of QKV; None: `hidden`.
    """

    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    sinks: bool = False
    rotated: int | None = None
    norm_over: Literal["head", "all"] = "head"
    fused: bool = False
    multiplier: float | None = None
    gate: GateSpec | None = None
    inputs: int | None = None
    is_attention: ClassVar[bool] = True
    latent: ClassVar[None] = None  # keys and values are stored separately

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.multiplier is None else self.multiplier

    @property
    def gate_width(self) -> int:
        """Gates per query head."""
        return 0 if self.gate is None else 1 if self.gate.per_head else self.head_dim

    @property
    def weights(self) -> int:
        heads = self.head_dim * 2 * (self.q_heads + self.kv_heads) + self.q_heads * self.gate_width
        return self.hidden * heads

    @property
    def multiplications(self) -> int:
        return self.q_heads * 2 * self.head_dim

    def kv_cache_specs(self, layout: HelixLayout, rank: int, dtype: str, kv: str = "auto") -> tuple[KVCacheSpec, ...]:
        heads = len(layout.kv_heads(rank, self.kv_heads))
        return keys_and_values(heads, self.head_dim, dtype, kv, self.window)

    def activations_per_token(self, layout: HelixLayout, rank: int) -> int:
        # QKV, the queries, and partial outputs of all heads, also as sent and received messages.
        q, lanes, copies = exchange_sizes(layout, rank, self.q_heads, self.kv_heads)
        rows = (q + 2 * len(layout.kv_heads(rank, self.kv_heads))) * self.head_dim
        gates = self.gate_width + self.head_dim if self.gate else 0  # and the scaled output
        outputs = 2 * (q + lanes) * self.head_dim
        return copies * rows + outputs + len(layout.o_heads(rank, self.q_heads, self.kv_heads)) * gates

    def largest_matrix(self, layout: HelixLayout, rank: int) -> int:
        heads = rank, self.q_heads, self.kv_heads
        rows = self.head_dim * (len(layout.q_heads(*heads)) + 2 * len(layout.kv_heads(rank, self.kv_heads)))
        columns = len(layout.hidden_columns(*heads, self.head_dim))
        return max(rows * (self.inputs or self.hidden), columns * self.hidden)


def exchange_sizes(layout: HelixLayout, rank: int, q_heads: int, kv_heads: int) -> tuple[int, int, int]:
    """Returns a rank's query heads, the heads in its received messages, and copies of QKV: local, sent, received."""
    heads = rank, q_heads, kv_heads
    if layout.kvp == 1:
        return len(layout.q_heads(*heads)), 0, 1
    return len(layout.q_heads(*heads)), layout.kvp * max(layout.head_shares(*heads)), 3


@dataclass(frozen=True)
class IndexerSpec:
    """Shape of a layer's DSA indexer in the checkpoint.

    Attributes:
        heads: H_I, index heads.
        width: D_I, of a query and of the single key.
        rope: width of the rotated part, which comes first.
        interleaved: whether rotated pairs are adjacent in the checkpoint, instead of in two halves.
        stored_topk: tokens per query whose selection is stored until the next step, for drafts; 0: none is.
    """

    heads: int
    width: int
    rope: int
    interleaved: bool
    stored_topk: int = 0

    def weights(self, hidden: int, q_rank: int) -> int:
        return hidden * (self.width + self.heads) + q_rank * self.heads * self.width

    def kv_cache_specs(self, dtype: str, kv: str = "auto") -> tuple[KVCacheSpec, ...]:
        """Lists what it caches: keys in `dtype`, or with kv.dtype=fp8_all (`kv`) in e4m3 with a scale; selections."""
        selections = (
            KVCacheSpec("selected", (self.stored_topk,), "int32", "row"),
            KVCacheSpec("num_selected", (), "int32", "row"),
        )
        stored = selections if self.stored_topk else ()
        if kv != "fp8_all":
            return KVCacheSpec("index_keys", (self.width,), dtype), *stored
        keys = KVCacheSpec("index_keys", (self.width,), "float8_e4m3fn")
        return keys, KVCacheSpec("index_scales", (), "float32"), *stored

    def activations_per_token(self, topk: int) -> int:
        """Returns the activations per token of a prefill step, in 16-bit numbers.

        These are queries, fp32 keys and head weights, and rows of slots, twice while they are concatenated.
        """
        return self.heads * self.width + 2 * (self.width + self.heads) + 4 * topk

    def rows(self, begin: int) -> list[range]:
        """Returns the rows of a query or key from `begin` on in the kernels' order: rotated pairs in two halves.

        Permuting queries and keys alike leaves scores unchanged.
        """
        end = begin + self.rope
        rotated = [range(begin, end, 2), range(begin + 1, end, 2)] if self.interleaved else [range(begin, end)]
        return [*rotated, range(end, begin + self.width)]


@dataclass(frozen=True)
class MLASpec:
    """Shape of a layer's MLA in the checkpoint.

    Attributes:
        q_rank: width of the queries' latent; None: queries are projected from x directly.
        latent: R, width of the latent without the rotated part.
        rope: P, width of the rotated part of queries and keys.
        nope: width of the part of a head's queries and keys that is not rotated.
        value: width of a head's values.
        norm_eps: of the latents' norms.
        scale: factor on q.k.
        interleaved: whether rotated pairs are adjacent in the checkpoint, instead of in two halves.
        topk: tokens that an indexer selects per query; None: all are read.
        indexer: this layer's indexer; None with `topk`: the layer reads the previous layer's selection.
    """

    hidden: int
    q_heads: int
    q_rank: int | None
    latent: int
    rope: int
    nope: int
    value: int
    norm_eps: float
    scale: float
    interleaved: bool
    topk: int | None = None
    indexer: IndexerSpec | None = None
    kv_heads: ClassVar[int] = 1  # the one latent
    is_attention: ClassVar[bool] = True
    window: ClassVar[None] = None

    @property
    def query(self) -> int:
        """Width of a head's query before absorption."""
        return self.nope + self.rope

    @property
    def entry(self) -> int:
        """Width of a cached latent with its rotated part."""
        return self.latent + self.rope

    @property
    def weights(self) -> int:
        head_weights = self.query * (self.q_rank or self.hidden) + (self.nope + self.value) * self.latent
        index = 0 if self.indexer is None else self.indexer.weights(self.hidden, self.q_rank or 0)
        return (
            index
            + self.hidden * ((self.q_rank or 0) + self.entry + self.q_heads * self.value)
            + self.q_heads * head_weights
        )

    @property
    def multiplications(self) -> int:
        """Multiplications of a token's queries with one expanded key and value, or with one index key."""
        if self.topk is not None:
            return 0 if self.indexer is None else self.indexer.heads * self.indexer.width
        return self.q_heads * (self.query + self.value)

    def kv_cache_specs(self, layout: HelixLayout, rank: int, dtype: str, kv: str = "auto") -> tuple[KVCacheSpec, ...]:
        index = () if self.indexer is None else self.indexer.kv_cache_specs(dtype, kv)
        return (*latents(self.latent, self.rope, dtype, kv), *index)

    def activations_per_token(self, layout: HelixLayout, rank: int) -> int:
        # See `AttentionSpec.activations_per_token`.
        q, lanes, copies = exchange_sizes(layout, rank, self.q_heads, 1)
        queries = q * (self.query + copies * self.entry + self.latent)
        index = 0 if self.indexer is None or self.topk is None else self.indexer.activations_per_token(self.topk)
        return (self.q_rank or 0) + self.entry + queries + 2 * lanes * self.latent + index

    def largest_matrix(self, layout: HelixLayout, rank: int) -> int:
        # Where ranks gather queries, each computes fewer heads: then this may be more.
        queries = len(layout.q_heads(rank, self.q_heads, 1)) * self.query
        down = self.hidden * ((self.q_rank or queries) + self.entry)
        output = len(layout.hidden_columns(rank, self.q_heads, 1, self.value)) * self.hidden
        return max(down, output, (self.q_rank or 0) * queries)


def max_gathered_tokens(spec: MLASpec, rows: int) -> int:
    """Returns the number of tokens below which gathering the sequences is faster than exchanging for `rows` rows.

    The exchange sends queries and outputs of all heads, and also has to exchange selections and to pack and merge
    partial outputs (GATHER_SPEEDUP).
    """
    return GATHER_SPEEDUP * rows * spec.q_heads * (spec.query + spec.value) // spec.entry


@dataclass(frozen=True)
class GatedDeltaSpec:
    """Shape of a layer's Gated DeltaNet in the checkpoint.

    Attributes:
        key_heads, value_heads: `value_heads` is a multiple of `key_heads`; neighbors share a key head.
        key_dim, value_dim: widths of a head.
        conv: kernel size of the causal convolution.
        storage: `fused` (in_proj_qkvz and in_proj_ba, rows grouped by key head) or `apart` (in_proj_qkv, _z, _b, _a).
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    norm_eps: float
    storage: Literal["fused", "apart"]
    is_attention: ClassVar[bool] = False
    window: ClassVar[None] = None
    multiplications: ClassVar[int] = 0

    @property
    def group(self) -> int:
        """Value heads per key head."""
        return self.value_heads // self.key_heads

    @property
    def weights(self) -> int:
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return self.hidden * (2 * keys + 3 * values + 2 * self.value_heads)

    def channels(self, keys: int, values: int) -> int:
        """Returns the total width of q, k and v for these numbers of heads."""
        return 2 * keys * self.key_dim + values * self.value_dim

    def key_heads_of(self, values: range) -> range:
        """Returns the key heads of these value heads."""
        return range(values.start // self.group, -(-values.stop // self.group)) if values else range(0)

    def kv_cache_specs(self, layout: HelixLayout, rank: int, dtype: str, kv: str = "auto") -> tuple[KVCacheSpec, ...]:
        # States, the convolution's recent rows, and the last step's updates.
        values = layout.state_heads(rank, self.value_heads)
        channels = self.channels(len(self.key_heads_of(values)), len(values))
        return (
            KVCacheSpec("state", (len(values), self.key_dim, self.value_dim), "float32", "slot"),
            KVCacheSpec("qkv", (channels,), dtype, "recent", before=self.conv - 1),
            KVCacheSpec("rows", (len(values), self.key_dim + self.value_dim), "float32", "row"),
            KVCacheSpec("decays", (len(values),), "float32", "row"),
        )

    def activations_per_token(self, layout: HelixLayout, rank: int) -> int:
        # Inputs and outputs of the convolution, z and gates, w of the chunks' systems, gates in fp32, and outputs.
        values = layout.state_heads(rank, self.value_heads)
        channels = self.channels(len(self.key_heads_of(values)), len(values))
        return 2 * channels + len(values) * (self.key_dim + 2 * self.value_dim + 6)

    def largest_matrix(self, layout: HelixLayout, rank: int) -> int:
        values = layout.state_heads(rank, self.value_heads)
        rows = self.channels(len(self.key_heads_of(values)), len(values)) + len(values) * (self.value_dim + 2)
        return rows * self.hidden


@dataclass(frozen=True)
class MLPSpec:
    """Shape of a layer's dense FFN in the checkpoint.

    Attributes:
        width: intermediate size.
        bias: whether all three projections have a bias.
        fused: whether gate and up share one matrix.
        clamp_at: limit of silu's output and of up's absolute values; None: there is none.
    """

    width: int
    bias: bool = False
    fused: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    clamp_at: float | None = None

    def multiplications(self, hidden: int) -> int:
        """Returns the multiplications with weights per token, over all ranks."""
        return 3 * hidden * self.width

    def activations_per_token(self, layout: HelixLayout, rank: int, hidden: int) -> int:
        """Returns the activations per token of a prefill step on a rank: gate, up and their product."""
        return 3 * len(layout.ffn_columns(rank, self.width))

    def largest_matrix(self, layout: HelixLayout, rank: int, hidden: int) -> int:
        """Returns the elements of a rank's largest projection: gate and up."""
        return 2 * len(layout.ffn_columns(rank, self.width)) * hidden


Storage = Literal["apart", "stacked", "mxfp4", "joined", "transposed", "by_matrix"]


@dataclass(frozen=True)
class MoESpec:
    """Experts of a layer, their routing, and their storage in a checkpoint.

    Attributes:
        width: intermediate size of one expert.
        shared_width: total intermediate size of the shared experts, which every token uses; 0: none.
        scoring: this and the following up to `group_score` as in `kernels.moe.router.route`.
        score_correction_bias: name within `block` of a learned bias on scores, used only to select experts, or None.
        router_bias: whether the router's logits have a bias.
        exact_router: whether the logits stay in fp32.
        expert_bias: whether the experts' matrices have a bias.
        clamp_at: limit of the clamped SwiGLU; None: plain SwiGLU.
        activation: which clamped SwiGLU, see `kernels.moe.experts.RoutedExperts`.
        shared_clamp_at: `MLPSpec.clamp_at` of the shared experts.
        block: name of the layer's FFN.
        router: name of the router within `block`.
        shared: name of the shared experts within the layer.
        shared_gate: name within `block` of a row whose sigmoid weights the shared experts; None: weight 1.
        matrices: names of gate, up and down, if they have their own tensors.
        storage: `apart` (matrices of each expert), `stacked` ([E, in, out], gate and up interleaved), `mxfp4` (like
            `stacked`, but [E, out, in] in packed 4-bit blocks), `joined` ([E, out, in], gate's rows, then up's) or
            `transposed` (`joined` as [E, in, out]) or `by_matrix` ([E, out, in], gate, up and down in tensors of their
            own).
    """

    experts: int
    top_k: int
    width: int
    shared_width: int = 0
    scoring: Literal["softmax", "top_softmax", "sigmoid"] = "softmax"
    normalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: int = 1
    score_correction_bias: str | None = None
    router_bias: bool = False
    exact_router: bool = False
    expert_bias: bool = False
    clamp_at: float | None = None
    activation: Literal["swigluoai", "swiglustep"] = "swigluoai"
    shared_clamp_at: float | None = None
    block: str = "mlp"
    router: str = "gate"
    shared: str = "mlp.shared_experts"
    shared_gate: str | None = None
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    storage: Storage = "apart"

    def multiplications(self, hidden: int) -> int:
        """Returns the multiplications with weights per token, over all ranks, without the router."""
        return 3 * hidden * (self.top_k * self.width + self.shared_width)

    def activations_per_token(self, layout: HelixLayout, rank: int, hidden: int) -> int:
        """Returns the activations per token of a prefill step on a rank.

        Every token-expert pair has a row, even if another rank holds the expert.
        """
        routed = self.top_k * (len(layout.expert_columns(rank, self.width)) + hidden)
        return routed + self.experts + 3 * len(layout.ffn_columns(rank, self.shared_width))

    def largest_matrix(self, layout: HelixLayout, rank: int, hidden: int) -> int:
        """Returns the elements of the shared experts' gate and up on a rank; steps dequantize no routed experts."""
        return 2 * len(layout.ffn_columns(rank, self.shared_width)) * hidden


FFNSpec = MLPSpec | MoESpec


@dataclass(frozen=True)
class MatrixFormat:
    """Format of a quantized matrix, see `kernels.scaled.ScaledMatrix`.

    Attributes:
        group: columns that share a scale.
        kind: type of an element.
        scales: type of a scale.
        zeros: whether groups have zero points.
        row_scales: whether rows have a second scale.
        fp8_rows: whether products with many rows round these, too.
    """

    group: int
    kind: Literal["e4m3", "e2m1", "int4"] = "e4m3"
    scales: Literal["float32", "bfloat16", "float16", "uint8"] = "float32"
    zeros: bool = False
    row_scales: bool = False
    fp8_rows: bool = False

    @property
    def packed(self) -> bool:
        """Whether eight elements share a word."""
        return self.kind != "e4m3"

    @property
    def bits(self) -> float:
        """Bits of an element, with its share of its group's scale and zero point."""
        scale = {"float32": 32, "bfloat16": 16, "float16": 16, "uint8": 8}[self.scales]
        return (4 if self.packed else 8) + (scale + 8 * self.zeros) / self.group

    def supports(self, columns: range, total: int) -> bool:
        """Returns whether kernels support these columns of a matrix of `total` columns without unpacking."""
        if not self.packed:
            return self.group % 128 == 0 or self.group == 32 or self.group >= total
        words = columns.start % PACKED_BLOCK == len(columns) % PACKED_BLOCK == 0
        return words and (self.group % PACKED_BLOCK == 0 or self.group >= total or self == NVFP4)


PACKED_BLOCK = 32  # columns that 4-bit formats pack together
MXFP4 = MatrixFormat(MXFP4_BLOCK, "e2m1", "uint8")
NVFP4 = MatrixFormat(16, "e2m1", "uint8", row_scales=True)
Formats = Callable[[str], MatrixFormat | None]  # by a tensor's name in the checkpoint; None: in the model's dtype


@dataclass(frozen=True)
class Fp8Activations:
    """`Formats` of matrices whose products with many rows round these to e4m3: model.activations=fp8."""

    formats: Formats

    def __call__(self, name: str) -> MatrixFormat | None:
        found = self.formats(name)
        return replace(found, fp8_rows=True) if found is not None and found.kind == "e4m3" else found


def unquantized(name: str) -> None:
    """`Formats` of a model without quantized matrices."""
