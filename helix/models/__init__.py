"""The registry of model families: architecture name in `config.json` -> how transformers calls it, and its spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from helix.models import deepseek, gpt_oss, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from helix.models.decoder import Decoder, DecoderSpec
from helix.models.hf import read_as

FAMILIES: dict[str, tuple[str, Callable[[Any], DecoderSpec]]] = {
    "DeepseekV2ForCausalLM": ("deepseek_v2", deepseek.spec_v2),
    "DeepseekV3ForCausalLM": ("deepseek_v3", deepseek.spec_v3),
    "LlamaForCausalLM": ("llama", llama.spec),
    "MistralForCausalLM": ("mistral", mistral.spec),
    "MixtralForCausalLM": ("mixtral", mixtral.spec),
    "Qwen2ForCausalLM": ("qwen2", qwen2.spec),
    "Qwen3ForCausalLM": ("qwen3", qwen3.spec),
    "Qwen3MoeForCausalLM": ("qwen3_moe", qwen3_moe.spec),
    "GptOssForCausalLM": ("gpt_oss", gpt_oss.spec),
}


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a Hugging Face config.

    Raises:
        ValueError: the architecture is unknown (the message lists those known), or the config is not usable.
    """
    model_type, spec = FAMILIES[_architecture(config)]
    return spec(read_as(model_type, config))


def _architecture(config: Mapping[str, Any]) -> str:
    """The known architecture that `architectures` names or, without it, `model_type`."""
    names, model_type = config.get("architectures"), config.get("model_type")
    if not names and model_type is not None:
        names = [name for name, (known, _) in FAMILIES.items() if known == model_type] or [model_type]
    if not isinstance(names or [], list) or not all(isinstance(known, str) for known in names or []):
        raise ValueError(f"config.json: architectures={names!r} must be a list of names")
    name = next((known for known in names or [] if known in FAMILIES), None)
    if name is None:
        unknown = ", ".join(names or []) or "(none named)"
        raise ValueError(f"unknown architecture {unknown}; known: {', '.join(sorted(FAMILIES))}")
    if model_type not in (None, FAMILIES[name][0]):
        raise ValueError(
            f"config.json: architectures names {name}, whose model_type is {FAMILIES[name][0]!r}, not {model_type!r}"
        )
    return name


__all__ = ["FAMILIES", "Decoder", "DecoderSpec", "spec_from_config"]
