"""Laguna and Step-3.5: published spellings, and what goes wrong where all layers are taken to be alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helix.checks import check_layout
from helix.engine.core import Engine
from helix.layers.ffn import GatedMLP, MoE
from helix.layers.specs import AttentionSpec
from helix.layout import HelixLayout
from helix.models import DecoderSpec, spec_from_config
from helix.models.checkpoint import read_config
from helix.models.decoder import Decoder
from helix.models.loading import Checkpoint
from helix.models.overrides import overridden
from helix.setup.parts import make_spec
from launch.inputs.auto_layout import choose
from tests.e2e import parity
from tests.e2e.checkpoints import TINY, checkpoint, continuations, oracle
from tests.e2e.parity import build_model, check, loopback
from tests.e2e.test_parity import MOE_LENGTHS, MOE_TOKENS
from tests.unit.test_config import compose_config

PUBLISHED: dict[str, Any] = TINY["experts"]["step3p5"]
LAYOUTS = HelixLayout.create("helix", 3), HelixLayout.create("helix", 1, 2)
BY_LAYER = "layer_types", "rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared"


def published(directory: Path, wrap: Callable[[dict[str, Any]], dict[str, Any]] = lambda text: text) -> Path:
    """Writes the tiny Step-3.5 as published: its own keys, MTP layers, and a tower's tensors if the config has one."""
    plain = checkpoint("step3p5")
    weights = load_file(plain / "model.safetensors")
    layers = PUBLISHED["num_hidden_layers"]
    for name in [name for name in weights if name.startswith("model.layers.1.")]:
        for i in (layers, layers + 1):
            weights[name.replace(".1.", f".{i}.")] = weights[name].clone()
    weights |= {f"model.layers.{i}.eh_proj.weight": torch.ones(2) for i in (layers, layers + 1)}
    saved = json.loads((plain / "config.json").read_text())
    same = "vocab_size", "intermediate_size", "rms_norm_eps", "max_position_embeddings", "torch_dtype"
    config = wrap({key: saved[key] for key in same if key in saved} | PUBLISHED)
    if "vision_config" in config:
        weights |= {"vision_model.ln_pre.weight": torch.ones(2), "vit_large_projector.weight": torch.ones(2)}
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def outer(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda text: {
        "architectures": [name],
        "model_type": "step3p7",
        "vision_config": {},
        "text_config": text | {"model_type": "step3p5"},
    }


@pytest.mark.parametrize(
    "wrap",
    [
        lambda text: text | {"model_type": "step3p5"},
        lambda text: text | {"architectures": ["Step3p7FlashForCausalLM"], "model_type": "step3p7"},
        outer("Step3p7FlashForCausalLM"),
        outer("Step3p7ForConditionalGeneration"),
    ],
    ids=["step-3.5", "flat", "flash", "images"],
)
def test_published_spellings(wrap: Callable[[dict[str, Any]], dict[str, Any]], tmp_path: Path) -> None:
    wanted = oracle("step3p5", MOE_LENGTHS, MOE_TOKENS)
    for layout in LAYOUTS:
        check(loopback(published(tmp_path, wrap), layout, 16, wanted), wanted)


def test_lists_that_end_before_the_mtp_layers() -> None:
    """Lists have entries for MTP layers or end before them; any other length is refused by name."""
    layers, found = PUBLISHED["num_hidden_layers"], spec_from_config(PUBLISHED)
    assert len(found.layers) == layers and found.nextn is None
    assert found.unused == tuple(f"model.layers.{i}." for i in (layers, layers + 1))
    assert spec_from_config(PUBLISHED | {key: PUBLISHED[key][:layers] for key in BY_LAYER}) == found
    assert spec_from_config(PUBLISHED | {"swiglu_limits": PUBLISHED["swiglu_limits"][:layers]}) == found
    for key in BY_LAYER[3:]:
        for entries in (PUBLISHED[key][: layers - 1], PUBLISHED[key][: layers + 1]):
            with pytest.raises(ValueError, match=f"{key}=.* for each of num_hidden_layers={layers}"):
                spec_from_config(PUBLISHED | {key: entries})
    with pytest.raises(ValueError, match="layer_types"):
        spec_from_config(PUBLISHED | {"layer_types": PUBLISHED["layer_types"][: layers - 1]})


def test_clamps_with_large_weights(tmp_path: Path) -> None:
    """Most values reach the clamps; without one of them, or with clamps before silu, logits are others."""
    plain = checkpoint("step3p5")
    weights = load_file(plain / "model.safetensors")
    for name, weight in weights.items():
        if "gate_proj" in name or "up_proj" in name:
            weight *= 8
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((plain / "config.json").read_text())
    wanted = continuations(tmp_path, MOE_LENGTHS, MOE_TOKENS)
    for layout in LAYOUTS:
        check(loopback(tmp_path, layout, 16, wanted), wanted)

    def unlike(tamper: Callable[[Engine], None]) -> None:
        with pytest.raises(AssertionError, match="prompt"):
            check(loopback(tmp_path, LAYOUTS[0], 16, wanted, tamper), wanted)

    def ffns(engine: Engine, kind: type[Any]) -> list[Any]:
        found = [layer.ffn for layer in engine.runner.model.layers]
        return [ffn for each in found for ffn in (each, getattr(each, "shared", None)) if isinstance(ffn, kind)]

    def without_clamps(engine: Engine, kind: type[Any]) -> None:
        for ffn in ffns(engine, kind):
            ffn.spec = replace(ffn.spec, clamp_at=None)

    def before_silu(engine: Engine) -> None:
        for ffn in ffns(engine, MoE):
            ffn.spec = replace(ffn.spec, activation="swigluoai")

    unlike(lambda engine: without_clamps(engine, MoE))
    unlike(lambda engine: without_clamps(engine, GatedMLP))
    unlike(before_silu)


def alike(spec: DecoderSpec, of: str) -> DecoderSpec:
    """Returns the spec as if layers with windows had an attribute of the attention of others, or their RoPE."""
    full = spec.attention
    assert isinstance(full, AttentionSpec)
    if of == "rope":
        return replace(spec, layers=tuple(replace(layer, rope=None) for layer in spec.layers))
    changed = {"function": dict(gate=replace(full.gate, function="sigmoid")), "rotated": dict(rotated=full.rotated)}[of]  # type: ignore[type-var]
    return replace(
        spec,
        layers=tuple(replace(each, mixer=replace(each.mixer, **changed)) for each in spec.layers),  # type: ignore[type-var]
    )


@pytest.mark.parametrize("of", ["rope", "rotated", "function"])
def test_layers_that_are_taken_to_be_alike(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(path: Path, layout: HelixLayout, comm: Any, dtype: torch.dtype) -> Decoder:
        with monkeypatch.context() as patched:
            patched.setattr(parity, "spec_from_config", lambda config: alike(spec_from_config(config), of))
            return build_model(path, layout, comm, dtype)

    wanted = oracle("laguna", MOE_LENGTHS, MOE_TOKENS)
    with pytest.raises(AssertionError, match="prompt"):
        check(loopback(checkpoint("laguna"), HelixLayout.create(), 16, wanted, build=build), wanted)


def test_an_end_of_turn_that_only_generation_config_names(tmp_path: Path) -> None:
    """Laguna's `</assistant>` is 24, an ordinary token: config.json has the end of the text alone."""
    config = {"architectures": ["LagunaForCausalLM"], "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert spec_from_config(read_config(tmp_path)).eos == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 24]}))
    assert spec_from_config(read_config(tmp_path)).eos == (2, 24)


def test_heads_of_another_config_are_refused(tmp_path: Path) -> None:
    """A config that lacks the heads of layers with windows does not fit the tensors."""
    directory = published(tmp_path, lambda text: {k: v for k, v in text.items() if k != "attention_other_setting"})
    with pytest.raises(ValueError, match=r"misshaped: model\.layers\.1\.self_attn\.g_proj\.weight \[10, 48\]"):
        loopback(directory, HelixLayout.create(), 16, [])


@pytest.mark.parametrize(
    "more, words",
    [
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "per_layer_config sets head_dim"),
        ({"per_layer_config": {"1": {"skip": ["mlp"]}}}, "per_layer_config with skip"),
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate=False is not supported"),
        ({"yarn_only_types": ["sliding_attention"]}, "yarn_only_types"),
        ({"use_rope_layers": [True, False, True, True]}, "use_rope_layers"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'"),  # as Step-3.7 calls it
        ({"first_k_dense_replace": 3}, "first_k_dense_replace=3 contradicts"),
        ({"partial_rotary_factors": [0.2] * 6}, "partial_rotary_factor=0.2"),
        ({"attention_other_setting": {"num_attention_heads": "x"}}, "num_attention_heads"),
    ],
)
def test_what_step_is_refused_for(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        spec_from_config(PUBLISHED | more)


def test_overrides_of_rope_by_layer() -> None:
    """Overrides reach RoPE that the file has in lists; the part that they do not name stays."""
    shape = "model=step-3.5-flash", "model.load=random"
    plain = make_spec(compose_config(*shape))
    longer = make_spec(compose_config(*shape, "model.config.rope_scaling.factor=4"))
    assert longer == replace(plain, rope=replace(plain.rope, scaling={**plain.rope.scaling, "factor": 4}))
    assert (plain.rope.theta, plain.rope.head_dim) == (5e6, 64)
    assert [rope.theta for rope in plain.ropes] == [5e6, 1e4] and plain.ropes[1].head_dim == 128
    other = make_spec(compose_config(*shape, f"model.config.rope_theta={[3e6, *[2e4] * 47]}"))
    assert [rope.theta for rope in other.ropes] == [3e6, 2e4]
    with pytest.raises(ValueError, match=r"rope_theta=\[1\.0\] must have an entry for each of layer_types"):
        make_spec(compose_config(*shape, "model.config.rope_theta=[1.0]"))


def test_parameters_of_rope_beside_those_of_layer_types() -> None:
    """Laguna-XS.2 publishes the trained context there, too: each layer type has it unless it says otherwise."""
    config = json.loads((checkpoint("laguna") / "config.json").read_text())
    rope, trained = config["rope_parameters"], "original_max_position_embeddings"
    wanted, longer = spec_from_config(config), {"rope_parameters": {"full_attention": {"factor": 4.0}}}
    moved = {key: {k: v for k, v in of.items() if k != trained} for key, of in rope.items()}
    for nested, beside in ((rope, 4096), (moved, rope["full_attention"][trained])):
        found = config | {"rope_parameters": nested | {trained: beside}}
        assert spec_from_config(found) == wanted
        assert spec_from_config(overridden(found, longer)) == spec_from_config(overridden(config, longer)) != wanted


def test_stacks_of_experts_are_read_whole() -> None:
    """Every tensor is bound: none of the three stacks may be ignored."""
    names = Checkpoint(checkpoint("step3p5")).shapes
    model = build_model(
        checkpoint("step3p5"), HelixLayout.create(), parity.LoopbackWorld(1).communicator(0, (0,)), torch.float32
    )
    assert {s.name for s in model.weights.slices} == {*names}


def test_tpa_divides_the_kv_heads_of_every_layer() -> None:
    spec = make_spec(compose_config("model=laguna-xs", "model.load=random"))
    check_layout(HelixLayout.create("helix", 1, 8), spec)
    last = spec.layers[-1]
    assert isinstance(last.mixer, AttentionSpec)
    fewer = replace(spec, layers=(*spec.layers[:-1], replace(last, mixer=replace(last.mixer, kv_heads=4))))
    check_layout(HelixLayout.create("helix", 2, 4), fewer)
    with pytest.raises(ValueError, match=r"layout\.tpa=8 does not fit a model of 64 query and 4 KV heads"):
        check_layout(HelixLayout.create("helix", 1, 8), fewer)
    assert choose(compose_config(), fewer, [], 8, None, (1, 1))[0] == HelixLayout.create("helix", 2, 4)
