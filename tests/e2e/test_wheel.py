"""The wheel, in an environment of its own: it decodes, serves its page, and says what it leaves to the checkout."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from launch.cli import COMMANDS, LABORATORY
from tests.e2e.checkpoints import DEMO
from tests.e2e.cli import ROOT
from tests.e2e.installed import install, job

FOLDERS = ("helix", "kernels", "comm", "launch", "benchmarks", "conf")
IN_A_CHECKOUT = ("bench", "demo", "fidelity", "acceptance", "plot", "tables", "needles make output=x")
IN_A_CHECKOUT += ("planner check", "planner bill", "papers")

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("wheel"), editable=False)


def test_it_decodes(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "def read_json(path):"}) + "\n")
    words = [f"model.path={DEMO}", "decode.prompts=p.jsonl", "decode.output=o.jsonl", "layout.kvp=2"]
    ended = job(installed, tmp_path, "run", *words, "decode.max_tokens=4", "record=r.json").wait()
    assert ended.code == 0, ended.output
    assert len(json.loads((tmp_path / "o.jsonl").read_text())["output_ids"]) == 4
    assert json.loads((tmp_path / "r.json").read_text())["commit"] is None


def test_torchrun_starts_its_ranks(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "def read_json(path):"}) + "\n")
    words = ["-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "helix", "run", str(DEMO), "p.jsonl"]
    words += ["-o", "o.jsonl", "layout.kvp=2", "decode.max_tokens=4"]
    ended = job(installed, tmp_path, *words, program="python").wait()
    assert ended.code == 0 and len(json.loads((tmp_path / "o.jsonl").read_text())["output_ids"]) == 4, ended.output


def test_it_serves_its_page(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()  # of the user's own
    (tmp_path / "launch" / "__init__.py").touch()
    server = job(installed, tmp_path, "serve", f"model.path={DEMO}", "layout.kvp=1", "kv.tokens=2048", "serve.port=0")
    try:
        server.wait_for(server.log, "curl -N ")
        url = server.log.read_text().partition("is served at ")[2].partition("\n")[0]
        page = ROOT / "launch" / "serving" / "page"
        for file in filter(Path.is_file, page.rglob("*")):
            name = "" if file.name == "index.html" else f"page/{file.relative_to(page)}"
            with urllib.request.urlopen(f"{url.rstrip('/')}/{name}", timeout=10) as answer:
                assert answer.read() == file.read_bytes(), name
    finally:
        server.kill()


def files(root: Path, packages: Path | None = None) -> set[Path]:
    """Lists the files that a wheel holds: of the checkout, or of where one is installed."""
    roots = {folder: root if folder != "helix" else packages or root for folder in FOLDERS}
    found = (file.relative_to(roots[folder]) for folder in FOLDERS for file in (roots[folder] / folder).rglob("*.*"))
    code = {file for file in found if file.suffix in (".py", ".yaml", ".txt", ".html", ".css", ".js")}
    own = ("benchmarks", "results"), ("helix", "_runtime")
    return {file for file in code if file.parts[:2] not in own and file.stem != "mine"}  # of `helix calibrate`


def test_it_has_all_that_the_checkout_has(installed: Path) -> None:
    (packages,) = (installed.parent / "lib").glob("python*/site-packages")
    assert files(packages / "helix" / "_runtime", packages) == files(ROOT)
    (record,) = packages.glob("helix_runtime-*.dist-info/RECORD")
    held = [line.partition(",")[0] for line in record.read_text().splitlines()]
    tops = {file.partition("/")[0] for file in held if not file.startswith("../")}
    assert tops == {"helix", record.parent.name}, "names of others are theirs"
    assert {file for file in held if "/licenses/" in file} == {
        f"{record.parent.name}/licenses/{name}" for name in ("LICENSE", "NOTICE")
    }


def test_commands_of_the_checkout_say_so(installed: Path, tmp_path: Path) -> None:
    assert {command.split()[0] for command in IN_A_CHECKOUT} <= (COMMANDS | LABORATORY).keys()
    ended = job(installed, tmp_path, "-c", PROGRAM, *IN_A_CHECKOUT, program="python").wait()
    assert ended.code == 0, ended.output
    said = ended.output
    for command, line in zip(IN_A_CHECKOUT, said.splitlines(), strict=True):
        assert line.startswith(f"error: helix {command.partition(' output')[0]}"), said
        assert " needs Helix's checkout" in line, said


# All of them in one process: each takes seconds to import.
PROGRAM = """
import importlib, sys, helix
sys.path.insert(0, str(helix.ROOT))
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
    program = "import sys, helix, runpy; sys.path.append(str(helix.ROOT)); runpy.run_module('torchrun_entry')"
    ended = job(installed, tmp_path, "-c", program, program="python").wait()
    assert ended.code == 1 and f"package 'comm' was imported from {tmp_path}" in ended.output, ended.output
