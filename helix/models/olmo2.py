"""OLMo-2 and OLMo-3: post-norms only, QK norms over all heads; OLMo-3 has sliding windows with another RoPE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helix.models.hf import attention_of, decoder_spec, layer_windows
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    """Reads a config of this family."""
    bias, windows = config.attention_bias, layer_windows(config) if config.model_type == "olmo3" else None
    attention = replace(attention_of(config), qkv_bias=bias, output_bias=bias, qk_norm=True, norm_over="all")
    return replace(decoder_spec(config, attention, windows=windows), norms="after")
