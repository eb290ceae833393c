"""The work of a sweep: checks of its points, their jobs one after the other, and what they took."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from helix.checks import check_layout
from helix.config import Config
from helix.devices import ranks
from helix.setup.parts import make_layout, make_spec
from launch.client.errors import REFUSED
from launch.client.supervisor import cause
from launch.inputs.front import Line
from launch.inputs.points import Point, read
from launch.inputs.preflight import prepared
from launch.inputs.work import RUNTIME, Program
from launch.job import spawn
from launch.job.spawn import heard

mpl.use("Agg")  # before pyplot: there may be no display
import matplotlib.pyplot as plt


def sweep(line: Line, program: Program) -> int:
    """Runs the points of a command line; returns 0 if one ran and none failed, 130 after control-C, otherwise 1.

    Raises:
        ValueError: a mistake in the line, or all points have the same.
    """
    points = read(line, program)
    check(points)
    return run_all(points, replace(program, command=(*program.command, *Line([], line.options).arguments)))


def check(points: Sequence[Point]) -> None:
    """Finds the points that cannot run here, without running any.

    Raises:
        ValueError: all points that are not skipped have the same mistake.
    """
    for point in points:
        if (reason := skip_reason(point.config)) is not None:
            point.status, point.reason = "skipped", reason
            continue
        try:
            prepared(point.config, point.work)
        except ValueError as error:
            point.status, point.reason = "failed", str(error)
    tried = [point for point in points if point.status != "skipped"]
    if len({point.reason for point in tried}) == 1 and tried[0].status == "failed":
        raise ValueError(tried[0].reason)


def run(point: Point, program: Program = RUNTIME) -> int:
    """Runs a point and records its outcome; returns its exit code."""
    config = point.config
    files = [f"record={config.record}", *([f"decode.output={config.decode.output}"] if config.decode.output else [])]
    with heard() as lines:
        code = spawn.run([*program.command, *point.overrides, *files])
    point.status = {0: "ok", REFUSED: "refused", spawn.INTERRUPTED: "interrupted"}.get(code, "failed")
    point.reason = cause(lines) or f"exit code {code}" if point.status == "failed" else ""
    record = Path(str(config.record))
    if point.status in ("ok", "refused") and record.exists():  # or it is of an earlier sweep
        point.record = json.loads(record.read_text())
    return code


def skip_reason(config: Config) -> str | None:
    """Returns the reason if a point is not a layout of the model or has too many ranks for this host; else None."""
    if config.layout.mode == "auto":
        return None
    try:
        count = ranks(config)
        layout = make_layout(config.layout)
    except ValueError as error:
        return str(error)
    try:
        spec = make_spec(config)
    except ValueError:
        return None
    try:
        check_layout(layout, spec)
    except ValueError as error:
        return str(error)
    gpus = torch.cuda.device_count()
    if gpus and config.comm.backend != "gloo" and count > gpus:
        return f"{layout.world_size} ranks on {gpus} GPUs (comm.backend=gloo runs them on the CPU)"
    return None


def write_csv(path: Path, points: list[Point]) -> None:
    rows = [row for point in points for row in point.rows()]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def plot(path: Path, points: list[Point]) -> None:
    """Plots throughput per rank over that of one user, a mark for each point that ran."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for row in (row for point in points for row in point.rows()):
        x, y, number = row["tokens_per_s_user"], row["tokens_per_s_gpu"], row["point"]
        if x is not None and y is not None:
            widths = ("dp", "ep") if row["mode"] == "dp" else ("kvp", "tpa", "ep")
            label = " ".join([f"{number}: {row['mode']}", *(f"{key}={row[key]}" for key in widths)]) + _timed(row)
            axes.scatter(x, y, color=f"C{number % 10}", label=label)
            axes.annotate(str(number), (x, y), textcoords="offset points", xytext=(5, 4), fontsize=8)
    if axes.collections:
        figure.legend(loc="outside right upper", fontsize=8)
        axes.set(xscale="log", yscale="log")
    axes.set(xlabel="tokens/s/user", ylabel="tokens/s/rank", title="Layouts: interactivity and throughput")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _timed(row: dict[str, Any]) -> str:
    """Returns the name of a row's point in `bench.points`; empty in a run over prompts."""
    if row["batch"] is None:
        return ""
    return f" {row['batch']} x {row['length']}" + (f", {row['gamma']} drafts" if row["gamma"] else "")


def show(points: list[Point]) -> None:
    """Prints a table of all points, by the keys that vary, with the reasons of those without figures."""
    varying = {o for p in points for o in p.overrides if any(o not in other.overrides for other in points)}
    table = Table("point", "overrides", "status", "TTL p50", "tok/s/user", "tok/s/rank")
    for point in points:
        differs = " ".join(o for o in point.overrides if o in varying)
        for row in point.rows():
            ttl, user, rank = (row[key] for key in ("ttl_p50_us", "tokens_per_s_user", "tokens_per_s_gpu"))
            cells = [
                "-" if ttl is None else f"{ttl / 1e3:.2f} ms",
                *("-" if v is None else f"{v:.1f}" for v in (user, rank)),
            ]
            table.add_row(str(point.number), escape(differs + _timed(row)), point.status, *cells)
    terminal = Console()
    terminal.print(table)
    why: dict[tuple[str, str], list[str]] = {}
    for point in points:
        why.setdefault((point.status, point.reason), []).append(str(point.number))
    for (status, reason), numbers in why.items():
        if reason:
            terminal.print(f"point {', '.join(numbers)} {status}: {reason}", markup=False, highlight=False)


def run_all(points: list[Point], program: Program) -> int:
    """Runs the points and reports on them; returns 0 if one ran and none failed, 130 after control-C, otherwise 1."""
    interrupted = False
    for point in points:
        print(f"--- point {point.number}: {' '.join(point.overrides)}", flush=True)
        if point.reason:
            print(point.status, flush=True)
        elif run(point, program) == spawn.INTERRUPTED:
            interrupted = True
            break
    ran = any(point.status in ("ok", "refused") for point in points)
    directory = Path(str(points[0].config.record)).parents[1]
    write_csv(directory / "sweep.csv", points)
    plot(directory / "sweep.png", points)
    show(points)
    print(f"wrote {directory / 'sweep.csv'} and {directory / 'sweep.png'}")
    return spawn.INTERRUPTED if interrupted else int(not ran or any(point.status == "failed" for point in points))
