"""conf/ and the schema agree, and values out of range are named."""

from __future__ import annotations

import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hydra import compose as compose_app
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from helix.checks import check
from helix.config import Config
from launch.inputs import command_parser, commands, compose, flags
from launch.inputs.command_parser import RUN
from launch.inputs.compose import ROOT, points
from launch.inputs.keys import keys
from tests.bad_inputs.tables import lines


def compose_config(*overrides: str) -> Config:
    return compose.compose_config(overrides)


@pytest.mark.parametrize("group, option", [(g, option) for g in RUN.groups if g != "model" for option in RUN.groups[g]])
def test_every_option_composes_into_the_schema(group: str, option: str) -> None:
    config = compose_config(f"{group}={option}")
    check(config)
    assert isinstance(config, Config)


def printed(*arguments: str) -> str | None:
    return compose.info_text(command_parser.read(arguments, commands.RUN), commands.RUN)


def test_info_names_every_group_and_key() -> None:
    text = printed("--info", "layout=tp")
    assert text is not None and "  layout: auto, dp, helix, medha, tp\n" in text and "mode: tp\n" in text
    assert all(f"\n  {group}: " in text for group in RUN.groups)
    assert all(f"\n  {key} ({default})\n" in text for key, default, _, _ in keys(Config))
    assert "hardware" not in text.partition("Keys,")[0], "the simulator's alone"


def test_the_composed_config_is_shown() -> None:
    text = printed("--cfg", "job", "layout.kvp=3")
    assert text is not None and "  kvp: 3\n" in text and "hydra" not in text and "${root:}" in text
    assert printed("layout.kvp=3") is None
    assert (
        printed("--cfg", "job", "--package", "layout", "-tp", "2")
        == "mode: tp\nkvp: 1\ntpa: 2\ntpf: null\nep: 1\ndp: 1\n"
    )
    resolved = printed("--cfg=job", "--resolve")
    assert resolved is not None and "${root:}" not in resolved and str(ROOT) in resolved
    points = printed("-c", "job", "-m", "-p", "layout", "layout.kvp=1,2")
    assert points is not None and [line for line in points.splitlines() if "kvp" in line] == [
        "# point 0: layout.kvp=1", "kvp: 1", "# point 1: layout.kvp=2", "kvp: 2",
    ]  # fmt: skip


def test_groups_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "layout").mkdir()
    (tmp_path / "layout" / "mine.yaml").write_text("mode: medha\nkvp: 3\n")
    (tmp_path / "night.yaml").write_text("defaults:\n  - config\n  - override layout: mine\n  - _self_\nseed: 7\n")
    given = "--config-dir", str(tmp_path)
    shown = printed("--cfg", "job", "-p", "layout", *given, "layout=mine")
    assert shown is not None and "mode: medha" in shown and "kvp: 3" in shown
    line = command_parser.read([*given, "--config-name", "night", "layout.tpa=2"], commands.RUN)
    config = compose.compose_config(line.overrides, line.settings)
    assert (config.layout.mode, config.layout.kvp, config.layout.tpa, config.seed) == ("medha", 3, 2, 7)
    assert line.arguments == [*given, "--config-name", "night", "layout.tpa=2"]
    info = printed("--info", *given)
    assert info is not None and "layout: auto, dp, helix, medha, mine, tp" in info and str(tmp_path) in info
    for wrong, said in (
        (["--config-dir", str(tmp_path / "none")], "none is not a directory"),
        (["--config-name", "day"], "no day.yaml in"),
        (["--config-path", "x"], "--config-path is not supported: use --config-dir DIR for more config groups"),
    ):
        with pytest.raises(ValueError, match=said):
            printed("--info", *wrong)


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("demo p.jsonl -o r.jsonl", "model=demo decode.prompts=p.jsonl decode.output=r.jsonl"),
        (". --output=r.jsonl kv.tokens=1M", "model.path=. decode.output=r.jsonl kv.tokens=1048576"),
        ("org/name@v1.2 --dtype half", "model.path=org/name@v1.2 model.dtype=float16"),
        ("-tp 4 --max-model-len 128K", "layout=tp layout.tpa=4 decode.max_length=131072"),
        ("--tensor-parallel-size=4", "layout=tp layout.tpa=4"),
        ("--max-num-seqs 32 --gpu-memory-utilization 0.8", "decode.max_batch=32 kv.memory_fraction=0.8"),
        ("--kv-cache-dtype auto --seed 3", "decode.seed=3"),
        ("--quantization fp8 --kv-cache-dtype fp8_e4m3", "model.weights=fp8 kv.dtype=fp8"),
        ("decode.prefill_chunk=4K --max-tokens 2K", "decode.prefill_chunk=4096 decode.max_tokens=2048"),
        ("layout.kvp=2 demo layout.tpa=2", "layout.kvp=2 model=demo layout.tpa=2"),
    ],
)
def test_what_stands_for_keys(typed: str, meant: str) -> None:
    line = command_parser.read(typed.split(), commands.RUN)
    assert compose_config(*line.overrides) == compose_config(*meant.split())


@pytest.mark.parametrize("command", commands.COMMANDS.values(), ids=lambda command: command.name)
def test_the_help_of_a_command_is_its_own(
    command: command_parser.Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(flags.API_KEY, "")  # examples set it, and servers of later tests would want a key
    line = command_parser.read(["--help"], command)
    text = compose.info_text(line, command)
    assert text is not None and command.about in text and all(example in text for example in command.examples)
    known = {key for key, _, _, _ in keys(Config)} | {*RUN.groups, "hydra.sweep.dir", flags.API_KEY}
    for flag in command.flags:
        assert f"{flag.names[0]}" in text and {key.partition("=")[0] for key in flag.key.split()} <= known, flag
    for named, _ in command.keys:
        assert {part.partition("=")[0] for part in named.split() if "=" in part} <= known | {"KEY"}, named
    for example in command.examples:
        typed = example.replace("./smollm2-135m-instruct", "demo").replace("./", "")
        read = command_parser.read(shlex.split(typed)[2:], command)
        assert (" -m " in typed) == ("--multirun" in read.options)
        if command in (commands.SWEEP, commands.RUN) and not any("/" in text for text in read.overrides):
            assert len(points(read, tmp_path)) > 1 if "," in typed else compose_config(*read.overrides)
    assert max(map(len, text.splitlines())) <= 120


def test_flags_of_others_are_none_of_ours() -> None:
    ours = {name for command in commands.COMMANDS.values() for flag in command.flags for name in flag.names}
    hydra = {name for flag in flags.HYDRA for name in flag.names}
    assert not (ours | hydra) & flags.FOREIGN_FLAGS.keys()
    known = {key for key, _, _, _ in keys(Config)} | {*RUN.groups, "model.config.KEY", "model.config.rope_scaling.KEY"}
    for flag, answer in flags.FOREIGN_FLAGS.items():
        named = re.findall(r"([a-zA-Z_.]+)=", answer)
        assert set(named) <= known and set(re.findall(r"(?<!\w)-[-\w]+", answer)) <= ours | hydra, flag


@pytest.mark.parametrize(
    "path",
    ["/a b(1)=x{'.jsonl", "a,b", "it's", "[x]", "~/x", "a\\", "x=${root:}y", "'a b'", "\u00fc {", "null.x", "1", "a:b"],
)
def test_paths_are_taken_as_they_are(path: str, tmp_path: Path) -> None:
    """Paths in quotes already, and interpolations, are Hydra's to read."""
    wanted = {"x=${root:}y": f"x={ROOT}y", "'a b'": "a b"}.get(path, path)
    assert compose_config(f"decode.prompts={path}").decode.prompts == wanted
    if "," not in path:
        (point,) = points(command_parser.CommandLine([f"decode.prompts={path}"]), tmp_path)
        assert point.config.decode.prompts == wanted


def swept(*typed: str) -> list[tuple[list[str], Config, str]]:
    line = command_parser.read([*typed, "hydra.sweep.dir=d"] if "hydra" not in str(typed) else typed, commands.SWEEP)
    return [(point.overrides, point.config, str(point.directory)) for point in points(line)]


def test_a_sweep_is_the_product_of_its_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = swept("layout.kvp=1,2", "decode.prompts=a b.jsonl,c=d.jsonl", "hydra.sweep.dir='x y'")
    assert [name for _, _, name in found] == [str(tmp_path / "x y" / str(i)) for i in range(4)]
    assert [(c.layout.kvp, c.decode.prompts) for _, c, _ in found] == [
        (kvp, prompts) for kvp in (1, 2) for prompts in ("a b.jsonl", "c=d.jsonl")
    ]
    assert len(swept("layout.kvp=range(1,3)", "decode.stop=[a,b]")) == 2
    found = swept("layout=glob([h*,t*])", "kv.tokens=choice(128K,1M)")
    assert [overrides for overrides, _, _ in found] == [
        [layout, tokens] for layout in ("layout=helix", "layout=tp") for tokens in ("kv.tokens=128K", "kv.tokens=1M")
    ]
    assert [config.kv.tokens for _, config, _ in found] == 2 * [1 << 17, 1 << 20]


@pytest.mark.parametrize("typed, words", lines("sweeps.txt"))
def test_mistakes_of_a_sweep_are_named(
    typed: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        swept(*typed)
    assert "\n" not in str(caught.value)


def test_hydra_s_habits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "night.yaml").write_text(
        "# @package _global_\nlayout:\n  kvp: 2\nhydra:\n  sweeper:\n    params:\n      seed: 1,2\n"
    )
    mine = "--config-dir", str(tmp_path)
    for typed in ("+experiment=night", "experiment=night"):
        found = swept(*mine, typed, "hydra.job.name=night", "'hydra.sweep.dir=out/${hydra.job.name}'".strip("'"))
        assert [(c.seed, c.layout.kvp) for _, c, _ in found] == [(1, 2), (2, 2)]
        assert [name for _, _, name in found] == [str(tmp_path / "out" / "night" / str(i)) for i in range(2)]
    assert swept("hydra.sweep.subdir=${hydra.job.override_dirname}", "seed=1,2", "hydra.sweep.dir=s")[1][2].endswith(
        "/s/seed=2"
    )
    assert swept("hydra/launcher=basic", "hydra/sweeper=basic", "seed=1,2")[1][1].seed == 2
    assert compose_config("++layout.kvp=3", "~layout.tpa", "+model.config.x=1", "++model.config.y=2").layout.kvp == 3
    assert compose_config("~speculation").speculation == Config().speculation, (
        "a group that is taken out has its defaults"
    )
    assert compose_config("model.config.x=1", "~model.config.x").model.config == {}


def test_a_program_of_hydra_s_keeps_its_own(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text("a: 1\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3", job_name="app"):
        assert compose_config("layout.kvp=3").layout.kvp == 3
        assert compose_app("app", ["a=2"]).a == 2
    assert not GlobalHydra.instance().is_initialized()
    with ThreadPoolExecutor(4) as pool:
        assert [c.seed for c in pool.map(lambda n: compose_config(f"seed={n}"), range(4))] == [*range(4)]
