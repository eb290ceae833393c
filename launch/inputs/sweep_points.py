"""Points of a sweep: each has a config, files and an outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helix.config import Config
from helix.hub import resolve_hub_models
from launch.inputs.command_parser import CommandLine
from launch.inputs.compose import points
from launch.inputs.job_kinds import JobKind, Program

MEASURED = (
    *("ttl_p50_us", "ttl_p90_us", "exchange_us", "tokens_per_s_user", "tokens_per_s_gpu"),
    *("prefill_s", "decode_tokens"),
)
TIMED = ("batch", "length", "gamma")  # keys of an entry of bench.points
LAYOUT = ("mode", "kvp", "tpa", "tpf", "ep", "dp", "world_size")


@dataclass
class Point:
    """A point of a sweep and its outcome.

    Attributes:
        config: config of its job, with the paths of its files.
        status: waiting, ok, refused (some requests were), skipped, failed or interrupted.
        reason: why it was skipped or failed.
        record: measurements of the run.
    """

    number: int
    overrides: list[str]
    config: Config
    job_kind: JobKind
    status: str = "waiting"
    reason: str = ""
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, str]:
        texts = (text.partition("=") for text in self.overrides)
        return {key.lstrip("+~"): value for key, _, value in texts}

    def rows(self) -> list[dict[str, Any]]:
        """Returns the measurements: one row, or one per entry of `bench.points`."""
        layout = self.record.get("layout", {})
        return [
            {
                "point": self.number,
                "overrides": " ".join(self.overrides),
                "status": self.status,
                **{key: layout.get(key) for key in LAYOUT},
                **{key: measured.get(key) for key in (*TIMED, *MEASURED)},
                "kv_bytes_per_rank_max": max(measured.get("kv_bytes_per_rank", []), default=None),
                "reason": measured.get("failed", self.reason),
            }
            for measured in self.record.get("points", [self.record])
        ]


def read(line: CommandLine, program: Program) -> tuple[list[Point], Path]:
    """Reads the points of a sweep and sets the files of each; returns the points and the sweep's directory.

    Raises:
        ValueError: an argument is wrong.
    """
    found = []
    for number, point in enumerate(points(line)):
        config = point.config
        for key, value in (("record", config.record), ("decode.output", config.decode.output)):
            if value is not None:
                raise ValueError(f"{key}={value}: a sweep chooses its files; hydra.sweep.dir=DIR sets where")
        resolve_hub_models(config)
        config.record = str(point.directory / "record.json")
        job_kind = program.select(config)
        if job_kind.prompts == "needed":
            config.decode.output = str(point.directory / "results.jsonl")
        found.append(Point(number, point.overrides, config, job_kind))
    return found, point.sweep
