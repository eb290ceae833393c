"""Qwen2-MoE: Qwen2 with routed experts and a gated shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helix.models.hf import attention_of, decoder_spec, layer_ffns, layer_windows
from helix.models.qwen3_moe import shared_gated, sparse_layers
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    """Reads a config of this family."""
    ffns = layer_ffns(config, shared_gated(config), sparse_layers(config))
    attention = replace(attention_of(config), qkv_bias=config.qkv_bias)
    return decoder_spec(config, attention, ffns, windows=layer_windows(config))
