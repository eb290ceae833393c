"""Qwen3-MoE: Qwen3 with routed experts in every layer, or every n-th."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helix.layers.specs import MoESpec, Storage
from helix.models.hf import attention_of, check_sizes, decoder_spec, experts_of, layer_ffns
from helix.models.spec import DecoderSpec


def spec(config: Any, storage: Storage = "apart") -> DecoderSpec:
    """Reads a config of this family; `storage` is that of its experts unless the file has another."""
    check_sizes(config, "moe_intermediate_size")
    norm = getattr(config, "norm_topk_prob", True)  # always in Qwen3-VL
    moe = MoESpec(*experts_of(config), config.moe_intermediate_size, normalize=norm, storage=storage)
    bias, layers = config.attention_bias, config.num_hidden_layers
    attention = replace(attention_of(config), qkv_bias=bias, output_bias=bias, qk_norm=True)
    windows = (getattr(config, "sliding_window", None),) * layers  # in all layers, unlike the dense models
    return decoder_spec(config, attention, layer_ffns(config, moe, sparse_layers(config)), windows=windows)


def sparse_layers(config: Any) -> tuple[bool, ...]:
    """Returns per layer whether it has experts, from `decoder_sparse_step` and `mlp_only_layers`."""
    check_sizes(config, "decoder_sparse_step")
    every, dense = config.decoder_sparse_step, config.mlp_only_layers
    return tuple(i not in dense and (i + 1) % every == 0 for i in range(config.num_hidden_layers))


def shared_gated(config: Any) -> MoESpec:
    """Reads routed experts, and a shared one with a sigmoid gate."""
    check_sizes(config, "moe_intermediate_size", "shared_expert_intermediate_size")
    return MoESpec(
        *experts_of(config),
        config.moe_intermediate_size,
        shared_width=config.shared_expert_intermediate_size,
        normalize=getattr(config, "norm_topk_prob", True),
        shared="mlp.shared_expert",
        shared_gate="shared_expert_gate",
    )
