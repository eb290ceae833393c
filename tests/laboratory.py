"""Configs of the laboratory, which has all keys of a run and `bench.*` beside, and what becomes of them."""

from __future__ import annotations

from benchmarks import schema
from benchmarks.program import PROGRAM
from benchmarks.schema import LabConfig
from helix.config import Config
from launch.inputs import preflight as checks
from launch.inputs.preflight import CheckedRun


def composed(*overrides: str) -> LabConfig:
    return schema.composed(overrides)


def preflight(config: Config, world_size: int, device: str | None = None, writes: bool = True) -> CheckedRun:
    return checks.preflight(config, world_size, device, PROGRAM.work(config), writes)
