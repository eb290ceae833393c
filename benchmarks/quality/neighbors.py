"""Measures how far tokens that follow each other read the same keys: Figure 7 of Vegas (arXiv:2602.07223).

  python -m benchmarks.quality.neighbors
  python -m benchmarks.quality.neighbors length=8192 prompts=4 output=neighbors.jsonl

The model continues each prompt greedily, by transformers in float32. For each of these tokens and each layer, the keys
of the prompt with the largest logits, summed over the query heads, are selected; two tokens' overlap is the share of
keys that both select. It is averaged over layers, prompts and pairs of tokens equally far apart.

  task         code, copy or facts, as in `helix acceptance`; comma-separated (default: all)
  model        demo, or the directory of a checkpoint
  length       tokens of a prompt (default 32000)
  prompts      per task (default 30)
  tokens       that follow, a verification's queries (default 8)
  keys         that a token selects (default 1024)
  output       append a JSON line per task to this file
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from benchmarks.quality.continuations import TASKS
from benchmarks.quality.prefill import EvalSetup
from launch.inputs.arguments import handle_help, parse
from launch.job.report import provenance

KEYS: dict[str, Any] = {
    "task": list[str], "model": str, "length": int, "prompts": int, "tokens": int, "keys": int, "output": Path,
}  # fmt: skip
CHUNK = 4096  # prompt tokens of a forward pass


def overlaps(logits: Tensor, keys: int) -> list[float]:
    """Returns the mean overlap of the best `keys` of two tokens 1, 2, .. apart, from their logits [tokens, S]."""
    tokens, length = logits.shape
    selected = torch.zeros(tokens, length, dtype=torch.bool).scatter_(1, logits.topk(keys).indices, True)
    shared = (selected.float() @ selected.float().T) / keys
    return [float(shared.diagonal(apart).mean()) for apart in range(1, tokens)]


@torch.inference_mode()
def read(model: Any, prompt: Tensor, tokens: int) -> Tensor:
    """Continues a prompt [n] greedily; returns the tokens' logits [layers, tokens, n] over its keys, summed over heads.

    A head's logits are those up to a constant of its token, which changes no selection.
    """
    from transformers import DynamicCache

    cache, found = DynamicCache(), []
    model.set_attn_implementation("sdpa")
    for chunk in prompt[:-1].split(CHUNK):
        model.model(chunk[None], past_key_values=cache)
    model.set_attn_implementation("eager")  # the others return no weights
    token = prompt[-1:]
    for _ in range(1 + tokens):
        out = model(token[None], past_key_values=cache, output_attentions=True)
        found.append(
            torch.stack([weights[0, :, 0, : len(prompt)].clamp(min=1e-38).log().sum(0) for weights in out.attentions])
        )
        token = out.logits[0, -1:].argmax(-1)
    return torch.stack(found[1:], 1)  # the first is the prompt's last token


def measure(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a row per task.

    Raises:
        ValueError: no such task, or keys, tokens and length do not fit together.
    """
    from transformers import AutoModelForCausalLM

    tasks, length, prompts = values.get("task", [*TASKS]), values.get("length", 32_000), values.get("prompts", 30)
    tokens, keys = values.get("tokens", 8), values.get("keys", 1024)
    if unknown := {*tasks} - {*TASKS}:
        raise ValueError(f"task={', '.join(sorted(unknown))} must be of {', '.join(TASKS)}")
    setting = EvalSetup.create(values.get("model", "demo"), 1, "float32")
    if not (1 <= keys <= length <= setting.spec().max_positions - tokens and tokens >= 2 and prompts >= 1):
        raise ValueError(
            f"keys={keys}, length={length}, tokens={tokens}, prompts={prompts}: needs keys up to length, length up to "
            f"the model's {setting.spec().max_positions} less tokens, and two tokens"
        )
    model = AutoModelForCausalLM.from_pretrained(setting.path, dtype=torch.float32).to(setting.device)
    tokenizer, facts = setting.tokenizer(), provenance(torch.device(setting.device))
    for task in tasks:
        found = []
        console = Console(file=sys.stderr)
        for one in track(TASKS[task](tokenizer, length, prompts), task, console=console):
            layers = read(model, one.prompt.to(setting.device), tokens).cpu()
            found.append([overlaps(logits, keys) for logits in layers])
        overlap = torch.tensor(found).mean((0, 1)).tolist()
        row = {"model": setting.path.name, "task": task, "length": length, "prompts": prompts, "keys": keys}
        yield {"name": "neighbors", **facts, **row, "overlap": overlap}


def main() -> None:
    """Prints a line per task and appends it to the record."""
    if handle_help(sys.argv[1:], __doc__ or ""):
        return
    try:
        values = parse(sys.argv[1:], KEYS)
        for row in measure(values):
            print(f"{row['task']}: " + " ".join(f"{share:.2f}" for share in row["overlap"]), flush=True)
            if "output" in values:
                with values["output"].open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
