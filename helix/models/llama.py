"""Llama 2, 3, 3.1, 3.2, 3.3 (text)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helix.layers.specs import MLPSpec
from helix.models.hf import attention_of, decoder_spec
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    """Reads a config of this family."""
    bias = config.attention_bias
    attention = replace(attention_of(config), qkv_bias=bias, output_bias=bias)
    return decoder_spec(config, attention, MLPSpec(config.intermediate_size, config.mlp_bias))
