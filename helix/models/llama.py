"""Llama 2, 3, 3.1, 3.2, 3.3 (text)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helix.models.decoder import DecoderSpec
from helix.models.hf import decoder_spec


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    bias = bool(config.get("attention_bias", False))
    return decoder_spec(config, qkv_bias=bias, output_bias=bias, mlp_bias=bool(config.get("mlp_bias", False)))
