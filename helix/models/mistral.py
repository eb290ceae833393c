"""Mistral: one sliding window for all layers, where the config has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helix.models.decoder import DecoderSpec
from helix.models.hf import decoder_spec


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    # An absent key means the 4096 of the first release; later checkpoints write null.
    window = config.get("sliding_window", 4096)
    return decoder_spec(config, windows=(window,) * config["num_hidden_layers"])
