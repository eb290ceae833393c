"""DeepSeek-V2, V2-Lite, V3, R1 and V3.2, and GLM-5: MLA, and routed experts after some dense layers.

V3.2 and GLM-5 have DSA indexers, which select the tokens that a query reads. Some layers of GLM-5.2 share the previous
layer's selection.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from helix.layers.specs import IndexerSpec, MLASpec, MoESpec, RopeSpec
from helix.models.checkpoint import METHODS
from helix.models.hf import (
    check_common,
    check_head_dim,
    check_sizes,
    check_supported,
    decoder_spec,
    layer_ffns,
    sparse_layers,
    with_nextn,
)
from helix.models.spec import DecoderSpec, LayerSpec

LATENT_NORM_EPS = 1e-6  # of the latents' norms in the released models, whatever rms_norm_eps is


def spec_v2(config: Any) -> DecoderSpec:
    """Reads a V2 config: softmax routing over all experts (`greedy`) or over the groups with the best experts."""
    check_supported(config, topk_method=("greedy", "group_limited_greedy"), scoring_func=("softmax",))
    check_supported(config, norm_topk_prob=(False,))
    return latent_spec(
        config, experts_of(config, grouped=config.topk_method == "group_limited_greedy"), interleaved=True
    )


def spec_v3(config: Any) -> DecoderSpec:
    """Reads a V3 config."""
    return latent_spec(config, sigmoid_experts(config), interleaved=bool(config.rope_interleave))


def sigmoid_experts(config: Any) -> MoESpec:
    """Reads experts with sigmoid routing plus a bias, from the groups with the best sums of two scores."""
    check_supported(config, topk_method=("noaux_tc",), scoring_func=("sigmoid",))
    return replace(pairs_of(config), scoring="sigmoid", score_correction_bias="gate.e_score_correction_bias")


def spec_v32(config: Any) -> DecoderSpec:
    """Reads a V3.2 config: V3 with an indexer in each layer, with RoPE in two halves."""
    check_supported(config, indexer_rope_interleave=(False,))
    return _with_indexers(config, ["full"] * config.num_hidden_layers, interleaved=False)


def spec_glm(config: Any) -> DecoderSpec:
    """Reads a GLM-5 config: V3 with indexers, with interleaved RoPE; layers may share a selection."""
    check_supported(config, indexer_rope_interleave=(True,))
    return _with_indexers(config, config.indexer_types, interleaved=True)


def _with_indexers(config: Any, kinds: Any, interleaved: bool) -> DecoderSpec:
    check_sizes(config, "num_hidden_layers", "q_lora_rank", "index_topk", "index_head_dim", "index_n_heads")
    check_supported(config, rope_interleave=(True,))
    layers, width, rope = config.num_hidden_layers, config.index_head_dim, config.qk_rope_head_dim
    if width < rope:
        raise ValueError(f"config.json: index_head_dim={width} must be at least qk_rope_head_dim={rope}")
    if not isinstance(kinds, list) or len(kinds) != layers or {*kinds} - {"full", "shared"} or kinds[0] != "full":
        raise ValueError(
            f"config.json: indexer_types={kinds!r:.200} must be a list of full or shared for each of "
            f"num_hidden_layers={layers} layers, full for the first"
        )
    if {*config.layer_types} != {"deepseek_sparse_attention"}:
        raise ValueError(f"config.json: layer_types={config.layer_types!r:.200} must be deepseek_sparse_attention")
    experts = sigmoid_experts(config)
    spec = latent_spec(config, experts, interleaved=True)
    indexer = IndexerSpec(config.index_n_heads, width, rope, interleaved)

    def indexed(layer: LayerSpec, kind: str) -> LayerSpec:
        assert isinstance(layer.mixer, MLASpec)
        own = indexer if kind == "full" else None
        return replace(layer, mixer=replace(layer.mixer, topk=config.index_topk, indexer=own))

    nextn = None
    if getattr(config, "num_nextn_predict_layers", 0):
        nextn = indexed(LayerSpec(spec.layers[0].mixer, experts), "full")
    shared = getattr(config, "index_share_for_mtp_iteration", False)
    return replace(
        spec,
        layers=tuple(map(indexed, spec.layers, kinds)),
        nextn=nextn,
        nextn_shared_topk=config.index_topk if shared else 0,
    )


def latent_spec(config: Any, moe: MoESpec, interleaved: bool, formats: Iterable[str] = METHODS) -> DecoderSpec:
    """Reads an MLA config; `moe` are the experts after the first dense layers."""
    sizes = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    check_sizes(config, *sizes, *(["q_lora_rank"] if config.q_lora_rank is not None else []))
    check_supported(config, attention_bias=(False,), mlp_bias=(False,), moe_layer_freq=(1,))
    latent, rope, nope, value = (getattr(config, key) for key in sizes)
    if rope % 2:
        raise ValueError(f"config.json: qk_rope_head_dim={rope} must be even")
    check_common(config)
    check_head_dim(rope)
    rotary, scale = RopeSpec.from_config(config, rope), (nope + rope) ** -0.5
    if rotary.kind != "default" and (temperature := rotary.scaling.get("mscale_all_dim")):
        scale *= rotary.mscale(temperature) ** 2
    mla = MLASpec(
        hidden=config.hidden_size,
        q_heads=config.num_attention_heads,
        q_rank=config.q_lora_rank,
        latent=latent,
        rope=rope,
        nope=nope,
        value=value,
        norm_eps=LATENT_NORM_EPS,
        scale=scale,
        interleaved=interleaved,
    )
    if getattr(config, "mlp_layer_types", None) is not None:
        sparse = sparse_layers(config)
    else:
        sparse = [i >= (config.first_k_dense_replace or 0) for i in range(config.num_hidden_layers)]
    ffns = layer_ffns(config, moe, sparse)
    mtp = max(getattr(config, key, 0) or 0 for key in ("num_mtp_layers", "num_nextn_predict_layers"))
    return with_nextn(decoder_spec(config, mla, ffns, formats=formats), moe, mtp)


def experts_of(config: Any, grouped: bool) -> MoESpec:
    """Reads routed and shared experts; `grouped`: routing is limited to the best groups."""
    check_sizes(config, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    experts, top_k, width = config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size
    groups, top_groups = (config.n_group or 1, config.topk_group or 1) if grouped else (1, 1)
    if min(groups, top_groups) < 1 or experts % groups or not top_k <= experts // groups * top_groups <= experts:
        raise ValueError(
            f"num_experts_per_tok={top_k} of n_routed_experts={experts} cannot be selected from topk_group="
            f"{top_groups} of n_group={groups} equal groups"
        )
    return MoESpec(
        experts,
        top_k,
        width,
        shared_width=(config.n_shared_experts or 0) * width,
        scale=float(config.routed_scaling_factor),
        groups=groups,
        top_groups=top_groups,
        exact_router=True,
    )


def pairs_of(config: Any) -> MoESpec:
    """Reads experts whose groups are ranked by the sum of their two best scores."""
    moe = replace(experts_of(config, grouped=True), group_score=2, normalize=bool(config.norm_topk_prob))
    if moe.experts < 2 * moe.groups:
        raise ValueError(f"n_group={moe.groups} leaves a group fewer than two of n_routed_experts={moe.experts}")
    return moe
