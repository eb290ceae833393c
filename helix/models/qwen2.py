"""Qwen2 and Qwen2.5: biased QKV, optional sliding window in the upper layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helix.models.hf import attention_of, decoder_spec, layer_windows
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    """Reads a config of this family."""
    return decoder_spec(config, replace(attention_of(config), qkv_bias=True), windows=layer_windows(config))


def spec_mimo(config: Any) -> DecoderSpec:
    """Reads a config of MiMo-7B: Qwen2, and MTP layers, which are not used."""
    return replace(spec(config), unused=("model.mtp_layers.",))
