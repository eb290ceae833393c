"""Measures how many self-drafted tokens are accepted: every draft policy on the same prompts.

  helix acceptance model=demo
  helix acceptance model=DIR length=16384,32768 gamma=7,11 output=acceptance.jsonl
  helix acceptance model=demo policies=any sparsity=0.01,0.02,0.05,0.1,0.2
  helix acceptance model=demo policies=any temperature=0.6 noise=shared,own kvp=1,4

Each prompt is prefilled once, and each draft policy continues from there. Comma-separated values form a full
product; a policy ignores options it does not read. Intervals are 95%: Student's t over prompts for tokens per
iteration, Wilson's for the acceptance rate. On a CPU in float32, outputs must equal those without drafts.

  task         code      continue this repository's sources, which the demo model was not trained on
               copy      repeat a file from anywhere in the prompt with one name replaced
               facts     recall the numbers of eight lines in turn; the questions are given as accepted drafts
               comma-separated (default: all three)
  model        demo, or the directory of a checkpoint
  length       tokens of a prompt and its output; comma-separated (default 8192)
  prompts      per task, at least 2 (default 30)
  new_tokens   per prompt (default 128)
  policies     any, c2q, window, quest, full; ngram, suffix; mtp or eagle3, each only with lookups. Comma-separated
               (default: all that need no draft layer)
  layer        directory of the draft layer of policies=eagle3; mtp reads it from the model
  gamma        draft tokens per iteration (default 7)
  sparsity, recent, reach, heads, noise
               as in speculation=sparse
  temperature  sampling temperature; above 0 with top-p 0.95 and top-k 20 (default 0)
  kvp          KV-parallel ranks, as threads of this process (default 1)
  dtype        float32, bfloat16 or float16 (default: the checkpoint's on a GPU, float32 on a CPU)
  output       append one JSON line per row to this file as it is measured
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from benchmarks.quality.acceptance_rows import DEFAULTS, LOOKUPS, SCORED, draft_configs, rows
from benchmarks.quality.continuations import FACTS, TASKS
from benchmarks.quality.drafting import DRAFTERS, LAYER_DRAFTERS, PAGES, run
from benchmarks.quality.prefill import EvalSetup
from benchmarks.records.acceptance_tables import join_tasks
from benchmarks.records.columns import terminal
from benchmarks.records.declared import table_cells
from benchmarks.records.rows import append
from helix.config import MAX_QUERIES, SpeculationConfig
from helix.schema import unknown_message
from launch.inputs.arguments import handle_help, need_checkout, parse
from launch.job.report import provenance

KEYS: dict[str, Any] = {
    "task": list[str], "model": str, "length": list[int], "prompts": int, "new_tokens": int, "policies": list[str],
    "gamma": list[int], "sparsity": list[float], "recent": list[float], "reach": list[int], "heads": list[str],
    "noise": list[str], "temperature": list[float], "kvp": list[int],
    "dtype": Literal["float32", "bfloat16", "float16"], "layer": Path, "output": Path,
}  # fmt: skip
OPTIONS: dict[str, list[Any]] = {
    **{name: [getattr(DEFAULTS, name)] for name in SCORED},
    "noise": ["shared"], "gamma": [7], "temperature": [0.0],
}  # fmt: skip
WORDS: dict[str, list[Any]] = {
    "task": [*TASKS], "policies": [*DRAFTERS], "noise": ["shared", "own"], "reach": [0, 1, 2, 4, 8, 16],
    "heads": ["each", "all"],
}  # fmt: skip
RANGES: dict[str, Callable[[float], bool]] = {
    "sparsity": lambda x: 0 < x <= 1, "recent": lambda x: 0 <= x <= 1, "temperature": lambda x: 0 <= x < 100,
    "gamma": lambda x: 1 <= x < MAX_QUERIES,
}  # fmt: skip


def _check(values: dict[str, Any], options: dict[str, list[Any]]) -> None:
    for name, given in ({key: values[key] for key in ("task", "policies") if key in values} | options).items():
        for value in given:
            if name in WORDS and value not in WORDS[name]:
                raise ValueError(f"{name}: {unknown_message(str(value), [str(word) for word in WORDS[name]])}")
            if name in RANGES and not RANGES[name](value):
                raise ValueError(f"{name}={value:g} is out of range (see --help and docs/reference/config.md)")


def _layer(policies: list[str], path: Path | None) -> SpeculationConfig | None:
    """Returns the config of the draft layer that `policies` asks for; None if none does.

    Raises:
        ValueError: other policies cannot run with it, or `path` is missing.
    """
    layered = [policy for policy in policies if policy in LAYER_DRAFTERS]
    if not layered:
        return None
    if len(layered) > 1 or {*policies} - {*layered, *LOOKUPS}:
        raise ValueError(
            f"policies: {layered[0]} can only be combined with {' and '.join(LOOKUPS)}: leave the others out"
        )
    if layered == ["eagle3"] and path is None:
        raise ValueError("policies=eagle3 needs layer=DIR, the directory of the draft layer")
    return SpeculationConfig(
        drafter="eagle3" if layered == ["eagle3"] else "mtp", path=None if path is None else str(path)
    )


def measure(values: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of each length and kvp as they are measured.

    Raises:
        ValueError: the model, prompts or policies do not fit together.
        RuntimeError: drafts changed the output.
    """
    options = {name: values.get(name, default) for name, default in OPTIONS.items()}
    _check(values, options)
    policies = values.get("policies", [name for name in DRAFTERS if name not in LAYER_DRAFTERS])
    layer = _layer(policies, values.get("layer"))
    configs = draft_configs(policies, options)
    tasks, lengths, kvps = values.get("task", [*TASKS]), values.get("length", [8192]), values.get("kvp", [1])
    prompts, new_tokens = values.get("prompts", 30), values.get("new_tokens", 128)
    if prompts < 2:
        raise ValueError(f"prompts={prompts} must be at least 2")
    settings = {kvp: EvalSetup.create(values["model"], kvp, values.get("dtype"), layer) for kvp in kvps}
    setting = settings[kvps[0]]
    spec, tokenizer = setting.spec(), setting.tokenizer()
    for length in lengths:
        if not 2 * FACTS <= new_tokens <= length // 2 or length > spec.max_positions:
            raise ValueError(
                f"length={length} must be within the model's {spec.context}, and new_tokens={new_tokens} from "
                f"{2 * FACTS} to half of it"
            )
    for config in configs:
        if config.policy == "quest":
            for kvp in kvps:
                config.budget.blocks(PAGES["quest"], kvp, max(lengths), config.gamma)
    facts = provenance(torch.device(setting.device))
    for length in lengths:
        max_tokens = length - new_tokens - MAX_QUERIES
        continuations = [c for task in tasks for c in TASKS[task](tokenizer, max_tokens, prompts)]
        for kvp, kvp_setup in settings.items():
            began = time.perf_counter()
            exact = kvp_setup.device == "cpu" and kvp_setup.dtype == torch.float32
            found = run(kvp_setup, continuations, new_tokens, configs)
            about = {**facts, "model": kvp_setup.path.name, "dtype": str(kvp_setup.dtype), "length": length, "kvp": kvp}
            yield [
                about | {"new_tokens": new_tokens} | row for row in rows(found, [c.task for c in continuations], exact)
            ]
            elapsed_s = time.perf_counter() - began
            print(f"{length} tokens, kvp={kvp}: {len(configs)} ways in {elapsed_s:.1f} s", file=sys.stderr, flush=True)


def main() -> None:
    """Measures, prints the tables and appends the rows."""
    if handle_help(sys.argv[1:], __doc__):
        return
    need_checkout("helix acceptance")
    try:
        values = parse(sys.argv[1:], KEYS, ("model",), words=("model",))
        for found in measure(values):
            table = terminal(table_cells("acceptance-sampled", join_tasks(found)), "tokens an iteration")
            Console(width=200).print(table)
            if "output" in values:
                append(values["output"], found)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
