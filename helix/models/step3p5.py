"""Step-3.5 and 3.7 (text): query heads and RoPE by layer kind, gates on heads, clamped SwiGLU in late layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helix.layers.specs import GateSpec, MLPSpec, MoESpec
from helix.models.hf import (
    attention_of,
    check_positive,
    check_sizes,
    check_supported,
    decoder_spec,
    experts_of,
    layer_windows,
    sparse_layers,
    with_query_heads,
)
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    """Reads a config of this family; the MTP layers are ignored.

    Raises:
        ValueError: a feature is not supported, or a list does not have an entry for each layer.
    """
    layers = config.num_hidden_layers
    _check_keys(config)
    config.num_experts = getattr(config, "num_experts", None) or config.n_routed_experts  # either is published
    check_sizes(config, "moe_intermediate_size", "share_expert_dim")
    moe = MoESpec(
        *experts_of(config),
        config.moe_intermediate_size,
        shared_width=config.share_expert_dim,
        scoring="sigmoid",
        normalize=True,
        scale=float(config.moe_router_scaling_factor),
        score_correction_bias="router_bias",
        exact_router=True,
        activation="swiglustep",
        block="moe",
        shared="share_expert",
        storage="by_matrix",
    )
    clamps, shared_clamps = (_clamps(config, f"swiglu_limits{suffix}") for suffix in ("", "_shared"))
    ffns = [
        replace(moe, clamp_at=clamp, shared_clamp_at=shared)
        if sparse
        else MLPSpec(config.intermediate_size, clamp_at=shared)
        for sparse, clamp, shared in zip(sparse_layers(config), clamps, shared_clamps, strict=True)
    ]
    bias, gate = config.attention_bias, GateSpec("g_proj", per_head=True)
    by_layer = [config.per_layer_config[i] for i in range(layers)]
    attention = replace(
        attention_of(by_layer[0]),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        gate=gate,
        multiplier=config.query_pre_attn_scalar**-0.5,
    )
    heads = [layer.num_attention_heads for layer in by_layer]
    attentions = with_query_heads(attention, heads, "num_attention_heads")
    found = decoder_spec(config, attentions, ffns, windows=layer_windows(config), partial_rotary=True)
    mtp = range(layers, layers + config.num_nextn_predict_layers)
    return replace(found, weight_offset=1.0, unused=tuple(f"model.layers.{i}." for i in mtp))


def _check_keys(config: Any) -> None:
    if more := sorted((config.per_layer_attributes or set()) - {"num_attention_heads"}):
        raise ValueError(f"config.json: per_layer_config sets {', '.join(more)}; supported: num_attention_heads")
    if any(config.per_layer_config[i].skip for i in range(config.num_hidden_layers) if config.is_heterogeneous):
        raise ValueError("config.json: per_layer_config with skip is not supported")
    check_supported(config, mlp_bias=(False,), use_bidirectional_attention=(False,), gating=(True,))
    # As published files call what the class takes for granted.
    check_supported(config, use_head_wise_attn_gate=(True,), use_qk_norm=(True,), sink=(False,), zero_centered=(True,))
    check_supported(config, moe_router_activation=("sigmoid",), norm_expert_weight=(True,), use_moe_router_bias=(True,))
    check_supported(config, yarn_only_types=(["full_attention"],), att_impl_type=("GQA",), use_rope_layers=([],))
    check_positive(config, "query_pre_attn_scalar")
    dense, sparse = getattr(config, "first_k_dense_replace", None), sparse_layers(config)
    if dense is not None and (dense != sparse.count(False) or sparse != sorted(sparse)):
        raise ValueError(f"config.json: first_k_dense_replace={dense!r:.80} contradicts mlp_layer_types")


def _clamps(config: Any, key: str) -> list[float | None]:
    # Each layer's limit; 0 and null: none.
    limits, layers = getattr(config, key), config.num_hidden_layers
    if limits is None:
        return [None] * layers
    if len(limits) != layers or any(limit is not None and not limit >= 0 for limit in limits):
        raise ValueError(
            f"config.json: {key}={limits!r:.80} must have a limit, 0 or null for each of num_hidden_layers={layers}"
        )
    return [float(limit) if limit else None for limit in limits]
