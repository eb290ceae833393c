"""Configs of every family become specs, and what is not supported is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from helix.models import FAMILIES, DecoderSpec, spec_from_config


def spec(config: Any, architecture: str, **more: Any) -> DecoderSpec:
    return spec_from_config({**config.to_dict(), "architectures": [architecture], **more})


def test_llama() -> None:
    s = spec(LlamaConfig(num_key_value_heads=8, attention_bias=True, mlp_bias=True), "LlamaForCausalLM")
    assert (s.q_heads, s.kv_heads, s.head_dim, s.layers) == (32, 8, 128, 32)
    assert s.qkv_bias and s.output_bias and s.mlp_bias and not s.qk_norm and s.windows == (None,) * 32


def test_mistral() -> None:
    assert spec(MistralConfig(), "MistralForCausalLM").windows == (4096,) * 32
    assert spec(MistralConfig(sliding_window=None), "MistralForCausalLM").windows == (None,) * 32
    assert spec(MistralConfig(head_dim=64), "MistralForCausalLM").head_dim == 64


def test_qwen2() -> None:
    s = spec(Qwen2Config(), "Qwen2ForCausalLM")
    assert s.qkv_bias and not s.output_bias and s.windows == (None,) * 32
    windowed = Qwen2Config(use_sliding_window=True, sliding_window=100, max_window_layers=30)
    assert spec(windowed, "Qwen2ForCausalLM").windows == (None,) * 30 + (100,) * 2
    old = {**windowed.to_dict(), "architectures": ["Qwen2ForCausalLM"], "layer_types": None}
    assert spec_from_config(old).windows == (None,) * 30 + (100,) * 2


def test_qwen3() -> None:
    s = spec(Qwen3Config(), "Qwen3ForCausalLM")
    assert s.qk_norm and s.head_dim == 128 and not s.qkv_bias
    without = {k: v for k, v in Qwen3Config(hidden_size=512).to_dict().items() if k != "head_dim"}
    assert spec_from_config({**without, "architectures": ["Qwen3ForCausalLM"]}).head_dim == 128


@pytest.mark.parametrize("eos, expected", [(None, ()), (2, (2,)), ([2, 3], (2, 3))])
def test_eos(eos: Any, expected: tuple[int, ...]) -> None:
    assert spec(LlamaConfig(), "LlamaForCausalLM", eos_token_id=eos).eos == expected


def test_an_unknown_architecture_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match="FalconForCausalLM") as caught:
        spec(LlamaConfig(), "FalconForCausalLM")
    assert all(name in str(caught.value) for name in FAMILIES)
    with pytest.raises(ValueError, match="none named"):
        spec_from_config({})


@pytest.mark.parametrize(
    "more, words",
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quantised.*awq"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_attention_heads": "8"}, "lacks num_attention_heads"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        spec(LlamaConfig(), "LlamaForCausalLM", **more)
