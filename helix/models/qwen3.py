"""Qwen3 (dense): RMSNorm on each query and key head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helix.models.hf import attention_of, decoder_spec, layer_windows
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    """Reads a config of this family."""
    bias = config.attention_bias
    attention = replace(attention_of(config), qkv_bias=bias, output_bias=bias, qk_norm=True)
    return decoder_spec(config, attention, windows=layer_windows(config))
