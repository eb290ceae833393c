"""Mistral: an optional sliding window, in all layers or in those that `layer_types` names."""

from __future__ import annotations

from typing import Any

from helix.models.hf import attention_of, decoder_spec, layer_windows
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    """Reads a config of this family."""
    alike = getattr(config, "layer_types", None) is None  # else transformers runs it as Ministral
    windows = (config.sliding_window,) * config.num_hidden_layers if alike else layer_windows(config)
    return decoder_spec(config, attention_of(config), windows=windows)
