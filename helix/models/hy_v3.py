"""Hy3: Qwen3's attention, experts with sigmoid routing plus a bias, and shared experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helix.layers.specs import MoESpec
from helix.models.hf import (
    attention_of,
    check_sizes,
    check_supported,
    decoder_spec,
    experts_of,
    layer_ffns,
    sparse_layers,
    with_nextn,
)
from helix.models.spec import DecoderSpec, NextTokenNames


def spec(config: Any) -> DecoderSpec:
    """Reads a config of this family."""
    check_supported(config, mlp_bias=(False,), route_norm=(True,), moe_router_use_sigmoid=(True,))
    check_supported(config, moe_router_enable_expert_bias=(True,))
    check_sizes(config, "moe_intermediate_size", "num_shared_experts")
    width, bias = config.moe_intermediate_size, config.attention_bias
    moe = MoESpec(
        *experts_of(config),
        width,
        shared_width=config.num_shared_experts * width,
        scoring="sigmoid",
        normalize=True,
        scale=float(config.router_scaling_factor),
        score_correction_bias="expert_bias",
        exact_router=True,
        router="router.gate",
        shared="mlp.shared_mlp",
    )
    attention = replace(attention_of(config), qkv_bias=bias, output_bias=bias, qk_norm=True)
    ffns = layer_ffns(config, moe, sparse_layers(config))
    mtp = getattr(config, "num_nextn_predict_layers", 0)
    found = with_nextn(decoder_spec(config, attention, ffns), moe, mtp)
    return replace(found, nextn_names=NextTokenNames(norm="model.layers.{}.final_layernorm"))
