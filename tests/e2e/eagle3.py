"""Tiny targets with random EAGLE-3 layers, and a plain torch reference."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.e2e.checkpoints import config_of, write_random
from tests.exit_cleanup import folder

LAYERS = 5  # of the targets
HEADS, KV_HEADS, DIM, WIDTH = 8, 4, 8, 97
EPS, THETA = 1e-2, 10_000.0

# Variants of checkpoints.
KINDS = {
    "shared": dict(d2t=True),
    "own": dict(d2t=True, own_embedding=True, ids=[0, 2, 4], speculators=True),
    "whole": dict(d2t=False, ids=[0, 1, 2], residual=True),
    # EAGLE-3.1: norms of the target's states, of each or of all, and of the layer's own.
    "3.1": dict(d2t=True, norms=[f"fc_norm.{i}" for i in range(3)], about={"fc_norm": True, "norm_output": True}),
    "one norm": dict(
        d2t=True, norms=["input_norm"], residual=True, nested=True, about={"norm_before_fc": True, "norm_output": True}
    ),
    # Other spellings of "shared".
    "llama": dict(d2t=True, ids=[], about={"architectures": ["LlamaForCausalLM"], "model_type": "qwen3"}),
    "prefixed": dict(d2t=True, prefix="model.", about={"target_hidden_size": None, "num_aux_hidden_states": 3}),
    "unstated": dict(d2t=True, about={"draft_vocab_size": None, "architectures": ["Eagle3LlamaForCausalLM"]}),
    "sliding": dict(d2t=True, speculators=True, window=20),
}


@functools.cache
def target(family: str) -> Path:
    """Returns the directory of a random model with LAYERS layers."""
    directory, config = folder(f"helix-{family}-eagle-target-"), config_of(family)
    config.num_hidden_layers = LAYERS
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i % len(config.layer_types)] for i in range(LAYERS)]
    return write_random(config, directory)


@functools.cache
def layer(family: str, kind: str, window: int = 512) -> Path:
    """Returns the directory of a random layer for this target; `window` is its stated training length."""
    directory, of = folder(f"helix-{family}-eagle-"), json.loads((target(family) / "config.json").read_text())
    save(directory, KINDS[kind], of["hidden_size"], of["vocab_size"], window)
    return directory


def save(
    directory: Path,
    options: Mapping[str, Any],
    hidden_size: int,
    vocab: int,
    window: int,
    heads: tuple[int, int, int] = (HEADS, KV_HEADS, DIM),
    seed: int = 13,
) -> None:
    """Writes a random layer for a target; heads: query heads, KV heads, head dim."""
    generator, (q_heads, kv_heads, dim) = torch.Generator().manual_seed(seed), heads
    own, draft_vocab = bool(options.get("own_embedding")), min(100, vocab)
    hidden = 48 if own else hidden_size

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.12

    name = "layers.0" if own else "midlayer"
    tensors = {
        "fc.weight": normal(hidden, 3 * hidden_size),
        "norm.weight": 1 + normal(hidden),
        **{f"{name}.{n}.weight": 1 + normal(hidden) for n in ("input_layernorm", "hidden_norm")},
        f"{name}.post_attention_layernorm.weight": 1 + normal(hidden),
        f"{name}.self_attn.q_proj.weight": normal(q_heads * dim, 2 * hidden),
        f"{name}.self_attn.k_proj.weight": normal(kv_heads * dim, 2 * hidden),
        f"{name}.self_attn.v_proj.weight": normal(kv_heads * dim, 2 * hidden),
        f"{name}.self_attn.o_proj.weight": normal(hidden, q_heads * dim),
        f"{name}.mlp.gate_proj.weight": normal(WIDTH, hidden),
        f"{name}.mlp.up_proj.weight": normal(WIDTH, hidden),
        f"{name}.mlp.down_proj.weight": normal(hidden, WIDTH),
    }
    if options["d2t"]:
        ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
        tensors["lm_head.weight"] = normal(draft_vocab, hidden)
    if own:
        tensors["embed_tokens.weight"] = normal(vocab, hidden) * 5
    norms = options.get("norms", [])
    tensors |= {f"{n}.weight": 1 + normal(3 * hidden_size // len(norms)) * 3 for n in norms}
    outside = ("d2t", "t2d", "lm_head.weight")
    if prefix := options.get("prefix"):
        tensors = {n if n in outside else prefix + n: tensor for n, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors")
    config = {
        "hidden_size": hidden, "intermediate_size": WIDTH, "num_attention_heads": q_heads, "head_dim": dim,
        "num_key_value_heads": kv_heads, "num_hidden_layers": 1, "vocab_size": vocab,
        "rms_norm_eps": EPS, "rope_theta": THETA, "max_position_embeddings": window,
    }  # fmt: skip
    about = {"draft_vocab_size": draft_vocab if options["d2t"] else None}
    if options.get("residual"):
        about["norm_before_residual"] = True
    about |= options.get("about", {})
    if options.get("nested"):
        about = {"draft_vocab_size": about.pop("draft_vocab_size"), "eagle_config": about}
    if "window" in options:
        config |= {"layer_types": ["sliding_attention"], "sliding_window": options["window"]}
    if options.get("speculators"):
        config = {"speculators_model_type": "eagle3", "transformer_layer_config": config}
        about |= {"eagle_aux_hidden_state_layer_ids": options["ids"]} if "ids" in options else {}
    elif "ids" in options:
        about["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": options["ids"]}
    config |= {"architectures": ["LlamaForCausalLMEagle3"]} | about
    (directory / "config.json").write_text(json.dumps(config))


class Oracle:
    """A target and its layer in fp32."""

    def __init__(self, family: str, kind: str, window: int) -> None:
        options = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
        self.lm = AutoModelForCausalLM.from_pretrained(target(family), **options).eval()
        self.tensors, self.window = load_file(layer(family, kind, window) / "model.safetensors"), window
        self.name = "layers.0" if kind == "own" else "midlayer"
        self.taps = {"own": (0, 2, 4), "whole": (1, 2, 3)}.get(kind, (2, 2, 2))
        self.normed_residual, self.normed_output = kind in ("whole", "one norm"), kind in ("3.1", "one norm")

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"{self.name}.{name}.weight"]

    @staticmethod
    def norm(x: Tensor, norm_weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], norm_weight, EPS)

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """Returns greedy drafts after a sequence whose last token is not cached yet."""
        ids = torch.tensor([tokens])
        hidden = self.lm.model(ids[:, :-1], use_cache=False, output_hidden_states=True).hidden_states
        parts = [hidden[i][0] for i in self.taps]
        if "fc_norm.0.weight" in self.tensors:
            parts = [self.norm(part, self.tensors[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
        joined = torch.cat(parts, -1)
        if "input_norm.weight" in self.tensors:
            joined = self.norm(joined, self.tensors["input_norm.weight"])
        states = joined @ self.tensors["fc.weight"].T  # [n, H]
        found: list[int] = []
        for _ in range(count):
            y = self.forward(torch.tensor([*tokens[1:], *found]), states)
            normed = self.norm(y[-1], self.tensors["norm.weight"])
            states = torch.cat((states, normed[None] if self.normed_output else y[-1:]))
            head = self.tensors.get("lm_head.weight", self.lm.lm_head.weight)
            best = int((normed @ head.T).argmax())
            found.append(best + (int(self.tensors["d2t"][best]) if "d2t" in self.tensors else 0))
        return found

    def forward(self, tokens: Tensor, g: Tensor) -> Tensor:
        """Returns the residual stream after the layer, [n, H]."""
        embedded = F.embedding(tokens, self.tensors.get("embed_tokens.weight", self.lm.model.embed_tokens.weight))
        normed, n = self.norm(g, self.weight("hidden_norm")), len(g)
        both = torch.cat((self.norm(embedded, self.weight("input_layernorm")), normed), -1)
        q, k, v = (
            (both @ self.weight(f"self_attn.{p}_proj").T).unflatten(-1, (heads, DIM)).transpose(0, 1)
            for p, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        angles = torch.arange(n)[:, None] / THETA ** (torch.arange(0, DIM, 2) / DIM)
        cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()

        def rotated(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return x * cos + torch.cat((-b, a), -1) * sin

        distance = torch.arange(n)[:, None] - torch.arange(n)
        mask = (distance >= 0) & (distance < self.window)
        attended = F.scaled_dot_product_attention(rotated(q), rotated(k), v, attn_mask=mask, enable_gqa=True)
        x = (normed if self.normed_residual else g) + attended.transpose(0, 1).flatten(1) @ self.weight(
            "self_attn.o_proj"
        ).T
        y = self.norm(x, self.weight("post_attention_layernorm"))
        gated = F.silu(y @ self.weight("mlp.gate_proj").T) * (y @ self.weight("mlp.up_proj").T)
        return x + gated @ self.weight("mlp.down_proj").T


@functools.cache
def oracle(family: str, kind: str, window: int = 512) -> Oracle:
    """Returns the reference of a family and variant."""
    return Oracle(family, kind, window)
