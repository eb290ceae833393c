"""Configs of the laboratory, which has all keys of a run and `bench.*` beside, and what becomes of them; plans."""

from __future__ import annotations

from benchmarks import schema
from benchmarks.program import PROGRAM
from benchmarks.schema import LabConfig
from helix.config import Config
from helix.planner.plan import Ranking, plan
from launch.inputs import front, planning
from launch.inputs import preflight as checks
from launch.inputs.planning import CheckedQuestion
from launch.inputs.preflight import CheckedRun
from launch.plan import PLAN


def composed(*overrides: str) -> LabConfig:
    return schema.composed(overrides)


def preflight(config: Config, world_size: int, device: str | None = None, writes: bool = True) -> CheckedRun:
    return checks.preflight(config, world_size, device, PROGRAM.work(config), writes)


def answered(question: str) -> tuple[Ranking, CheckedQuestion]:
    """What `helix plan` answers to these arguments."""
    checked = planning.check_question(front.read(question.split(), PLAN).overrides)
    return plan(checked.question), checked
