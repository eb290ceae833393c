"""gpt-oss: attention sinks, sliding windows in every other layer, biased experts with a clamped SwiGLU."""

from __future__ import annotations

from typing import Any

from helix.layers.specs import MoESpec
from helix.models.hf import check_only, decoder_spec, experts_of, layer_windows, quantisation
from helix.models.spec import DecoderSpec

LIMIT = 7.0  # of the clamped SwiGLU, in every release


def spec(config: Any) -> DecoderSpec:
    check_only(config, swiglu_limit=(LIMIT,))
    packed = quantisation(config) == "mxfp4"
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
    return decoder_spec(
        config,
        windows=layer_windows(config),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        sinks=True,
        moe=moe,
        formats=("mxfp4",),
    )
