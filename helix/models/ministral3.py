"""Ministral-3 and Mistral-Medium-3.5: Mistral with position-dependent query scaling."""

from __future__ import annotations

from typing import Any

from helix.models.hf import attention_of, decoder_spec, with_query_scale
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    """Reads a config of this family."""
    attention, windows = attention_of(config), (config.sliding_window,) * config.num_hidden_layers
    return with_query_scale(decoder_spec(config, attention, windows=windows))
