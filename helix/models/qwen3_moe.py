"""Qwen3-MoE: Qwen3 with routed experts in every layer, or in every few."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helix.layers.moe import MoESpec
from helix.models.decoder import DecoderSpec
from helix.models.hf import check_sizes, decoder_spec, experts_of


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    check_sizes(config, "moe_intermediate_size")
    normalise = bool(config.get("norm_topk_prob", False))
    moe = MoESpec(*experts_of(config), config["moe_intermediate_size"], normalise=normalise)
    layers, dense = config["num_hidden_layers"], set(config.get("mlp_only_layers") or ())
    every = config.get("decoder_sparse_step") or 1
    # Unlike in the dense models, a sliding window holds for all layers.
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    bias = bool(config.get("attention_bias", False))
    return decoder_spec(
        config,
        windows=(window,) * layers,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        moe=moe,
        moe_layers=tuple(i not in dense and (i + 1) % every == 0 for i in range(layers)),
    )
