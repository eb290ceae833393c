"""The schema of a benchmark's command line: all that a run can set, and what is timed (`bench.*`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from helix.config import MOST_SEQUENCES, Config
from helix.schema import FilePath, Range, parse_value
from launch.inputs import compose
from launch.inputs.command_parser import RUN, Settings

CONF = Path(__file__).resolve().parent / "conf"
POINTED = ("decode", "hopb", "hosts", "prefill")  # what times bench.points
LIMITED = ("decode", "prefill")  # where a rank may be kept to a part of its GPU
DRAFTED = ("none", "decode", "tune")  # where a model may draft


@dataclass
class BenchConfig:
    """Attributes:
    kind: none; decode: time decode steps over a cache filled with random data; comm: time the collectives of a step;
        hopb: time decode steps with and without HOP-B; hosts: time and predict the exchange between hosts; prefill:
        time prompts; serve: serve requests by the clock; tune: find sparsity and gamma of speculation=sparse (helix
        tune).
    points: what decode, hopb, hosts and prefill time, each SEQUENCESxTOKENS in the cache of each; and tune, where
        bench.acceptance says how many drafts are kept.
    gammas: drafts of a step with which decode times each point, 0 being plain steps; none given: speculation.gamma.
        Those that tune tries.
    variants: settings of attention with which decode times each point, one after the other over the same cache, such
        as ["bench.repeat=0", "bench.repeat=0.8 attention.num_blocks=8"]; none given: those of the config alone.
    steps: timed steps of each point.
    acceptance: chance of each draft, of any drafter, given that those before it were kept; unset: what the model says.
    repeat: share of the last step's blocks that a block-sparse step keeps; unset: what the model chooses.
    sparsities: shares of the keys that tune tries, with speculation.gamma drafts of a step.
    grid: tune measures each of sparsities with each of gammas in the end.
    output: file of what tune has measured, JSON lines, which is not measured again; the rows of each of points are
        appended as it ends.
    gpu_bytes: what a rank may allocate of its GPU, with decode and prefill; more fails, as on a smaller card. What the
        driver and loaded kernels take comes on top. Unset: all of it.
    traces: what serve serves, some of those in benchmarks/ranks/serving.py; none given: all.
    """

    kind: Literal["none", "decode", "comm", "hopb", "hosts", "prefill", "serve", "tune"] = "none"
    points: list[str] = field(default_factory=lambda: ["1x131072"])
    gammas: list[int] = field(default_factory=list)
    variants: list[str] = field(default_factory=list)
    steps: Annotated[int, Range(1, 1 << 20)] = 32
    acceptance: Annotated[float, Range(0, 1)] | None = None
    repeat: Annotated[float, Range(0, 1)] | None = None
    sparsities: list[float] = field(default_factory=list)
    grid: bool = False
    output: FilePath | None = None
    gpu_bytes: float | None = None
    traces: list[str] = field(default_factory=list)


@dataclass
class LabConfig(Config):
    """The config of a run, and what is timed."""

    bench: BenchConfig = field(default_factory=BenchConfig)


SETTINGS = Settings(LabConfig, (CONF, *RUN.directories), "lab")


def compose_config(overrides: Sequence[str]) -> LabConfig:
    """The config of a benchmark's job; raises ValueError as `launch.inputs.compose.compose_config`."""
    return lab(compose.compose_config(overrides, SETTINGS))


def lab(config: Config) -> LabConfig:
    """The config of a benchmark's job."""
    assert isinstance(config, LabConfig), "its command line was composed with the laboratory's settings"
    return config


def bench_points(bench: BenchConfig) -> list[tuple[int, int]]:
    """(sequences, tokens in the cache of each) of every point.

    Raises:
        ValueError: there is none, or one is not written as `8x131072`.
    """
    if not bench.points:
        raise ValueError("bench.points is empty: name at least one, such as [8x131072]")
    points = []
    for text in bench.points:
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*[KM]?)", text)
        if match is None:
            raise ValueError(f"bench.points has {text!r}: a point is SEQUENCESxTOKENS, such as 8x131072 or 8x128K")
        if int(match[1][:9]) > MOST_SEQUENCES:
            raise ValueError(f"bench.points has {text!r}: a point has from 1 to {MOST_SEQUENCES} sequences")
        points.append((int(match[1]), parse_value("bench.points", match[2], int)))
    return points


def check(config: LabConfig) -> None:
    """Raises ValueError for a value of `bench` out of its range, or one that does not go with the rest."""
    bench, speculation = config.bench, config.speculation
    if bench.gpu_bytes is not None and not (bench.gpu_bytes > 0 and bench.kind in LIMITED):
        raise ValueError(f"bench.gpu_bytes={bench.gpu_bytes} must be positive, and goes with {' and '.join(LIMITED)}")
    for key, share in (("acceptance", bench.acceptance), ("repeat", bench.repeat)):
        if share is not None and bench.kind == "none":
            raise ValueError(
                f"bench.{key}={share} holds whatever the model says, so that its output is not the model's: time it "
                "with bench=decode, or leave it unset"
            )
    if bench.acceptance is not None and speculation.drafter == "none":
        raise ValueError(f"bench.acceptance={bench.acceptance} keeps drafts, and there are none: set speculation=ngram")
    if bench.repeat is not None and (config.attention.policy, config.attention.choice) != ("block_sparse", "local"):
        raise ValueError(
            f"bench.repeat={bench.repeat} keeps blocks, each rank's share of topk: set attention=block_sparse and "
            "attention.choice=local"
        )
    gamma = 0 if speculation.drafter == "none" else speculation.gamma
    if bench.kind != "tune" and (bad := [n for n in bench.gammas if not 0 <= n <= gamma]):
        raise ValueError(
            f"bench.gammas has {bad[0]}, but speculation.drafter={speculation.drafter} with "
            f"speculation.gamma={speculation.gamma} proposes {gamma} at most"
        )
    if bench.kind in POINTED:
        bench_points(bench)
    if speculation.drafter in ("model", "sparse") and bench.kind not in DRAFTED:
        raise ValueError(
            f"bench.kind={bench.kind} has no drafts of a model: set speculation=none "
            f"(speculation.drafter={speculation.drafter} goes with bench.kind=none, decode and tune)"
        )
    if config.serve.socket is not None and bench.kind != "none":
        raise ValueError(f"serve.socket={config.serve.socket} and bench={bench.kind} are two kinds of work")
