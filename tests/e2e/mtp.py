"""Tiny models with an MTP layer, and transformers' output of that layer."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from helix.models import spec_from_config
from helix.models.spec import NextTokenNames
from tests.e2e.checkpoints import config_of, earliest_topk, write_random
from tests.exit_cleanup import folder

# Keys with one entry per layer, and the MTP layer's entry; empty: the last layer's.
PER_LAYER_KEYS = {"mlp_layer_types": "sparse", "indexer_types": "full", "layer_types": ""}


@functools.cache
def whole(family: str) -> Path:
    """Returns the directory of a random model with one more layer."""
    directory, config = folder(f"helix-{family}-whole-"), config_of(family)
    config.num_hidden_layers += 1
    for key, kind in PER_LAYER_KEYS.items():
        if kinds := getattr(config, key, None):
            setattr(config, key, [*kinds, kind or kinds[-1]])
    if hybrid(config):
        config.layer_types[-1] = "full_attention"
    return write_random(config, directory)


@functools.cache
def with_layer(family: str) -> Path:
    """Returns the directory of that model's checkpoint with its last layer as MTP layer."""
    directory, config = folder(f"helix-{family}-mtp-"), json.loads((whole(family) / "config.json").read_text())
    tensors = load_file(whole(family) / "model.safetensors")
    layers, hidden = config["num_hidden_layers"] - 1, config["hidden_size"]
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    for key in PER_LAYER_KEYS:
        if kinds := config.get(key):
            config[key] = kinds[:layers]
    names, generator = names_of(config), torch.Generator().manual_seed(5)
    for norm in (names.token_norm, names.state_norm, names.norm):
        tensors[f"{norm}.weight"] = norm_weight(config) + 0.3 * torch.randn(hidden, generator=generator)
    tensors[f"{names.join}.weight"] = 0.12 * torch.randn(hidden, 2 * hidden, generator=generator)
    name = f"model.layers.{layers}."
    if hybrid(config):
        tensors = {n.replace(name, f"{names.layer}."): tensor for n, tensor in tensors.items()}
    else:
        tensors[f"{name}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{name}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def names_of(config: dict[str, Any]) -> NextTokenNames:
    """Returns the names of the layer's tensors."""
    spec = spec_from_config(config)
    return NextTokenNames(*(name.format(len(spec.layers)) for name in spec.nextn_names))


def norm_weight(config: dict[str, Any]) -> float:
    """Returns the weight of an identity norm."""
    return 0.0 if hybrid(config) else 1.0


def hybrid(config: Any) -> bool:
    """Returns whether layers have states."""
    return str(config["model_type"] if isinstance(config, dict) else config.model_type).startswith(
        ("qwen3_next", "qwen3_5")
    )


class Oracle:
    """The whole model in fp32, whose last layer drafts."""

    def __init__(self, family: str) -> None:
        options = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
        self.lm = AutoModelForCausalLM.from_pretrained(whole(family), **options).eval()
        self.model, self.tensors = self.lm.model, load_file(with_layer(family) / "model.safetensors")
        self.model.config.num_hidden_layers -= 1  # number of layers to run
        self.layer = self.model.layers[-1]
        config = json.loads((with_layer(family) / "config.json").read_text())
        self.names, self.offset = names_of(config), 1 - norm_weight(config)

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.tensors[f"{name}.weight"] + self.offset
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, self.model.config.rms_norm_eps)

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """Returns greedy drafts after a sequence whose last token is not cached yet."""
        ids = torch.tensor([tokens])
        with patch.object(Tensor, "topk", earliest_topk):
            states = self.model(ids[:, :-1], use_cache=False).last_hidden_state
        found: list[int] = []
        for _ in range(count):
            following = torch.tensor([[*tokens[1:], *found]])
            y = self.forward(self.model.embed_tokens(following), states, len(tokens) - 1)
            states = torch.cat((states, y[:, -1:]), 1)
            found.append(int(self.lm.lm_head(y[0, -1]).argmax()))
        return found

    def forward(self, embedded: Tensor, states: Tensor, num_tokens: int) -> Tensor:
        """Returns the layer's states [1, n, H]; rows after the first `num_tokens` are drafts."""
        both = torch.cat((self.norm(embedded, self.names.token_norm), self.norm(states, self.names.state_norm)), -1)
        x = both @ self.tensors[f"{self.names.join}.weight"].T
        n = x.shape[1]
        mask = torch.full((n, n), torch.finfo(x.dtype).min).triu(1)[None, None]
        positions = torch.arange(n)[None]
        axes = positions.expand(3, 1, n) if "qwen3_5" in self.model.config.model_type else positions  # M-RoPE positions
        angles = self.model.rotary_emb(x, position_ids=axes)
        with patch.object(Tensor, "topk", earliest_topk), self.shared_selection(num_tokens):
            y = self.layer(x, attention_mask=mask, position_embeddings=angles, position_ids=positions)
        y = y[0] if isinstance(y, tuple) else y
        return self.norm(y, self.names.norm)

    def shared_selection(self, num_tokens: int) -> AbstractContextManager[Any]:
        """Makes drafts reuse the last known row's indexer selection, for models trained so; it may be everything."""
        if not getattr(self.model.config, "index_share_for_mtp_iteration", False):
            return nullcontext()
        forward = self.layer.self_attn.indexer.forward

        def choose(*args: Any, **more: Any) -> Tensor:
            found: Tensor = forward(*args, **more)  # [1, n, topk]
            found[:, num_tokens:] = found[:, num_tokens - 1 : num_tokens].clamp(max=num_tokens - 1)
            return found

        return patch.object(self.layer.self_attn.indexer, "forward", choose)


@functools.cache
def oracle(family: str) -> Oracle:
    """Returns the reference of a family."""
    return Oracle(family)
