"""Overrides of config.json: merged into a checkpoint's; refused or reported where nothing reads them."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from helix.config import Config
from helix.models import FAMILIES, spec_from_config
from helix.models.overrides import BESIDES, check_overrides, ignored_overrides, overridden
from helix.setup.parts import ignored, make_spec, models_of, resolved_config
from launch.inputs.command_parser import RUN
from launch.inputs.compose import compose_config
from tests.bad_inputs.tables import lines

SIZES: dict[str, Any] = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=4096, dtype="bfloat16",
)  # fmt: skip
NEW = SIZES | {"architectures": ["Qwen3ForCausalLM"], "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
OLD = SIZES | dict(
    architectures=["LlamaForCausalLM"], torch_dtype="bfloat16", rope_theta=5e5,
    rope_scaling=dict(rope_type="llama3", factor=8, low_freq_factor=1, high_freq_factor=4,
                      original_max_position_embeddings=1024),
)  # fmt: skip
del OLD["dtype"]
NESTED = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "eos_token_id": [7],
    "text_config": SIZES
    | dict(
        model_type="qwen3_5_text", linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, eos_token_id=3,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
    ),
}  # fmt: skip
TWO = SIZES | dict(
    architectures=["Gemma3ForCausalLM"],
    rope_parameters={
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    sliding_window=64,
    layer_types=["sliding_attention"] * 3 + ["full_attention"],
)
WINDOW = SIZES | {"architectures": ["MistralForCausalLM"], "sliding_window": 64}
MOE = SIZES | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
FP8 = NEW | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def at(spec: Any, path: str) -> Any:
    """Returns a value within a spec, by names of attributes, indices and keys with dots between them."""
    for name in path.split("."):
        spec = spec[name] if isinstance(spec, dict) else spec[int(name)] if name.isdigit() else getattr(spec, name)
    return spec


def text(**keys: Any) -> dict[str, Any]:
    return {"text_config": keys}


def rope(**keys: Any) -> dict[str, Any]:
    return {"rope_parameters": keys}


def scaling(**keys: Any) -> dict[str, Any]:
    return {"rope_scaling": keys}


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        # Either spelling reaches what the file has in either, and the rest of it stays.
        (NEW, scaling(**YARN), {"rope.theta": 1e6, "rope.kind": "yarn"}),
        (NEW, rope(**YARN), {"rope.theta": 1e6, "rope.kind": "yarn"}),
        (NEW, scaling(type="linear", factor=4.0), {"rope.theta": 1e6, "rope.kind": "linear"}),
        (NEW, {"rope_theta": 5e6}, {"rope.theta": 5e6, "rope.kind": "default"}),
        (OLD, rope(factor=16), {"rope.theta": 5e5, "rope.scaling.factor": 16}),
        (OLD, scaling(factor=16), {"rope.kind": "llama3", "rope.scaling.factor": 16}),
        (OLD, rope(rope_theta=2e6), {"rope.theta": 2e6, "rope.kind": "llama3"}),
        (OLD, {"rope_scaling": None}, {"rope.theta": 5e5, "rope.kind": "default"}),
        (NEW | rope(**YARN, rope_theta=1e6), {"rope_scaling": None}, {"rope.theta": 1e6, "rope.kind": "default"}),
        # Families with two RoPEs: scaling is of full layers, as in their older files.
        (TWO, scaling(factor=4.0), {"rope.scaling.factor": 4.0, "rope.theta": 1e6, "layers.0.rope.theta": 1e4}),
        (TWO, rope(sliding_attention={"rope_theta": 2e4}), {"rope.kind": "linear", "layers.0.rope.theta": 2e4}),
        (TWO, {"rope_local_base_freq": 3e4, "rope_theta": 2e6}, {"rope.theta": 2e6, "layers.0.rope.theta": 3e4}),
        # A text part within.
        (NESTED, text(max_position_embeddings=9), {"max_positions": 9, "rope.theta": 1e7, "dtype": "bfloat16"}),
        (NESTED, text(**rope(rope_theta=2e7)), {"rope.theta": 2e7, "rope.head_dim": 4}),
        (NESTED, text(eos_token_id=5), {"eos": (5,)}),
        (NESTED, {"eos_token_id": [5, 6]}, {"eos": (5, 6)}),
        # Other objects, lists, null, and keys with two names.
        (NEW | {"eos_token_id": [1, 2]}, {"eos_token_id": [3]}, {"eos": (3,)}),
        (NEW | {"eos_token_id": [1, 2]}, {"eos_token_id": None}, {"eos": ()}),
        (WINDOW, {"sliding_window": None}, {"windows.0": None}),
        (OLD, {"dtype": "float16"}, {"dtype": "float16"}),
        (NEW, {"torch_dtype": "float16"}, {"dtype": "float16"}),
        (MOE, {"num_experts": 8}, {"layers.0.ffn.experts": 8}),
        # A whole shape, with another spelling typed over it.
        ({}, OLD | rope(factor=16), {"rope.theta": 5e5, "rope.scaling.factor": 16}),
        ({}, NEW | {"rope_theta": 3e6}, {"rope.theta": 3e6}),
        ({}, OLD | {"dtype": "float16"}, {"dtype": "float16"}),
    ],
)
def test_overrides_are_merged(config: dict[str, Any], overrides: dict[str, Any], expected: dict[str, Any]) -> None:
    before = json.dumps([config, overrides])
    check_overrides(config, overrides, "model.config")
    resolved = overridden(config, overrides)
    spec = spec_from_config(resolved)
    assert {path: at(spec, path) for path in expected} == expected
    assert json.dumps([config, overrides]) == before, "its arguments stay as they are"
    assert not config or ignored_overrides(config, overrides, "c") == []


def test_quantization_is_merged_and_lists_replace() -> None:
    resolved = overridden(FP8, {"quantization_config": {"weight_block_size": [16, 16]}})
    assert resolved["quantization_config"] == {"quant_method": "fp8", "weight_block_size": [16, 16]}
    assert "quantization_config" not in overridden(FP8, {"quantization_config": None})


@pytest.mark.parametrize("given, words", lines("overrides.txt"))
def test_keys_that_nothing_reads_are_refused(given: list[str], words: str) -> None:
    config = {"NONE": {}, "NEW": NEW, "NESTED": NESTED, "TWO": TWO, "FP8": FP8}[given[0]]
    with pytest.raises(ValueError) as refusal:
        check_overrides(config, json.loads(" ".join(given[1:])), "c")
    assert all(word in str(refusal.value) for word in words.split("|")), refusal.value


@pytest.mark.parametrize(
    ("config", "overrides", "key", "why"),
    [
        (NEW, {"initializer_range": 0.5}, "initializer_range=0.5", "qwen3 models ignore it here"),
        (NEW, rope(factor=4), "rope_parameters.factor=4", "qwen3 models ignore it here with rope_type=default"),
        (OLD, scaling(beta_fast=4), "rope_scaling.beta_fast=4", "llama models ignore it here with rope_type=llama3"),
        (NESTED, {"vision_config": {"depth": 4}}, "vision_config.depth=4", "qwen3_5_text models ignore it here"),
        (NESTED, text(use_cache=False), "text_config.use_cache=False", "qwen3_5_text models ignore it here"),
        (MOE, {"output_router_logits": True}, "output_router_logits=True", "mixtral models ignore it here"),
    ],
)
def test_keys_that_a_family_ignores_are_reported(
    config: dict[str, Any], overrides: dict[str, Any], key: str, why: str
) -> None:
    check_overrides(config, overrides, "c")
    same = {} if config is NESTED else {"max_position_embeddings": 4096}  # as the file has it: it is read
    assert ignored_overrides(config, overrides | same, "c") == [f"c.{key} changes nothing: {why}"]


@pytest.mark.parametrize("preset", [name for name in RUN.groups["model"] if name != "demo"])
def test_presets_have_only_keys_that_are_read(preset: str) -> None:
    config = compose_config([f"model={preset}"])
    assert make_spec(config) == spec_from_config(config.model.config) and ignored(config) == []


def test_overrides_of_a_command_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NEW))

    def of(*overrides: str) -> Config:
        return compose_config([f"model.path={tmp_path}", *overrides])

    config = of("model.config.rope_parameters={rope_type:yarn,factor:4}", "model.config.rope_scaling.factor=8")
    assert resolved_config(config.model)["rope_parameters"] == {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8}
    assert resolved_config(of("model.config.head_dim=16", "~model.config.head_dim").model) == NEW
    draft = of(
        f"speculation.model.path={tmp_path}", "speculation.model.config.rope_parameters.factor=4", "speculation=model"
    )
    assert resolved_config(models_of(draft)["speculation.model"])["rope_parameters"]["rope_theta"] == 1e6
    assert [line.partition("=")[0] for line in ignored(draft)] == ["speculation.model.config.rope_parameters.factor"]
    with pytest.raises(ValueError, match=r"^model\.config\.hiden_size=3: qwen3 models have no such key"):
        make_spec(of("model.config.hiden_size=3"))
    with pytest.raises(ValueError, match=r"^model\.config\.architectures=\['LlamaForCausalLM'\] cannot replace"):
        make_spec(of("model.config.architectures=[LlamaForCausalLM]"))
    with pytest.raises(ValueError, match=r"architectures=\['LlamaForCausalLM'\]\) have no such key"):
        make_spec(compose_config(["model=deepseek-r1", "model.config.architectures=[LlamaForCausalLM]"]))


def test_keys_that_families_read_are_known() -> None:
    """Whatever helix/models asks a config object for is a field of every class, of some class, or listed."""
    sources = [file.read_text() for file in (Path(__file__).parents[2] / "helix" / "models").glob("*.py")]
    asked = {name for text in sources for name in re.findall(r'getattr\(config, "(\w+)"', text)}
    calls = [call for text in sources for call in re.findall(r"check_supported\((.*)\)", text)]
    asked |= {name for call in calls for name in re.findall(r"(\w+)=\(", call)}
    kinds = [CONFIG_MAPPING[kind] for kind, _ in FAMILIES.values()]
    fields = {name for kind in kinds for name in (*kind.__dataclass_fields__, *kind.attribute_map)}
    assert len(asked) > 20 and asked - {*BESIDES} - fields == set()


VALUES = st.sampled_from(
    [None, [], [None], [[1]], {}, {"a": 1}, {"rope_type": 3}, {"full_attention": 3}, 9, -1, 0, "x", True, 1.5]
)


@settings(max_examples=200)
@given(
    st.sampled_from([NEW, OLD, NESTED, TWO, WINDOW, MOE, FP8]),
    st.dictionaries(
        st.sampled_from([*BESIDES, "text_config", "dtype", "torch_dtype", "eos_token_id", "hidden_size"]),
        VALUES,
        max_size=3,
    ),
)
def test_whatever_an_override_holds_is_read_or_refused(config: dict[str, Any], overrides: dict[str, Any]) -> None:
    with suppress(ValueError):
        check_overrides(config, overrides, "c")
        spec_from_config(overridden(config, overrides))
        ignored_overrides(config, overrides, "c")
