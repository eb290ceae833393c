"""Tables declared in `benchmarks/tables.yaml`: rows of a record, and what each column shows.

A column is an expression over a row's fields and the functions of COMPUTED, with an optional format after a colon, as
in `ttl_p50_us:ms`, or a text with such expressions in braces. If a row lacks a field, the cell is a dash.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from types import CodeType, ModuleType
from typing import Any

import numpy as np
import yaml

from benchmarks.records import (
    acceptance_tables,
    draft_tables,
    fidelity_tables,
    fp8_tables,
    hopb_tables,
    kernel_tables,
    layer_tables,
    mixer_tables,
    pareto,
    planner_check,
    serving_tables,
    sparse_cost_model,
    sparse_criteria,
    sparse_tables,
    step_tables,
    tuned_tables,
    weight_tables,
)
from benchmarks.records.columns import Cells, page
from benchmarks.records.rows import Row, kv, results, shape, tokens
from benchmarks.timer import READ_CEILING
from launch.client import options, request_fields
from launch.inputs.compose import ROOT

Table = Mapping[str, Any]
PATH = ROOT / "benchmarks" / "tables.yaml"
FORMATS: dict[str, Callable[[Any], str]] = {
    "us": "{:,.1f} us".format,
    "ms": lambda us: f"{us / 1e3:,.2f} ms",
    "K": lambda count: f"{count // 1024}K",
}
MODULES: dict[str, ModuleType] = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        acceptance_tables, draft_tables, fidelity_tables, fp8_tables, pareto, hopb_tables, kernel_tables,
        layer_tables, mixer_tables, options, planner_check, serving_tables, sparse_cost_model, sparse_criteria,
        sparse_tables, request_fields, step_tables, tuned_tables, weight_tables,
    )
}  # fmt: skip
COMPUTED: dict[str, Callable[[Row], Any]] = {
    "r": lambda row: row,
    "KV": kv,
    "shape": shape,
    "ttl": step_tables.ttl,
    "grid": step_tables.grid,
    "model_named": step_tables.named,
    "ideal_us": step_tables.ideal_us,
}
FUNCTIONS: dict[str, Any] = {
    "READ_CEILING": READ_CEILING,
    "all_plain": acceptance_tables.as_plain,
    "balance": fidelity_tables.balance,
    "choice_over_rest": draft_tables.choice_over_rest,
    "offline_load": serving_tables.named,
    "depths": fidelity_tables.depths,
    "each": lambda values, spec: " ".join(format(value, spec) for value in values),
    "fp8_attention": fp8_tables.attention,
    "fp8_layout": fp8_tables.layout,
    "task_tokens": acceptance_tables.task_tokens,
    "largest_batch": step_tables.largest_batch,
    "on_gpus": pareto.on_gpus,
    "task_acceptance": acceptance_tables.task_acceptance,
    "predicted_us": pareto.predicted_us,
    "quantile": np.quantile,
    "spread": fidelity_tables.spread,
    "stored": fp8_tables.stored,
    "tokens": tokens,
}


class Scope(dict[str, Any]):
    """The names of an expression: a row's fields, and what is computed from them.

    Attributes:
        lenient: whether an unknown name is None rather than an error.
    """

    lenient = False

    def __missing__(self, name: str) -> Any:
        if name in COMPUTED:
            return COMPUTED[name](self)
        if self.lenient and name not in FUNCTIONS and not hasattr(builtins, name):
            return None
        raise KeyError(name)


class LenientScope(Scope):
    """A scope in which unknown names are None."""

    lenient = True


@cache
def _code(expression: str) -> CodeType:
    return compile(expression.strip(), f"<{expression}>", "eval")


@cache
def _parts(template: str) -> list[tuple[str, str, str]]:
    """Splits a template into (text, expression after it or "", format)."""
    rest, parts = template if "{" in template else f"{{{template}}}", []
    while rest:
        text, brace, rest = rest.partition("{")
        depth, end, colon, quote = 1, 0, None, ""
        while brace and depth:
            letter = rest[end]
            if letter in "'\"" and quote in ("", letter):
                quote = "" if quote else letter
            elif not quote:
                depth += (letter in "{[(") - (letter in "}])")
                colon = end if letter == ":" and depth == 1 else colon
            end += 1
        inner, rest = rest[: max(end - 1, 0)], rest[end:]
        parts.append((text, inner[:colon], inner[colon + 1 :] if colon is not None else ""))
    return parts


def value(expression: str, scope: Scope) -> Any:
    """Evaluates an expression."""
    return eval(_code(expression), FUNCTIONS, scope)


def render_cell(template: str, row: Row) -> str | None:
    """Returns a column's text for a row; None if the row lacks a field or its value."""
    words, scope = [], Scope(row)
    for text, expression, spec in _parts(template):
        words.append(text)
        if not expression:
            continue
        try:
            found = value(expression, scope)
        except (NameError, KeyError):
            return None
        except TypeError:
            if any(row.get(name, 0) is None for name in _code(expression).co_names):
                return None
            raise
        if found is None:
            return None
        words.append(FORMATS[spec](found) if spec in FORMATS else format(found, spec))
    return "".join(words)


def cells(columns: Mapping[str, str], rows: Sequence[Row], failed: str | None = None) -> Cells:
    """Returns the cells of a table, headings first.

    Args:
        failed: text for the first missing value of a row that failed; its later ones are empty. None: dashes.
    """
    table: list[Sequence[str]] = [[name.rstrip() for name in columns]]
    for row in rows:
        found = [render_cell(template, row) for template in columns.values()]
        ran = failed is None or "failed" not in row
        if not ran and None in found:
            found[found.index(None)] = failed
        table.append([("-" if ran else "") if text is None else text for text in found])
    return table


def columns_of(table: Table) -> dict[str, str]:
    """Returns the columns of a table, joined if there are several sets."""
    sets = table["columns"] if isinstance(table["columns"], list) else [table["columns"]]
    return {name: template for columns in sets for name, template in columns.items()}


def table_cells(name: str, rows: Sequence[Row]) -> Cells:
    """Returns the cells of rows in a declared table."""
    table = declared()[name]
    return _pivoted(table, rows) if "across" in table else cells(columns_of(table), rows, table.get("failed"))


def _pivoted(table: Table, rows: Sequence[Row]) -> Cells:
    """Pivots: one line per value of `columns`, one column per value of `across`."""
    names: dict[Any, str] = {}
    found: dict[tuple[str, ...], dict[Any, str]] = {}
    for row in rows:
        line = found.setdefault(tuple(render_cell(t, row) or "-" for t in table["columns"].values()), {})
        n = value(table["across"], Scope(row))
        names[n] = render_cell(table.get("head", "n"), {**row, "n": n}) or "-"
        line[n] = render_cell(table["cell"], row) or "-"
    heads = sorted(names)
    body = ([*labels, *(line.get(n, "-") for n in heads)] for labels, line in found.items())
    return [[*table["columns"], *(names[n] for n in heads)], *body]


def _resolve(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(".")
    found: Callable[..., Any] = getattr(MODULES[module], function)
    return found


def rows_of(table: Table) -> list[Row]:
    """Returns a table's rows in order."""
    rows = _resolve(table["rows"])(**table.get("with", {})) if "rows" in table else _recorded(table)
    for order in ("sort", "falling"):
        if order in table:
            rows = sorted(rows, key=partial(_by, table[order]), reverse=order == "falling")
    for name in table.get("through", "").split():
        rows = _resolve(name)(rows)
    return [row for row in rows if "where" not in table or value(table["where"], LenientScope(row))]


def _recorded(table: Table) -> list[Row]:
    only, key, free = table.get("only", {}), table["key"].split(), table.get("free", "").split()
    several = next((name for name, wanted in only.items() if isinstance(wanted, list)), None)
    kinds = [only] if several is None else [{**only, several: one} for one in only[several]]
    return [r for kind in kinds for name in table["record"].split() for r in results(name, *key, free=free, **kind)]


def _by(expression: str, row: Row) -> Any:
    return value(expression, Scope(row))


def table_of(name: str) -> list[str]:
    """Returns a table's Markdown lines; none without rows. Notes if rows are of several commits."""
    table = declared()[name]
    arguments = table.get("with", {})
    if "lines" in table:
        return list(_resolve(table["lines"])(**arguments))
    if "cells" in table:
        made = _resolve(table["cells"])(**arguments)
        return page(made) if len(made) > 1 else []
    rows = rows_of(table)
    if not rows or "says" in table:
        return [render_cell(table["says"], row) or "-" for row in rows]
    commits = [] if any("commit" in t for t in columns_of(table).values()) else commits_of(rows)
    below = _resolve(table["below"])(**arguments) if "below" in table else []
    below += [f"Rows of {len(commits)} commits: {', '.join(commits)}."] if len(commits) > 1 else []
    return [*page(table_cells(name, rows)), *([""] if below else []), *below]


def commits_of(rows: Iterable[Row]) -> list[str]:
    """Returns the commits of rows, and of their source rows in `of`."""
    every = [part for row in rows for part in (row, *row.get("of", ()))]
    return list(dict.fromkeys(str(r["commit"])[:7] for r in every if isinstance(r, dict) and r.get("commit")))


@cache
def declared() -> dict[str, Table]:
    """Returns the declared tables by name."""
    found: dict[str, Table] = yaml.safe_load(PATH.read_text(encoding="utf-8"))
    return {name: table for name, table in found.items() if not name.startswith(".")}
