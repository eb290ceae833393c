"""Tables of how many drafts hold, for a terminal and for docs/results/acceptance.md: the same columns in both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.table import Table

from benchmarks.records.columns import Columns, cells, lines, terminal
from benchmarks.records.rows import Row, results

WAY = ("policy", "gamma", "sparsity", "recent", "reach", "block", "heads", "temperature", "noise")
# What names a row among all that were recorded.
KEY = ("kind", "model", "length", "prompts", "kvp", "task", *WAY)
TASKS = {"code": "code", "copy": "copy", "facts": "facts"}
USUAL = 0.07  # of the keys, where nothing else is said


def joined(rows: Sequence[Row]) -> list[Row]:
    """One row for each way and length, with those of its tasks in `tasks`, and the mean of their tokens."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in KEY if name != "task")
        found.setdefault(key, {**row, "tasks": {}})["tasks"][row["task"]] = row
    for row in found.values():
        each = [of_task["tokens"] for of_task in row["tasks"].values()]
        row["mean"] = sum(each) / len(each)
    return list(found.values())


def _option(name: str) -> Callable[[Row], str]:
    return lambda r: "-" if r[name] is None else f"{r[name]:g}" if isinstance(r[name], float) else str(r[name])


def _tokens(task: str) -> Callable[[Row], str]:
    def cell(r: Row) -> str:
        found = r["tasks"].get(task)
        return "-" if found is None else "{:.2f} ({:.2f} to {:.2f})".format(found["tokens"], *found["tokens_range"])

    return cell


def _places(task: str) -> Callable[[Row], str]:
    def cell(r: Row) -> str:
        found = r["tasks"].get(task)
        shares = [] if found is None else [*zip(found["kept_share"], found["kept_range"], strict=True)]
        return " ".join("-" if x is None else f"{x:.2f}±{(high - low) / 2:.2f}" for x, (low, high) in shares) or "-"

    return cell


def _as_plain(r: Row) -> str:
    found = [of_task for of_task in r["tasks"].values() if of_task["as_plain"] is not None]
    return f"{sum(x['as_plain'] for x in found)} of {sum(x['prompts'] for x in found)}" if found else "-"


TEXT: Columns = {
    "text": lambda r: f"{r['prompts']} x {r['length'] >> 10}K",
    "ranks": lambda r: str(r["kvp"]),
    "drafts": _option("gamma"),
    "policy": _option("policy"),
}
OPTIONS: Columns = {name: _option(name) for name in ("sparsity", "recent", "reach", "block", "heads")}
DRAWN: Columns = {"temperature": _option("temperature"), "noise": _option("noise")}
TOKENS: Columns = {
    **{name: _tokens(task) for task, name in TASKS.items()},
    "mean": lambda r: f"{r['mean']:.2f}",
    "tokens as without drafts": _as_plain,
}
CHOICES: Columns = {
    **TEXT,
    **OPTIONS,
    "recall": lambda r: f"{r['recall']:.3f}",
    "recall by place": lambda r: " ".join(f"{x:.2f}" for x in r["recall_by_place"]),
    "mass, of the best choice": lambda r: f"{r['mass']:.3f}, {r['best']:.3f}",
    "two drafts 1, 2, .. apart choose the same": lambda r: " ".join(f"{x:.2f}" for x in r["overlap"]),
}
RANKS: Columns = {
    **TEXT,
    "ranks that choose": lambda r: r["of"],
    "of the one choice": lambda r: f"{r['same']:.3f}",
    "recall": lambda r: f"{r['local_recall']:.3f}",
    "recall of one choice": lambda r: f"{r['recall']:.3f}",
    "mass": lambda r: f"{r['local_mass']:.3f}",
    "mass of one choice": lambda r: f"{r['mass']:.3f}",
    "most keys on a rank by one choice, over an even share": lambda r: f"{r['most']:.2f}",
}


def by_ranks(rows: Sequence[Row]) -> list[Row]:
    """Rows of kind `choices`, each for every number of ranks that choose for themselves."""
    return [{**r, **found, "of": ranks} for r in rows for ranks, found in r["ranks"].items()]


def terminal_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """Tables of what was measured at once."""
    chosen = [r for r in rows if r["kind"] == "choices"]
    tokens = joined([r for r in rows if r["kind"] != "choices"])
    yield terminal(cells(TEXT | OPTIONS | DRAWN | TOKENS, tokens), "tokens an iteration")
    if chosen:
        yield terminal(cells(CHOICES, chosen), "choices")
    if ranks := by_ranks(chosen):
        yield terminal(cells(RANKS, ranks), "choices of ranks")


def _recorded(kind: str = "acceptance") -> list[Row]:
    return [r for r in results("acceptance", *KEY) if r["kind"] == kind]


def is_usual(r: Row) -> bool:
    """Greedy decoding on one rank with the usual share of keys."""
    return r["temperature"] == 0 and r["kvp"] == 1 and r["sparsity"] in (None, USUAL)


def widest(rows: Sequence[Row]) -> list[Row]:
    """Rows of the most prompts that a length was measured with."""
    most: dict[int, int] = {}
    for r in rows:
        most[r["length"]] = max(most.get(r["length"], 0), r["prompts"])
    return [r for r in rows if r["prompts"] == most[r["length"]]]


def is_varied(r: Row) -> bool:
    """Keys chosen in blocks, or alike for all heads of a rank."""
    return r["block"] not in (None, 1) or r["heads"] == "shared"


def policies() -> list[str]:
    """Greedy decoding on one rank with the usual share of keys."""
    return lines(TEXT | OPTIONS | TOKENS, joined(widest([r for r in _recorded() if is_usual(r) and not is_varied(r)])))


def variants() -> list[str]:
    """The same with keys chosen in blocks, or alike for all heads of a rank."""
    return lines(TEXT | OPTIONS | TOKENS, joined([r for r in _recorded() if is_usual(r) and is_varied(r)]))


def places() -> list[str]:
    """Shares of drafts that hold where all before them did."""
    by_task: Columns = {f"{name}: held by place": _places(task) for task, name in TASKS.items()}
    return lines(TEXT | OPTIONS | by_task, joined(widest([r for r in _recorded() if is_usual(r) and not is_varied(r)])))


def sparsities() -> list[str]:
    """Tokens an iteration over the share of keys."""
    found = sorted(_recorded("sweep"), key=lambda r: (r["length"], r["policy"], r["sparsity"]))
    return lines(TEXT | OPTIONS | TOKENS, joined(found))


def sampled() -> list[str]:
    """Requests with a temperature."""
    return lines(TEXT | OPTIONS | DRAWN | TOKENS, joined([r for r in _recorded() if r["temperature"] > 0]))


def ranks() -> list[str]:
    """The same ways over several ranks, each of which chooses among its own keys."""
    others = [name for name in KEY if name != "kvp"]
    greedy = [r for r in _recorded() if r["temperature"] == 0]
    several = {tuple(r[name] for name in others) for r in greedy if r["kvp"] > 1}
    return lines(TEXT | OPTIONS | TOKENS, joined([r for r in greedy if tuple(r[name] for name in others) in several]))


def choices() -> list[str]:
    """What the chosen keys keep of each draft's attention."""
    return lines(CHOICES, _recorded("choices"))


def local_choices() -> list[str]:
    """The same by ranks that choose for themselves."""
    return lines(RANKS, by_ranks(_recorded("choices")))


def layers() -> list[str]:
    """Drafts of a layer that was trained for a model, beside others, over the length of the text."""
    found = joined(results("layer-acceptance", *KEY))
    found.sort(key=lambda r: (r["model"], r["length"]))
    shares = {f"{name}: held by place": _places(name) for name in ("code", "copy")}
    columns = {
        "model": lambda r: str(r["model"]),
        **TEXT,
        **{name: TOKENS[name] for name in ("code", "copy")},
        **shares,
    }
    return lines(columns, found)


PAGE = {
    "policies": policies, "variants": variants, "places": places, "sparsity": sparsities, "sampled": sampled,
    "ranks": ranks, "layers": layers,
    "choices": choices, "local": local_choices,
}  # fmt: skip
