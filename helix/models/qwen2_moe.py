"""Qwen2-MoE: Qwen2 with routed experts, beside a shared one with a weight of its own."""

from __future__ import annotations

from typing import Any

from helix.layers.specs import MoESpec
from helix.models.hf import check_sizes, decoder_spec, experts_of, layer_windows
from helix.models.qwen3_moe import sparse_layers
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    check_sizes(config, "moe_intermediate_size", "shared_expert_intermediate_size")
    moe = MoESpec(
        *experts_of(config),
        config.moe_intermediate_size,
        shared_width=config.shared_expert_intermediate_size,
        normalise=config.norm_topk_prob,
        shared="shared_expert",
        shared_gate="shared_expert_gate",
    )
    return decoder_spec(
        config,
        windows=layer_windows(config),
        qkv_bias=config.qkv_bias,
        moe=moe,
        moe_layers=sparse_layers(config),
    )
