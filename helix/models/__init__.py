"""Model registry: architecture name in `config.json` -> transformers' model type, and the function that reads it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain, combinations, islice
from typing import Any

from helix.models import (
    deepseek,
    gemma3,
    glm4_moe,
    gpt_oss,
    granite,
    hy_v3,
    laguna,
    llama,
    minimax_m2,
    ministral3,
    mistral,
    mistral4,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    step3p5,
)
from helix.models.checkpoint import quantization_section
from helix.models.hf import load_hf_config
from helix.models.spec import DecoderSpec

FAMILIES: dict[str, tuple[str, Callable[[Any], DecoderSpec]]] = {
    "DeepseekV2ForCausalLM": ("deepseek_v2", deepseek.spec_v2),
    "DeepseekV3ForCausalLM": ("deepseek_v3", deepseek.spec_v3),
    "DeepseekV32ForCausalLM": ("deepseek_v32", deepseek.spec_v32),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", deepseek.spec_glm),
    "Gemma3ForCausalLM": ("gemma3_text", gemma3.spec),
    "Glm4MoeForCausalLM": ("glm4_moe", glm4_moe.spec),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", deepseek.spec_v3),
    "Glm4vMoeTextModel": ("glm4v_moe_text", glm4_moe.spec),
    "GraniteForCausalLM": ("granite", granite.spec),
    "HYV3ForCausalLM": ("hy_v3", hy_v3.spec),
    "LagunaForCausalLM": ("laguna", laguna.spec),
    "LlamaForCausalLM": ("llama", llama.spec),
    "MiniMaxM2ForCausalLM": ("minimax_m2", minimax_m2.spec),
    "Ministral3ForCausalLM": ("ministral3", ministral3.spec),
    "MistralForCausalLM": ("mistral", mistral.spec),
    "Mistral4ForCausalLM": ("mistral4", mistral4.spec),
    "MixtralForCausalLM": ("mixtral", mixtral.spec),
    "Olmo2ForCausalLM": ("olmo2", olmo2.spec),
    "Olmo3ForCausalLM": ("olmo3", olmo2.spec),
    "Phi3ForCausalLM": ("phi3", phi3.spec),
    "Qwen2ForCausalLM": ("qwen2", qwen2.spec),
    "MiMoForCausalLM": ("qwen2", qwen2.spec_mimo),
    "Qwen2MoeForCausalLM": ("qwen2_moe", qwen2_moe.spec),
    "Qwen3ForCausalLM": ("qwen3", qwen3.spec),
    "Qwen3MoeForCausalLM": ("qwen3_moe", qwen3_moe.spec),
    "Qwen3NextForCausalLM": ("qwen3_next", qwen3_next.spec),
    "Qwen3VLTextModel": ("qwen3_vl_text", qwen3.spec),
    "Qwen3VLMoeTextModel": ("qwen3_vl_moe_text", partial(qwen3_moe.spec, storage="transposed")),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", qwen3_5.spec_dense),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", qwen3_5.spec_moe),
    "SeedOssForCausalLM": ("seed_oss", seed_oss.spec),
    "Step3p5ForCausalLM": ("step3p5", step3p5.spec),
    "GptOssForCausalLM": ("gpt_oss", gpt_oss.spec),
}
# Other names in published files -> the architecture or model type that they mean.
ALIASES = {
    "kimi_k2": "deepseek_v3",
    "mimo": "qwen2",
    "step3p7": "step3p5",
    "Step3p7FlashForCausalLM": "Step3p5ForCausalLM",
}

# Multimodal models -> the architectures that their text part can have. Only the text part runs.
WRAPPERS = {
    "Gemma3ForConditionalGeneration": ("Gemma3ForCausalLM",),
    "Glm4vMoeForConditionalGeneration": ("Glm4vMoeTextModel",),
    "KimiK25ForConditionalGeneration": ("DeepseekV3ForCausalLM",),
    "Kimi_K25ForConditionalGeneration": ("DeepseekV3ForCausalLM",),  # as transformers saves it
    "Mistral3ForConditionalGeneration": ("MistralForCausalLM", "Ministral3ForCausalLM", "Mistral4ForCausalLM"),
    "Qwen3_5ForConditionalGeneration": ("Qwen3_5ForCausalLM",),
    "Qwen3_5MoeForConditionalGeneration": ("Qwen3_5MoeForCausalLM",),
    "Qwen3VLForConditionalGeneration": ("Qwen3VLTextModel",),
    "Qwen3VLMoeForConditionalGeneration": ("Qwen3VLMoeTextModel",),
    "Step3p7FlashForCausalLM": ("Step3p5ForCausalLM",),
    "Step3p7ForConditionalGeneration": ("Step3p5ForCausalLM",),
}

# Outer keys that apply to the text part, too.
SHARED_KEYS = ("eos_token_id", "tie_word_embeddings", "quantization_config", "dtype", "torch_dtype")

# Known architectures and model types that are not supported -> why.
UNSUPPORTED = {
    name: why
    for why, names in {
        "each key channel of its states has its own decay rate (KDA), but the kernels support one rate per head": (
            "KimiLinearForCausalLM", "kimi_linear", "KimiK3ForConditionalGeneration", "kimi_k3",
            "BailingMoeV3ForCausalLM", "bailing_hybrid",
        ),
        "its layers have Mamba-2 states, and experts without a gate": ("NemotronHForCausalLM", "nemotron_h"),
        "its keys are compressed windows of tokens, which the cache does not support": (
            "DeepseekV4ForCausalLM", "deepseek_v4",
        ),
        "its layers keep several residual streams": ("Qwen4ExpForConditionalGeneration", "qwen4_exp"),
        "its values are narrower than its keys, but the kernels support one head size": (
            "MiMoV2FlashForCausalLM", "mimo_v2_flash", "MiMoV2ForCausalLM", "mimo_v2",
        ),
        "an indexer selects its blocks of keys per KV head, which sparse attention does not support": (
            "MiniMaxM3ForCausalLM", "MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLForConditionalGeneration",
            "minimax_m3", "minimax_m3_vl",
        ),
        "its full layers have other heads than its windows, and keys that are values too": (
            "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration", "Gemma4ForCausalLM", "gemma4",
            "gemma4_text", "gemma4_unified",
        ),
        "its layers attend to chunks of 8,192 tokens, which the kernels do not support": (
            "Llama4ForConditionalGeneration", "Llama4ForCausalLM", "llama4", "llama4_text",
        ),
        "its layers have different attention, and some have none": ("DeciLMForCausalLM", "nemotron-nas"),
        "its norms lie around each half of a layer, under names of their own": (
            "Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration", "Glm4ForCausalLM", "glm4", "glm4v",
            "glm46v",
        ),
    }.items()
    for name in names
}  # fmt: skip

MAX_KEY_PAIRS = 2000  # more than published configs have


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Creates the spec of a Hugging Face config.

    Raises:
        ValueError: the architecture is unknown (the message lists the known ones), or the config is not usable (it
            names the key).
    """
    config = get_text_config(config)
    model_type, spec = FAMILIES[_architecture(config)]
    try:
        return spec(load_hf_config(model_type, config))
    except ValueError as error:
        if any(re.search(rf"\b{re.escape(key)}\b", str(error)) for key in config):
            raise
        # Find the keys to blame: without them the config is accepted. First single keys, then pairs.
        for keys in chain(combinations(config, 1), islice(combinations(config, 2), MAX_KEY_PAIRS)):
            try:
                spec(load_hf_config(model_type, {key: value for key, value in config.items() if key not in keys}))
            except ValueError:
                continue
            named = ", ".join(f"{key}={config[key]!r:.100}" for key in keys)
            raise ValueError(f"config.json: {named}: {str(error).removeprefix('config.json: ')}") from error
        raise


def multimodal_architecture(config: Mapping[str, Any]) -> str | None:
    """Returns a multimodal architecture whose text part is supported; None for other models."""
    names = config.get("architectures")
    wrappers = [n for n in names if isinstance(n, str) and n in WRAPPERS] if isinstance(names, list) else []
    # Where a name is also an alias, the file may have the text part's keys outside of text_config.
    return next((n for n in wrappers if n not in ALIASES or "text_config" in config), None)


def get_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the text part's config of a multimodal model, else the config; ValueError if the text part is missing."""
    outer, text = multimodal_architecture(config), config.get("text_config")
    if outer is None:
        return config
    if not isinstance(text, Mapping):
        raise ValueError(f"config.json: text_config={text!r:.100} must be an object in {outer}")
    kind = ALIASES.get(str(text.get("model_type")), text.get("model_type"))
    inner = next((name for name in WRAPPERS[outer] if kind in (None, FAMILIES[name][0])), WRAPPERS[outer][0])
    given = {key: config[key] for key in SHARED_KEYS if config.get(key) is not None}
    if section := quantization_section(config):
        given["quantization_config"] = section
    if text.get("tie_word_embeddings"):  # published files contradict themselves; `as_stored` looks for a head
        given["tie_word_embeddings"] = True
    return {**text, **given, "architectures": [inner]}


def family_of(config: Mapping[str, Any]) -> str:
    """Returns transformers' model type of a config's family; raises ValueError if it is unknown."""
    return FAMILIES[_architecture(config)][0]


def _architecture(config: Mapping[str, Any]) -> str:
    # `architectures` decides or, without it, `model_type`.
    names, model_type = config.get("architectures"), config.get("model_type")
    if not isinstance(model_type, str | None):
        raise ValueError(f"config.json: model_type={model_type!r:.100} must be a name")
    if not isinstance(names or [], list) or not all(isinstance(name, str) for name in names or []):
        raise ValueError(f"config.json: architectures={names!r:.100} must be a list of names")
    names, model_type = [ALIASES.get(name, name) for name in names or []], ALIASES.get(model_type or "", model_type)
    key = "architectures" if names or model_type is None else "model_type"
    if key == "model_type":
        names = [name for name, (known, _) in FAMILIES.items() if known == model_type] or [str(model_type)]
    name = next((known for known in names or [] if known in FAMILIES), None)
    if name is None:
        for unsupported in UNSUPPORTED.keys() & {*(names or [])}:
            raise ValueError(
                f"config.json: {key} names {unsupported}, which is not supported: {UNSUPPORTED[unsupported]}"
            )
        unknown = ", ".join(names or []) or "(none named)"
        raise ValueError(
            f"config.json: {key} has unknown architecture {unknown}; known: {', '.join(sorted([*FAMILIES, *WRAPPERS]))}"
        )
    if model_type not in (None, FAMILIES[name][0]):
        raise ValueError(
            f"config.json: architectures names {name}, whose model_type is {FAMILIES[name][0]!r}, not {model_type!r}"
        )
    return name


__all__ = ["FAMILIES", "DecoderSpec", "spec_from_config"]
