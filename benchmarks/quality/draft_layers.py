"""Draft layers in training: EAGLE-3 and multi-token prediction (MTP)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from helix.models.checkpoint import INDEX

DraftKV = list[tuple[Tensor, Tensor]]  # keys and values from the model's states, then from each draft position

EXPERTS, TOP_K, SHARED = 4, 2, 12  # of MTP; the shared experts together are as wide as the model's MLP
LIKE_GLM = ("llama", "qwen3")  # model types that equal GLM-4.5 without experts


class DraftedLayer(nn.Module):
    """A draft layer with a checkpoint's names; heads and widths are the model's.

    Attributes:
        aux_hidden_state_layers: layers of the model whose hidden states it reads.
        theta: its RoPE base.
    """

    def __init__(self, config: Any, aux_hidden_state_layers: tuple[int, ...], theta: float) -> None:
        super().__init__()
        self.config, self.aux_hidden_state_layers, self.theta = config, aux_hidden_state_layers, theta
        self.hidden, self.dim, self.eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads

    def begin(self, states: Tensor) -> Tensor:
        """Returns the first draft position's input [B, U, H] from the model's states [B, U, layers x H]."""
        raise NotImplementedError

    def next_input(self, embedded: Tensor, x: Tensor, angles: Tensor, causal: Tensor, cache: DraftKV) -> Tensor:
        """Returns the next position's input [B, U, H], and appends this one's keys and values to `cache`."""
        raise NotImplementedError

    def read(self, x: Tensor) -> Tensor:
        """Returns the input [B, U, H] of the model's head."""
        raise NotImplementedError

    def save(self, model: Path, window: int, to: Path) -> None:
        """Writes a checkpoint for the model in `model`, trained on texts of `window` tokens."""
        raise NotImplementedError

    def drafts(self, embedded: Tensor, states: Tensor, num_drafts: int) -> Iterator[Tensor]:
        """Yields the head's input [B, U, H] at each draft position, from each of the first U = T - num_drafts tokens.

        Args:
            embedded, states: [B, T, H] and [B, T, layers x H], of all tokens.
        """
        U = embedded.shape[1] - num_drafts
        causal = torch.ones(U, U, dtype=torch.bool, device=embedded.device).tril()
        angles = torch.arange(U + num_drafts, device=embedded.device)[:, None] / self.theta ** (
            torch.arange(0, self.dim, 2, device=embedded.device) / self.dim
        )
        angles = torch.cat((angles, angles), -1)
        x = self.begin(states[:, :U])
        cache: DraftKV = []
        for draft_index in range(num_drafts):
            x = self.next_input(
                embedded[:, draft_index + 1 : draft_index + 1 + U],
                x,
                angles[draft_index : draft_index + U],
                causal,
                cache,
            )
            yield self.read(x)

    def attention_output(self, of: Any, inputs: Tensor, angles: Tensor, causal: Tensor, cache: DraftKV) -> Tensor:
        """Returns attention's output [B, U, H] over the model's states and earlier draft positions."""

        def heads(part: str, count: int) -> Tensor:  # [B, heads, U, D]
            found = of[f"{part}_proj"](inputs).unflatten(-1, (count, self.dim)).transpose(1, 2)
            found = of[f"{part}_norm"](found) if f"{part}_norm" in of else found
            return found.repeat_interleave(self.heads // count, 1)

        q, k = (_apply_rotary(heads(part, n), angles) for part, n in (("q", self.heads), ("k", self.kv_heads)))
        cache.append((k, heads("v", self.kv_heads)))
        (first, values), *draft_kv = cache
        scores = (q @ first.mT).masked_fill(~causal, -torch.inf)
        draft_scores = [(q * keys).sum(-1, keepdim=True) for keys, _ in draft_kv]
        weights = (torch.cat([scores, *draft_scores], -1).float() * self.dim**-0.5).softmax(-1).to(q.dtype)
        attended = weights[..., : first.shape[2]] @ values
        for i, (_, value) in enumerate(draft_kv):
            attended = attended + weights[..., first.shape[2] + i, None] * value
        added: Tensor = of["o_proj"](attended.transpose(1, 2).flatten(2))
        return added

    def _attention(self, inputs: int, qk_norm: bool) -> nn.ModuleDict:
        q, kv = self.heads * self.dim, self.kv_heads * self.dim
        parts: dict[str, nn.Module] = {
            f"{n}_proj": _matrix(inputs, width) for n, width in (("q", q), ("k", kv), ("v", kv))
        }
        parts |= {f"{part}_norm": nn.RMSNorm(self.dim, self.eps) for part in "qk" if qk_norm}
        return nn.ModuleDict({**parts, "o_proj": _matrix(q, self.hidden)})

    def _mlp(self, width: int) -> nn.ModuleDict:
        both = {f"{part}_proj": _matrix(self.hidden, width) for part in ("gate", "up")}
        return nn.ModuleDict({**both, "down_proj": _matrix(width, self.hidden)})

    def _norm(self) -> nn.RMSNorm:
        return nn.RMSNorm(self.hidden, self.eps)

    def _stored(self, prefix: str = "") -> dict[str, Tensor]:
        return {
            f"{prefix}{name}": tensor.detach().to("cpu", torch.bfloat16).contiguous()
            for name, tensor in self.state_dict().items()
        }


class Eagle3(DraftedLayer):
    """EAGLE-3 layer: reads hidden states of three layers, then its own output."""

    def __init__(self, config: Any) -> None:
        layers = config.num_hidden_layers
        super().__init__(config, (2, layers // 2, layers - 3), 10_000.0)
        self.fc, self.norm = _matrix(3 * self.hidden, self.hidden), self._norm()
        parts = {name: self._norm() for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
        attention, mlp = self._attention(2 * self.hidden, qk_norm=False), self._mlp(config.intermediate_size)
        self.midlayer: Any = nn.ModuleDict({**parts, "self_attn": attention, "mlp": mlp})

    def begin(self, states: Tensor) -> Tensor:
        x: Tensor = self.fc(states)
        return x

    def next_input(self, embedded: Tensor, x: Tensor, angles: Tensor, causal: Tensor, cache: DraftKV) -> Tensor:
        layer = self.midlayer
        both = torch.cat((layer["input_layernorm"](embedded), layer["hidden_norm"](x)), -1)
        x = x + self.attention_output(layer["self_attn"], both, angles, causal, cache)
        return x + _gated(layer["mlp"], layer["post_attention_layernorm"](x))

    def read(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x)
        return normed

    def save(self, model: Path, window: int, to: Path) -> None:
        save_file(self._stored(), to / "model.safetensors", {"format": "pt"})
        config_keys = (
            "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
            "rms_norm_eps",
        )  # fmt: skip
        about = {name: getattr(self.config, name) for name in config_keys}
        about |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": None}
        about |= {"rope_theta": self.theta, "max_position_embeddings": window, "dtype": "bfloat16"}
        _write(to / "config.json", about)


class NextToken(DraftedLayer):
    """MTP layer as in GLM-4.5: reads the normalized output, then its own output.

    The model's checkpoint is saved as GLM-4.5 without experts, which computes the same; the layer has few experts.

    Raises:
        ValueError: GLM-4.5 does not compute what the model does.
    """

    def __init__(self, config: Any) -> None:
        rope = config.rope_parameters
        if config.model_type not in LIKE_GLM or config.attention_bias or rope["rope_type"] != "default":
            supported = " or ".join(LIKE_GLM)
            raise ValueError(f"form=mtp needs a model of type {supported}, without biases and with plain RoPE")
        super().__init__(config, (config.num_hidden_layers,), rope["rope_theta"])
        self.enorm, self.hnorm, self.eh_proj = self._norm(), self._norm(), _matrix(2 * self.hidden, self.hidden)
        self.input_layernorm, self.post_attention_layernorm = self._norm(), self._norm()
        self.self_attn = self._attention(self.hidden, qk_norm=config.model_type == "qwen3")
        self.shared_head: Any = nn.ModuleDict({"norm": self._norm()})
        self.width = config.intermediate_size // SHARED
        gate = _matrix(self.hidden, EXPERTS)
        gate.register_buffer("e_score_correction_bias", torch.zeros(EXPERTS))
        experts = nn.ModuleList(self._mlp(self.width) for _ in range(EXPERTS))
        shared = self._mlp(self.width * SHARED)
        self.mlp: Any = nn.ModuleDict({"gate": gate, "experts": experts, "shared_experts": shared})

    def begin(self, states: Tensor) -> Tensor:
        return states

    def next_input(self, embedded: Tensor, x: Tensor, angles: Tensor, causal: Tensor, cache: DraftKV) -> Tensor:
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(x)), -1))
        x = x + self.attention_output(self.self_attn, self.input_layernorm(x), angles, causal, cache)
        normed: Tensor = self.shared_head["norm"](x + self._experts(self.post_attention_layernorm(x)))
        return normed

    def read(self, x: Tensor) -> Tensor:
        return x

    def _experts(self, x: Tensor) -> Tensor:
        scores = self.mlp["gate"](x).float().sigmoid()
        best, expert_ids = scores.topk(TOP_K)
        weights = torch.zeros_like(scores).scatter(-1, expert_ids, best / best.sum(-1, keepdim=True)).to(x.dtype)
        out = _gated(self.mlp["shared_experts"], x)
        for i, expert in enumerate(self.mlp["experts"]):
            out = out + weights[..., i, None] * _gated(expert, x)
        return out

    def save(self, model: Path, window: int, to: Path) -> None:
        config, layers = self.config, self.config.num_hidden_layers
        shards = sorted(model.glob("*.safetensors"))
        names = [f"model-{i + 1:05}-of-{len(shards) + 1:05}.safetensors" for i in range(len(shards) + 1)]
        tensors = self._stored(f"model.layers.{layers}.")
        where = dict.fromkeys(tensors, names[-1])
        for shard, name in zip(shards, names, strict=False):
            _link(shard, to / name)
            with safe_open(shard, "pt") as opened:
                where |= dict.fromkeys(opened.keys(), name)
        for other in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
            if (model / other).exists():
                _link(model / other, to / other)
        save_file(tensors, to / names[-1], {"format": "pt"})
        _write(to / INDEX, {"metadata": {}, "weight_map": where})
        config_keys = (
            "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "num_hidden_layers", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "eos_token_id",
        )  # fmt: skip
        about = {name: getattr(config, name) for name in config_keys}
        about |= {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "dtype": "bfloat16"}
        about |= {"rope_parameters": {**config.rope_parameters, "partial_rotary_factor": 1.0}}
        about |= {"attention_bias": False, "use_qk_norm": config.model_type == "qwen3", "first_k_dense_replace": layers}
        about |= {"n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K, "n_shared_experts": SHARED}
        about |= {"moe_intermediate_size": self.width, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
        about |= {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1}
        _write(to / "config.json", about)


FORMS: dict[str, type[Eagle3] | type[NextToken]] = {"eagle3": Eagle3, "mtp": NextToken}


def _matrix(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def _gated(of: Any, x: Tensor) -> Tensor:
    found: Tensor = of["down_proj"](F.silu(of["gate_proj"](x)) * of["up_proj"](x))
    return found


def _apply_rotary(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates heads x [.., U, D] by angles [U, D]."""
    a, b = x.chunk(2, -1)
    return x * angles.cos().to(x.dtype) + torch.cat((-b, a), -1) * angles.sin().to(x.dtype)


def _link(file: Path, to: Path) -> None:
    to.unlink(missing_ok=True)
    to.symlink_to(os.path.relpath(file.resolve(), to.parent.resolve()))


def _write(to: Path, content: dict[str, Any]) -> None:
    to.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
