"""Phi-3 and Phi-4: one matrix for queries, keys and values, one for gate and up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helix.layers.specs import MLPSpec
from helix.models.hf import attention_of, decoder_spec
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    """Reads a config of this family."""
    windows = (config.sliding_window,) * config.num_hidden_layers
    attention, ffn = replace(attention_of(config), fused=True), MLPSpec(config.intermediate_size, fused=True)
    return decoder_spec(config, attention, ffn, windows=windows, partial_rotary=True)
