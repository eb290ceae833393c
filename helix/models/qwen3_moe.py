"""Qwen3-MoE: Qwen3 with routed experts in every layer, or in every few."""

from __future__ import annotations

from typing import Any

from helix.layers.specs import MoESpec
from helix.models.hf import check_sizes, decoder_spec, experts_of
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    check_sizes(config, "moe_intermediate_size")
    moe = MoESpec(*experts_of(config), config.moe_intermediate_size, normalise=config.norm_topk_prob)
    return decoder_spec(
        config,
        windows=(config.sliding_window,) * config.num_hidden_layers,  # unlike in the dense models, in all layers
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=True,
        moe=moe,
        moe_layers=sparse_layers(config),
    )


def sparse_layers(config: Any) -> tuple[bool, ...]:
    """Returns whether each layer has experts, from `decoder_sparse_step` and `mlp_only_layers`."""
    check_sizes(config, "decoder_sparse_step")
    every, dense = config.decoder_sparse_step, config.mlp_only_layers
    return tuple(i not in dense and (i + 1) % every == 0 for i in range(config.num_hidden_layers))
