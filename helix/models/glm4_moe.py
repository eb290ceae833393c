"""GLM-4.5, 4.5-Air, 4.6 and 4.7: half of each head is rotated; experts as in DeepSeek-V3 after some dense layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helix.models.deepseek import sigmoid_experts
from helix.models.hf import attention_of, decoder_spec, layer_ffns, with_nextn
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    """Reads a config of this family."""
    layers, dense = config.num_hidden_layers, config.first_k_dense_replace
    moe = sigmoid_experts(config)
    qk_norm, mtp = getattr(config, "use_qk_norm", False), getattr(config, "num_mtp_layers", 0)  # not in GLM-4.5V
    attention = replace(attention_of(config), qkv_bias=config.attention_bias, qk_norm=qk_norm)
    ffns = layer_ffns(config, moe, (i >= dense for i in range(layers)))
    return with_nextn(decoder_spec(config, attention, ffns, partial_rotary=True), moe, mtp)
