"""Rows and cells of how many drafts hold."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.records.rows import Row

CONFIG = ("policy", "gamma", "sparsity", "recent", "reach", "block", "heads", "temperature", "noise")
# What names a row among all that were recorded.
KEY = ("kind", "model", "length", "prompts", "kvp", "task", *CONFIG)
TASKS = {"code": "code", "copy": "copy", "facts": "facts"}
USUAL = 0.07  # of the keys, where nothing else is said


def join_tasks(rows: Sequence[Row]) -> list[Row]:
    """One row for each way and length, with those of its tasks in `tasks`, and the mean of their tokens."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in KEY if name != "task")
        found.setdefault(key, {**row, "tasks": {}})["tasks"][row["task"]] = row
    for row in found.values():
        each = [task_row["tokens"] for task_row in row["tasks"].values()]
        row["mean"] = sum(each) / len(each)
    return list(found.values())


def task_tokens(r: Row, task: str) -> str:
    """Tokens an iteration on a task, with their range."""
    found = r["tasks"].get(task)
    return "-" if found is None else "{:.2f} ({:.2f} to {:.2f})".format(found["tokens"], *found["tokens_range"])


def task_acceptance(r: Row, task: str) -> str:
    """Shares of drafts that hold where all before them did, by place."""
    found = r["tasks"].get(task)
    shares = [] if found is None else [*zip(found["kept_share"], found["kept_range"], strict=True)]
    return " ".join("-" if x is None else f"{x:.2f}±{(high - low) / 2:.2f}" for x, (low, high) in shares) or "-"


def as_plain(r: Row) -> str:
    found = [task_row for task_row in r["tasks"].values() if task_row["as_plain"] is not None]
    return f"{sum(x['as_plain'] for x in found)} of {sum(x['prompts'] for x in found)}" if found else "-"


def by_ranks(rows: Sequence[Row]) -> list[Row]:
    """Rows of kind `choices`, each for every number of ranks that choose for themselves."""
    return [{**r, **found, "of": ranks} for r in rows for ranks, found in r["ranks"].items()]


def is_usual(r: Row) -> bool:
    """Greedy decoding on one rank with the usual share of keys."""
    return r["temperature"] == 0 and r["kvp"] == 1 and r["sparsity"] in (None, USUAL)


def widest(rows: Sequence[Row]) -> list[Row]:
    """Rows of the most prompts that a length was measured with."""
    max_prompts: dict[int, int] = {}
    for r in rows:
        max_prompts[r["length"]] = max(max_prompts.get(r["length"], 0), r["prompts"])
    return [r for r in rows if r["prompts"] == max_prompts[r["length"]]]


def usual(rows: Sequence[Row]) -> list[Row]:
    return [r for r in rows if is_usual(r)]


def varied(rows: Sequence[Row]) -> list[Row]:
    """Keys chosen in blocks, or alike for all heads of a rank."""
    return [r for r in rows if r["block"] not in (None, 1) or r["heads"] == "shared"]


def plain(rows: Sequence[Row]) -> list[Row]:
    apart = varied(rows)
    return [r for r in rows if r not in apart]


def multi_rank(rows: Sequence[Row]) -> list[Row]:
    """Greedy ways that several ranks were measured in, each of which chooses among its own keys; and one rank's."""
    others = [name for name in KEY if name != "kvp"]
    greedy = [r for r in rows if r["temperature"] == 0]
    several = {tuple(r[name] for name in others) for r in greedy if r["kvp"] > 1}
    return [r for r in greedy if tuple(r[name] for name in others) in several]
