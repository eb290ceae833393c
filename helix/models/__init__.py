"""Registry of model families: architecture name in `config.json` -> transformers' model type, and spec."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import chain, combinations, islice
from typing import Any

from helix.models import deepseek, gpt_oss, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from helix.models.decoder import Decoder, DecoderSpec
from helix.models.hf import read_as

FAMILIES: dict[str, tuple[str, Callable[[Any], DecoderSpec]]] = {
    "DeepseekV2ForCausalLM": ("deepseek_v2", deepseek.spec_v2),
    "DeepseekV3ForCausalLM": ("deepseek_v3", deepseek.spec_v3),
    "DeepseekV32ForCausalLM": ("deepseek_v32", deepseek.spec_v32),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", deepseek.spec_glm),
    "LlamaForCausalLM": ("llama", llama.spec),
    "MistralForCausalLM": ("mistral", mistral.spec),
    "MixtralForCausalLM": ("mixtral", mixtral.spec),
    "Qwen2ForCausalLM": ("qwen2", qwen2.spec),
    "Qwen3ForCausalLM": ("qwen3", qwen3.spec),
    "Qwen3MoeForCausalLM": ("qwen3_moe", qwen3_moe.spec),
    "GptOssForCausalLM": ("gpt_oss", gpt_oss.spec),
}

PAIRS = 2000  # most pairs of keys tried; more than published configs have


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Creates the spec of a Hugging Face config.

    Raises:
        ValueError: the architecture is unknown (the message lists those known), or the config is not usable; the
            message names the key.
    """
    model_type, spec = FAMILIES[_architecture(config)]
    try:
        return spec(read_as(model_type, config))
    except ValueError as error:
        if any(re.search(rf"\b{re.escape(key)}\b", str(error)) for key in config):
            raise
        # Finds the keys without which the config is accepted: single ones, then a bounded number of pairs.
        for keys in chain(combinations(config, 1), islice(combinations(config, 2), PAIRS)):
            try:
                spec(read_as(model_type, {key: value for key, value in config.items() if key not in keys}))
            except ValueError:
                continue
            named = ", ".join(f"{key}={config[key]!r:.100}" for key in keys)
            raise ValueError(f"config.json: {named}: {error}") from error
        raise


def _architecture(config: Mapping[str, Any]) -> str:
    """Returns the known architecture named by `architectures` or, without it, by `model_type`."""
    names, model_type = config.get("architectures"), config.get("model_type")
    if not isinstance(model_type, str | None):
        raise ValueError(f"config.json: model_type={model_type!r:.100} must be a name")
    if not isinstance(names or [], list) or not all(isinstance(name, str) for name in names or []):
        raise ValueError(f"config.json: architectures={names!r:.100} must be a list of names")
    key = "architectures" if names or model_type is None else "model_type"
    if key == "model_type":
        names = [name for name, (known, _) in FAMILIES.items() if known == model_type] or [str(model_type)]
    name = next((known for known in names or [] if known in FAMILIES), None)
    if name is None:
        unknown = ", ".join(names or []) or "(none named)"
        raise ValueError(f"config.json: {key} has unknown architecture {unknown}; known: {', '.join(sorted(FAMILIES))}")
    if model_type not in (None, FAMILIES[name][0]):
        raise ValueError(
            f"config.json: architectures names {name}, whose model_type is {FAMILIES[name][0]!r}, not {model_type!r}"
        )
    return name


__all__ = ["FAMILIES", "Decoder", "DecoderSpec", "spec_from_config"]
