"""MiniMax-M2: partial RoPE, QK norms over all heads, and experts with sigmoid routing plus a bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helix.layers.specs import MoESpec
from helix.models.hf import attention_of, check_sizes, check_supported, decoder_spec, experts_of
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    """Reads a config of this family."""
    check_supported(config, use_routing_bias=(True,), routed_scaling_factor=(1.0,))
    moe = MoESpec(
        *experts_of(config),
        config.intermediate_size,
        scoring="sigmoid",
        normalize=True,
        score_correction_bias="e_score_correction_bias",
        block="block_sparse_moe",
        matrices=("w1", "w3", "w2"),
    )
    if (rotated := getattr(config, "rotary_dim", None)) is not None:  # as in published configs
        check_sizes(config, "rotary_dim", "head_dim")
        if rotated % 2 or rotated > config.head_dim:
            raise ValueError(f"config.json: rotary_dim={rotated} must be even, and at most head_dim={config.head_dim}")
        config.rope_parameters["partial_rotary_factor"] = rotated / config.head_dim
    attention = replace(attention_of(config), qk_norm=True, norm_over="all")
    return decoder_spec(config, attention, moe, partial_rotary=True)
