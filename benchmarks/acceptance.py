"""How many drafts hold that the model makes itself with few keys: each policy on the same prompts.

  helix acceptance model=demo
  helix acceptance model=DIR length=16384,32768 gamma=7,11 output=acceptance.jsonl
  helix acceptance model=demo policies=any sparsity=0.01,0.02,0.05,0.1,0.2
  helix acceptance model=demo policies=any temperature=0.6 noise=shared,own kvp=1,4

Every prompt is prefilled once, and each way to draft goes on from there. Values with commas are combined, each with
each; an option that a policy does not read changes nothing of it. Ranges are of 95%: Student's over prompts for tokens
an iteration, Wilson's for the share of drafts that hold. On a CPU in float32, tokens must be those without drafts.

  task         code      this repository's sources, which the demo model has not seen, continued
               copy      a file at any depth, continued with a name replaced
               facts     numbers of eight lines, wanted one after the other; questions come as drafts that hold
               several with commas (default: all three)
  model        demo, or the directory of a checkpoint
  length       tokens of a prompt and what follows it; several with commas (default 8192)
  prompts      of a task, at least 2 (default 30)
  new_tokens   of each prompt (default 128)
  policies     any, c2q, window, quest, full; ngram, suffix; mtp or eagle3, beside lookups alone. Several with commas
               (default: all without a layer)
  layer        directory of the layer of policies=eagle3; mtp's is in the model's
  gamma        drafts of an iteration (default 7)
  sparsity, noise
               as of speculation=sparse
  recent       of the keys, the share that the latest have whatever their score (default 0.5)
  reach        a key scores as the best of itself and so many before it (default 8)
  temperature  0, or with top-p 0.95 and top-k 20 (default 0)
  kvp          ranks over which the cache is split, threads of this process (default 1)
  dtype        float32, bfloat16 or float16 (default: the checkpoint's on a GPU, float32 on a CPU)
  output       a file to append a JSON line for each row to, as soon as it is there
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from benchmarks.quality.acceptance_rows import DEFAULTS, LOOKUPS, draft_configs, rows
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
    "gamma": list[int], "sparsity": list[float], "recent": list[float], "reach": list[int],
    "noise": list[str], "temperature": list[float], "kvp": list[int],
    "dtype": Literal["float32", "bfloat16", "float16"], "layer": Path, "output": Path,
}  # fmt: skip
OPTIONS: dict[str, list[Any]] = {
    **{name: [getattr(DEFAULTS, name)] for name in ("sparsity", "recent", "reach")},
    "noise": ["shared"], "gamma": [7], "temperature": [0.0],
}  # fmt: skip
WORDS: dict[str, list[Any]] = {
    "task": [*TASKS], "policies": [*DRAFTERS], "noise": ["shared", "own"], "reach": [0, 1, 2, 4, 8, 16],
}  # fmt: skip
RANGES: dict[str, Callable[[float], bool]] = {
    "sparsity": lambda x: 0 < x <= 1, "recent": lambda x: 0 <= x <= 1, "temperature": lambda x: 0 <= x < 100,
    "gamma": lambda x: 1 <= x < MAX_QUERIES,
}  # fmt: skip


def _check(values: dict[str, Any], options: dict[str, list[Any]]) -> None:
    """Raises ValueError where a value is none that its key can have."""
    for name, given in ({key: values[key] for key in ("task", "policies") if key in values} | options).items():
        for value in given:
            if name in WORDS and value not in WORDS[name]:
                raise ValueError(f"{name}: {unknown_message(str(value), [str(word) for word in WORDS[name]])}")
            if name in RANGES and not RANGES[name](value):
                raise ValueError(f"{name}={value:g} is out of range (see --help and docs/reference/config.md)")


def _layer(policies: list[str], path: Path | None) -> SpeculationConfig | None:
    """Returns the settings that name the layer of the policy that has one; None where none does.

    Raises:
        ValueError: another policy cannot be beside it, or its layer is not named.
    """
    layered = [policy for policy in policies if policy in LAYER_DRAFTERS]
    if not layered:
        return None
    if len(layered) > 1 or {*policies} - {*layered, *LOOKUPS}:
        raise ValueError(f"policies: beside {layered[0]} only {' and '.join(LOOKUPS)} can be: leave the others out")
    if layered == ["eagle3"] and path is None:
        raise ValueError("policies=eagle3 needs layer=DIR, the directory of its layer")
    return SpeculationConfig(
        drafter="eagle3" if layered == ["eagle3"] else "mtp", path=None if path is None else str(path)
    )


def measure(values: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Rows of each length and number of ranks, as soon as they are measured.

    Raises:
        ValueError: the model, the prompts or the policies cannot be as they are given.
        RuntimeError: drafts have changed tokens.
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
