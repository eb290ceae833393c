"""Seed-OSS: Llama with a bias of its own for the output projection."""

from __future__ import annotations

from typing import Any

from helix.models.hf import decoder_spec
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    bias, output = config.attention_bias, config.attention_out_bias
    return decoder_spec(config, qkv_bias=bias, output_bias=output, mlp_bias=config.mlp_bias)
