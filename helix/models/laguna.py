"""Laguna: query heads and RoPE by layer kind, softplus gates on heads, experts with sigmoid routing plus a bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helix.layers.specs import GateSpec, MoESpec
from helix.models.hf import (
    attention_of,
    check_sizes,
    check_supported,
    decoder_spec,
    experts_of,
    layer_ffns,
    layer_windows,
    sparse_layers,
    with_query_heads,
)
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    """Reads a config of this family."""
    check_supported(config, gating=(True, "per-head", "per-element"), norm_topk_prob=(True,))
    check_supported(config, moe_apply_router_weight_on_input=(False,), moe_router_logit_softcapping=(0.0,))
    check_supported(config, moe_router_use_sigmoid=(True,))
    check_sizes(config, "moe_intermediate_size", "shared_expert_intermediate_size")
    moe = MoESpec(
        *experts_of(config),
        config.moe_intermediate_size,
        shared_width=config.shared_expert_intermediate_size,
        scoring="sigmoid",
        normalize=True,
        scale=float(config.moe_routed_scaling_factor),
        score_correction_bias="experts.e_score_correction_bias",
        shared="mlp.shared_expert",
    )
    bias, gate = config.attention_bias, GateSpec("g_proj", "softplus", per_head=config.gating != "per-element")
    attention = replace(attention_of(config), qkv_bias=bias, output_bias=bias, qk_norm=True, gate=gate)
    attentions = with_query_heads(attention, config.num_attention_heads_per_layer, "num_attention_heads_per_layer")
    ffns = layer_ffns(config, moe, sparse_layers(config))
    return decoder_spec(config, attentions, ffns, windows=layer_windows(config), partial_rotary=True)
