"""Gemma-3 (text): norms around each half of a layer, GELU, windows with a RoPE of their own in most layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helix.models.hf import check_only, check_positive, decoder_spec, layer_windows
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    check_only(config, hidden_activation=("gelu_pytorch_tanh",), use_bidirectional_attention=(False,))
    check_only(config, final_logit_softcapping=(), attn_logit_softcapping=())
    check_positive(config, "query_pre_attn_scalar")
    found = decoder_spec(
        config,
        windows=layer_windows(config),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=True,
        scale=config.query_pre_attn_scalar**-0.5,
        activation="gelu_tanh",
    )
    return replace(found, norms="around", gain_offset=1.0, embedding_scale=found.hidden**0.5, rounds_scale=True)
