"""Granite: Llama with multipliers on embedding, scores, residuals and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helix.layers.specs import MLPSpec
from helix.models.hf import attention_of, check_positive, decoder_spec
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    """Reads a config of this family."""
    multipliers = "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"
    check_positive(config, *multipliers)
    bias, residual = config.attention_bias, config.residual_multiplier
    scale = float(config.attention_multiplier)
    attention = replace(attention_of(config), qkv_bias=bias, output_bias=bias, multiplier=scale)
    found = decoder_spec(config, attention, MLPSpec(config.intermediate_size, config.mlp_bias))
    # Divide the stream by `residual_multiplier`: then sublayers are added as they are, and norms give the same result.
    return replace(
        found,
        norm_eps=found.norm_eps / residual**2,
        embedding_scale=config.embedding_multiplier / residual,
        logit_scale=1 / config.logits_scaling,
    )
