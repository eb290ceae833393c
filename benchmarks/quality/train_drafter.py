"""Trains a draft layer for a small model, on one GPU in minutes.

  python -m benchmarks.quality.train_drafter to=DIR
  python -m benchmarks.quality.train_drafter to=DIR form=mtp
  python -m benchmarks.quality.train_drafter to=DIR model=MODEL texts=own minutes=2 drafts=7
  helix run speculation=eagle3 speculation.path=DIR                      then draft with it
  helix run speculation=mtp model.path=DIR                               with an MTP layer

From every token of a text, a training step drafts `drafts` tokens ahead as decoding does: the first draft reads the
model's states, later ones the layer's own. It prints the conditional acceptance rate of greedy drafts at each position
on held-out texts. An MTP layer's directory links to the model's files.

  to           directory of the checkpoint to write
  form         eagle3 (default), or mtp
  model        demo (default), or the directory of a checkpoint that transformers loads
  texts        sources: Python sources of what is installed here, not of this repository, which those not trained on are
               of (default); own: what the model says to questions, and as code
  answers      texts that it says (default 1024)
  minutes      of training (default 4)
  steps        of training at most (default: as many as there is time for)
  drafts       drafts ahead (default 5)
  batch        texts of a step (default 16)
  length       tokens of a text, and the window of an EAGLE-3 layer (default 1024)
  megabytes    of sources (default 40)
  rate         highest learning rate (default 1e-3)
  output       a file to append a JSON line to
"""

from __future__ import annotations

import json
import math
import random
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.quality import generated_texts
from benchmarks.quality.draft_layers import FORMS, DraftedLayer
from benchmarks.quality.haystacks import source_windows
from launch.inputs.arguments import handle_help, parse
from launch.inputs.compose import ROOT
from launch.job.report import provenance

KEYS: dict[str, Any] = {
    "to": Path, "form": Literal[FORMS], "model": str, "texts": Literal["sources", "own"], "answers": int,
    "minutes": float, "steps": int, "drafts": int, "batch": int, "length": int, "megabytes": float, "rate": float,
    "output": Path,
}  # fmt: skip
DISCOUNT = 0.8  # weight of a position's loss relative to the one before
WARM = 0.05  # share of the time with rate warm-up
UNSEEN = 16  # held-out texts


@dataclass(frozen=True)
class Target:
    """The frozen model that a layer drafts for."""

    model: Any

    @classmethod
    def load(cls, path: Path, device: torch.device) -> Target:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
        return cls(model.requires_grad_(False))

    @torch.no_grad()
    def read(self, ids: Tensor, aux_hidden_state_layers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns embeddings [B, T, H], states for the layer [B, T, layers x H], and logits [B, T, V] fp32."""
        found = self.model(ids, output_hidden_states=True, use_cache=False)
        states = torch.cat([found.hidden_states[i] for i in aux_hidden_state_layers], -1)
        return found.hidden_states[0].float(), states.float(), found.logits.float()


def losses(target: Target, layer: DraftedLayer, ids: Tensor, num_drafts: int) -> tuple[Tensor, list[Tensor]]:
    """Returns the loss against the model's distributions, and whether each position's draft is right [B, U] bool."""
    embedded, states, logits = target.read(ids, layer.aux_hidden_state_layers)
    total, correct = torch.zeros((), device=ids.device), []
    for draft_index, normed in enumerate(layer.drafts(embedded, states, num_drafts)):
        wanted = logits[:, draft_index + 1 : draft_index + 1 + normed.shape[1]]
        found = target.model.lm_head(normed.to(target.model.dtype)).float()
        total = total - DISCOUNT**draft_index * (wanted.softmax(-1) * found.log_softmax(-1)).sum(-1).mean()
        correct.append(found.argmax(-1) == wanted.argmax(-1))
    return total, correct


@torch.no_grad()
def agreement(target: Target, layer: DraftedLayer, ids: Tensor, num_drafts: int) -> list[float]:
    """Returns the conditional acceptance rate at each position, over texts [n, T]."""
    counts = torch.zeros(2, num_drafts)
    for sequence in ids.split(1):
        all_accepted = torch.ones((), dtype=torch.bool, device=ids.device)
        for draft_index, correct in enumerate(losses(target, layer, sequence, num_drafts)[1]):
            all_accepted = all_accepted.expand_as(correct)
            counts[:, draft_index] += torch.stack((all_accepted.sum(), (all_accepted & correct).sum())).cpu()
            all_accepted = all_accepted & correct
    return [float(accepted / max(tried, 1)) for tried, accepted in counts.T]


def corpus(tokenizer: Any, megabytes: float) -> Tensor:
    """Returns Python sources of the installed packages as tokens [n] int64, in a fixed random order."""
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


def schedule(done: float) -> float:
    """Returns the learning rate at a share of the time, over the highest: a linear warm-up, then a cosine."""
    return min(1.0, done / WARM + 1e-3) * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)


def train(values: dict[str, Any]) -> dict[str, Any]:
    """Trains and saves a layer; returns the time, and its `agreement` on held-out texts.

    Raises:
        ValueError: there are too few texts, or the model does not support this form.
    """
    from transformers import AutoTokenizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, form = values.get("model", "demo"), values.get("form", "eagle3")
    path = ROOT / "assets" / "demo-model" if model == "demo" else Path(model)
    num_drafts, length, batch = (
        values.get(name, default) for name, default in (("drafts", 5), ("length", 1024), ("batch", 16))
    )
    rate, seconds, max_steps = values.get("rate", 1e-3), 60 * values.get("minutes", 4.0), values.get("steps", 1 << 30)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(path)
    target = Target.load(path, device)
    layer = FORMS[form](target.model.config).to(device)
    ids = corpus(tokenizer, values.get("megabytes", 40.0))
    if values.get("texts") == "own":
        prompts = generated_texts.prompts(tokenizer, ids, values.get("answers", 1024))
        ids = generated_texts.generate(target.model, prompts, tokenizer.eos_token_id)
        unseen, ids = ids[: UNSEEN * length].view(-1, length), ids[UNSEEN * length :]
    else:
        unseen = source_windows(tokenizer, UNSEEN, length)
    ids, unseen = ids.to(device), unseen.to(device)
    if len(ids) <= length:
        raise ValueError(
            f"only {len(ids)} tokens to train on, but length={length} needs more: lower it, or give more texts"
        )
    optimizer = torch.optim.AdamW(layer.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    began, step = time.perf_counter(), 0
    while (done := max((time.perf_counter() - began) / seconds, step / max_steps)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * schedule(done)
        begins = torch.randint(len(ids) - length, (batch, 1), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, _ = losses(target, layer, ids[begins + torch.arange(length, device=device)], num_drafts)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step & (step - 1) == 0:
            progress = f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - began:.0f} s"
            print(progress, file=sys.stderr, flush=True)
    values["to"].mkdir(parents=True, exist_ok=True)
    layer.save(path, length, values["to"])
    facts = {"minutes": round((time.perf_counter() - began) / 60, 2), "steps": step, "loss": round(loss.item(), 3)}
    return facts | {
        "acceptance_by_position": [round(share, 3) for share in agreement(target, layer, unseen, num_drafts)]
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains a layer; exits with a one-line error for a wrong value."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if handle_help(arguments or ["--help"], __doc__):
        return
    try:
        values = parse(arguments, KEYS, ("to",), words=("to",))
        found = train(values)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    if "output" in values:
        about = {"name": "trained-drafters", **provenance(torch.device("cuda" if torch.cuda.is_available() else "cpu"))}
        about |= {"model": Path(values.get("model", "demo")).name, "drafter": values.get("form", "eagle3")}
        command = " ".join(["python -m benchmarks.quality.train_drafter", *arguments])
        about |= {"command": command, "texts": values.get("texts", "sources")}
        with values["output"].open("a", encoding="utf-8") as file:
            file.write(json.dumps(about | found) + "\n")
    print(
        "acceptance rate of each draft after accepted ones: "
        + " ".join(f"{share:.2f}" for share in found["acceptance_by_position"])
    )


if __name__ == "__main__":
    main()
