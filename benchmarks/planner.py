"""Compares the planner with recorded steps.

  helix planner check [FILE ...]    compare its first choices with recorded steps
  helix planner sparse [FILE ...]   break down the time of recorded block-sparse steps, and show where sparsity pays

Without files, reads benchmarks/results/.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.records import sparse_cost_model
from benchmarks.records.columns import terminal
from benchmarks.records.declared import table_cells
from benchmarks.records.planner_check import drafted_errors, regrets, summary
from benchmarks.records.recorded_steps import DRAFTED, read_cells
from helix.schema import unknown_message
from launch.inputs.arguments import handle_help, need_checkout


def check(files: Sequence[str]) -> None:
    """Prints how good the planner's first choices were over recorded steps (default: all of benchmarks/results)."""
    if not files:
        need_checkout("helix planner check without files")
    cells = read_cells([Path(file) for file in files]) if files else read_cells()
    rows = regrets(cells)
    Console(width=max(130, Console().width), highlight=False).print(terminal(table_cells("planner", rows)))
    print(summary(rows))
    if (off := drafted_errors(cells if files else read_cells(DRAFTED))) is not None:
        print(off)


def sparse(files: Sequence[str]) -> None:
    """Prints what recorded steps spend on bytes, overhead and block selection (default: all of benchmarks/results)."""
    if not files:
        need_checkout("helix planner sparse without files")
    found = (
        sparse_cost_model.accounts(read_cells([Path(file) for file in files]))
        if files
        else sparse_cost_model.recorded()
    )
    tables = {"sparse-cost": sparse_cost_model.rows(found), "sparse-crossover": sparse_cost_model.rows_by_batch(found)}
    for table in [table_cells(name, rows) for name, rows in tables.items()] if found else ():
        Console(width=max(150, Console().width), highlight=False).print(terminal(table))
    print(sparse_cost_model.summary(found))


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {"check": check, "sparse": sparse}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one of the commands; exits with a one-line error for a wrong value."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if handle_help(arguments or ["--help"], __doc__):
        return
    name, *files = arguments
    try:
        if name not in COMMANDS:
            raise ValueError(unknown_message(name, COMMANDS))
        COMMANDS[name](files)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
