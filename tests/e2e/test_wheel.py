"""The wheel, in an environment of its own: it decodes, serves its page, and says what it leaves to the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
import venv
from pathlib import Path

import pytest

from launch.cli import COMMANDS, LABORATORY
from tests.e2e.checkpoints import DEMO
from tests.e2e.cli import ROOT, Job

FOLDERS = ("helix", "kernels", "comm", "launch", "benchmarks", "conf")
PARTS = (*FOLDERS, "pyproject.toml", "torchrun_entry.py", "README.md", "LICENSE")
RECORDS = shutil.ignore_patterns("results", "figures", "*.md")  # of the laboratory, which a wheel leaves out
IN_A_CHECKOUT = ("bench", "demo", "fidelity", "acceptance", "plot", "tables", "needles make output=x")
IN_A_CHECKOUT += ("planner check", "planner bill", "papers")

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel, which sees this one's other packages: no network is needed."""
    directory = tmp_path_factory.mktemp("wheel")
    source, environment = directory / "source", directory / "environment"
    source.mkdir()
    for part in PARTS:
        if part in FOLDERS:
            shutil.copytree(ROOT / part, source / part, ignore=RECORDS if part == "benchmarks" else None)
        else:
            shutil.copy(ROOT / part, source / part)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", str(source), "--no-deps", "--no-build-isolation", f"--wheel-dir={directory}"]
    subprocess.run(build, check=True)
    (wheel,) = directory.glob("*.whl")
    venv.create(environment, symlinks=True)
    subprocess.run(
        [*pip, f"--python={environment}", "install", "--no-deps", "--no-index", "--no-compile", str(wheel)], check=True
    )
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in others))
    return environment / "bin"


def job(installed: Path, directory: Path, *words: str, program: str = "helix") -> Job:
    return Job(
        ["env", "-u", "PYTHONPATH", "-C", str(directory), str(installed / program)], *words, log=directory / "log"
    )


def test_it_decodes(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "def read_json(path):"}) + "\n")
    words = [f"model.path={DEMO}", "decode.prompts=p.jsonl", "decode.output=o.jsonl", "layout.kvp=2"]
    ended = job(installed, tmp_path, "run", *words, "decode.max_new_tokens=4", "record=r.json").wait()
    assert ended.code == 0, ended.output
    assert len(json.loads((tmp_path / "o.jsonl").read_text())["output_ids"]) == 4
    assert json.loads((tmp_path / "r.json").read_text())["commit"] is None


def test_it_serves_its_page(installed: Path, tmp_path: Path) -> None:
    server = job(installed, tmp_path, "serve", f"model.path={DEMO}", "layout.kvp=1", "kv.tokens=2048", "serve.port=0")
    try:
        server.wait_for(server.log, "curl -N ")
        url = server.log.read_text().partition("is served at ")[2].partition("\n")[0]
        for file in (ROOT / "launch" / "serving" / "page").iterdir():
            name = "" if file.name == "index.html" else f"page/{file.name}"
            with urllib.request.urlopen(f"{url.rstrip('/')}/{name}", timeout=10) as answer:
                assert answer.read() == file.read_bytes(), name
    finally:
        server.kill()


def files(root: Path) -> set[Path]:
    """Lists the files that a wheel holds, of the checkout or of where it is installed."""
    found = (file.relative_to(root) for folder in FOLDERS for file in (root / folder).rglob("*.*"))
    code = {file for file in found if file.suffix in (".py", ".yaml", ".txt", ".html", ".css", ".js")}
    return {file for file in code if file.parts[:2] != ("benchmarks", "results")}


def test_it_has_all_that_the_checkout_has(installed: Path) -> None:
    (packages,) = (installed.parent / "lib").glob("python*/site-packages")
    assert files(packages) == files(ROOT)


def test_commands_of_the_checkout_say_so(installed: Path, tmp_path: Path) -> None:
    assert {command.split()[0] for command in IN_A_CHECKOUT} <= (COMMANDS | LABORATORY).keys()
    program = [str(installed / "python"), "-c", PROGRAM, *IN_A_CHECKOUT]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    said = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    for command, line in zip(IN_A_CHECKOUT, said.splitlines(), strict=True):
        assert line.startswith(f"error: helix {command.partition(' output')[0]}"), said
        assert " needs Helix's checkout" in line, said


# All of them in one process: each takes seconds to import.
PROGRAM = """
import importlib, sys
for command in sys.argv[1:]:
    name, *arguments = command.split()
    file = f"{name}.__main__" if name == "papers" else name
    module = importlib.import_module(f"{'launch' if name == 'demo' else 'benchmarks'}.{file}")
    sys.argv = [name, *(arguments or ["kernels"] * (name == "bench"))]
    try:
        module.main()
    except SystemExit as end:
        print(end.code)
"""


def test_packages_of_others_are_not_taken_for_its_own(installed: Path, tmp_path: Path) -> None:
    """Jupyter has a `comm`: one that comes first is named."""
    (tmp_path / "comm").mkdir()
    (tmp_path / "comm" / "__init__.py").touch()
    ended = job(installed, tmp_path, "-m", "torchrun_entry", program="python").wait()
    assert ended.code == 1 and f"package 'comm' was imported from {tmp_path}" in ended.output, ended.output
