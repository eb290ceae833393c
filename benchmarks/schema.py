"""Config schema of benchmarks: everything that a run can set, plus what is timed (`bench.*`)."""

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
POINTED = ("decode", "hopb", "multi-node", "prefill")  # kinds that time bench.points
LIMITED = ("decode", "prefill")  # kinds that can cap a rank's GPU memory
DRAFTED = {"model": ("none", "decode", "tune"), "sparse": ("none", "decode", "serve", "tune")}  # kinds, by drafter


@dataclass
class BenchConfig:
    """Keys `bench.*`.

    Attributes:
        kind: none; decode: time decode steps over a cache of random data; comm: time a step's collectives; hopb: time
            decode steps with and without HOP-B; multi-node: time and predict the exchange between hosts; prefill: time
            prompts; serve: serve requests by the clock; tune: find sparsity and gamma of speculation=sparse (helix
            tune).
        points: SEQUENCESxTOKENS that decode, hopb, multi-node and prefill time, TOKENS being cached for each sequence;
            also the point of tune with bench.acceptance.
        gammas: drafts per step with which decode times each point, 0 for plain steps; empty: speculation.gamma. The
            values that tune tries.
        variants: attention settings with which decode times each point, in turn over the same cache, such as
            ["bench.repeat=0", "bench.repeat=0.8 attention.num_blocks=8"]; empty: only the config's.
        steps: timed steps per point.
        acceptance: acceptance rate of each draft, of any drafter, given that those before it were accepted; unset: by
            the model.
        repeat: share of the last step's blocks that a block-sparse step selects again; unset: by the model.
        sparsities: shares of the keys that tune tries, with speculation.gamma drafts per step.
        grid: whether tune finally measures each of sparsities with each of gammas.
        output: JSON lines file of tune's measurements, which are not repeated; otherwise the rows of each point are
            appended as it ends.
        gpu_bytes: maximum that a rank may allocate of its GPU, with decode and prefill, to emulate a smaller card. The
            driver and loaded kernels come on top. Unset: no limit.
        traces: traces that serve replays, names in benchmarks/ranks/serving.py; empty: all.
    """

    kind: Literal["none", "decode", "comm", "hopb", "multi-node", "prefill", "serve", "tune"] = "none"
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
    """The config of a run, plus what is timed."""

    bench: BenchConfig = field(default_factory=BenchConfig)


SETTINGS = Settings(LabConfig, (CONF, *RUN.directories), "lab")


def compose_config(overrides: Sequence[str]) -> LabConfig:
    """Composes the config of a benchmark job; raises ValueError like `launch.inputs.compose.compose_config`."""
    return lab(compose.compose_config(overrides, SETTINGS))


def lab(config: Config) -> LabConfig:
    """Narrows a config to `LabConfig`."""
    assert isinstance(config, LabConfig), "its command line was composed with the benchmarks' settings"
    return config


def bench_points(bench: BenchConfig) -> list[tuple[int, int]]:
    """Parses `bench.points` into pairs (sequences, cached tokens of each).

    Raises:
        ValueError: there are none, or one does not read like `8x131072`.
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
    """Raises ValueError for a value of `bench` that is out of range or conflicts with other settings."""
    bench, speculation = config.bench, config.speculation
    if bench.gpu_bytes is not None and not (bench.gpu_bytes > 0 and bench.kind in LIMITED):
        raise ValueError(
            f"bench.gpu_bytes={bench.gpu_bytes} must be positive, and needs bench.kind={' or '.join(LIMITED)}"
        )
    for key, share in (("acceptance", bench.acceptance), ("repeat", bench.repeat)):
        if share is not None and bench.kind == "none":
            raise ValueError(
                f"bench.{key}={share} overrides the model, so its output would be wrong: use it with bench=decode, or "
                "leave it unset"
            )
    if bench.acceptance is not None and speculation.drafter == "none":
        raise ValueError(f"bench.acceptance={bench.acceptance} needs a drafter: set speculation=ngram")
    if bench.repeat is not None and (config.attention.policy, config.attention.choice) != ("block_sparse", "local"):
        raise ValueError(
            f"bench.repeat={bench.repeat} needs blocks that each rank selects itself: set attention=block_sparse and "
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
    kinds = DRAFTED.get(speculation.drafter)
    if kinds is not None and bench.kind not in kinds:
        raise ValueError(
            f"bench.kind={bench.kind} cannot time speculation.drafter={speculation.drafter}: set speculation=none, or "
            f"bench={', '.join(kinds[:-1])} or {kinds[-1]}"
        )
    if config.serve.socket is not None and bench.kind != "none":
        raise ValueError(f"serve.socket={config.serve.socket} and bench={bench.kind} cannot be combined: leave one out")
