"""FP8 checkpoints in several spellings decode as transformers does with their dequantized weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from comm.base import Communicator
from helix.layers.specs import Fp8Activations
from helix.layout import HelixLayout
from helix.models import spec_from_config
from helix.models.checkpoint import WeightFormat, fp8_format, read_config
from helix.models.decoder import Decoder
from helix.models.loading import Checkpoint
from kernels import scaled
from tests.e2e.checkpoints import checkpoint, continuations, write_fp8
from tests.e2e.command_line import write_lines
from tests.e2e.parity import Continuation, check, loopback
from tests.e2e.test_cli import decode
from tests.unit.test_loading import ROWS, mixed, mixed_groups, modelopt

LAYOUTS = [HelixLayout.create(), HelixLayout.create("helix", 2), HelixLayout.create("helix", 1, 2)]
SPELLINGS: dict[str, Any] = {
    "groups of different blocks": (mixed_groups(), mixed),
    "modelopt without a method": (modelopt("FP8_PER_CHANNEL_PER_TOKEN"), ROWS),
}


def written(family: str, section: dict[str, Any], block: Any, directory: Path) -> list[Continuation]:
    """Writes a checkpoint in FP8; returns transformers' continuations with its dequantized weights."""
    plain = shutil.copytree(checkpoint(family), directory / "plain")
    (directory / "fp8").mkdir()
    whole = write_fp8(plain, directory / "fp8", section, block)
    save_file(whole, plain / "model.safetensors", metadata={"format": "pt"})
    return continuations(plain, (5, 40), 8)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_tokens_are_those_of_the_dequantized_weights(spelling: str, tmp_path: Path) -> None:
    wanted = written("qwen3", *SPELLINGS[spelling], tmp_path)
    for layout in LAYOUTS:
        check(loopback(tmp_path / "fp8", layout, 16, wanted), wanted)
    with pytest.raises(AssertionError):  # the weights before rounding are others
        check(loopback(checkpoint("qwen3"), HelixLayout.create(), 16, wanted), wanted)


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_activations_in_e4m3_change_little(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every layout; KL in nats, of a model of two layers whose logits spread over a few units."""
    monkeypatch.setattr(scaled, "FP8_ROWS", 16)
    wanted = continuations(checkpoint(family), (5, 40), 1)

    def first_logits(layout: HelixLayout, activations: bool) -> torch.Tensor:
        def build(path: Path, layout: HelixLayout, comm: Communicator, dtype: torch.dtype) -> Decoder:
            formats = Fp8Activations(fp8_format) if activations else fp8_format
            model = Decoder(spec_from_config(read_config(path)), layout, comm, dtype, comm.device, formats)
            Checkpoint(path).load(model.weights)
            return model

        results = loopback(checkpoint(family), layout, 16, wanted, build=build)
        return torch.cat([r.logits[1, 0] for r in results if (1, 0) in r.logits]).log_softmax(0)

    for layout in LAYOUTS:
        exact, rounded = (first_logits(layout, activations) for activations in (False, True))
        kl = (exact.exp() * (exact - rounded)).sum().item()
        assert 1e-7 < kl < 1e-2, kl


def test_activations_need_e4m3_weights(tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "p.jsonl", {"prompt_ids": [1, 2, 3]})
    ended, _ = decode(
        tmp_path, f"model.path={checkpoint('qwen3')}", f"decode.prompts={prompts}", "model.activations=fp8"
    )
    assert ended.code != 0
    for words in ("model.activations=fp8", "model.weights=auto", "model.weights=fp8"):
        assert words in ended.output, ended.output


def test_a_section_of_the_text_part_counts(tmp_path: Path) -> None:
    """Its targets have the names of the multimodal model."""
    section = mixed_groups()
    wanted = written("qwen3.5-tied", section, mixed, tmp_path)
    path = tmp_path / "fp8"
    text, weights = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    weights = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in weights.items()}
    save_file(weights, path / "model.safetensors")
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    (path / "config.json").write_text(json.dumps(outer))
    found = Checkpoint(path)
    assert found.format == WeightFormat.from_config(section) and found.scales
    spec_from_config(read_config(path))
    for layout in LAYOUTS:
        check(loopback(path, layout, 16, wanted), wanted)
    text["quantization_config"] = {"quant_method": "awq"}
    (path / "config.json").write_text(json.dumps(outer))
    for read in (Checkpoint, lambda path: spec_from_config(read_config(path))):
        with pytest.raises(ValueError, match=r"quantized \(awq"):
            read(path)


def test_one_line_of_the_log_says_that_kv_scales_are_not_used(tmp_path: Path) -> None:
    written("qwen3", *SPELLINGS["modelopt without a method"], tmp_path)
    path = tmp_path / "fp8"
    weights = load_file(path / "model.safetensors")
    layers = {f"model.layers.{layer}.self_attn.{kind}_proj.{kind}_scale" for layer in range(2) for kind in "kv"}
    save_file(weights | {name: torch.ones(()) for name in layers}, path / "model.safetensors")
    prompts = write_lines(tmp_path / "p.jsonl", {"prompt_ids": [1, 2, 3]})
    ended, lines = decode(tmp_path, f"model.path={path}", f"decode.prompts={prompts}", "layout.kvp=2")
    assert ended.code == 0 and len(lines) == 1, ended.output
    assert ended.output.count(f"{path}: skipped the KV scales") == 1
