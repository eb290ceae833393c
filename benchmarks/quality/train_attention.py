"""Distils the demo model into one with MLA, or with recurrent states, on one GPU in minutes.

  python -m benchmarks.quality.train_attention to=DIR form=latents       MLA in every layer, as in DeepSeek-V3
  python -m benchmarks.quality.train_attention to=DIR form=states        Gated DeltaNet in three of four, as in Qwen3.5
  helix acceptance model=DIR                                             then measure its own drafts

All weights that both models have start as the demo model's. Then it is distilled: first each layer's attention alone,
then the next tokens. Training texts are Python sources of the installed packages, with numbered lines hidden and
repeated as in the demo model's own training. It prints both models' loss on this repository's sources.

  to           directory of the checkpoint to write
  form         latents or states
  minutes      of training (default 8)
  steps        of training at most (default: as many as there is time for)
  tokens       of a step (default 65536)
  length       tokens of a text in the last third of the time, before that at most 2048 (default 8192)
  megabytes    of sources (default 80)
  rate         highest learning rate (default 2e-3)
  output       a file to append a JSON line to
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quality.haystacks import source_windows
from benchmarks.quality.needles import WORDS
from benchmarks.quality.train_drafter import corpus, schedule
from launch.inputs.arguments import handle_help, parse
from launch.inputs.compose import ROOT
from launch.job.report import provenance

KEYS: dict[str, Any] = {
    "to": Path, "form": Literal["latents", "states"], "minutes": float, "steps": int, "tokens": int, "length": int,
    "megabytes": float, "rate": float, "output": Path,
}  # fmt: skip
DEMO = ROOT / "assets" / "demo-model"
SHORT = 2048  # tokens of a text in the first two thirds
ALONE = 0.4  # share of the time in which each layer's attention is trained by itself
RECALLED = 0.7  # share of texts with numbered lines
UNSEEN = 8  # held-out texts
CHUNK = 64  # tokens of a chunk of the gated delta rule
SAME = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")


@torch.no_grad()
def student(form: str, demo: Any) -> Any:
    """Makes a model of the demo model's sizes with other attention, and copies what both have."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

    sizes = {name: getattr(demo.config, name) for name in SAME}
    sizes |= {"max_position_embeddings": demo.config.max_position_embeddings, "tie_word_embeddings": True}
    rope = {"rope_type": "default", "rope_theta": demo.config.rope_parameters["rope_theta"]}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if form == "latents":
        ranks = {"q_lora_rank": None, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32}
        experts = {"first_k_dense_replace": sizes["num_hidden_layers"], "num_key_value_heads": 8, "v_head_dim": 64}
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **tokens, **ranks, **experts, rope_parameters=rope))
    else:
        heads = {"num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
        heads |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
        rope["partial_rotary_factor"] = 1.0
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **tokens, **heads, rope_parameters=rope))
    here, there = model.state_dict(), {name: weight.float() for name, weight in demo.state_dict().items()}
    for name, weight in here.items():
        if name.endswith(("o_proj.weight", "out_proj.weight")):
            weight.zero_()  # random attention would drown what the layers before wrote
        if form == "latents" and "attn." not in name:
            weight.copy_(there[name])
        elif form == "states" and name in there:
            _copy_gated(name, weight, there[name], demo.config.num_attention_heads)
    return model


def _copy_gated(name: str, weight: Tensor, of: Tensor, heads: int) -> None:
    """Copies a weight of Qwen3's to Qwen3.5's, whose norms multiply by 1 + weight and whose attention has a gate."""
    if "norm" in name:
        weight.copy_(of - 1.0)
    elif name.endswith("q_proj.weight"):
        weight.zero_()
        weight.view(heads, 2, -1)[:, 0] = of.view(heads, -1)
    else:
        weight.copy_(of * (2.0 if name.endswith("o_proj.weight") else 1.0))  # the gate is sigmoid(0)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Computes transformers' `torch_chunk_gated_delta_rule` without a state before and after it.

    A chunk's effect on the state is linear: state' = keep @ state + new. So the loop over chunks has one product each;
    transformers' loop slices tensors, and the gradient of each slice fills a whole tensor.

    Args:
        query, key: [B, T, H, K].
        value: [B, T, H, V].
        g, beta: [B, T, H].
    """
    dtype, length = value.dtype, value.shape[1]
    with torch.autocast(value.device.type, enabled=False):
        query, key = (t.float() * torch.rsqrt(t.float().square().sum(-1, keepdim=True) + 1e-6) for t in (query, key))
        rows = query * query.shape[-1] ** -0.5, key, value.float(), g.float()[..., None], beta.float()[..., None]
        query, key, value, g, beta = (
            F.pad(t.transpose(1, 2), (0, 0, 0, -length % CHUNK)).unflatten(2, (-1, CHUNK)) for t in rows
        )
        total = g.cumsum(3)  # [B, H, N, CHUNK, 1]
        later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
        decay = (total - total.mT).masked_fill(later, -torch.inf).exp()
        wanted = torch.cat((value * beta, key * beta * total.exp()), -1)
        solved = torch.linalg.solve_triangular((key * beta) @ key.mT * decay, wanted, upper=False, unitriangular=True)
        delta, read = solved.split((value.shape[-1], key.shape[-1]), -1)
        left = key * (total[..., -1:, :] - total).exp()
        keep = torch.diag_embed(total[..., -1, :].exp().expand(*total.shape[:3], key.shape[-1])) - left.mT @ read
        states = [torch.zeros_like(keep[:, :, 0, :, :1]).expand(-1, -1, -1, value.shape[-1])]
        for of_chunk, new in zip(keep.unbind(2), (left.mT @ delta).unbind(2), strict=True):
            states.append(of_chunk @ states[-1] + new)
        state = torch.stack(states[:-1], 2)
        out = (query * total.exp()) @ state + (query @ key.mT * decay) @ (delta - read @ state)
    return out.flatten(2, 3)[:, :, :length].transpose(1, 2).to(dtype), None


class Texts:
    """Random texts of `ids` [n], some with numbered lines that come back later."""

    def __init__(self, tokenizer: Any, ids: Tensor, seed: int = 0) -> None:
        self.ids, self.rng, self.tokenizer = ids, random.Random(seed), tokenizer

    def line(self, word: str, number: int) -> list[int]:
        text = f"\n# The magic number for {word} is {number:05d}.\n"
        return self.tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]

    def draw(self, length: int) -> Tensor:
        """Returns one text [length]."""
        begin = self.rng.randrange(len(self.ids) - length)
        text = self.ids[begin : begin + length].clone()
        if self.rng.random() < RECALLED:
            for word in self.rng.sample(WORDS, max(2, length // 1024)):
                line = torch.tensor(self.line(word, self.rng.randrange(100_000)))
                for at in self.rng.sample(range(length - len(line)), 3):
                    text[at : at + len(line)] = line
        return text

    def batch(self, length: int, tokens: int) -> Tensor:
        """Returns texts [max(1, tokens / length), length]."""
        return torch.stack([self.draw(length) for _ in range(max(1, tokens // length))])


class Attentions:
    """Trains each layer's attention alone: given the input of the demo model's attention, it learns its output."""

    def __init__(self, model: Any, demo: Any) -> None:
        self.read: list[Tensor] = []
        self.wanted: list[Tensor] = []
        self.missed: list[Tensor] = []
        for index, (here, there) in enumerate(zip(model.model.layers, demo.model.layers, strict=True)):
            there.self_attn.register_forward_hook(self._see, with_kwargs=True)
            attention = here.linear_attn if hasattr(here, "linear_attn") else here.self_attn
            attention.register_forward_pre_hook(partial(self._replace, index), with_kwargs=True)
            attention.register_forward_hook(partial(self._compare, index))
        self.on = False

    def _see(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.on:
            self.read.append(kwargs["hidden_states"])
            self.wanted.append(_first(output))

    def _replace(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args, kwargs | {"hidden_states": self.read[index]}) if self.on else None

    def _compare(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        if self.on:
            wanted = self.wanted[index].float()
            self.missed.append((_first(output).float() - wanted).square().sum() / wanted.square().sum())

    def loss(self, model: Any, demo: Any, ids: Tensor) -> Tensor:
        """Returns the share of each layer's output that its attention misses, added up."""
        self.read, self.wanted, self.missed, self.on = [], [], [], True
        with torch.no_grad():
            demo.model(ids, use_cache=False)
        model.model(ids, use_cache=False)
        total = torch.stack(self.missed).sum()
        self.read, self.wanted, self.missed, self.on = [], [], [], False  # frees the last step's graph
        return total


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def distillation_loss(model: Any, demo: Any, ids: Tensor) -> Tensor:
    """Returns the loss against the demo model's distributions of next tokens, and against the text."""
    with torch.no_grad():
        wanted = demo(ids, use_cache=False).logits.float().softmax(-1)
    found = model(ids, use_cache=False).logits.float().log_softmax(-1)
    return F.nll_loss(found[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) - (wanted * found).sum(-1).mean()


@torch.no_grad()
def text_loss(model: nn.Module, texts: Tensor) -> float:
    """Returns the mean loss per token over texts [n, T], in nats."""
    found = [F.cross_entropy(model(t[None], use_cache=False).logits[0, :-1].float(), t[1:]).item() for t in texts]
    return sum(found) / len(found)


def train(values: dict[str, Any]) -> dict[str, Any]:
    """Trains and saves a version; returns its loss on held-out texts and the demo model's."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    form, length, tokens = values["form"], values.get("length", 8192), values.get("tokens", 65536)
    rate, seconds, max_steps = values.get("rate", 2e-3), 60 * values.get("minutes", 8.0), values.get("steps", 1 << 30)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    demo = AutoModelForCausalLM.from_pretrained(DEMO, dtype=dtype).to(device).eval().requires_grad_(False)
    model: Any = student(form, demo).to(device).train()
    attentions = Attentions(model, demo)
    texts = Texts(tokenizer, corpus(tokenizer, values.get("megabytes", 80.0)))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    began, step, seen = time.perf_counter(), 0, 0
    while (done := max((time.perf_counter() - began) / seconds, step / max_steps)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * schedule(done)
        ids = texts.batch(length if done > 2 / 3 else min(length, SHORT), tokens).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = attentions.loss(model, demo, ids) if done < ALONE else distillation_loss(model, demo, ids)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, seen = step + 1, seen + ids.numel()
        if step & (step - 1) == 0 or step % 100 == 0:
            progress = (
                f"step {step}: loss {loss.item():.3f}, {seen / 1e6:.0f}M tokens, {time.perf_counter() - began:.0f} s"
            )
            print(progress, file=sys.stderr, flush=True)
    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(values["to"])
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / name, values["to"])
    unseen = source_windows(tokenizer, UNSEEN, length).to(device)
    return {
        "minutes": round((time.perf_counter() - began) / 60, 2), "steps": step, "tokens": seen,
        "text_loss": round(text_loss(model, unseen), 3), "demo_loss": round(text_loss(demo, unseen), 3),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains a version; exits with a one-line error for a wrong value."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if handle_help(arguments or ["--help"], __doc__):
        return
    try:
        values = parse(arguments, KEYS, ("to", "form"), words=("to",))
        from transformers.models.qwen3_5 import modeling_qwen3_5

        with patch.object(modeling_qwen3_5, "torch_chunk_gated_delta_rule", gated_delta_rule):
            found = train(values)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    if "output" in values:
        about = {
            "name": "trained-attention",
            **provenance(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        }
        command = " ".join(["python -m benchmarks.quality.train_attention", *arguments])
        with values["output"].open("a", encoding="utf-8") as file:
            file.write(json.dumps(about | {"form": values["form"], "command": command} | found) + "\n")
    print(f"loss on held-out text {found['text_loss']}, the demo model's {found['demo_loss']}")


if __name__ == "__main__":
    main()
