"""GLM-4.5, 4.5-Air, 4.6 and 4.7: half of each head is rotated; experts as in DeepSeek-V3 after some dense layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helix.models.deepseek import sigmoid_experts
from helix.models.hf import decoder_spec
from helix.models.spec import DecoderSpec, LayerSpec


def spec(config: Any) -> DecoderSpec:
    layers, dense = config.num_hidden_layers, config.first_k_dense_replace
    moe = sigmoid_experts(config)
    found = decoder_spec(
        config,
        qkv_bias=config.attention_bias,
        qk_norm=config.use_qk_norm,
        partial_rotary=True,
        moe=moe if dense < layers else None,
        moe_layers=tuple(i >= dense for i in range(layers)),
    )
    brought = LayerSpec(found.layers[-1].mixer, moe) if config.num_mtp_layers else None
    return replace(found, unused=(f"model.layers.{layers}.",), brought=brought)
