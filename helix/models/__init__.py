"""The registry of model families: architecture name in `config.json` -> spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from helix.models import deepseek, gpt_oss, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from helix.models.decoder import Decoder, DecoderSpec
from helix.models.hf import check_shape

FAMILIES: dict[str, Callable[[Mapping[str, Any]], DecoderSpec]] = {
    "DeepseekV2ForCausalLM": deepseek.spec_v2,
    "DeepseekV3ForCausalLM": deepseek.spec_v3,
    "LlamaForCausalLM": llama.spec,
    "MistralForCausalLM": mistral.spec,
    "MixtralForCausalLM": mixtral.spec,
    "Qwen2ForCausalLM": qwen2.spec,
    "Qwen3ForCausalLM": qwen3.spec,
    "Qwen3MoeForCausalLM": qwen3_moe.spec,
    "GptOssForCausalLM": gpt_oss.spec,
}


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a Hugging Face config.

    Raises:
        ValueError: the architecture is unknown (the message lists those known), or the config is not usable.
    """
    names = config.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            check_shape(config)
            return FAMILIES[name](config)
    raise ValueError(f"unknown architecture {', '.join(names) or '(none named)'}; known: {', '.join(sorted(FAMILIES))}")


__all__ = ["FAMILIES", "Decoder", "DecoderSpec", "spec_from_config"]
