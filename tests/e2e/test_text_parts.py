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
    Mistral3Config,
    Mistral3ForConditionalGeneration,
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


MODELS = {
    "gemma3": gemma,
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
    return model


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
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, -1].float()
    wanted = [Continuation(PROMPT, (int(logits.argmax()),), logits[None])]
    for layout in (HelixLayout.create("helix", 2), HelixLayout.create("helix", 3)):
        check(loopback(tmp_path, layout, 16, wanted), wanted)


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
