"""Compares block-sparse attention and FP8 KV caches with dense attention on the same prompts.

  helix fidelity model=demo
  helix fidelity task=needles model=DIR length=8192,32768 haystack=loop,code count=200 output=FILE.jsonl
  helix fidelity task=text model=DIR length=32768 steps=256 kvp=4 choice=global output=fidelity.jsonl

Each prompt is prefilled densely once, and each policy continues from there; with dense-fp8 and dense-k16v8 the prefill
also reads FP8 keys and values, as with kv.dtype; with dense-w8a8 it rounds activations to FP8, as with
model.activations, which needs weights=fp8 or, of a checkpoint in FP8, weights=auto. Texts are this repository's
sources, which the demo model was not trained on. Intervals are Wilson's, 95%. A sparse policy that read all blocks is
an error: blocks are counted on the device.

  task       text       teacher forcing. `agrees`: the top-1 token equals dense attention's; `sure`: the same over
                        steps in which dense attention's top-1 leads by more than 1 logit. KL is from the
                        dense distribution to the policy's, in nats; TV is total variation
             needles    a numbered line hidden in each prompt, at depths spread over the text; its number is the answer.
                        p: McNemar's exact two-sided test over the prompts that only dense attention or only the policy
                        gets right
             facts      four such lines; recall their numbers in turn
             hops       three such lines, each of which refers to the number of the one before it
             free       greedy output of each policy, up to the first token that differs from dense attention
             generated  as text, over generated text; -frozen never selects pages that fill up after the prefill
             hits       share of selected blocks that a resident-block cache would hit, by its size relative to the
                        text's blocks, and by layer; sizes below one selection are left out. With kv.offload_prefetch:
                        the same with prefetch, how many more blocks are fetched, and the recall of the prefetch among
                        the selected blocks (the first layer has no prefetch)
  model      demo, or the directory of a checkpoint
  length     tokens of a text (prefill and steps), or of a prompt and its answer; comma-separated (default 8192)
  steps      decode steps at the end of each text (default 64; free 128; generated 1024)
  count      texts without common lines (default 5), or prompts (default 200; facts and hops 50)
  haystack   for needles, facts and hops: code, loop (one repeated paragraph), or code,loop (default code)
  kvp        KV-parallel ranks, as threads of this process (default 1)
  choice     local: each rank selects its share of the blocks; global: one selection over all (default local)
  policies   comma-separated names from the table's column (default: all)
  dtype      float32, bfloat16 or float16 (default: the checkpoint's on a GPU, float32 on a CPU)
  weights    as model.weights (default bf16: unpacked)
  output     append one JSON line per row to this file as it is measured
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.quality.fidelity_tasks import TASKS, FidelityTask, policies
from benchmarks.quality.haystacks import KINDS
from benchmarks.quality.prefill import EvalSetup
from benchmarks.quality.teacher_forcing import Policy
from benchmarks.records.columns import terminal
from benchmarks.records.declared import table_cells
from benchmarks.records.rows import append
from helix.schema import unknown_message
from launch.inputs.arguments import handle_help, need_checkout, parse
from launch.job.report import provenance

KEYS: dict[str, Any] = {
    "task": Literal[tuple(TASKS)], "model": str, "length": list[int], "steps": int, "count": int, "haystack": list[str],
    "kvp": int, "choice": Literal["local", "global"], "policies": list[str],
    "dtype": Literal["float32", "bfloat16", "float16"], "weights": Literal["auto", "bf16", "fp8"], "output": Path,
}  # fmt: skip
STEPS = {"free": 128, "generated": 1024}
COUNTS = {"needles": 200, "facts": 50, "hops": 50}
HAYSTACKS = tuple(COUNTS)
NOT_READ = dict.fromkeys(HAYSTACKS, ("steps",))


def select_policies(values: dict[str, Any], length: int) -> tuple[Policy, ...]:
    """Returns dense attention and the policies of the command line; by default all that the weights have.

    Raises:
        ValueError: a name is unknown, or a policy reads the whole text.
    """
    unpacked = values.get("weights", "bf16") == "bf16"
    by_name = {policy.name: policy for policy in policies()}
    for name in values.get("policies", []) if unpacked else []:
        if name in by_name and by_name[name].activations == "fp8":
            raise ValueError(f"{name} needs e4m3 weights: set weights=fp8")
    for name in values.get("policies", []):
        if name not in by_name:
            raise ValueError(f"policies: {unknown_message(name, by_name)}")
    default = [name for name, policy in by_name.items() if policy.activations == "auto" or not unpacked]
    wanted = ["dense", *(name for name in values.get("policies", default) if name != "dense")]
    for name in wanted:
        if (by_name[name].keys or 0) >= length:
            raise ValueError(f"{name} reads the whole text at length={length}: set length higher, or policies=...")
    return tuple(replace(by_name[name], choice=values.get("choice", "local")) for name in wanted)


def measure(values: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of each length and haystack as they are measured.

    Raises:
        ValueError: the model, texts or policies do not fit together.
        RuntimeError: a sparse policy read all blocks.
    """
    task, lengths = values.get("task", "text"), values.get("length", [8192])
    setting = EvalSetup.create(values["model"], values.get("kvp", 1), values.get("dtype"))
    setting = replace(setting, weights=values.get("weights", "bf16"))
    spec, kvp, dtype = setting.spec(), setting.layout.kvp, str(setting.dtype)
    steps, count = values.get("steps", STEPS.get(task, 64)), values.get("count", COUNTS.get(task, 5))
    for key in NOT_READ.get(task, ("haystack",)):
        if key in values:
            raise ValueError(f"task={task} does not read {key}: leave it out")
    for length in lengths:
        if not 3 <= steps + 2 <= length <= spec.max_positions:
            raise ValueError(f"length={length} must be more than steps={steps} and within the model's {spec.context}")
    if count < 1:
        raise ValueError(f"count={count} must be at least 1")
    haystacks = values.get("haystack", ["code"])
    if unknown_kinds := {*haystacks} - {*KINDS}:
        raise ValueError(f"haystack: {unknown_message(min(unknown_kinds), KINDS)}")
    selected = {length: select_policies(values, length) for length in lengths}
    tokenizer = setting.tokenizer()
    facts = provenance(torch.device(setting.device))
    for length in lengths:
        for haystack in haystacks if task in HAYSTACKS else haystacks[:1]:
            began = time.perf_counter()
            task_args = FidelityTask(setting, tokenizer, selected[length], length, steps, count, haystack)
            shared = {"kind": task, **facts, "model": setting.path.name, "length": length, "kvp": kvp}
            shared["weights"] = setting.weights
            yield [shared | {"dtype": dtype} | row for row in TASKS[task](task_args)]
            what = f"{task}, {length} tokens" + f", {haystack}" * (task in HAYSTACKS)
            print(f"{what}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)


def tables(rows: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """Yields one table per kind of row."""
    for kind, same in groupby(sorted(rows, key=lambda row: row["kind"]), key=lambda row: row["kind"]):
        yield terminal(table_cells(f"fidelity-{kind}", list(same)), kind)


def main() -> None:
    """Measures, prints the tables and appends the rows."""
    if handle_help(sys.argv[1:], __doc__):
        return
    need_checkout("helix fidelity")
    try:
        values = parse(sys.argv[1:], KEYS, ("model",), words=("model",))
        for rows in measure(values):
            for table in tables(rows):
                Console(width=180).print(table)
            if "output" in values:
                append(values["output"], rows)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
