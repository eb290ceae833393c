"""The pages: links, paths and commands work, tables and figures are those of the records."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks import reference
from benchmarks.program import PROGRAM
from benchmarks.records.tables import PAGES, with_tables
from helix.layers.specs import ROPE_TYPES
from helix.layout import HelixLayout
from helix.models.checkpoint import METHODS
from launch import cli
from launch.inputs import command_parser
from launch.inputs.command_parser import Command
from launch.inputs.commands import COMMANDS, SWEEP
from launch.inputs.compose import compose_config, points
from launch.inputs.job_kinds import RUNTIME
from tests.e2e.checkpoints import DEMO

ROOT = Path(__file__).parents[2]
ROOT_PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/papers/README.md"]
DOCS = [*ROOT_PAGES, *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
FOLDERS = "assets|benchmarks|comm|conf|docs|examples|helix|kernels|launch|tests"
PATH = re.compile(rf"(?<![\w./-])((?:{FOLDERS})/[\w./*-]*[\w*/])")
QUOTED_VALUE = (  # in an error: a number, a variable's text, a setting
    r"\d[\d.*]*|\.\.\.|\b[A-Z_]{2,}\b|[\w.]+=[\w.*\[]*|\blayout[.\w]+|'\w+'|[()]|bfloat|bitsandbytes|ranks,"
)
KINDS = "csv|html|json|jsonl|md|pdf|png|py|sbatch|sh|toml|txt|yaml|yml"
FILE = re.compile(
    rf"(?<![\w./:-])((?:[\w*.-]+/)+[\w*.-]*\.(?:{KINDS}))\b(?:#([\w-]+))?"
)  # in any folder, also one not here
PLACEHOLDER = re.compile(r"\b(?:x|test_x|x_sm90|mine)\.|[A-Z]{2,}")  # in `helix/models/x.py`, `conf/GROUP/`
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)")
NEEDS = re.compile(r"\s+# (needs GPUs|needs several hosts|needs that directory|takes minutes)$")
RUNS = {
    "torchrun_entry.py": RUNTIME,
    "benchmarks.entry": PROGRAM,
    "launch/agent.sh": RUNTIME,
    "launch/slurm.sbatch": RUNTIME,
}


CODE = [ROOT / room for room in ("helix", "kernels", "comm", "launch", "conf")]
CODE += [*(ROOT / "benchmarks").glob("*.py"), *(f.parent for f in (ROOT / "benchmarks").glob("*/__init__.py"))]
CODE += [ROOT / "benchmarks" / "conf"]
BESIDE = "torchrun_entry.py", "Makefile", "pyproject.toml", "constraints.txt", ".ci/run"  # code that is in no room


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings have on the web."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    plain = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def commands(page: str) -> Iterator[tuple[str, bool]]:
    """Lines of a page's shell blocks, without comments, and whether they run anywhere in seconds."""
    for block in re.findall(r"^```sh\n(.*?)^```", read(page), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            command = re.sub(r"\s+# .*", "", line)
            if command.strip():
                yield " ".join(command.split()), NEEDS.search(line) is None


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_the_recorded_ones(page: str) -> None:
    assert with_tables(page) == read(page), "run `make docs`"


def test_the_configuration_page_is_that_of_the_code() -> None:
    assert reference.page() == reference.PAGE.read_text(encoding="utf-8"), "run `make docs`"


@pytest.mark.parametrize("page", [*DOCS, "benchmarks/LOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    dead = []
    for link, anchor in LINK.findall(read(page)):
        target = ((ROOT / page).parent / link).resolve() if link else ROOT / page
        if not target.exists():
            dead.append(link)
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            dead.append(f"{link}#{anchor}")
    assert not dead


@pytest.mark.parametrize("page", DOCS)
def test_paths_are_there(page: str) -> None:
    prose = re.sub(r"<!-- table .*?<!-- end -->|^```.*?^```|\]\([^)]*\)", "", read(page), flags=re.M | re.S)
    named = {path for code in re.findall(r"`([^`]+)`", prose) for path in PATH.findall(code)}
    named |= {path for command, _ in commands(page) for path in PATH.findall(command)}
    assert missing(named) + dead_files(prose) == []


@cache
def is_there(path: str) -> bool:
    return any(ROOT.glob(path)) if "*" in path else (ROOT / path).exists()


def missing(paths: Iterable[str]) -> list[str]:
    return sorted(path for path in paths if not PLACEHOLDER.search(path) and not is_there(path))


def dead_files(text: str) -> list[str]:
    """Files and headings of pages that a text names and that are not there."""
    named = FILE.findall(text)
    dead = [
        f"{path}#{anchor}"
        for path, anchor in named
        if anchor and (ROOT / path).exists() and anchor not in anchors(read(path))
    ]
    return missing(path for path, _ in named) + dead


def remarks(file: Path) -> str:
    """Takes what a file says to its readers: comments and docstrings; all of a text."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".txt":
        return text
    said = re.findall(r"(?:^|\s)(#.*)$", text, re.M)
    if file.suffix == ".py":
        documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
        said += [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    return "\n".join(said)


def files_in(*paths: Path) -> list[Path]:
    """Lists files of this project's code, among some files and folders."""
    found = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.*"))]
    return [file for file in found if file.is_file() and file.suffix != ".pyc" and "vendor" not in file.parts]


def test_what_code_names_is_there() -> None:
    """Paths, links and headings in comments and docstrings of all rooms and of conf/; papers are named by their ids."""
    files = [ROOT / name for name in BESIDE]
    files += files_in(*CODE, ROOT / "tests")
    found = []
    for file in files:
        said = remarks(file)
        links = [link for link, _ in LINK.findall(said) if link and not (file.parent / link).exists()]
        dead = [*dead_files(said), *missing(PATH.findall(said)), *links, *re.findall(r"\(papers\b.*", said)]
        found += [f"{file.relative_to(ROOT)}: {name}" for name in dict.fromkeys(dead)]
    assert found == []


def test_each_figure_is_shown_once() -> None:
    shown = Counter(Path(link).name for page in DOCS for link, _ in LINK.findall(read(page)) if link.endswith(".png"))
    plotted = {
        file.name
        for folder in ("assets", "benchmarks/figures", "docs/images")
        for file in (ROOT / folder).rglob("*.png")
    }
    assert plotted == set(shown)
    assert set(shown.values()) == {1}


def test_the_worked_example_is_what_the_layout_says() -> None:
    """Four ranks of the demo model: 8 query heads, 2 KV heads of 64, 768 FFN columns, 4096 tokens; a sequence of 40."""
    layout, heads = HelixLayout.create(kvp=2, tpa=2), (8, 2)

    def span(numbers: range) -> str:
        return str(numbers.start) if len(numbers) == 1 else f"{numbers.start}-{numbers.stop - 1}"

    for rank in range(4):
        kvp = layout.kvp_rank(rank)
        blocks = [range(b, min(b + 16, 40)) for b in range(0, 40, 16) if layout.token_owner(b, 16) == kvp]
        cells = [
            str(rank), f"({layout.tpa_rank(rank)}, {kvp})", span(layout.q_heads(rank, *heads)),
            span(layout.kv_heads(rank, 2)), ", ".join(map(span, blocks)), span(layout.o_heads(rank, *heads)),
            span(layout.hidden_columns(rank, *heads, 64)), span(layout.ffn_columns(rank, 768)),
            span(layout.vocab_rows(rank, 4096)),
        ]  # fmt: skip
        assert f"| {' | '.join(cells)} |\n" in read("docs/concepts.md")


@pytest.mark.parametrize("page", DOCS)
def test_commands_are_understood(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs compose, programs have the options, quick ones that need no GPU are run, paths and targets exist."""
    monkeypatch.chdir(ROOT)
    for command, quick in commands(page):
        words = [word for word in shlex.split(command) if not re.match(r"[A-Z][A-Z0-9_]*=", word)]
        if program := next((program for name, program in RUNS.items() if name in words), None):
            at = max(i for i, word in enumerate(words) if word in RUNS)
            _composes(words[at + 1 :], program.cli_command, tmp_path)
        elif words[:2] == ["helix", "bench"] and any(word.startswith("bench=") for word in words):
            _composes(words[2:], PROGRAM.cli_command, tmp_path)
        elif words[0] == "helix" and words[1] in COMMANDS:
            _composes(words[2:], COMMANDS[words[1]], tmp_path)
        elif words[0] == "helix" and words[1] in cli.COMMANDS | cli.LABORATORY:
            module = f"{'launch' if words[1] in cli.COMMANDS else 'benchmarks'}.{words[1]}"
            _has_options(module, words[2:], monkeypatch, capsys)
            if quick:
                assert _main(module, words[2:], monkeypatch) in (None, 0), command
        elif words[:3] == ["python", "-m", "pytest"]:
            assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), command
        elif words[0] == "torchrun" or (words[2:3] and words[2].startswith("examples.")):
            assert importlib.util.find_spec(words[words.index("-m") + 1]), command
        elif words[:2] == ["python", "-m"]:
            _has_options(words[2], words[3:], monkeypatch, capsys)
            if quick:
                assert _main(words[2], words[3:], monkeypatch) in (None, 0), command
        elif words[0] == "make":
            assert subprocess.run(["make", "-n", words[1]], capture_output=True).returncode == 0, command
        else:
            assert words[0] in (".", "pip", "git", "cd", "eval") or words[1:] in (["--help"], ["--version"]), command


def _composes(words: list[str], command: Command, directory: Path) -> None:
    line = command_parser.read([str(DEMO) if word in ("DIR", "./model") else word for word in words], command)
    if {"--help", "--info", "--url"} & {*line.options, *line.flag_values}:
        return
    sweeps = "--multirun" in line.options or command is SWEEP
    found = (
        [point.config for point in points(line, directory)]
        if sweeps
        else [compose_config(line.overrides, line.settings)]
    )
    for config in found:
        assert config.model.path is not None or config.model.load == "random", "a shape has no weights"


def _has_options(
    module: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [words[0]] if words and module in ("launch.simulate", "benchmarks.bench", "benchmarks.planner") else []
    assert _main(module, [*command, "--help"], monkeypatch) in (None, 0)
    said = capsys.readouterr().out
    for option in (word.partition("=")[0] for word in words if re.match(r"--\w|\w+=", word)):
        assert option in (*re.split(r"[\s=]", said), "--help"), f"{module} has no {option}"


def _main(module: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """What `python -m MODULE WORDS` ends with, run in this process."""
    monkeypatch.setattr(sys, "argv", [module, *words])
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    try:
        return importlib.import_module(f"{module}.__main__" if spec.submodule_search_locations else module).main()
    except SystemExit as end:
        return end.code


def test_troubleshooting_refuses_what_is_not_supported() -> None:
    text = (ROOT / "docs/howto/troubleshooting.md").read_text()
    methods = re.findall(r"the checkpoint is quantized \((\S+),", text)
    assert methods and not {*methods} & {*METHODS}
    kinds = re.findall(r"`RoPE scaling 'dynamic' is not supported` \| (.*) are \|", text)
    assert [tuple(re.split(", | and ", each)) for each in kinds] == [ROPE_TYPES]


def test_the_lines_that_troubleshooting_quotes_are_the_codes() -> None:
    """Between values, which are numbers, settings and `...`, and inside of parentheses or not."""
    written = []
    for path in (path for room in ("helix", "kernels", "comm", "launch") for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                constants = [value.value if isinstance(value, ast.Constant) else "\0" for value in node.values]
                written.append("".join(map(str, constants)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                written.append(node.value)
    source = "\n".join(written)
    rows = [row for row in (ROOT / "docs/howto/troubleshooting.md").read_text().splitlines() if row.startswith("| `")]
    quoted = [
        line
        for row in rows
        for line in re.findall(r"`([^`]+)`", row.split(" | ")[0])
        if " " in line and '"' not in line
    ]
    pieces = [(line, piece.strip(" ,;:'")) for line in quoted for piece in re.split(QUOTED_VALUE, line)]
    assert len(pieces) > 40
    assert [(line, piece) for line, piece in pieces if len(piece) > 8 and piece not in source] == []
