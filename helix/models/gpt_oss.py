"""gpt-oss: attention sinks, sliding windows in every other layer, biased experts with a clamped SwiGLU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helix.layers.specs import MoESpec
from helix.models.hf import attention_of, check_supported, decoder_spec, experts_of, layer_windows, quantization
from helix.models.spec import DecoderSpec

LIMIT = 7.0  # of the clamped SwiGLU, in every release


def spec(config: Any) -> DecoderSpec:
    """Reads a config of this family."""
    check_supported(config, swiglu_limit=(LIMIT,))
    packed = quantization(config) == "mxfp4"
    moe = MoESpec(
        *experts_of(config),
        config.intermediate_size,
        scoring="top_softmax",
        router_bias=True,
        expert_bias=True,
        clamp_at=LIMIT,
        router="router",
        storage="mxfp4" if packed else "stacked",
    )
    bias = config.attention_bias
    attention = replace(attention_of(config), qkv_bias=bias, output_bias=bias, sinks=True)
    return decoder_spec(config, attention, moe, windows=layer_windows(config), formats=("mxfp4",))
