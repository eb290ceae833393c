"""Gemma-3 (text): norms before and after each sublayer, GELU, sliding windows with another RoPE in most layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helix.layers.specs import MLPSpec
from helix.models.hf import attention_of, check_positive, check_supported, decoder_spec, layer_windows
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    """Reads a config of this family."""
    check_supported(config, hidden_activation=("gelu_pytorch_tanh",), use_bidirectional_attention=(False,))
    check_supported(config, final_logit_softcapping=(), attn_logit_softcapping=())
    check_positive(config, "query_pre_attn_scalar")
    bias, scale = config.attention_bias, config.query_pre_attn_scalar**-0.5
    attention = replace(attention_of(config), qkv_bias=bias, output_bias=bias, qk_norm=True, multiplier=scale)
    ffn = MLPSpec(config.intermediate_size, activation="gelu_tanh")
    found = decoder_spec(config, attention, ffn, windows=layer_windows(config))
    return replace(
        found, norms="around", weight_offset=1.0, embedding_scale=found.hidden**0.5, round_embedding_scale=True
    )
