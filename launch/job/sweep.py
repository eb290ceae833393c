"""Runs a sweep: checks its points, runs their jobs one after the other, reports the results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from helix.checks import check_layout
from helix.config import Config
from helix.devices import ranks
from helix.setup.parts import make_layout, make_spec
from launch.client.errors import REFUSED
from launch.client.supervisor import cause
from launch.inputs.command_parser import CommandLine
from launch.inputs.job_kinds import RUNTIME, Program
from launch.inputs.preflight import prepare_run
from launch.inputs.sweep_points import Point
from launch.job import spawn
from launch.job.spawn import TIME_EXCHANGE, captured_stderr
from launch.job.sweep_report import comparison_rows, plot, show, swept_keys, write_csv


def sweep(points: Sequence[Point], directory: Path, line: CommandLine, program: Program) -> int:
    """Runs the points of a sweep and writes its table and plot to a directory; returns `run_all`'s exit code.

    Raises:
        ValueError: all points have the same error.
    """
    check(points)
    options = CommandLine([], line.options).arguments
    return run_all(points, directory, replace(program, command=(*program.command, *options)))


def check(points: Sequence[Point]) -> None:
    """Finds the points that cannot run on this host, without running any.

    Raises:
        ValueError: all points that are not skipped have the same error.
    """
    for point in points:
        if (reason := skip_reason(point.config)) is not None:
            point.status, point.reason = "skipped", reason
            continue
        try:
            if prepare_run(point.config, point.job_kind).finished:  # its record is not replaced
                _check_settings(point.config)
        except ValueError as error:
            point.status, point.reason = "failed", str(error)
    tried = [point for point in points if point.status != "skipped"]
    if len({point.reason for point in tried}) == 1 and tried[0].status == "failed":
        raise ValueError(tried[0].reason)


def _check_settings(config: Config) -> None:
    """Raises ValueError if the existing record is of other settings; files may have moved."""
    path = Path(str(config.record))
    if not path.exists():
        return
    theirs, ours = json.loads(path.read_text())["config"], json.loads(json.dumps(asdict(config)))
    for one in (theirs, ours):
        one["record"] = None
        one["decode"] |= {"output": None, "resume": None}
    if theirs != ours:
        raise ValueError(
            f"decode.output={config.decode.output} already has all results, and {path.name} has measurements of other "
            "settings: choose another hydra.sweep.dir"
        )


def run(point: Point, program: Program = RUNTIME) -> int:
    """Runs a point and records its outcome; returns its exit code."""
    config = point.config
    files = [f"record={config.record}", *([f"decode.output={config.decode.output}"] if config.decode.output else [])]
    with captured_stderr() as lines:
        code = spawn.run([*program.command, *point.overrides, *files], **{TIME_EXCHANGE: "1"})
    point.status = {0: "ok", REFUSED: "refused", spawn.INTERRUPTED: "interrupted"}.get(code, "failed")
    reasons = {"failed": cause(lines) or f"exit code {code}", "refused": f"see {config.decode.output} for the requests"}
    point.reason = reasons.get(point.status, "")
    record = Path(str(config.record))
    if point.status in ("ok", "refused") and record.exists():  # otherwise the record may be of an earlier sweep
        point.record = json.loads(record.read_text())
    return code


def skip_reason(config: Config) -> str | None:
    """Returns why a point must be skipped: not a layout of the model, or more ranks than GPUs; else None."""
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


def run_all(points: Sequence[Point], directory: Path, program: Program) -> int:
    """Runs and reports the points; returns 0 if one ran and none failed, 130 after control-C, otherwise 1."""
    interrupted = False
    for point in points:
        print(f"--- point {point.number}: {' '.join(point.overrides)}", flush=True)
        if point.reason:
            print(point.status, flush=True)
        elif run(point, program) == spawn.INTERRUPTED:
            interrupted = True
            break
    ran = any(point.status in ("ok", "refused") for point in points)
    rows = comparison_rows(points)
    write_csv(directory / "sweep.csv", rows)
    plot(directory / "sweep.png", rows, swept_keys(points))
    show(points, rows)
    print(f"wrote {directory / 'sweep.csv'} and {directory / 'sweep.png'}")
    return spawn.INTERRUPTED if interrupted else int(not ran or any(point.status == "failed" for point in points))
