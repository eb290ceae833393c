"""Times MTP and EAGLE-3 drafts: `helix bench layer-drafts`.

Decode steps of whole models over a cache of random data, with up to seven drafts of an MTP or EAGLE-3 layer with random
weights. The acceptance rate is fixed; drafts are made, verified and written as usual, and the time of an iteration does
not depend on the rate. The gain takes the tokens per iteration published for the most similar model (`PUBLISHED`),
with these times, over plain steps. A model has as many layers as fit next to the KV cache.

  helix bench layer-drafts
  helix bench layer-drafts ranks=8 models=glm-4.6
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.models.workloads import Items, K, M, drafted, fitting_layers, named, over_plain
from benchmarks.runner import BenchContext, Row
from helix.layers.specs import AttentionSpec, MLPSpec
from helix.layout import HelixLayout
from helix.models import DecoderSpec
from helix.worker.kv_cache_spec import token_bytes
from launch.inputs.shapes import spec_of

MODELS = ("qwen2.5-7b", "qwen3.5-27b", "glm-4.6", "deepseek-r1")
DRAFTERS = {"qwen2.5-7b": "eagle3"}  # the others: mtp
OPTIONS = {"glm-4.6": ["model.weights=fp8"]}  # as published
POINTS = {1: [(1, 128 * K), (4, 96 * K)], 8: [(1, 128 * K), (8, 128 * K), (1, M)]}
GAMMAS = [0, 1, 2, 3, 4, 5, 7]
ACCEPTANCE, STEPS = 0.8, 16
HEAD = 32_000  # vocabulary of an EAGLE-3 layer
# Tokens per iteration by number of drafts, SPEED-Bench coding: DeepSeek-V4-Pro's and GLM-5.2's MTP, and MiniMax-M3's
# EAGLE-3 with grouped heads (SemiAnalysisAI/InferenceX, golden_al_distribution, 2026-08); and Qwen3.5-397B's MTP.
PUBLISHED = {
    "deepseek-r1": {1: 1.79, 2: 2.27, 3: 2.49, 4: 2.54, 5: 2.55, 7: 2.54},
    "glm-4.6": {1: 1.84, 2: 2.50, 3: 2.99, 4: 3.33, 5: 3.61, 7: 3.91},
    "qwen3.5-27b": {3: 3.39},
    "qwen2.5-7b": {1: 1.79, 2: 2.39, 3: 2.78, 4: 3.02, 5: 3.21, 7: 3.52},
}


def write_eagle3(spec: DecoderSpec, to: Path) -> None:
    """Writes a random EAGLE-3 layer for a model, with its numbers of heads and its MLP width."""
    attention, mlp = spec.layers[0].mixer, spec.layers[0].ffn
    assert isinstance(attention, AttentionSpec) and isinstance(mlp, MLPSpec)
    hidden, width, vocab = spec.hidden, mlp.width, min(HEAD, spec.vocab)
    q, kv = (heads * attention.head_dim for heads in (attention.q_heads, attention.kv_heads))

    def random_tensor(*shape: int) -> Tensor:
        return (torch.randn(*shape) * 0.02).bfloat16()

    layer = {"self_attn.o_proj": (hidden, q), "mlp.down_proj": (hidden, width)}
    layer |= {f"self_attn.{part}_proj": (rows, 2 * hidden) for part, rows in (("q", q), ("k", kv), ("v", kv))}
    layer |= {f"mlp.{part}_proj": (width, hidden) for part in ("gate", "up")}
    tensors = {"fc.weight": random_tensor(hidden, 3 * hidden), "lm_head.weight": random_tensor(vocab, hidden)}
    tensors |= {f"midlayer.{name}.weight": random_tensor(*shape) for name, shape in layer.items()}
    norms = ("norm", *(f"midlayer.{n}" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")))
    tensors |= {f"{name}.weight": 1 + random_tensor(hidden) for name in norms}
    tensors["d2t"] = torch.arange(vocab) * (spec.vocab // vocab - 1)
    save_file(tensors, to / "model.safetensors")
    about = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "max_position_embeddings": 2048}
    about |= {"hidden_size": hidden, "intermediate_size": width, "head_dim": attention.head_dim}
    about |= {"num_attention_heads": attention.q_heads, "num_key_value_heads": attention.kv_heads}
    about |= {"vocab_size": spec.vocab, "draft_vocab_size": vocab, "rms_norm_eps": spec.norm_eps}
    (to / "config.json").write_text(json.dumps(about), encoding="utf-8")


def fitting(model: str, layout: HelixLayout, tokens: int) -> tuple[int, list[str]]:
    """Returns how many layers of a model fit on these GPUs next to `tokens` of KV, and the overrides that cut it."""
    spec = spec_of(model)
    layers = len(spec.layers)
    if torch.cuda.is_available():
        kv_bytes = token_bytes(spec.kv_cache_specs(layout, 0, "bfloat16")[0]) * tokens / layout.kvp
        items = Items.of([*named(model), *OPTIONS.get(model, [])])
        memory = torch.cuda.get_device_properties(0).total_memory
        layers = fitting_layers(spec, layout.world_size, memory, items, kv_bytes)
    return layers, [f"model.config.num_hidden_layers={layers}"] if layers < len(spec.layers) else []


def cases(ctx: BenchContext) -> list[tuple[str]]:
    """Returns one job per model; on one GPU the two smallest, on a CPU the demo model."""
    if not ctx.gpu:
        return [("demo",)]
    return [(model,) for model in ctx.models or (MODELS if ctx.ranks > 1 else MODELS[:2])]


def measure(ctx: BenchContext, model: str) -> Iterator[Row]:
    """Yields the rows of a job in a kvp layout."""
    near = max(n for n in POINTS if n <= ctx.ranks)
    points, gammas, steps = (POINTS[near], GAMMAS, STEPS) if ctx.gpu else ([(2, 512)], [0, 2], 3)
    drafter = DRAFTERS.get(model, "mtp") if ctx.gpu else "eagle3"
    layout = HelixLayout.create("helix", ctx.ranks, ep=1 if spec_of(model).experts is None else ctx.ranks)
    layers, cut = fitting(model, layout, max(batch * length for batch, length in points))
    about: dict[str, Any] = {"kind": "layer-drafts", "model": model, "layers": layers, "drafter": drafter}
    about |= {"layout": str(layout), "acceptance": ACCEPTANCE}
    with tempfile.TemporaryDirectory() as directory:
        if drafter == "eagle3":
            write_eagle3(spec_of(model), Path(directory))
        drafts = [f"speculation={drafter}", f"speculation.gamma={max(gammas)}", *cut, *OPTIONS.get(model, [])]
        drafts += [f"speculation.path={directory}"] if drafter == "eagle3" else []
        _, found = drafted(model, layout, points, gammas, steps, ACCEPTANCE, *drafts)
    yield from (about | row | gains(model, row, found) for row in found)


def gains(model: str, row: Row, points: list[Row]) -> Row:
    """Returns the time relative to a plain step at the same point, and the gain with the published tokens."""
    if "failed" in row:
        return {}
    over = over_plain(row, points)
    tokens = PUBLISHED.get(model, {}).get(row["gamma"])
    return {"step_over_plain": over, "gain_published": None if tokens is None else tokens / over}
