"""Facts of a machine and of models that `helix info` shows."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helix.layout import HelixLayout
from helix.models import spec_from_config
from helix.models.checkpoint import CheckpointFiles, read_config
from helix.planner.plan import plan
from helix.worker.kv_cache_spec import token_bytes
from launch import info
from launch.inputs import machine, model_facts
from launch.inputs.planning import check_query
from tests.e2e.checkpoints import DEMO, PACKINGS, ROOT, checkpoint, write_fp8, write_packed

Describe = Callable[[Path | str], dict[str, Any]]


@pytest.fixture
def describe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Describe:
    """Returns what `helix info MODEL json=-` prints on a machine without GPUs, and the `error` that ends it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def call(model: Path | str) -> dict[str, Any]:
        error = None
        try:
            info.main([str(model), "json=-"])
        except SystemExit as end:
            error = end.code
        return {**json.loads(capsys.readouterr().out), "error": error}

    return call


SHOWN = """\
┌───────────────┬──────────────────────────────────────────────────────────────┐
│ model         │ demo-mtp                                                     │
│ family        │ glm4_moe Glm4MoeForCausalLM                                  │
│ layers        │ 8 x full                                                     │
│ FFN           │ 8 x dense 768                                                │
│ sizes         │ hidden 256, vocabulary 4,096, LM head tied to the embedding  │
│ heads         │ 8 query, 2 KV of 64                                          │
│ weights       │ 19.3 MB in 3 files: BF16 19.3 MB                             │
│ quantization  │ none (dtype bfloat16)                                        │
│ context       │ 32,768 tokens (max_position_embeddings); RoPE plain          │
│ KV cache      │ 4,096 B a token in bfloat16; 0.1 GB for the whole context    │
│ drafts        │ MTP layer: speculation=mtp (2.5 MB)                          │
│ tokenizer     │ tokenizer.json                                               │
│ chat template │ yes; format unknown: answers are not split into thoughts,    │
│               │ calls and text                                               │
│ end tokens    │ 0 <|endoftext|>                                              │
└───────────────┴──────────────────────────────────────────────────────────────┘

On NVIDIA H200 (149.0 GB, the default hardware), in the layouts that `helix
plan` ranks first for one sequence of 32,768 tokens, or of the most that fit:
"""


def test_the_text_of_a_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(DEMO.parent)
    info.main(["demo-mtp"])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    golden = SHOWN.splitlines()
    assert lines[: len(golden)] == golden
    assert max(map(len, lines)) <= 80
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines[len(golden) :] if "│" in line]
    assert [row[0] for row in cells] == ["1", "2", "4", "8"]
    assert cells[1][:4] == ["2", "tp tpa=2", "8.4 MB", "2,048 B"]


MOE = "top 2 of 6 experts of 26"
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama-llama3": {"mixers": {"full": 2}, "ffns": {"dense 97": 2}, "ropes": ["llama3 x 8 from 64"], "tied": False},
    "llama-yarn-biased-tied": {"tied": True, "ropes": ["yarn x 8 from 64"], "query_heads": 15, "kv_heads": 3},
    "gemma3": {"mixers": {"window 24": 2, "full": 1}, "ropes": ["linear x 8", "plain"], "family": "gemma3_text"},
    "deepseek-v3-yarn": {"mixers": {"latent (MLA)": 2}, "kv_heads": None, "latent": [32, 8], "head_dim": 20},
    "glm-5-shared": {
        "mixers": {
            "latent (MLA), top 2 by its indexer": 3,
            "latent (MLA), top 2 as selected before": 1,
        }
    },
    "qwen3-next": {"mixers": {"recurrent": 3, "full": 1}, "architecture": "Qwen3NextForCausalLM"},
    "gpt-oss-mxfp4": {"quantization": "mxfp4", "mixers": {"window 24": 1, "full": 1}, "scale_blocks": []},
}


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_a_checkpoint(family: str, describe: Describe) -> None:
    path = checkpoint(family)
    found = describe(path)
    assert {key: found[key] for key in CHECKPOINTS[family]} == CHECKPOINTS[family]
    assert found["error"] is None and found["context"] == 512 and found["context_key"] == "max_position_embeddings"
    with (path / "model.safetensors").open("rb") as file:
        stored = (path / "model.safetensors").stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    assert found["weights"]["bytes"] == sum(found["weights"]["dtypes"].values()) == stored
    # The planner and the cache count the same bytes.
    spec = spec_from_config(read_config(path))
    assert spec.dtype == "float32" and found["kv_dtype"] == "bfloat16", "`helix plan` predicts no fp32"
    assert found["kv_token_bytes"] == sum(map(token_bytes, spec.kv_cache_specs(HelixLayout.create(), 0, "bfloat16")))
    assert (found["kv_sequence_bytes"] > 0) == (spec.has_states or any(spec.windows))


def test_layouts_are_the_planner_s(describe: Describe) -> None:
    found = describe("deepseek-r1")
    *fewer, eight = found["layouts"]
    assert [(one["gpus"], one["layout"]) for one in fewer] == [(1, None), (2, None), (4, None)]
    assert fewer[0]["why"].startswith("the weights alone take ")
    first = plan(check_query(["model=deepseek-r1", "gpus=8", "context=2M"]).query).choices[0]
    assert (eight["layout"], eight["weight_bytes"]) == (first.name, round(first.weight_bytes))
    assert eight["sequences"] == first.largest_batch and eight["tokens"] > first.longest_context == found["context"]
    assert first.layout.kvp * eight["kv_token_bytes"] == found["kv_token_bytes"] == 61 * 2 * (512 + 64)


def test_a_context_longer_than_memory_holds(describe: Describe) -> None:
    """The layout of the longest sequence that fits; one page more does not."""
    most = describe("llama-3.1-405b")["layouts"]
    (eight,) = (one for one in most if one["gpus"] == 8)
    assert eight["sequences"] == 0 and eight["tokens"] > 1024
    query = check_query(["model=llama-3.1-405b", "gpus=8", f"context={eight['tokens']}"]).query
    assert eight["layout"] in [choice.name for choice in plan(query).choices]


def test_quantized_weights(tmp_path: Path, describe: Describe) -> None:
    section = {"quant_method": "fp8", "weight_block_size": [16, 8], "activation_scheme": "dynamic"}
    write_fp8(checkpoint("qwen3"), tmp_path, section, (16, 8))
    found, files = describe(tmp_path), CheckpointFiles(tmp_path)
    assert (found["quantization"], found["scale_blocks"], found["mtp"]) == ("fp8", [[16, 8]], False)
    assert found["weights"]["dtypes"]["F8_E4M3"] == sum(math.prod(files.shapes[name]) for name in files.scales) > 0


def test_matrices_in_few_bits(tmp_path: Path, describe: Describe, capsys: pytest.CaptureFixture[str]) -> None:
    def packing(name: str) -> str | None:
        chosen = {"up_proj": "int4 of rows", "self_attn": "int4 of 32", "mlp": "nvfp4 divided"}
        return next((packing for part, packing in chosen.items() if part in name), None)

    write_packed(checkpoint("packed-llama"), tmp_path, packing, section=PACKINGS["int4 of 32"].section)
    found = describe(tmp_path)
    counts = [(row["format"], row["kind"], row["group"], row["matrices"]) for row in found["few_bits"]]
    int4, nvfp4 = "int4 of compressed-tensors", "NVFP4 of compressed-tensors"
    assert counts == [(int4, "int4", 32, 8), (nvfp4, "e2m1", 16, 4), (int4, "int4", 0, 2)]
    assert found["few_bits"][1]["elements"] == 2 * 2 * 192 * 352
    model_facts.show(found)
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"8 matrices in {int4} (int4, a scale for 32 columns); 4 matrices in {nvfp4} (e2m1, a scale for 16" in shown
    assert f"2 matrices in {int4} (int4, a scale for a row)" in shown


def test_a_tied_head_that_is_stored_counts(tmp_path: Path, describe: Describe) -> None:
    tied = checkpoint("llama-yarn-biased-tied")
    weights = load_file(tied / "model.safetensors")
    head = weights["model.embed_tokens.weight"] + 1
    save_file(weights | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((tied / "config.json").read_text())
    found, before = describe(tmp_path), describe(tied)
    assert (found["tied"], before["tied"]) == (False, True)
    more = found["layouts"][0]["weight_bytes"] - before["layouts"][0]["weight_bytes"]
    assert more == head.numel() * 2, "in bfloat16"


def test_the_text_part_of_a_model_with_a_tower(tmp_path: Path, describe: Describe) -> None:
    plain = checkpoint("qwen3.5-moe")
    weights = load_file(plain / "model.safetensors")
    nested = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in weights.items()}
    nested |= {"model.visual.merger.weight": torch.ones(6), "mtp.norm.weight": torch.ones(2)}
    save_file(nested, tmp_path / "model.safetensors")
    text = json.loads((plain / "config.json").read_text())
    outer = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    found = describe(tmp_path)
    assert found["text_part_only"] and found["architecture"] == outer["architectures"][0]
    assert (found["family"], found["weights"]["skipped_bytes"]) == ("qwen3_5_moe_text", 6 * 4)
    assert found["weights"]["mtp_bytes"] == 2 * 4
    assert found["mixers"] == describe(plain)["mixers"]


@pytest.mark.parametrize("left", [[], ["tiktoken.model"], ["tekken.json", "tokenizer_config.json"]])
def test_a_config_without_weights_and_tokenizer(left: list[str], tmp_path: Path, describe: Describe) -> None:
    (tmp_path / "config.json").write_text((DEMO / "config.json").read_text())
    for name in left:
        (tmp_path / name).write_text((DEMO / "tokenizer_config.json").read_text())
    found, whole = describe(tmp_path), describe(DEMO)
    assert found["weights"] is None and found["error"] is None
    assert found["layouts"] == whole["layouts"] and found["kv_bytes"] == whole["kv_bytes"]
    assert found["why_no_tokenizer"] == "no tokenizer.json" + (f" ({left[0]} cannot be read)" if left else "")
    assert (found["chat_template"], whole["chat_template"]) == (False, True), "templates need tokenizer.json"
    assert found["end_tokens"][0] | {"text": "<|endoftext|>"} == whole["end_tokens"][0]


@pytest.mark.parametrize(
    "file, content, error",
    [
        ("config.json", {"architectures": ["NewForCausalLM"]}, "unknown architecture NewForCausalLM; known: Deepseek"),
        ("config.json", {"quantization_config": {"quant_method": "awq"}}, r"quanti[sz]ed \(awq"),
        ("config.json", {"hidden_size": 0}, "hidden_size=0"),
        ("model.safetensors.index.json", {"weight_map": {"a": "gone.safetensors"}}, "missing: gone.safetensors"),
        ("tokenizer_config.json", {"chat_template": 5}, "chat template in .* cannot be read"),
    ],
)
def test_a_refused_model(file: str, content: Any, error: str, tmp_path: Path, describe: Describe) -> None:
    """The reason is that of a run."""
    for path in DEMO.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / file).write_text(json.dumps(json.loads((tmp_path / file).read_text()) | content))
    found = describe(tmp_path)
    assert found["error"] == f"error: {found['refused']}" and "layers" not in found
    assert pytest.RaisesExc(ValueError, match=error).matches(ValueError(found["refused"])), found["refused"]
    assert found["architecture"] == content.get("architectures", ["Qwen3ForCausalLM"])[0]


def test_a_draft_layer_s_checkpoint_and_no_checkpoint(
    tmp_path: Path, describe: Describe, capsys: pytest.CaptureFixture[str]
) -> None:
    drafts = describe(DEMO.with_name("demo-eagle3"))["refused"]
    assert "EAGLE-3 draft layer" in drafts and f"speculation.path={DEMO.with_name('demo-eagle3')}" in drafts
    for model, why in ((tmp_path, "has no config.json"), (tmp_path / "gone", "is not a directory")):
        with pytest.raises(SystemExit, match=f"error: .*{why}"):
            info.main([str(model)])
        assert capsys.readouterr().out == ""


def test_a_model_is_described_without_torch() -> None:
    program = "import sys; from launch.info import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program, str(DEMO)], cwd=ROOT, check=True, timeout=120)


# ---- the machine


def test_a_machine_without_gpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    info.main(["json=-"])
    found = json.loads(capsys.readouterr().out)
    assert (
        found["backend"] == "gloo" and found["gpus"] == [] and torch.__version__.startswith(found["versions"]["torch"])
    )
    info.main([])
    shown = capsys.readouterr().out
    assert "no GPU" in shown and "gloo, on CPUs" in shown and "helix-runtime" in shown


@pytest.mark.parametrize("count, peers, wanted", [(1, True, "nccl"), (2, True, "symm_mem"), (2, False, "nccl")])
def test_collectives_follow_the_links(count: int, peers: bool, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: peers)
    assert machine.backend(count) == wanted


def test_kernels_follow_the_capability() -> None:
    assert "plain torch" in machine.kernels(None) and "Hopper kernels and" in machine.kernels((9, 0))
    assert all("general" in machine.kernels(c) for c in ((8, 0), (8, 9), (10, 0), (12, 0)))


def test_the_planner_s_description() -> None:
    assert machine.described("NVIDIA H200").startswith("NVIDIA H200, 149 GB")
    assert "helix calibrate" in machine.described("NVIDIA X9")
