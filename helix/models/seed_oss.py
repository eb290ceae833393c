"""Seed-OSS: Llama with separate settings for QKV and output bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helix.layers.specs import MLPSpec
from helix.models.hf import attention_of, decoder_spec
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    """Reads a config of this family."""
    bias, output = config.attention_bias, config.attention_out_bias
    attention = replace(attention_of(config), qkv_bias=bias, output_bias=output)
    return decoder_spec(config, attention, MLPSpec(config.intermediate_size, config.mlp_bias))
