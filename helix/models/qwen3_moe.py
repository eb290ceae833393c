"""Qwen3-MoE: Qwen3 with routed experts in every layer, or in every few."""

from __future__ import annotations

from typing import Any

from helix.layers.moe import MoESpec
from helix.models.decoder import DecoderSpec
from helix.models.hf import check_sizes, decoder_spec, experts_of


def spec(config: Any) -> DecoderSpec:
    check_sizes(config, "moe_intermediate_size", "decoder_sparse_step")
    moe = MoESpec(*experts_of(config), config.moe_intermediate_size, normalise=config.norm_topk_prob)
    layers, every = config.num_hidden_layers, config.decoder_sparse_step
    return decoder_spec(
        config,
        windows=(config.sliding_window,) * layers,  # unlike in the dense models, in all layers
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=True,
        moe=moe,
        moe_layers=tuple(i not in config.mlp_only_layers and (i + 1) % every == 0 for i in range(layers)),
    )
