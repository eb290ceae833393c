"""Phi-3 and Phi-4: one matrix for queries, keys and values, one for gate and up; RoPE `longrope` is refused."""

from __future__ import annotations

from typing import Any

from helix.models.hf import decoder_spec
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    windows = (config.sliding_window,) * config.num_hidden_layers
    return decoder_spec(config, windows=windows, partial_rotary=True, fused=True)
