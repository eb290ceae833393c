"""What block-sparse attention changes: the same text under several policies, step by step against dense attention.

  python -m launch.fidelity model=demo
  python -m launch.fidelity model=DIR length=32768 steps=256 kvp=4 choice=global output=fidelity.jsonl

Texts are this repository's sources, of which the demo model has seen none. Each is prefilled densely, and each policy
then goes on from there over the same true tokens, so that steps are judged one by one. `agrees`: the likeliest token
is that of dense attention; `sure`: the same, of steps in which dense attention prefers its token by a logit of more
than 1. Ranges are Wilson's, of 95%. KL is of the dense distribution to the policy's, in nats; TV is half the sum of
differences.

  model      demo, or the directory of a checkpoint
  length     tokens of a text, prefill and steps (default 8192)
  steps      of each text, the last of its tokens (default 64)
  windows    texts, none of whose lines is in another (default 5)
  kvp        ranks over which the cache is split, threads of this process (default 1)
  choice     local: each rank takes its share of the blocks; global: one choice over all of them (default local)
  policies   some of the names in the table's first column, separated by commas (default: all)
  dtype      float32, bfloat16 or float16 (default: the checkpoint's on a GPU, float32 on a CPU)
  output     a file to append a JSON line for each policy to
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from comm.loopback import LoopbackWorld, run_ranks
from helix.kv_cache import BlockBudget
from helix.layout import HelixLayout
from helix.loading import load_tokenizer, read_config
from helix.models import spec_from_config
from launch.inputs.arguments import helped, one_of, parse, several, unknown
from launch.inputs.compose import ROOT
from launch.inputs.needles import source_lines
from launch.job.report import provenance
from launch.measure.forced import Policy, forced_logits, load

KEYS: dict[str, Callable[[str], Any]] = {
    "model": str, "length": int, "steps": int, "windows": int, "kvp": int, "choice": one_of("local", "global"),
    "policies": several, "dtype": one_of("float32", "bfloat16", "float16"), "output": Path,
}  # fmt: skip
SOURCES = [ROOT / part for part in ("helix", "kernels", "launch", "tests", "comm")]
MARGIN = 1.0  # of dense attention's logits, from which on a step counts as sure
Z = 1.96
DEADLINE_S = 6 * 3600.0


def policies() -> list[Policy]:
    """Dense attention and what is compared with it: budgets of blocks, of finer blocks, of a window, by each score."""

    def blocks(topk: int, local: int = 4) -> BlockBudget:
        return BlockBudget(1, local, topk, 0)

    return [
        Policy("dense"),
        Policy("window-640", blocks(0)),
        Policy("window-4736", blocks(0, 36)),
        *(Policy(f"bounds-{k}", blocks(k)) for k in (4, 8, 16, 32)),
        *(Policy(f"{score}-{k}", blocks(k), score=score) for score in ("mean", "mean_std") for k in (8, 32)),
        Policy("quest-64", blocks(64, 32), page=16),
    ]


def wilson(hits: int, count: int) -> tuple[float, float]:
    """The range of a share that `hits` of `count` leave open, at 95%."""
    if count == 0:
        return 0.0, 1.0
    share, z2 = hits / count, Z * Z / count
    half = Z * math.sqrt(share * (1 - share) / count + z2 / count / 4) / (1 + z2)
    middle = (share + z2 / 2) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)


def compare(logits: Tensor, dense: Tensor, targets: Tensor) -> dict[str, Any]:
    """A policy's logits [n, steps, V] beside dense attention's, and the true next tokens [n, steps]."""
    ours, theirs = (x.double().log_softmax(-1) for x in (logits, dense))
    best = dense.topk(2, dim=-1)
    agrees = logits.argmax(-1) == best.indices[..., 0]
    margins = best.values[..., 0] - best.values[..., 1]
    sure = margins > MARGIN
    hits, sure_hits = int(agrees.sum()), int((agrees & sure).sum())
    nll = -ours.gather(-1, targets[..., None])[..., 0]
    return {
        "steps": agrees.numel(),
        "agrees": hits / agrees.numel(),
        "agrees_range": wilson(hits, agrees.numel()),
        "agrees_by_window": agrees.double().mean(1).tolist(),
        "sure_steps": int(sure.sum()),
        "sure": sure_hits / max(1, int(sure.sum())),
        "sure_range": wilson(sure_hits, int(sure.sum())),
        "margins_of_misses": [round(x, 3) for x in sorted(margins[~agrees].tolist(), reverse=True)],
        "perplexity": float(nll.mean().exp()),
        "kl": float((theirs.exp() * (theirs - ours)).sum(-1).mean()),
        "tv": float((theirs.exp() - ours.exp()).abs().sum(-1).mean() / 2),
    }


def texts(tokenizer: Any, windows: int, length: int) -> Tensor:
    """Disjoint texts [windows, length] of this repository's sources."""
    lines = source_lines([folder for part in SOURCES for folder in (part, *part.rglob("*/"))], seed=0)
    ids = tokenizer("\n".join(lines), verbose=False)["input_ids"]  # longer than any context, and cut
    if len(ids) < windows * length:
        raise ValueError(
            f"{windows} texts of {length} tokens are more than the {len(ids)} tokens of this repository's sources: set "
            "windows or length lower"
        )
    return torch.tensor(ids[: windows * length]).view(windows, length)


def measure(values: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each policy.

    Raises:
        ValueError: the model, the texts or the policies cannot be as they are given.
    """
    name = values["model"]
    path = ROOT / "assets/demo-model" if name == "demo" else Path(name)
    length, steps, windows = (
        values.get(key, usual) for key, usual in (("length", 8192), ("steps", 64), ("windows", 5))
    )
    known = {policy.name: policy for policy in policies()}
    wanted = ["dense", *(p for p in values.get("policies", [*known]) if p != "dense")]
    for policy in wanted:
        if policy not in known:
            raise ValueError(f"policies: {unknown(policy, known)}")
    chosen = [replace(known[policy], choice=values.get("choice", "local")) for policy in wanted]
    spec = spec_from_config(read_config(path))
    if not 2 <= steps + 2 <= length <= spec.max_positions:
        raise ValueError(f"length={length} must be more than steps={steps} and within the model's {spec.context}")
    tokenizer = load_tokenizer(path)
    if tokenizer is None:
        raise ValueError(f"model={name} has no tokenizer.json")
    ids = texts(tokenizer, windows, length)
    layout = HelixLayout.create("helix", values.get("kvp", 1))
    gpu = torch.cuda.is_available()
    dtype = getattr(torch, values.get("dtype", spec.dtype if gpu else "float32"))

    def rank(world: LoopbackWorld, index: int) -> list[tuple[Policy, Tensor, float | None]]:
        comm = world.communicator(index, layout.kvp_group(index))
        model = load(path, layout, comm, dtype)
        if index:
            return [*forced_logits(model, layout, comm, ids, steps, chosen)]
        with Progress() as progress:
            task = progress.add_task("steps", total=steps * len(chosen))
            return [
                *forced_logits(
                    model, layout, comm, ids, steps, chosen, lambda done: progress.update(task, completed=done)
                )
            ]

    found = run_ranks(layout.world_size, rank, DEADLINE_S, "cuda" if gpu else "cpu")[0]
    by_name = {policy.name: (policy, logits, read) for policy, logits, read in found}
    dense = by_name["dense"][1]
    facts = provenance(torch.device("cuda" if gpu else "cpu"))
    shared = {"model": path.name, "length": length, "windows": windows, "kvp": layout.kvp, "dtype": str(dtype)}
    rows = []
    for name in wanted:
        policy, logits, read = by_name[name]
        budget = None if policy.budget is None else asdict(policy.budget)
        kind = {"policy": name, "keys": policy.keys, "page": policy.page, "score": policy.score, "budget": budget}
        row = {"name": "fidelity", **facts, **shared, **kind, "choice": policy.choice, "blocks_read": read}
        rows.append(row | compare(logits, dense, ids[:, -steps:]))
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Table:
    result = Table(
        "policy", "keys", "blocks read", "agrees", "95%", "sure", "95%", "perplexity", "KL", "TV",
        title=f"{rows[0]['windows']} texts of {rows[0]['length']:,} tokens, kvp={rows[0]['kvp']}",
    )  # fmt: skip
    for r in rows:
        result.add_row(
            r["policy"], "all" if r["keys"] is None else f"{r['keys']:,}",
            "-" if r["blocks_read"] is None else f"{r['blocks_read']:.1f}",
            f"{r['agrees']:.3f}", "{:.3f} to {:.3f}".format(*r["agrees_range"]),
            f"{r['sure']:.3f}", "{:.3f} to {:.3f}".format(*r["sure_range"]),
            f"{r['perplexity']:.3f}", f"{r['kl']:.4f}", f"{r['tv']:.4f}",
        )  # fmt: skip
    return result


def main() -> None:
    """Measures, prints the table and appends the rows."""
    if helped(sys.argv[1:], __doc__):
        return
    try:
        values = parse(sys.argv[1:], KEYS, ("model",))
        rows = measure(values)
        Console(width=140).print(table(rows))
        if "output" in values:
            with values["output"].open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
