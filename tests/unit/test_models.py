"""Configs of every family become specs, and what is not supported is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    CONFIG_MAPPING,
    Gemma3TextConfig,
    Gemma3TextModel,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from comm.loopback import LoopbackWorld
from helix.layers.specs import AttentionSpec, MLPSpec, MoESpec
from helix.layout import HelixLayout
from helix.models import FAMILIES, DecoderSpec, spec_from_config
from helix.models.checkpoint import WeightFormat
from helix.models.decoder import Decoder
from helix.setup.parts import make_spec
from tests.unit.test_config import composed


def spec(config: Any, architecture: str, **more: Any) -> DecoderSpec:
    return spec_from_config({**config.to_dict(), "architectures": [architecture], **more})


def test_llama() -> None:
    s = spec(LlamaConfig(num_key_value_heads=8, attention_bias=True, mlp_bias=True), "LlamaForCausalLM")
    a = heads(s)
    assert (a.q_heads, a.kv_heads, a.head_dim, len(s.layers)) == (32, 8, 128, 32)
    assert a.qkv_bias and a.output_bias and not a.qk_norm and s.windows == (None,) * 32
    assert s.layers[0].ffn == MLPSpec(11008, True)


def test_mistral() -> None:
    assert spec(MistralConfig(), "MistralForCausalLM").windows == (4096,) * 32
    assert spec(MistralConfig(sliding_window=None), "MistralForCausalLM").windows == (None,) * 32
    assert heads(spec(MistralConfig(head_dim=64), "MistralForCausalLM")).head_dim == 64


def test_qwen2() -> None:
    s = spec(Qwen2Config(), "Qwen2ForCausalLM")
    assert heads(s).qkv_bias and not heads(s).output_bias and s.windows == (None,) * 32
    windowed = Qwen2Config(use_sliding_window=True, sliding_window=100, max_window_layers=30)
    assert spec(windowed, "Qwen2ForCausalLM").windows == (None,) * 30 + (100,) * 2
    old = {**windowed.to_dict(), "architectures": ["Qwen2ForCausalLM"], "layer_types": None}
    assert spec_from_config(old).windows == (None,) * 30 + (100,) * 2


def test_qwen3() -> None:
    s = spec(Qwen3Config(), "Qwen3ForCausalLM")
    assert heads(s).qk_norm and heads(s).head_dim == 128 and not heads(s).qkv_bias
    without = {k: v for k, v in Qwen3Config(hidden_size=512).to_dict().items() if k != "head_dim"}
    assert heads(spec_from_config({**without, "architectures": ["Qwen3ForCausalLM"]})).head_dim == 128


def test_qwen3_moe() -> None:
    s = spec(Qwen3MoeConfig(norm_topk_prob=True), "Qwen3MoeForCausalLM")
    assert heads(s).qk_norm and experts_in(s) == (True,) * 24 and s.windows == (None,) * 24
    assert (e := s.experts) is not None
    assert (e.experts, e.top_k, e.width, e.normalise) == (
        128,
        8,
        768,
        True,
    )
    mixed = Qwen3MoeConfig(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert experts_in(spec(mixed, "Qwen3MoeForCausalLM")) == (False, True, False, False, False, True)
    windowed = Qwen3MoeConfig(use_sliding_window=True, sliding_window=64, num_hidden_layers=2)
    assert spec(windowed, "Qwen3MoeForCausalLM").windows == (64, 64)


def test_mixtral() -> None:
    s = spec(MixtralConfig(), "MixtralForCausalLM")
    assert (e := s.experts) is not None
    assert (e.experts, e.top_k, e.width, e.normalise) == (
        8,
        2,
        14336,
        True,
    )
    assert s.windows == (None,) * 32 and experts_in(s) == (True,) * 32
    assert spec(MixtralConfig(sliding_window=9), "MixtralForCausalLM").windows == (9,) * 32


def test_gpt_oss() -> None:
    s = spec(GptOssConfig(), "GptOssForCausalLM")
    a = heads(s)
    assert a.sinks and a.qkv_bias and a.output_bias and a.head_dim == 64 and s.windows == (128, None) * 18
    assert s.experts is not None and (s.experts.experts, s.experts.top_k, s.experts.clamp_at) == (128, 4, 7.0)
    assert s.experts.storage == "stacked" and not s.rope.scaling["truncate"]
    packed = spec(GptOssConfig(), "GptOssForCausalLM", quantization_config={"quant_method": "mxfp4"})
    assert packed.experts is not None and packed.experts.storage == "mxfp4"


@pytest.mark.parametrize(
    "config, architecture, more, words",
    [
        (
            GptOssConfig(),
            "GptOssForCausalLM",
            {"quantization_config": {"quant_method": "fp8"}},
            "fp8.*mxfp4 of gpt-oss",
        ),
        (Qwen3MoeConfig(), "Qwen3MoeForCausalLM", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        (Qwen3MoeConfig(), "OlmoeForCausalLM", {}, "unknown architecture Olmoe.*Qwen3MoeForCausalLM"),
        (
            MixtralConfig(),
            "MixtralForCausalLM",
            {"num_local_experts": None},
            "num_local_experts.*expected int",
        ),
        (MixtralConfig(), "MixtralForCausalLM", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than"),
        (
            Qwen3MoeConfig(),
            "Qwen3MoeForCausalLM",
            {"moe_intermediate_size": 0},
            "moe_intermediate_size=0: positive",
        ),
    ],
)
def test_experts_that_are_not_supported(config: Any, architecture: str, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        spec(config, architecture, **more)


@pytest.mark.parametrize(
    "model, billions",
    [
        ("qwen3-30b-a3b", 30.53),
        ("mixtral-8x7b", 46.70),
        ("qwen3-next-80b-a3b", 79.67),
        ("gpt-oss-20b", 20.91),
        ("gpt-oss-120b", 116.83),
        ("glm-4.6", 352.80),  # without its layer for multi-token prediction
        ("glm-4.5-air", 106.85),
        ("hy3", 295.03),
        ("seed-oss-36b", 36.15),
        ("minimax-m2", 228.69),
        ("ministral-3-8b", 8.49),
        ("mistral-small-4", 118.97),
        ("phi-4", 14.66),
        ("qwen2-57b-a14b", 57.41),
        ("olmo-2-7b", 7.30),
        ("olmo-3-32b", 32.23),
        ("gemma-3-27b", 27.01),
        ("granite-3.3-8b", 8.17),
    ],
)
def test_the_shapes_have_the_published_number_of_parameters(model: str, billions: float) -> None:
    s = make_spec(composed(f"model={model}"))
    comm = LoopbackWorld(1).communicator(0, (0,))
    decoder = Decoder(s, HelixLayout.create(), comm, torch.bfloat16, torch.device("meta"))
    assert round(sum(p.numel() for p in decoder.weights.parameters) / 1e9, 2) == billions


def group(strategy: str, bits: int = 8, kind: str = "float", **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy} | more
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"g": {"weights": weights}},
    }


UNREAD = [
    ({"quant_method": "awq"}, "awq"),
    ({"quant_method": "gptq", "bits": 4}, "gptq.*supported: FP8 of fp8, .*mxfp4 of gpt-oss"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 with fmt='e5m2'"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt with quant_algo='NVFP4'"),
    ({"quant_method": "modelopt"}, "modelopt with quant_algo=None"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors with format='pack"),
    (group("group"), "strategy='group'"),
    (group("channel", bits=4, kind="int"), "num_bits=4, type='int'"),
    (group("tensor") | {"config_groups": {"g": {"weights": 3}}}, "num_bits=None"),
    (
        group("tensor") | {"config_groups": group("tensor")["config_groups"] | {"h": {"weights": {
            "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}}}},
        r"different blocks \[None, \[128, 128\]\]",
    ),
]  # fmt: skip


def test_formats_that_are_read() -> None:
    for section, block in (
        ({"quant_method": "fp8", "weight_block_size": [128, 64], "scale_fmt": "ue8m0"}, (128, 64)),
        ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, None),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, None),
        (group("channel"), None),
        (group("block", block_structure=[16, 32]), (16, 32)),
    ):
        assert WeightFormat.from_config(section) == WeightFormat(section["quant_method"], block)
        spec(LlamaConfig(), "LlamaForCausalLM", quantization_config=section)
    deepseek = WeightFormat("fp8", (128, 128))
    assert deepseek.block_of((576, 7168), (5, 56)) == (128, 128)  # kv_a_proj_with_mqa, of 4.5 blocks
    assert deepseek.block_of((576, 7168), (4, 56)) is None and deepseek.block_of((576, 7168), ()) is None
    plain = WeightFormat("modelopt")
    assert {plain.block_of((6, 4), grid) for grid in ((), (1,), (1, 1))} == {(6, 4)}
    assert {plain.block_of((6, 4), grid) for grid in ((6,), (6, 1))} == {(1, 4)}
    assert {plain.block_of((6, 4), grid) for grid in ((4,), (1, 4), (2, 1), (6, 4))} == {None}
    with pytest.raises(ValueError, match="blocks of 128 must be two positive integers"):
        WeightFormat.from_config({"quant_method": "fp8", "weight_block_size": 128})


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
        *(({"quantization_config": section}, f"quantised.*{words}") for section, words in UNREAD),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        ({"dtype": "bfloat17"}, "dtype 'bfloat17'"),
        ({"hidden_size": None}, "hidden_size.*expected int, got NoneType"),
        ({"num_attention_heads": "8"}, "num_attention_heads.*expected int, got str"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"max_position_embeddings": -5}, "max_position_embeddings=-5: positive"),
        ({"vocab_size": 1 << 70}, "vocab_size=.*: positive"),
        ({"head_dim": 7}, "head_dim=7 must be"),
        ({"model_type": "mistral"}, "whose model_type is 'llama', not 'mistral'"),
        ({"is_causal": False}, "is_causal=False is not supported in llama"),
        ({"quantization_config": [1]}, "quantised"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        spec(LlamaConfig(), "LlamaForCausalLM", **more)


@pytest.mark.parametrize("name", [{"architectures": ["KimiLinearForCausalLM"]}, {"model_type": "kimi_linear"}])
def test_kimi_linear_is_refused_with_the_reason(name: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"names (KimiLinearForCausalLM|kimi_linear), .* decays .* \(KDA\)"):
        spec_from_config({"model_type": "kimi_linear", "hidden_size": 2304, "num_hidden_layers": 27} | name)


@pytest.mark.parametrize("window", [0, -4])
@pytest.mark.parametrize(
    "config, architecture",
    [
        (MistralConfig(), "MistralForCausalLM"),
        (Qwen2Config(use_sliding_window=True, max_window_layers=0), "Qwen2ForCausalLM"),
        (GptOssConfig(), "GptOssForCausalLM"),
        (MixtralConfig(), "MixtralForCausalLM"),
    ],
)
def test_windows_without_tokens_are_refused(window: int, config: Any, architecture: str) -> None:
    with pytest.raises(ValueError, match=f"sliding_window={window} must be a positive integer or null"):
        spec(config, architecture, sliding_window=window)


def test_layer_types_that_are_not_computed_are_refused() -> None:
    kinds = ["chunked_attention"] * 32
    with pytest.raises(ValueError, match="chunked_attention"):
        spec(Qwen2Config(layer_types=kinds), "Qwen2ForCausalLM")
    with pytest.raises(ValueError, match="there is no sliding_window"):
        spec(Qwen2Config(layer_types=["sliding_attention"] * 32), "Qwen2ForCausalLM")


def test_mistral_with_layer_types_is_ministral() -> None:
    kinds = ["sliding_attention", "full_attention"] * 16
    assert spec(MistralConfig(), "MistralForCausalLM", layer_types=kinds).windows == (4096, None) * 16


@pytest.mark.parametrize(
    ("config", "architecture", "kind"),
    [
        (LlamaConfig(), "LlamaForCausalLM", "sliding_attention"),
        (LlamaConfig(), "LlamaForCausalLM", "chunked_attention"),
        (MixtralConfig(), "MixtralForCausalLM", "sliding_attention"),
        (MixtralConfig(sliding_window=64), "MixtralForCausalLM", "full_attention"),
    ],
)
def test_layer_types_that_a_family_does_not_read_are_refused(config: Any, architecture: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"layer_types has {kind}"):
        spec(config, architecture, layer_types=[kind] * config.num_hidden_layers)
    same = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
    assert spec(config, architecture, layer_types=[same] * config.num_hidden_layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scale_of_gemma_s_embedding_is_of_the_model_s_type(dtype: torch.dtype) -> None:
    config = Gemma3TextConfig(vocab_size=9, hidden_size=48, num_hidden_layers=1, head_dim=8)
    theirs = Gemma3TextModel(config).to(dtype)
    comm = LoopbackWorld(1).communicator(0, (0,))
    decoder = Decoder(spec(config, "Gemma3ForCausalLM"), HelixLayout.create(), comm, dtype, torch.device("cpu"))
    decoder.embedding.weight.copy_(theirs.embed_tokens.weight.detach())
    tokens = torch.arange(9)
    with torch.no_grad():
        assert torch.equal(decoder._embedded(tokens), theirs.embed_tokens(tokens))


# Without these, the defaults are no model.
NEEDED = {"DeepseekV2ForCausalLM": {"num_experts_per_tok": 2}, "Glm4MoeForCausalLM": {"head_dim": 128}}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_absent_keys_mean_what_they_mean_in_the_family(architecture: str) -> None:
    theirs = CONFIG_MAPPING[FAMILIES[architecture][0]]()
    needed = NEEDED.get(architecture, {})
    s = spec_from_config({"architectures": [architecture], **needed})
    assert (s.norm_eps, s.max_positions, len(s.layers)) == (
        theirs.rms_norm_eps, theirs.max_position_embeddings, theirs.num_hidden_layers,
    )  # fmt: skip
    assert s.eos == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    rope = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    assert s.rope.theta == rope["rope_theta"] and s.rope.kind == rope["rope_type"]
    if s.experts is not None and s.attention.latent is not None:
        assert s.experts.scale == theirs.routed_scaling_factor


def test_null_scaling_is_yarn_in_gpt_oss() -> None:
    for absent in ({}, {"rope_scaling": None}, {"rope_parameters": None}):
        rope = spec_from_config({"architectures": ["GptOssForCausalLM"], **absent}).rope
        assert (rope.kind, rope.theta, rope.scaling["factor"]) == ("yarn", 150_000.0, 32.0)
    assert spec_from_config({"architectures": ["GptOssForCausalLM"]}).windows[:2] == (128, None)


@pytest.mark.parametrize("names", [{"architectures": ["LlamaForCausalLM"]}, {"model_type": "llama"}])
def test_either_name_of_a_family_will_do(names: dict[str, Any]) -> None:
    assert spec_from_config(names).vocab == 32000


def test_contexts_beyond_the_first_chunk_of_dual_chunk_attention_are_not_the_models() -> None:
    chunked = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 300000}
    s = spec(Qwen2Config(max_position_embeddings=1010000), "Qwen2ForCausalLM", dual_chunk_attention_config=chunked)
    assert s.max_positions == 262144 and "dual_chunk_attention_config.chunk_size" in s.context
    with pytest.raises(ValueError, match=r"dual_chunk_attention_config\.chunk_size=-1"):
        spec(Qwen2Config(), "Qwen2ForCausalLM", dual_chunk_attention_config=chunked | {"chunk_size": -1})


CONFIGS = [
    {
        **CONFIG_MAPPING[kind]().to_dict(),
        "architectures": [name],
        "num_experts_per_tok": 2,
        "topk_group": 1,
        "n_group": 1,
    }
    | NEEDED.get(name, {})
    for name, (kind, _) in FAMILIES.items()
]
MORE_KEYS = "rope_scaling", "sliding_window", "per_layer_config", "num_labels", "attribute_map", "quantization_config"
VALUES = st.sampled_from(
    [None, [], [None], [[1]], [{}], {}, {"a": 1}, 9, -1, 0, 1 << 40, 1 << 63, "x", "", True, 1.5, -0.5, 1e308]
)


@settings(max_examples=300)
@given(st.sampled_from(CONFIGS), st.data())
def test_whatever_a_key_holds_is_read_or_refused_by_its_name(config: dict[str, Any], data: st.DataObject) -> None:
    spec_from_config(config)
    key = data.draw(st.sampled_from(sorted({*config, *MORE_KEYS})))
    said = key
    try:
        spec_from_config(config | {key: data.draw(VALUES)})
    except ValueError as error:
        said = str(error)
    assert key in said and "\n" not in said and len(said) < 600, said


def heads(spec: DecoderSpec) -> AttentionSpec:
    """Returns the attention of a model without latents."""
    assert isinstance(spec.attention, AttentionSpec)
    return spec.attention


def experts_in(spec: DecoderSpec) -> tuple[bool, ...]:
    """Says of each layer whether it has experts."""
    return tuple(isinstance(layer.ffn, MoESpec) for layer in spec.layers)
