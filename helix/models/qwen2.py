"""Qwen2 and Qwen2.5: biased QKV, optional sliding window in the upper layers."""

from __future__ import annotations

from typing import Any

from helix.models.hf import decoder_spec, layer_windows
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    return decoder_spec(config, windows=layer_windows(config), qkv_bias=True)
