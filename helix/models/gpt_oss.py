"""gpt-oss: attention sinks, sliding windows in every other layer, biased experts with a clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helix.layers.moe import MoESpec
from helix.models.decoder import DecoderSpec
from helix.models.hf import decoder_spec, experts_of, layer_windows, quantisation


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    packed = quantisation(config) == "mxfp4"
    moe = MoESpec(
        *experts_of(config),
        config["intermediate_size"],
        scoring="top_softmax",
        router_bias=True,
        expert_bias=True,
        limit=float(config.get("swiglu_limit", 7.0)),
        router="router",
        storage="mxfp4" if packed else "stacked",
    )
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    bias = bool(config.get("attention_bias", True))
    return decoder_spec(
        {**config, "head_dim": config.get("head_dim") or 64},
        windows=layer_windows({**config, "layer_types": kinds, "use_sliding_window": True}),
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
        moe=moe,
        quantised=packed,
    )
