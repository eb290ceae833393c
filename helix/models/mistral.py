"""Mistral: one sliding window for all layers, where the config has one."""

from __future__ import annotations

from typing import Any

from helix.models.decoder import DecoderSpec
from helix.models.hf import decoder_spec


def spec(config: Any) -> DecoderSpec:
    return decoder_spec(config, windows=(config.sliding_window,) * config.num_hidden_layers)
