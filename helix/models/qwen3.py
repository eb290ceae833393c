"""Qwen3 (dense): RMSNorm on each query and key head."""

from __future__ import annotations

from typing import Any

from helix.models.hf import decoder_spec, layer_windows
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    bias = config.attention_bias
    return decoder_spec(config, windows=layer_windows(config), qkv_bias=bias, output_bias=bias, qk_norm=True)
