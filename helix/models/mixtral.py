"""Mixtral: Mistral with routed experts in every layer."""

from __future__ import annotations

from typing import Any

from helix.layers.specs import MoESpec
from helix.models.hf import attention_of, decoder_spec, experts_of
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    """Reads a config of this family."""
    moe = MoESpec(
        *experts_of(config),
        config.intermediate_size,
        normalize=True,
        block="block_sparse_moe",
        matrices=("w1", "w3", "w2"),
    )
    return decoder_spec(config, attention_of(config), moe, windows=(config.sliding_window,) * config.num_hidden_layers)
