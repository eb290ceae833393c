"""Composes and checks configs with the keys of a run and `bench.*`, and answers plans."""

from __future__ import annotations

from benchmarks import schema
from benchmarks.program import PROGRAM
from benchmarks.schema import LabConfig
from helix.config import Config
from helix.planner.plan import Ranking, plan
from launch.inputs import command_parser, planning
from launch.inputs import preflight as checks
from launch.inputs.planning import CheckedQuery
from launch.inputs.preflight import CheckedRun
from launch.plan import PLAN


def compose_config(*overrides: str) -> LabConfig:
    """Composes a config with the benchmarks' keys."""
    return schema.compose_config(overrides)


def preflight(config: Config, world_size: int, device: str | None = None, writes: bool = True) -> CheckedRun:
    """Runs the checks before a start."""
    return checks.preflight(config, world_size, device, PROGRAM.select(config), writes)


def answered(question: str) -> tuple[Ranking, CheckedQuery]:
    """Returns `helix plan`'s answer to these arguments."""
    checked = planning.check_query(command_parser.read(question.split(), PLAN).overrides)
    return plan(checked.query), checked
