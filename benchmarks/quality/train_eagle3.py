"""Training of an EAGLE-3 layer that drafts for a small model, on one GPU in minutes.

  python -m benchmarks.quality.train_eagle3 to=DIR
  python -m benchmarks.quality.train_eagle3 to=DIR model=DIR minutes=10 places=7
  helix run speculation=eagle3 speculation.path=DIR                      then drafts with it

From every token of a text, each step drafts `places` tokens ahead as decoding does: the first draft reads the model's
states, further ones the layer's own. Texts are Python sources of what is installed here. This repository's sources are
not among them: of these it prints, for each place, how many drafts are the model's greedy tokens if those before are.

  to           directory for config.json and model.safetensors
  model        demo (default), or the directory of a checkpoint that transformers loads
  minutes      of training (default 4)
  steps        of training at most (default: as many as there is time for)
  places       drafts ahead (default 5)
  batch        texts of a step (default 16)
  length       tokens of a text, and the window of the layer (default 1024)
  megabytes    of texts (default 40)
  rate         highest learning rate (default 1e-3)
"""

from __future__ import annotations

import json
import math
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.quality.haystacks import texts
from launch.inputs.arguments import helped, parse
from launch.inputs.compose import ROOT

KEYS: dict[str, Callable[[str], Any]] = {
    "to": Path, "model": str, "minutes": float, "steps": int, "places": int, "batch": int, "length": int,
    "megabytes": float, "rate": float,
}  # fmt: skip
THETA = 10_000.0
DISCOUNT = 0.8  # of a place's loss, to that of the place before
WARM = 0.05  # share of the time in which the rate rises
UNSEEN = 16  # texts of this repository


@dataclass(frozen=True)
class Target:
    """The model for which the layer drafts, frozen."""

    model: Any
    taps: tuple[int, int, int]

    @classmethod
    def load(cls, path: Path, device: torch.device) -> Target:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
        layers = model.config.num_hidden_layers
        return cls(model.requires_grad_(False), (2, layers // 2, layers - 3))

    @torch.no_grad()
    def read(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns embeddings [B, T, H], the states that the layer reads [B, T, 3H], and logits [B, T, V] fp32."""
        found = self.model(ids, output_hidden_states=True, use_cache=False)
        states = torch.cat([found.hidden_states[i] for i in self.taps], -1)
        return found.hidden_states[0].float(), states.float(), found.logits.float()


class DraftedLayer(nn.Module):
    """The layer, with a checkpoint's names; heads and widths are the model's."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, dim

        def matrix(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(hidden, eps)

        q, kv, width = self.heads * dim, self.kv_heads * dim, config.intermediate_size
        projections = {"q_proj": matrix(2 * hidden, q), "o_proj": matrix(q, hidden)}
        projections |= {f"{part}_proj": matrix(2 * hidden, kv) for part in "kv"}
        mlp = {"gate_proj": matrix(hidden, width), "up_proj": matrix(hidden, width), "down_proj": matrix(width, hidden)}
        self.fc, self.norm = matrix(3 * hidden, hidden), norm()
        self.midlayer = nn.ModuleDict(
            {name: norm() for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
            | {"self_attn": nn.ModuleDict(projections), "mlp": nn.ModuleDict(mlp)}
        )

    def drafts(self, embedded: Tensor, states: Tensor, places: int) -> Iterator[Tensor]:
        """Yields normalised states [B, U, H] of each place, U = T - places, from every one of the first U tokens.

        Args:
            embedded, states: [B, T, H] and [B, T, 3H], of all tokens.
        """
        U = embedded.shape[1] - places
        causal = torch.ones(U, U, dtype=torch.bool, device=embedded.device).tril()
        angles = torch.arange(U + places, device=embedded.device)[:, None] / THETA ** (
            torch.arange(0, self.dim, 2, device=embedded.device) / self.dim
        )
        angles = torch.cat((angles, angles), -1)
        x = self.fc(states[:, :U])
        kept: list[tuple[Tensor, Tensor]] = []  # keys and values that the model's states made, then each place's own
        for place in range(places):
            x = self._ahead(embedded[:, place + 1 : place + 1 + U], x, angles[place : place + U], causal, kept)
            yield self.norm(x)

    def _ahead(
        self, embedded: Tensor, x: Tensor, angles: Tensor, causal: Tensor, kept: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Computes the residual stream [B, U, H] behind the layer, and adds its keys and values to `kept`."""
        layer: Any = self.midlayer
        attention, mlp = layer["self_attn"], layer["mlp"]
        both = torch.cat((layer["input_layernorm"](embedded), layer["hidden_norm"](x)), -1)

        def heads(part: str, count: int) -> Tensor:  # [B, heads, U, D]
            found: Tensor = attention[f"{part}_proj"](both).unflatten(-1, (count, self.dim)).transpose(1, 2)
            return found.repeat_interleave(self.heads // count, 1)

        q, k = (_turned(heads(part, n), angles) for part, n in (("q", self.heads), ("k", self.kv_heads)))
        kept.append((k, heads("v", self.kv_heads)))
        (first, values), *own = kept
        scores = (q @ first.mT).masked_fill(~causal, -torch.inf)
        beside = [(q * keys).sum(-1, keepdim=True) for keys, _ in own]
        weights = (torch.cat([scores, *beside], -1).float() * self.dim**-0.5).softmax(-1).to(q.dtype)
        attended = weights[..., : first.shape[2]] @ values
        for i, (_, value) in enumerate(own):
            attended = attended + weights[..., first.shape[2] + i, None] * value
        x = x + attention["o_proj"](attended.transpose(1, 2).flatten(2))
        normed = layer["post_attention_layernorm"](x)
        added: Tensor = mlp["down_proj"](F.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))
        return x + added


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates heads x [.., U, D] by angles [U, D]."""
    a, b = x.chunk(2, -1)
    return x * angles.cos().to(x.dtype) + torch.cat((-b, a), -1) * angles.sin().to(x.dtype)


def losses(target: Target, layer: DraftedLayer, ids: Tensor, places: int) -> tuple[Tensor, list[Tensor]]:
    """Computes the loss against the model's distributions, and whether each place's draft is right [B, U] bool."""
    embedded, states, logits = target.read(ids)
    total, right = torch.zeros((), device=ids.device), []
    for place, normed in enumerate(layer.drafts(embedded, states, places)):
        wanted = logits[:, place + 1 : place + 1 + normed.shape[1]]
        found = target.model.lm_head(normed.to(target.model.dtype)).float()
        total = total - DISCOUNT**place * (wanted.softmax(-1) * found.log_softmax(-1)).sum(-1).mean()
        right.append(found.argmax(-1) == wanted.argmax(-1))
    return total, right


@torch.no_grad()
def agreement(target: Target, layer: DraftedLayer, ids: Tensor, places: int) -> list[float]:
    """Computes the share of right drafts at each place, where all before it are right, of texts [n, T]."""
    counts = torch.zeros(2, places)
    for text in ids.split(1):
        behind = torch.ones((), dtype=torch.bool, device=ids.device)
        for place, right in enumerate(losses(target, layer, text, places)[1]):
            behind = behind.expand_as(right)
            counts[:, place] += torch.stack((behind.sum(), (behind & right).sum())).cpu()
            behind = behind & right
    return [float(kept / max(tried, 1)) for tried, kept in counts.T]


def corpus(tokenizer: Any, megabytes: float) -> Tensor:
    """Reads Python sources of what is installed here, in an order of their own [n] int64."""
    folders = {Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")}
    paths = sorted({path for folder in folders for path in folder.rglob("*.py") if ROOT not in path.parents})
    random.Random(0).shuffle(paths)
    found: list[str] = []
    left = megabytes * 1e6
    for path in paths:
        if left <= 0:
            break
        found.append(path.read_text(encoding="utf-8", errors="ignore")[: int(left) + 1])
        left -= len(found[-1])
    encoded = tokenizer(found, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in ids])


def train(values: dict[str, Any]) -> list[float]:
    """Trains and saves a layer; returns its `agreement` on this repository's sources.

    Raises:
        ValueError: the texts are too few.
    """
    from transformers import AutoTokenizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = values.get("model", "demo")
    path = ROOT / "assets" / "demo-model" if model == "demo" else Path(model)
    places, length, batch = (
        values.get(name, default) for name, default in (("places", 5), ("length", 1024), ("batch", 16))
    )
    rate, seconds, most = values.get("rate", 1e-3), 60 * values.get("minutes", 4.0), values.get("steps", 1 << 30)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(path)
    target = Target.load(path, device)
    unseen = texts(tokenizer, UNSEEN, length).to(device)
    ids = corpus(tokenizer, values.get("megabytes", 40.0)).to(device)
    if len(ids) <= length:
        raise ValueError(f"megabytes: the texts have {len(ids)} tokens, no more than length={length}")
    layer = DraftedLayer(target.model.config).to(device)
    optimizer = torch.optim.AdamW(layer.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    began, step = time.perf_counter(), 0
    while (done := max((time.perf_counter() - began) / seconds, step / most)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, done / WARM + 1e-3) * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)
        begins = torch.randint(len(ids) - length, (batch, 1), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, _ = losses(target, layer, ids[begins + torch.arange(length, device=device)], places)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step & (step - 1) == 0:
            said = f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - began:.0f} s"
            print(said, file=sys.stderr, flush=True)
    save(layer, target.model.config, length, values["to"])
    return agreement(target, layer, unseen, places)


def save(layer: DraftedLayer, config: Any, window: int, to: Path) -> None:
    """Writes the checkpoint."""
    to.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in layer.state_dict().items()
    }
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    kept = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "rms_norm_eps",
    )  # fmt: skip
    about = {name: getattr(config, name) for name in kept}
    about |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": None}
    about |= {"rope_theta": THETA, "max_position_embeddings": window, "dtype": "bfloat16"}
    (to / "config.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains a layer; ends with the known values if a value is wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if helped(arguments or ["--help"], __doc__):
        return
    try:
        found = train(parse(arguments, KEYS, ("to",), words=("to",)))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print("kept of each draft behind kept ones: " + " ".join(f"{share:.2f}" for share in found))


if __name__ == "__main__":
    main()
