"""What users get wrong, each answered by one line that names it, before any process starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.program import PROGRAM as LABORATORY
from launch import agent, run
from launch.inputs.files import claim
from launch.inputs.work import RUNTIME, Program
from launch.job import spawn
from tests.bad_inputs.command_lines import BAD_AGENTS, BAD_BENCHMARKS, BAD_COMMAND_LINES, BAD_ENVIRONMENTS, RANKS
from tests.bad_inputs.configs import CONFIGS
from tests.bad_inputs.files import CASES as FILES
from tests.e2e.checkpoints import DEMO, checkpoint
from tests.e2e.cli import ENTRY, Job

PROMPT = '{"id": "a", "prompt_ids": [1, 2, 3]}\n'
Setup = Callable[[Path], Any]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[list[str], str], None]:
    """Runs a command line in this process, which has to end it with one line that has the words, and start nothing."""
    monkeypatch.setattr(spawn, "launch", lambda *_: pytest.fail("ranks were started"))

    def check(arguments: list[str], words: str, program: Program = RUNTIME) -> None:
        capsys.readouterr()  # what making a checkpoint has printed
        code, said = run.main(arguments, program), capsys.readouterr()
        assert code == 1 and said.out == ""
        assert said.err.startswith("error: ") and said.err.count("\n") == 1 and words in said.err, ascii(said.err)

    return check


CASES = [(RUNTIME, *case) for case in BAD_COMMAND_LINES] + [(LABORATORY, *case) for case in BAD_BENCHMARKS]


@pytest.mark.parametrize("program, arguments, code, words", CASES, ids=[ascii(case[1]) for case in CASES])
def test_command_lines(
    program: Program, arguments: list[str], code: int, words: str, tmp_path: Path, refused: Any
) -> None:
    assert code == 1
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(PROMPT)
    paths = {"MODEL": str(checkpoint("qwen3")), "PROMPTS": str(prompts)}
    for name, path in paths.items():
        arguments, words = [text.replace(name, path) for text in arguments], words.replace(name, path)
    refused([f"model.path={paths['MODEL']}", f"decode.prompts={prompts}", *arguments], words, program)


@pytest.mark.parametrize("name, value, code, words", BAD_ENVIRONMENTS)
def test_environments(
    name: str, value: str, code: int, words: str, monkeypatch: pytest.MonkeyPatch, refused: Any
) -> None:
    assert code == 1
    for key, text in {**RANKS, name: value}.items():
        monkeypatch.setenv(key, text)
    refused([], words)


@pytest.mark.parametrize("variables, code, words", BAD_AGENTS)
def test_agents(variables: dict[str, str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"ENDPOINT": "localhost:29500", "NODES": "2", "RANKS": "1"}
    assert agent.main([], good | variables) == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("family, changed, words", CONFIGS, ids=lambda x: None if isinstance(x, str) else str(x))
def test_configs(family: str, changed: dict[str, Any], words: str, tmp_path: Path, refused: Any) -> None:
    model = shutil.copytree(checkpoint(family), tmp_path / "model")
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(content | changed))
    (tmp_path / "p.jsonl").write_text(PROMPT)
    refused([f"model.path={model}", f"decode.prompts={tmp_path / 'p.jsonl'}"], words)


def prepared(directory: Path) -> list[str]:
    shutil.copytree(checkpoint("qwen3"), directory / "model")
    shutil.copytree(DEMO, directory / "demo")  # no links: cases write into files
    (directory / "p.jsonl").write_text(PROMPT)
    return [f"model.path={directory}/model", f"decode.prompts={directory}/p.jsonl", "decode.max_tokens=2"]


@pytest.mark.parametrize(
    "setup, overrides, words",
    [pytest.param(*case[1:3], case[4], id=case[0]) for case in FILES if case[3] == 1],
)
def test_files(setup: Setup, overrides: list[str], words: str, tmp_path: Path, refused: Any) -> None:
    good = prepared(tmp_path)
    setup(tmp_path)
    refused([*good, *(text.replace("{d}", str(tmp_path)) for text in overrides)], words.replace("{d}", str(tmp_path)))


def test_two_runs_do_not_write_one_output(tmp_path: Path, refused: Any) -> None:
    out = tmp_path / "out.jsonl"
    with claim(out):
        refused(
            [*prepared(tmp_path), f"decode.output={out}", "decode.resume=true"],
            f"decode.output={out} cannot be written: another run writes it",
        )


def test_requests_out_of_range_are_refused_and_the_others_served(tmp_path: Path) -> None:
    good = prepared(tmp_path)
    cases = [case for case in FILES if case[3] == 3]
    lines = [PROMPT]
    for _, setup, overrides, _, _ in cases:
        assert overrides == []
        setup(tmp_path)
        lines.append((tmp_path / "p.jsonl").read_text().splitlines()[-1] + "\n")
    (tmp_path / "p.jsonl").write_text("".join(lines))
    job = Job(ENTRY, *good, f"decode.output={tmp_path / 'out.jsonl'}", log=tmp_path / "log")
    ended = job.wait()
    assert ended.code == spawn.REFUSED, ended.output
    first, *refusals = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert first["finish_reason"] == "length" and len(refusals) == len(cases)
    for refusal, case in zip(refusals, cases, strict=True):
        assert refusal["finish_reason"] == "error" and case[4] in refusal["reason"], (case[0], refusal)
