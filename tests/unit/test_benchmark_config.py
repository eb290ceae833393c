"""The laboratory's settings: all of a run's and its own, which a run does not have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import schema
from benchmarks.program import MODULES, PROGRAM
from benchmarks.schema import SETTINGS, BenchConfig, LabConfig, bench_points
from helix.checks import check
from helix.schema import field_types
from launch import cli
from launch.inputs import arguments, command_parser, compose
from launch.inputs.compose import RUN
from launch.inputs.job_kinds import DECODE
from tests.benchmark_config import compose_config


def test_the_laboratory_has_all_groups_of_a_run() -> None:
    assert {*SETTINGS.groups} - {*RUN.groups} == {"bench"}
    more = {name: {*found} - {*RUN.groups.get(name, [])} for name, found in SETTINGS.groups.items()}
    assert {name: found for name, found in more.items() if found} == {
        "bench": {"none", *MODULES}, "experiment": {"llama-1m"},
    }  # fmt: skip
    assert {*field_types(LabConfig)} - {*field_types(RUN.schema)} == {"bench"}


@pytest.mark.parametrize("override", [*(f"bench={kind}" for kind in SETTINGS.groups["bench"]), "experiment=llama-1m"])
def test_every_option_of_its_own_composes(override: str) -> None:
    config = compose_config(override)
    check(config)
    schema.check(config)
    wanted = "decode" if override == "experiment=llama-1m" else override.partition("=")[2]
    assert isinstance(config, LabConfig) and config.bench.kind == wanted
    assert PROGRAM.select(config).module == (DECODE.module if wanted == "none" else MODULES[wanted])


def test_its_help_and_config_are_its_own() -> None:
    def shown(*arguments: str) -> str:
        line = command_parser.read(arguments, PROGRAM.cli_command)
        text = compose.info_text(line, PROGRAM.cli_command)
        assert text is not None
        return text

    assert "bench=KIND" in shown("--help")
    info = shown("--info", "layout=tp")
    assert "  bench: comm, decode, hopb, multi-node" in info and "mode: tp\n" in info and "\n  bench.points (" in info
    job = shown("--cfg", "job", "bench=decode")
    assert "  kind: decode\n" in job and "hydra" not in job


@pytest.mark.parametrize("text", ["bench=decode", "bench.points=[1x64]", "bench.pints=3", "++bench.kind=decode"])
def test_a_run_names_the_command_that_times(text: str) -> None:
    with pytest.raises(ValueError, match=r"to run benchmarks use helix bench \+*bench") as caught:
        compose.compose_config([text])
    assert "\n" not in str(caught.value)


def test_a_missing_laboratory_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has left the package out."""
    monkeypatch.setattr(arguments, "ROOT", tmp_path)
    for name in cli.LABORATORY:
        monkeypatch.setattr(sys, "argv", ["helix", name])
        error = rf"error: helix {name} needs a checkout of Helix .* clone the repository"
        with pytest.raises(SystemExit, match=error):
            cli.main()


def test_every_command_is_a_module() -> None:
    for name in cli.LABORATORY:
        files = (cli.ROOT / "benchmarks" / file for file in (f"{name}.py", f"{name}/__main__.py"))
        assert any(file.is_file() for file in files), name
    for name in {*cli.COMMANDS} - {"run"}:
        assert (cli.ROOT / "launch" / f"{name}.py").is_file(), name


@pytest.mark.parametrize(
    "override, words",
    [
        ("bench.kind=all", ["bench.kind", "all", "decode"]),
        ("bench.gammas=[0,1]", ["bench.gammas", "1", "speculation.drafter=none"]),
        ("bench.steps=0", ["bench.steps=0", "from 1 to"]),
        ("bench.pints=3", ["bench.pints is unknown; known: bench.kind, bench.points"]),
        ("bench=all", ["bench has no option all; known: comm, decode"]),
        ("bench=decode bench.gpu_bytes=0", ["bench.gpu_bytes=0.0 must be positive"]),
        ("bench=comm bench.gpu_bytes=1e9", ["needs bench.kind=decode or prefill"]),
        ("speculation=ngram speculation.gamma=7 bench.gammas=[0,8]", ["bench.gammas has 8", "proposes 7 at most"]),
    ],
)
def test_values_out_of_range_are_named(override: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        PROGRAM.select(compose_config(*override.split()))
    assert all(word in str(caught.value) for word in words), caught.value


def test_points_are_read_before_anything_is_loaded() -> None:
    assert bench_points(BenchConfig("decode", ["2x3", "1x64K", "8x1M"])) == [(2, 3), (1, 65536), (8, 1 << 20)]
    with pytest.raises(ValueError, match=r"bench\.points has '1x2G'"):
        PROGRAM.select(compose_config("bench=decode", "bench.points=[1x2G]"))
    with pytest.raises(ValueError, match=r"bench\.points is empty"):
        PROGRAM.select(compose_config("bench=prefill", "bench.points=[]"))
    assert PROGRAM.select(compose_config("bench=comm", "bench.points=[]")).load == DECODE.load
