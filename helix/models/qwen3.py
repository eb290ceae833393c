"""Qwen3 (dense): RMSNorm on each query and key head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helix.models.decoder import DecoderSpec
from helix.models.hf import decoder_spec, layer_windows


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    bias = bool(config.get("attention_bias", False))
    # An absent head_dim means 128 in this family, not hidden / heads.
    config = {**config, "head_dim": config.get("head_dim") or 128}
    return decoder_spec(config, windows=layer_windows(config), qkv_bias=bias, output_bias=bias, qk_norm=True)
