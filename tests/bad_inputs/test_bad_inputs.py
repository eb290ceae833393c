"""What users get wrong, each answered by one line that names it, before any process starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.program import PROGRAM as LABORATORY
from helix.config import Config, DecodeConfig, ModelConfig
from launch import agent, plan, run, simulate
from launch.inputs.files import claim
from launch.inputs.job_kinds import RUNTIME, Program
from launch.inputs.preflight import preflight
from launch.inputs.prompt_files import PromptFile
from launch.job import spawn
from tests import benchmark_config
from tests.bad_inputs.files import REQUESTS, cases, do
from tests.bad_inputs.tables import lines
from tests.benchmark_config import compose_config
from tests.e2e import mtp
from tests.e2e.checkpoints import DEMO, checkpoint
from tests.e2e.command_line import ENTRY, Job

PROMPT = '{"id": "a", "prompt_ids": [1, 2, 3]}\n'
Refused = Callable[..., None]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command line in this process, which has to end it with one line that has the words, and start nothing."""
    monkeypatch.setattr(spawn, "launch", lambda *_: pytest.fail("ranks were started"))

    def check(arguments: list[str], words: str, program: Program = RUNTIME) -> None:
        capsys.readouterr()  # what making a checkpoint has printed
        code, output = run.main(arguments, program), capsys.readouterr()
        assert code == 1 and output.out == ""
        assert output.err.startswith("error: ") and output.err.count("\n") == 1 and words in output.err, ascii(
            output.err
        )

    return check


# What has blanks in it, or no text at all.
MORE = [
    ("", "'': a setting is KEY=VALUE"),
    (" ", "' ': a setting is KEY=VALUE"),
    ("a b=1", "a b is unknown; known: model, layout, kv, "),
    ("decode.prompts=/a b(1)={x'.jsonl", "decode.prompts=/a b(1)={x'.jsonl cannot be read: No such file"),
    ("model.path=~/no such dir", "model.path=~/no such dir is not a directory; it must hold a Hugging Face checkpoint"),
    ("layout.kvp=2\nlayout.tpa=3", "layout.kvp=2 layout.tpa=3: the value cannot be parsed; quote it, as in "),
    ("decode.prompts=\udcff", "'decode.prompts=\\udcff' is not UTF-8"),
]


@pytest.mark.parametrize(
    "arguments, words", [*lines("runs.txt"), *(pytest.param([typed], words, id=ascii(typed)) for typed, words in MORE)]
)
def test_command_lines(arguments: list[str], words: str, tmp_path: Path, refused: Refused) -> None:
    check_command_line(arguments, words, tmp_path, refused)


def stands_for() -> dict[str, str]:
    """Words of the table of runs over several ranks."""
    return {
        "DP": "layout.mode=dp layout.kvp=1 layout.dp=2",
        "HOST": "kv.offload=host kv.offload_host_bytes=1e9",
        "SPARSE": "attention=block_sparse",
        "DRAFT": f"layout.kvp=4 bench=decode speculation=model speculation.model.path={checkpoint('qwen3')}",
        "STATES": f"speculation=model speculation.model.path={checkpoint('qwen3-next')}",
    }


@pytest.mark.parametrize("arguments, words", lines("preflight.txt"))
def test_runs_of_several_ranks(arguments: list[str], words: str, tmp_path: Path) -> None:
    """Every rank finds what is wrong, before any collective."""
    (tmp_path / "p.jsonl").write_text(PROMPT)
    family, ranks, *typed = arguments
    model = mtp.with_layer(family[4:]) if family.startswith("mtp+") else checkpoint(family)
    typed = [text for word in typed for text in stands_for().get(word, word).split()]
    given = f"model.path={model}", f"decode.prompts={tmp_path / 'p.jsonl'}", "layout.kvp=2"
    with pytest.raises(ValueError) as refusal:
        benchmark_config.preflight(compose_config(*given, *typed), int(ranks))
    assert all(word in str(refusal.value) for word in words.split("|")), refusal.value


@pytest.mark.parametrize("arguments, words", lines("plans.txt"))
def test_plans(arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.inputs.planning.device_here", lambda: None)
    command, *typed = arguments
    with pytest.raises(SystemExit) as refusal:
        {"plan": plan, "simulate": simulate}[command].main(typed)
    assert words in str(refusal.value) and "\n" not in str(refusal.value), refusal.value


@pytest.mark.parametrize("arguments, words", lines("benchmarks.txt"))
def test_benchmarks(arguments: list[str], words: str, tmp_path: Path, refused: Refused) -> None:
    check_command_line(arguments, words, tmp_path, refused, LABORATORY)


def check_command_line(arguments: list[str], words: str, tmp_path: Path, refused: Refused, *program: Program) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(PROMPT)
    good = ["model.path=MODEL", "decode.prompts=PROMPTS"]
    for name, path in (("MODEL", str(checkpoint("qwen3"))), ("PROMPTS", str(prompts))):
        good, arguments = ([text.replace(name, path) for text in some] for some in (good, arguments))
        words = words.replace(name, path)
    refused([*good, *arguments], words, *program)


RANKS = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
RANKS |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
BLANK = "RANK= 1", "RANK= 1 must be an integer from 0 to 3 (WORLD_SIZE=4)"


@pytest.mark.parametrize("given, words", [*lines("environments.txt"), pytest.param([BLANK[0]], BLANK[1], id="a blank")])
def test_environments(given: list[str], words: str, monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    name, _, value = given[0].partition("=")
    for key, text in {**RANKS, name: value}.items():
        monkeypatch.setenv(key, text)
    refused([], words)


@pytest.mark.parametrize("given, words", lines("agents.txt"))
def test_agents(given: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, _, value = given[0].partition("=")
    good = {"ENDPOINT": "localhost:29500", "NODES": "2", "RANKS": "1"}
    assert agent.main([], good | {name: value}) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("arguments, words", lines("configs.txt"))
def test_configs(arguments: list[str], words: str, tmp_path: Path) -> None:
    """A run's checks name the key, in one line."""
    family, *changed = arguments
    model = shutil.copytree(checkpoint(family), tmp_path / "model")
    content = json.loads((model / "config.json").read_text()) | json.loads(" ".join(changed))
    (model / "config.json").write_text(json.dumps(content))
    (tmp_path / "p.jsonl").write_text(PROMPT)
    config = Config(model=ModelConfig(path=str(model)), decode=DecodeConfig(prompts=str(tmp_path / "p.jsonl")))
    with pytest.raises(ValueError) as refusal:
        preflight(config, 1)
    assert words in str(refusal.value) and "\n" not in str(refusal.value), ascii(refusal.value)


LONG = [
    ("[" * 100_000, "line 2: nested too deeply"),
    ('{"prompt_ids": [' + "9" * 5000 + "]}", "line 2: a number cannot be read: Exceeds the limit (4300 digits)"),
    ("\ufeff{}", "line 2: not JSON"),
]


@pytest.mark.parametrize(
    "line, words", [*lines("prompts.txt"), *(pytest.param([line], words, id=ascii(line[:9])) for line, words in LONG)]
)
def test_lines_of_prompts(line: list[str], words: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine", "id": "first"}\n' + " ".join(line))
    with pytest.raises(ValueError) as refusal:
        PromptFile(path)
    assert words in str(refusal.value) and str(path) in str(refusal.value) and "\n" not in str(refusal.value)


def prepared(directory: Path) -> list[str]:
    shutil.copytree(checkpoint("qwen3"), directory / "model")
    shutil.copytree(DEMO, directory / "demo")  # no links: cases write into files
    (directory / "p.jsonl").write_text(PROMPT)
    return [f"model.path={directory}/model", f"decode.prompts={directory}/p.jsonl", "decode.max_tokens=2"]


@pytest.mark.timeout(60)  # a FIFO that is opened waits for ever
@pytest.mark.parametrize("what, typed, words", cases())
def test_files(what: str, typed: str, words: str, tmp_path: Path, refused: Refused) -> None:
    good = prepared(tmp_path)
    do(what, tmp_path)
    held = {path: path.read_bytes() for path in tmp_path.glob("*.json*") if path.is_file() and not path.is_symlink()}
    refused([*good, *typed.replace("{d}", str(tmp_path)).split()], words.replace("{d}", str(tmp_path)))
    assert all(path.read_bytes() == content for path, content in held.items())


def test_two_runs_do_not_write_one_output(tmp_path: Path, refused: Refused) -> None:
    out = tmp_path / "out.jsonl"
    with claim(out):
        refused(
            [*prepared(tmp_path), f"decode.output={out}", "decode.resume=true"],
            f"decode.output={out} cannot be written: another run is writing it",
        )


def test_requests_out_of_range_are_refused_and_the_others_served(tmp_path: Path) -> None:
    good = prepared(tmp_path)
    (tmp_path / "p.jsonl").write_text(PROMPT + "".join(json.dumps(request) + "\n" for request, _ in REQUESTS))
    job = Job(ENTRY, *good, f"decode.output={tmp_path / 'out.jsonl'}", log=tmp_path / "log")
    ended = job.wait()
    assert ended.code == spawn.REFUSED, ended.output
    first, *refusals = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert first["finish_reason"] == "length"
    for refusal, (request, words) in zip(refusals, REQUESTS, strict=True):
        assert refusal["finish_reason"] == "error" and words in refusal["reason"], (request, refusal)
