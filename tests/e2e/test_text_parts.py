"""Text parts of checkpoints that read images too, as transformers saves them, against the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from comm.loopback import LoopbackWorld
from helix.layers.weights import Weights
from helix.layout import HelixLayout
from helix.models import spec_from_config
from helix.models.checkpoint import read_config
from helix.models.decoder import Decoder
from helix.models.loading import Checkpoint, is_untrained, weights_of
from tests.e2e.checkpoints import checkpoint, oracle
from tests.e2e.parity import Continuation, check, loopback
from tests.e2e.test_parity import MOE_LENGTHS, MOE_TOKENS

TEXT: dict[str, Any] = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
TOWER = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
)
LATENT = dict(
    num_key_value_heads=4, head_dim=16, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
    v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=16,
    first_k_dense_replace=0,
)  # fmt: skip
PROMPT = tuple(range(1, 40))


def gemma() -> Any:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    text = TEXT | dict(sliding_window=16, query_pre_attn_scalar=8, layer_types=layers, pad_token_id=0)
    images = dict(mm_tokens_per_image=4, image_token_index=95, boi_token_index=94, eoi_token_index=93)
    config = Gemma3Config(text_config=text, vision_config=TOWER, eos_token_id=[1, 2], **images)
    return Gemma3ForConditionalGeneration(config)


def mistral(kind: str, **more: Any) -> Any:
    text = TEXT | {"model_type": kind, "tie_word_embeddings": False} | more
    tower = TOWER | {"model_type": "pixtral", "head_dim": 8}
    config = Mistral3Config(text_config=text, vision_config=tower, spatial_merge_size=1, image_token_index=95)
    return Mistral3ForConditionalGeneration(config)


def qwen_vl(experts: bool, **more: Any) -> Any:
    tower = dict(
        hidden_size=16, intermediate_size=16, depth=1, num_heads=2, patch_size=8, out_hidden_size=32,
        deepstack_visual_indexes=[0], num_position_embeddings=16,
    )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
    text = TEXT | {"rope_parameters": rope, "tie_word_embeddings": not experts} | more
    if not experts:
        return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=tower))
    text |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12)
    config = Qwen3VLMoeConfig(text_config=text, vision_config=tower, tie_word_embeddings=False)
    return Qwen3VLMoeForConditionalGeneration(config)


def glm() -> Any:
    tower = dict(
        hidden_size=16, intermediate_size=16, depth=1, num_heads=2, patch_size=8, out_hidden_size=32, image_size=16
    )
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1)
    text = TEXT | experts | {"rope_parameters": rope, "first_k_dense_replace": 1, "pad_token_id": 0}
    return Glm4vMoeForConditionalGeneration(Glm4vMoeConfig(text_config=text, vision_config=tower))


def kimi() -> Any:
    tower = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, patch_size=8,
        projection_hidden_size=16, projection_layer_norm_eps=1e-5,
    )  # fmt: skip
    text = (
        TEXT | LATENT | {"model_type": "deepseek_v3", "n_group": 1, "topk_group": 1, "head_dim": 8, "pad_token_id": 0}
    )
    return Kimi_K25ForConditionalGeneration(Kimi_K25Config(text_config=text, vision_config=tower, pad_token_id=0))


MODELS = {
    "gemma3": gemma,
    "glm4v-moe": glm,
    "kimi": kimi,
    "qwen3-vl": lambda: qwen_vl(False),
    "qwen3-vl-moe": lambda: qwen_vl(True),
    "mistral": lambda: mistral("mistral", sliding_window=None),
    "ministral3": lambda: mistral("ministral3"),
    "mistral4": lambda: mistral("mistral4", **LATENT),
}


def saved(name: str, directory: Path) -> Any:
    """Saves a random model, whose norms are not what training begins with; returns it."""
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory)
    if name == "kimi":  # transformers 5.17 writes other names of layers than it reads, and than are published
        weights = load_file(directory / "model.safetensors")
        text = "language_model.model."
        weights = {key.replace(f"{text}blocks.", f"{text}layers."): tensor for key, tensor in weights.items()}
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        edit(directory, architectures=["KimiK25ForConditionalGeneration"], inner={"model_type": "kimi_k2"})
    return model


def edit(directory: Path, inner: dict[str, Any] | None = None, **outer: Any) -> None:
    """Changes keys of a config.json and of its text_config; None deletes one."""
    config = json.loads((directory / "config.json").read_text())
    for part, changes in ((config, outer), (config["text_config"], inner or {})):
        part |= changes
        for key in [key for key, value in changes.items() if value is None]:
            del part[key]
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_text_part_is_read_from_the_whole_checkpoint(name: str, newer: bool, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    if newer:  # the other names that published files have
        weights = load_file(tmp_path / "model.safetensors")
        names = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
        names |= {"vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector."}
        for old, new in names.items():
            weights = {new + k.removeprefix(old) if k.startswith(old) else k: t for k, t in weights.items()}
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (skipped, *_) = Checkpoint(tmp_path).skipped
    assert skipped.startswith("the ") and skipped.endswith(": only text is read")
    wanted = [next_token(model)]
    for grid in ((2, 1), (3, 1), (1, 2)):
        check(loopback(tmp_path, HelixLayout.create("helix", *grid), 16, wanted), wanted)


@pytest.mark.parametrize("square", [False, True])
def test_experts_of_qwen3_vl_are_published_transposed(square: bool, tmp_path: Path) -> None:
    """Also where both ways have the same shape; transformers then does not transpose, so the oracle is not its own."""
    torch.manual_seed(3)
    model = qwen_vl(True, moe_intermediate_size=16 if square else 12).eval()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    experts = {name: tensor.mT.contiguous() for name, tensor in weights.items() if ".experts." in name}
    save_file(weights | experts, tmp_path / "model.safetensors", metadata={"format": "pt"})
    wanted = [next_token(model)]
    check(loopback(tmp_path, HelixLayout.create("helix", 1, 2, ep=2), 16, wanted), wanted)


HEADS = [  # what the outer and inner tie_word_embeddings say, whether the file has a head; which is tied
    (True, True, False), (False, True, False), (None, True, False), (True, False, True), (False, True, True),
    (True, None, True), (None, False, True),
]  # fmt: skip


@pytest.mark.parametrize(("outer", "inner", "head"), HEADS)
def test_a_head_in_the_file_is_used_whatever_the_config_says(
    outer: bool | None, inner: bool | None, head: bool, tmp_path: Path
) -> None:
    """Published configs contradict their files, and themselves."""
    torch.manual_seed(3)
    model = qwen_vl(False, tie_word_embeddings=False).eval()
    if not head:
        model.lm_head.weight = model.model.language_model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    if not head:
        weights = load_file(tmp_path / "model.safetensors")
        weights.pop("lm_head.weight", None)
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edit(tmp_path, {"tie_word_embeddings": inner}, tie_word_embeddings=outer)
    wanted = [next_token(model)]
    check(loopback(tmp_path, HelixLayout.create("helix", 2), 16, wanted), wanted)


def test_a_missing_head_is_an_error_if_nothing_says_tied(tmp_path: Path) -> None:
    qwen_vl(False).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("lm_head.weight", None)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edit(tmp_path, {"tie_word_embeddings": False}, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"1 missing: lm_head\.weight"):
        loaded(tmp_path)


def next_token(model: Any) -> Continuation:
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, -1].float()
    return Continuation(PROMPT, (int(logits.argmax()),), logits[None])


def loaded(directory: Path) -> Weights:
    checkpoint = Checkpoint(directory)
    spec = checkpoint.as_stored(spec_from_config(read_config(directory)))
    comm = LoopbackWorld(1).communicator(0, (0,))
    weights = Decoder(spec, HelixLayout.create(), comm, torch.float32, torch.device("cpu")).weights
    checkpoint.check(weights.slices, spec.unused)
    checkpoint.load(weights)
    return weights


def test_weights_that_were_not_found_are_noticed(tmp_path: Path) -> None:
    """Saved by a class of text alone, a text part has random weights, of the right names and shapes."""
    saved("gemma3", tmp_path / "whole")
    Gemma3ForCausalLM.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "text")
    assert is_untrained(loaded(tmp_path / "text")) and not is_untrained(loaded(tmp_path / "whole"))


def test_a_text_part_beside_one_for_images(tmp_path: Path) -> None:
    """Published files have the text part's tensors under another name, experts in one tensor, and layers of no use."""
    plain = checkpoint("qwen3.5-moe")
    weights = load_file(plain / "model.safetensors")
    experts = weights.keys() - {name for name in weights if ".experts." not in name}
    for layer in range(2):
        block = f"model.layers.{layer}.mlp.experts"

        def stack(part: str, block: str = block) -> torch.Tensor:
            return torch.stack([weights[f"{block}.{e}.{part}_proj.weight"] for e in range(6)])

        weights[f"{block}.gate_up_proj"] = torch.cat((stack("gate"), stack("up")), 1)
        weights[f"{block}.down_proj"] = stack("down")
    whole = {name.replace("model.", "model.language_model.", 1): weights[name] for name in weights.keys() - experts}
    whole |= {"model.visual.merger.weight": torch.ones(2), "mtp.norm.weight": torch.ones(2)}
    save_file({name: tensor.contiguous() for name, tensor in whole.items()}, tmp_path / "model.safetensors")
    text = json.loads((plain / "config.json").read_text())
    outer = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer | {"eos_token_id": 7}))
    assert spec_from_config(read_config(tmp_path)).eos == (7,)
    wanted = oracle("qwen3.5-moe", MOE_LENGTHS, MOE_TOKENS)
    for layout in (HelixLayout.create("helix", 3), HelixLayout.create("helix", 1, 2, ep=2)):
        check(loopback(tmp_path, layout, 16, wanted), wanted)
    made = weights_of(Checkpoint(tmp_path).as_stored(spec_from_config(outer)), layout, 0, torch.float32)
    Checkpoint(tmp_path).check(made.slices, spec_from_config(outer).unused)
    with pytest.raises(ValueError, match="text_config=None must be an object"):
        spec_from_config(outer | {"text_config": None})
