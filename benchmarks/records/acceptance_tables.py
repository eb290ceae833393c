"""Rows and cells of acceptance rates."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.records.rows import Row

CONFIG = ("policy", "gamma", "sparsity", "recent", "reach", "block", "heads", "temperature", "noise")
# Fields that identify a row in the record.
KEY = ("kind", "model", "length", "prompts", "kvp", "task", *CONFIG)
TASKS = {"code": "code", "copy": "copy", "facts": "facts"}
USUAL = 0.07  # default share of the keys


def join_tasks(rows: Sequence[Row]) -> list[Row]:
    """Returns one row per draft config and length, with its tasks' rows in `tasks`, and the mean of their tokens."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in KEY if name != "task")
        found.setdefault(key, {**row, "tasks": {}})["tasks"][row["task"]] = row
    for row in found.values():
        each = [task_row["tokens"] for task_row in row["tasks"].values()]
        row["mean"] = sum(each) / len(each)
    return list(found.values())


def task_tokens(r: Row, task: str) -> str:
    """Returns the tokens per iteration on a task, with their interval."""
    found = r["tasks"].get(task)
    return "-" if found is None else "{:.2f} ({:.2f} to {:.2f})".format(found["tokens"], *found["tokens_range"])


def task_acceptance(r: Row, task: str) -> str:
    """Returns the conditional acceptance rates by draft position."""
    found = r["tasks"].get(task)
    shares = [] if found is None else [*zip(found["accepted_share"], found["accepted_range"], strict=True)]
    return " ".join("-" if x is None else f"{x:.2f}±{(high - low) / 2:.2f}" for x, (low, high) in shares) or "-"


def as_plain(r: Row) -> str:
    """Returns how many outputs equal those of plain decoding, or a dash."""
    found = [task_row for task_row in r["tasks"].values() if task_row["as_plain"] is not None]
    return f"{sum(x['as_plain'] for x in found)} of {sum(x['prompts'] for x in found)}" if found else "-"


def by_ranks(rows: Sequence[Row]) -> list[Row]:
    """Expands rows of kind `choices` into one row per number of ranks that select separately."""
    return [{**r, **found, "of": ranks} for r in rows for ranks, found in r["ranks"].items()]


def is_usual(r: Row) -> bool:
    """Whether a row is of greedy decoding on one rank with the default share of keys."""
    return r["temperature"] == 0 and r["kvp"] == 1 and r["sparsity"] in (None, USUAL)


def widest(rows: Sequence[Row]) -> list[Row]:
    """Keeps, for each length, the rows with the most prompts."""
    max_prompts: dict[int, int] = {}
    for r in rows:
        max_prompts[r["length"]] = max(max_prompts.get(r["length"], 0), r["prompts"])
    return [r for r in rows if r["prompts"] == max_prompts[r["length"]]]


def usual(rows: Sequence[Row]) -> list[Row]:
    """Keeps the rows for which `is_usual` holds."""
    return [r for r in rows if is_usual(r)]


def varied(rows: Sequence[Row]) -> list[Row]:
    """Keeps rows whose keys are selected in blocks, or jointly for all heads of a rank."""
    return [r for r in rows if r["block"] not in (None, 1) or r["heads"] == "shared"]


def plain(rows: Sequence[Row]) -> list[Row]:
    """Keeps the other rows."""
    apart = varied(rows)
    return [r for r in rows if r not in apart]


def multi_rank(rows: Sequence[Row]) -> list[Row]:
    """Keeps greedy configs measured on several ranks, each selecting among its own keys, with one rank's rows."""
    others = [name for name in KEY if name != "kvp"]
    greedy = [r for r in rows if r["temperature"] == 0]
    several = {tuple(r[name] for name in others) for r in greedy if r["kvp"] > 1}
    return [r for r in greedy if tuple(r[name] for name in others) in several]
