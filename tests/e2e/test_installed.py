"""What is installed, where users stand: in the checkout, above it and elsewhere; commands, programs and notebooks."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.cli import COMMANDS, LABORATORY
from tests.e2e.checkpoints import DEMO
from tests.e2e.command_line import ROOT

pytest.importorskip("jupyter_client", reason="of the extra dev; GPU hosts may lack it")
from tests.e2e.installed_package import Notebook, install, job

PROMPT, TEXT = "def read_json(path):", '\n    """\n    Return'
LLM = f"LLM({str(DEMO)!r}, kvp=1, overrides=['kv.tokens=8192'])"
OTHERS = "import comm, kernels\nprint(*[hasattr(comm, 'create_comm'), hasattr(kernels, 'own')])"
PROGRAM = f"from helix import LLM\nwith {LLM} as llm:\n    print(llm.generate({PROMPT!r}, max_tokens=4)[0].text)\n"
TORCHRUN = ["python", "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "helix", "run"]
FOLDERS = ("helix", "kernels", "comm", "launch", "benchmarks", "conf")
IN_A_CHECKOUT = ("bench", "demo", "fidelity", "acceptance", "plot", "tables", "needles make output=x")
IN_A_CHECKOUT += ("planner check", "planner sparse", "papers")

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", params=["editable", "wheel"])
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp(request.param), request.param == "editable")


from_wheel = pytest.mark.parametrize("programs", ["wheel"], indirect=True)


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """Directories to stand in; the second has a folder `helix`, the clone, which is no package."""
    (tmp_path / "other").mkdir()
    (tmp_path / "helix").symlink_to(ROOT)
    return {"checkout": ROOT, "parent": tmp_path, "other": tmp_path / "other"}


@pytest.mark.parametrize(
    "programs, place, script",
    [
        ("editable", "parent", False),
        ("wheel", "checkout", False),
        ("wheel", "other", True),
        pytest.param("editable", "other", True, marks=pytest.mark.slow),
        pytest.param("editable", "checkout", False, marks=pytest.mark.slow),
        pytest.param("wheel", "parent", False, marks=pytest.mark.slow),
    ],
    indirect=["programs"],
)
def test_a_program_decodes(programs: Path, places: dict[str, Path], place: str, script: bool, tmp_path: Path) -> None:
    (places["other"] / "mine.py").write_text(PROGRAM + OTHERS)
    words = ["mine.py"] if script else ["-c", PROGRAM]
    ended = job(programs, places[place], *words, program="python", log=tmp_path / "log").wait()
    assert ended.code == 0 and ended.output.startswith(TEXT), ended.output
    assert not script or ended.output.endswith("True True\n")


@pytest.mark.parametrize(
    "words", [["helix", "run"], pytest.param(TORCHRUN, marks=pytest.mark.slow)], ids=["helix", "torchrun"]
)
@from_wheel
def test_a_command_decodes(programs: Path, places: dict[str, Path], words: list[str]) -> None:
    place = places["parent"]
    (place / "p.jsonl").write_text(json.dumps({"prompt": PROMPT}) + "\n")
    given = [str(DEMO), "p.jsonl", "-o", "o.jsonl", "layout.kvp=2", "decode.max_tokens=4", "record=r.json"]
    ended = job(programs, place, *words[1:], *given, program=words[0]).wait()
    assert ended.code == 0 and json.loads((place / "o.jsonl").read_text())["text"] == TEXT, ended.output
    assert json.loads((place / "r.json").read_text())["commit"] is None


@from_wheel
def test_it_serves_its_page(programs: Path, places: dict[str, Path]) -> None:
    (places["parent"] / "launch").mkdir()  # of the user's own
    (places["parent"] / "launch" / "__init__.py").touch()
    server = job(programs, places["parent"], "serve", str(DEMO), "layout.kvp=1", "kv.tokens=2048", "serve.port=0")
    try:
        server.wait_for(server.log, "curl -N ")
        url = server.log.read_text().partition("is served at ")[2].partition("\n")[0]
        page = ROOT / "launch" / "serving" / "page"
        for file in filter(Path.is_file, page.rglob("*")):
            name = "" if file.name == "index.html" else f"page/{file.relative_to(page)}"
            with urllib.request.urlopen(f"{url.rstrip('/')}/{name}", timeout=60) as answer:
                assert answer.read() == file.read_bytes(), name
    finally:
        server.kill()


def files(root: Path, packages: Path | None = None) -> set[Path]:
    """Lists the files that a wheel holds: of the checkout, or of where one is installed."""
    roots = {folder: root if folder != "helix" else packages or root for folder in FOLDERS}
    found = (file.relative_to(roots[folder]) for folder in FOLDERS for file in (roots[folder] / folder).rglob("*.*"))
    code = {file for file in found if file.suffix in (".py", ".yaml", ".txt", ".html", ".css", ".js")}
    own_folders = ("benchmarks", "results"), ("helix", "_runtime")
    return {file for file in code if file.parts[:2] not in own_folders and file.stem != "mine"}  # of `helix calibrate`


@from_wheel
def test_a_wheel_has_all_that_the_checkout_has(programs: Path) -> None:
    (packages,) = (programs.parent / "lib").glob("python*/site-packages")
    assert files(packages / "helix" / "_runtime", packages) == files(ROOT)
    (record,) = packages.glob("helix_runtime-*.dist-info/RECORD")
    held = [line.partition(",")[0] for line in record.read_text().splitlines()]
    tops = {file.partition("/")[0] for file in held if not file.startswith("../")}
    assert tops == {"helix", record.parent.name}, "names of others are theirs"
    assert {file for file in held if "/licenses/" in file} == {
        f"{record.parent.name}/licenses/{name}" for name in ("LICENSE", "NOTICE")
    }


# All in one process, since each takes seconds to import. At the end, a `comm` comes first, as Jupyter has one.
ALL_COMMANDS = """
import importlib, runpy, sys, helix
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
sys.path.remove(str(helix.ROOT))
sys.path.append(str(helix.ROOT))
for name in [name for name in sys.modules if name.partition(".")[0] == "comm"]:
    del sys.modules[name]
runpy.run_module("torchrun_entry")
"""


@from_wheel
def test_what_a_wheel_cannot_do_is_said(programs: Path, tmp_path: Path) -> None:
    assert {command.split()[0] for command in IN_A_CHECKOUT} <= (COMMANDS | LABORATORY).keys()
    (tmp_path / "comm").mkdir()
    (tmp_path / "comm" / "__init__.py").touch()
    ended = job(programs, tmp_path, "-c", ALL_COMMANDS, *IN_A_CHECKOUT, program="python").wait()
    *output, last = ended.output.splitlines()
    assert ended.code == 1 and f"package 'comm' was imported from {tmp_path}" in last, ended.output
    for command, line in zip(IN_A_CHECKOUT, output, strict=True):
        assert line.startswith(f"error: helix {command.partition(' output')[0]}"), ended.output
        assert " needs a checkout of Helix" in line, ended.output


@pytest.fixture
def notebook(programs: Path, places: dict[str, Path]) -> Iterator[Notebook]:
    opened = Notebook(programs, places["parent"])
    yield opened
    opened.close()


@pytest.mark.clients
@pytest.mark.parametrize("programs", ["editable", "wheel"], indirect=True)
def test_a_notebook_decodes(notebook: Notebook) -> None:
    """The cells of the example, and what goes wrong in notebooks: interrupts, models that are made again."""
    document = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in document["cells"])
    assert notebook.run(OTHERS) == "True True\n"
    assert notebook.run(cells[0].replace('LLM("../assets/demo-model")', LLM)) == ""
    generated, answer, streamed = (notebook.run(cell) for cell in cells[1:-1])
    assert generated.startswith(TEXT) and generated.startswith(answer) and len(streamed) > 48
    long = f"print('begun')\nllm.generate({PROMPT!r}, max_tokens=8000, ignore_eos=True)"
    assert notebook.run(long, interrupted=True) == "begun\nKeyboardInterrupt: "
    assert notebook.run(cells[1]) == generated, "it stays usable"
    assert notebook.run(f"with {LLM} as second: print(second.generate({PROMPT!r}, max_tokens=16)[0].text)") == answer
    assert notebook.run(cells[-1]) == "" and notebook.run(OTHERS) == "True True\n"
