"""Configs of every family become specs, and what is not supported is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, Gemma3TextConfig, Gemma3TextModel

from comm.loopback import LoopbackWorld
from helix.layers.specs import MLPSpec, MoESpec
from helix.layout import HelixLayout
from helix.models import FAMILIES, DecoderSpec, spec_from_config
from helix.models.checkpoint import ScaleGroup, WeightFormat
from helix.models.decoder import Decoder
from helix.setup.parts import make_spec
from tests.unit.test_config import compose_config
from tests.unit.test_overrides import at


def spec(architecture: str, /, **keys: Any) -> DecoderSpec:
    return spec_from_config({"architectures": [f"{architecture}ForCausalLM"], **keys})


WINDOWED = dict(use_sliding_window=True, sliding_window=100, max_window_layers=30)
KINDS = ["sliding_attention", "full_attention"] * 16
# Of a family, with these keys: what is read, by names of attributes with dots between them.
READ: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("Llama", dict(num_key_value_heads=8), {"attention.q_heads": 32, "attention.kv_heads": 8}),
    ("Llama", {}, {"attention.head_dim": 128}),
    ("Llama", {}, {"windows": (None,) * 32, "attention.qk_norm": False, "layers.0.ffn": MLPSpec(11008, False)}),
    ("Llama", dict(attention_bias=True), {"attention.qkv_bias": True, "attention.output_bias": True}),
    ("Llama", dict(mlp_bias=True), {"layers.0.ffn": MLPSpec(11008, True)}),
    ("Llama", dict(eos_token_id=[2, 3]), {"eos": (2, 3)}),
    ("Mistral", {}, {"windows": (4096,) * 32}),
    ("Mistral", dict(sliding_window=None, head_dim=64), {"windows": (None,) * 32, "attention.head_dim": 64}),
    ("Mistral", dict(layer_types=KINDS), {"windows": (4096, None) * 16}),  # Ministral
    ("Qwen2", {}, {"attention.qkv_bias": True, "attention.output_bias": False, "windows": (None,) * 32}),
    ("Qwen2", WINDOWED, {"windows": (None,) * 30 + (100,) * 2}),
    ("Qwen3", dict(hidden_size=512), {"attention.qk_norm": True, "attention.head_dim": 128}),
    ("Qwen3", {}, {"attention.qkv_bias": False}),
    ("Qwen3Moe", dict(norm_topk_prob=True), {"attention.qk_norm": True, "windows": (None,) * 24}),
    ("Qwen3Moe", dict(norm_topk_prob=True), {"experts.experts": 128, "experts.top_k": 8, "experts.width": 768}),
    ("Qwen3Moe", dict(norm_topk_prob=True), {"experts.normalize": True}),
    ("Qwen3Moe", WINDOWED | dict(num_hidden_layers=2, max_window_layers=0), {"windows": (100, 100)}),
    ("Mixtral", {}, {"experts.experts": 8, "experts.top_k": 2, "experts.width": 14336, "experts.normalize": True}),
    ("Mixtral", dict(sliding_window=9), {"windows": (9,) * 32}),
    ("GptOss", {}, {"attention.sinks": True, "attention.qkv_bias": True, "attention.output_bias": True}),
    ("GptOss", {}, {"attention.head_dim": 64, "windows": (128, None) * 18, "experts.storage": "stacked"}),
    ("GptOss", {}, {"experts.experts": 128, "experts.top_k": 4, "experts.clamp_at": 7.0}),
    ("GptOss", dict(quantization_config={"quant_method": "mxfp4"}), {"experts.storage": "mxfp4"}),
    # Its RoPE is YaRN, also where nothing says so.
    *(
        ("GptOss", keys, {"rope.kind": "yarn", "rope.theta": 150_000.0, "rope.scaling.factor": 32.0})
        for keys in ({}, dict(rope_scaling=None), dict(rope_parameters=None))
    ),
    ("GptOss", {}, {"rope.scaling.truncate": False}),
    *(
        (family, {"num_nextn_predict_layers": 3}, {"unused": tuple(f"model.layers.{n + i}." for i in range(3))})
        for family, n in (("DeepseekV3", 61), ("HYV3", 80), ("GlmMoeDsa", 78))
    ),
]


@pytest.mark.parametrize("family, keys, expected", READ)
def test_configs_become_specs(family: str, keys: dict[str, Any], expected: dict[str, Any]) -> None:
    found = spec(family, **keys)
    assert {path: at(found, path) for path in expected} == expected


def test_some_layers_have_experts() -> None:
    mixed = spec("Qwen3Moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [isinstance(layer.ffn, MoESpec) for layer in mixed.layers] == [False, True, False, False, False, True]
    assert all(isinstance(layer.ffn, MoESpec) for layer in spec("Mixtral").layers)


# Without layers for multi-token prediction.
BILLIONS = {
    "qwen3-30b-a3b": 30.53, "mixtral-8x7b": 46.70, "qwen3-next-80b-a3b": 79.67, "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83, "glm-4.6": 352.80, "glm-4.5-air": 106.85, "glm-5.2": 743.38, "hy3": 295.03,
    "seed-oss-36b": 36.15, "minimax-m2": 228.69, "ministral-3-8b": 8.49, "mistral-small-4": 118.97, "phi-4": 14.66,
    "glm-4.7-flash": 29.94, "kimi-k2": 1026.41,
    "olmo-2-7b": 7.30, "olmo-3-32b": 32.23, "gemma-3-27b": 27.01, "granite-3.3-8b": 8.17,
    "deepseek-v2-lite": 15.71, "deepseek-r1": 671.03, "deepseek-v3.2": 671.88, "laguna-xs": 33.44,
    "step-3.5-flash": 196.96,
}  # fmt: skip


@pytest.mark.parametrize("model, billions", BILLIONS.items())
def test_the_shapes_have_the_published_number_of_parameters(model: str, billions: float) -> None:
    s = make_spec(compose_config(f"model={model}"))
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


def test_formats_that_are_read() -> None:
    for section, block in (
        ({"quant_method": "fp8", "weight_block_size": [128, 64], "scale_fmt": "ue8m0"}, (128, 64)),
        ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, None),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, None),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, (128, 128)),
        (group("channel"), None),
        (group("block", block_structure=[16, 32]), (16, 32)),
        (group("group", group_size=128, actorder="static"), (1, 128)),
    ):
        assert WeightFormat.from_config(section) == WeightFormat(section["quant_method"], (ScaleGroup(block),))
        spec("Llama", quantization_config=section)
    for section in (
        {"quant_algo": None, "kv_cache_quant_algo": "FP8"},
        group("channel") | {"config_groups": {}, "format": "dense", "kv_cache_scheme": {"num_bits": 8}},
    ):
        assert WeightFormat.from_config({"quant_method": "modelopt"} | section) is None  # of the KV cache alone
    deepseek = WeightFormat("fp8", (ScaleGroup((128, 128)),))
    assert deepseek.block_of((576, 7168), (5, 56)) == (128, 128)  # kv_a_proj_with_mqa, of 4.5 blocks
    assert deepseek.block_of((576, 7168), (4, 56)) is None and deepseek.block_of((576, 7168), ()) is None
    plain = WeightFormat("modelopt")
    assert {plain.block_of((6, 4), grid) for grid in ((), (1,), (1, 1))} == {(6, 4)}
    assert {plain.block_of((6, 4), grid) for grid in ((6,), (6, 1))} == {(1, 4)}
    assert {plain.block_of((6, 4), grid) for grid in ((4,), (1, 4), (2, 1), (6, 4))} == {None}
    with pytest.raises(ValueError, match="blocks of 128 must be two positive integers"):
        WeightFormat.from_config({"quant_method": "fp8", "weight_block_size": 128})


def test_names_of_published_files_are_those_of_families() -> None:
    kimi = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 2}
    assert spec_from_config(kimi | {"model_type": "kimi_k2"}) == spec_from_config(kimi)
    assert len(spec_from_config({"model_type": "kimi_k2", "num_hidden_layers": 2}).layers) == 2
    qwen = {"num_hidden_layers": 2, "num_key_value_heads": 4}
    mimo = spec_from_config({"architectures": ["MiMoForCausalLM"], "model_type": "mimo", **qwen})
    assert mimo == replace(spec("Qwen2", **qwen), unused=("model.mtp_layers.",))
    layers = dict(num_hidden_layers=2, indexer_types=["full"] * 2)
    newer = spec("GlmMoeDsa", **layers, layer_types=["indexed_attention"] * 2)
    assert newer == spec("GlmMoeDsa", **layers, layer_types=["deepseek_sparse_attention"] * 2)


def test_yarn_gives_the_context_of_its_factor() -> None:
    """As Qwen's cards write it, beside max_position_embeddings of the plain model."""
    card = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    stretched = spec("Qwen3", max_position_embeddings=40960, rope_scaling=card)
    assert stretched.max_positions == 131072 and stretched.context == (
        "context of 131072 tokens (RoPE's factor * original_max_position_embeddings in config.json)"
    )
    assert spec("Qwen3", max_position_embeddings=262144, rope_scaling=card).max_positions == 262144
    plain = spec("Qwen3", max_position_embeddings=40960)
    settings = plain.stretched(131072)
    assert settings.startswith(", or stretch it with YaRN: ") and stretched.stretched(1 << 20) == ""
    keys = dict(text.removeprefix("model.config.rope_scaling.").split("=") for text in settings.split(": ")[1].split())
    given = {key: value if key == "rope_type" else float(value) for key, value in keys.items()}
    assert spec("Qwen3", max_position_embeddings=40960, rope_scaling=given).max_positions == 4 * 40960


def test_layer_types_that_say_what_is_so_are_taken() -> None:
    assert spec("Llama", layer_types=["full_attention"] * 32)
    assert spec("Mixtral", layer_types=["sliding_attention"] * 32, sliding_window=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scale_of_gemma_s_embedding_is_of_the_model_s_type(dtype: torch.dtype) -> None:
    config = Gemma3TextConfig(vocab_size=9, hidden_size=48, num_hidden_layers=1, head_dim=8)
    theirs = Gemma3TextModel(config).to(dtype)
    comm = LoopbackWorld(1).communicator(0, (0,))
    decoder = Decoder(
        spec("Gemma3", **config.to_dict() | {"architectures": ["Gemma3ForCausalLM"]}),
        HelixLayout.create(),
        comm,
        dtype,
        torch.device("cpu"),
    )
    decoder.embedding.weight.copy_(theirs.embed_tokens.weight.detach())
    tokens = torch.arange(9)
    with torch.no_grad():
        assert torch.equal(decoder._embed(tokens), theirs.embed_tokens(tokens))


# Without these, the defaults are no model.
NEEDED = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "Glm4vMoeTextModel": {"head_dim": 128},
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_absent_keys_mean_what_they_mean_in_the_family(architecture: str) -> None:
    theirs = CONFIG_MAPPING[FAMILIES[architecture][0]]()
    needed = NEEDED.get(architecture, {})
    s = spec_from_config({"architectures": [architecture], **needed})
    assert (s.norm_eps, s.max_positions, len(s.layers)) == (
        theirs.rms_norm_eps, theirs.max_position_embeddings, theirs.num_hidden_layers,
    )  # fmt: skip
    eos = getattr(theirs, "eos_token_id", None)
    assert s.eos == (() if eos is None else (eos,))
    rope = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    assert s.rope.theta == rope["rope_theta"] and s.rope.kind == rope["rope_type"]
    if s.experts is not None and s.attention.latent is not None:
        assert s.experts.scale == theirs.routed_scaling_factor


@pytest.mark.parametrize("names", [{"architectures": ["LlamaForCausalLM"]}, {"model_type": "llama"}])
def test_either_name_of_a_family_will_do(names: dict[str, Any]) -> None:
    assert spec_from_config(names).vocab == 32000


def test_contexts_beyond_the_first_chunk_of_dual_chunk_attention_are_not_the_models() -> None:
    chunked = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 300000}
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 262144}
    for rope in (None, yarn):
        s = spec("Qwen2", max_position_embeddings=1010000, dual_chunk_attention_config=chunked, rope_scaling=rope)
        assert s.max_positions == 262144 and "dual_chunk_attention_config.chunk_size" in s.context
    with pytest.raises(ValueError, match=r"dual_chunk_attention_config\.chunk_size=-1"):
        spec("Qwen2", dual_chunk_attention_config=chunked | {"chunk_size": -1})


GROUPS = {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1}
CONFIGS = [
    CONFIG_MAPPING[kind]().to_dict() | {"architectures": [name]} | GROUPS | NEEDED.get(name, {})
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
    message = key
    try:
        spec_from_config(config | {key: data.draw(VALUES)})
    except ValueError as error:
        message = str(error)
    assert key in message and "\n" not in message and len(message) < 600, message
