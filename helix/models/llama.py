"""Llama 2, 3, 3.1, 3.2, 3.3 (text)."""

from __future__ import annotations

from typing import Any

from helix.models.hf import decoder_spec
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    bias = config.attention_bias
    return decoder_spec(config, qkv_bias=bias, output_bias=bias, mlp_bias=config.mlp_bias)
