"""Tiny models with a layer for multi-token prediction, and what transformers' own layer makes of it."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.e2e.checkpoints import config_of, earliest_topk
from tests.e2e.parity import Continuation
from tests.ending import folder

# Lists with an entry for each layer, and that of the layer behind the last; empty: the last one's.
OF_LAYERS = {"mlp_layer_types": "sparse", "indexer_types": "full", "layer_types": ""}


@functools.cache
def whole(family: str) -> Path:
    """Directory of a random model with a layer more."""
    directory, config = folder(f"helix-{family}-whole-"), config_of(family)
    config.num_hidden_layers += 1
    for key, kind in OF_LAYERS.items():
        if kinds := getattr(config, key, None):
            setattr(config, key, [*kinds, kind or kinds[-1]])
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if name.endswith(("bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory)
    return directory


@functools.cache
def with_layer(family: str) -> Path:
    """Directory of that model's checkpoint, whose last layer predicts the token after the next."""
    directory, config = folder(f"helix-{family}-mtp-"), json.loads((whole(family) / "config.json").read_text())
    tensors = load_file(whole(family) / "model.safetensors")
    layers, hidden = config["num_hidden_layers"] - 1, config["hidden_size"]
    name, generator = f"model.layers.{layers}", torch.Generator().manual_seed(5)
    for norm in ("enorm", "hnorm", last_norm(config)):
        tensors[f"{name}.{norm}.weight"] = 1 + 0.3 * torch.randn(hidden, generator=generator)
    tensors[f"{name}.eh_proj.weight"] = 0.12 * torch.randn(hidden, 2 * hidden, generator=generator)
    tensors[f"{name}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{name}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    for key in OF_LAYERS:
        if kinds := config.get(key):
            config[key] = kinds[:-1]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def last_norm(config: dict[str, Any]) -> str:
    """The name of the norm behind the layer."""
    return "final_layernorm" if config["model_type"] == "hy_v3" else "shared_head.norm"


class Oracle:
    """The whole model in fp32, whose last layer drafts."""

    def __init__(self, family: str) -> None:
        options = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
        self.lm = AutoModelForCausalLM.from_pretrained(whole(family), **options).eval()
        self.model, self.tensors = self.lm.model, load_file(with_layer(family) / "model.safetensors")
        self.model.config.num_hidden_layers -= 1  # it runs as many
        self.layer = self.model.layers[-1]
        self.name = f"model.layers.{len(self.model.layers) - 1}"

    def norm(self, x: Tensor, name: str) -> Tensor:
        gain = self.tensors[f"{self.name}.{name}.weight"]
        return torch.nn.functional.rms_norm(x, x.shape[-1:], gain, self.model.config.rms_norm_eps)

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """Greedy drafts behind a sequence whose last token is not in the cache yet."""
        ids = torch.tensor([tokens])
        with patch.object(Tensor, "topk", earliest_topk):
            states = self.model(ids[:, :-1], use_cache=False).last_hidden_state
        found: list[int] = []
        for _ in range(count):
            following = torch.tensor([[*tokens[1:], *found]])
            y = self.ahead(self.model.embed_tokens(following), states)
            states = torch.cat((states, y[:, -1:]), 1)
            found.append(int(self.lm.lm_head(y[0, -1]).argmax()))
        return found

    def ahead(self, embedded: Tensor, states: Tensor) -> Tensor:
        """States [1, n, H] of the layer."""
        both = torch.cat((self.norm(embedded, "enorm"), self.norm(states, "hnorm")), -1)
        x = both @ self.tensors[f"{self.name}.eh_proj.weight"].T
        n = x.shape[1]
        mask = torch.full((n, n), torch.finfo(x.dtype).min).triu(1)[None, None]
        positions = torch.arange(n)[None]
        angles = self.model.rotary_emb(x, position_ids=positions)
        with patch.object(Tensor, "topk", earliest_topk):
            y = self.layer(x, attention_mask=mask, position_embeddings=angles, position_ids=positions)
        y = y[0] if isinstance(y, tuple) else y
        return self.norm(y, last_norm(self.model.config.to_dict()))


@functools.cache
def oracle(family: str) -> Oracle:
    return Oracle(family)


def plain(family: str, lengths: Sequence[int], new_tokens: int) -> list[Continuation]:
    """Greedy continuations without drafts."""
    from tests.e2e.checkpoints import continuations

    return continuations(with_layer(family), tuple(lengths), new_tokens)
