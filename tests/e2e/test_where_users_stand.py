"""`from helix import LLM` where users stand: in the checkout, above it and elsewhere; in programs and in notebooks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.checkpoints import DEMO
from tests.e2e.cli import ROOT, Job
from tests.e2e.installed import install, job
from tests.e2e.notebook import Notebook

PROMPT, TEXT = "def read_json(path):", '\n    """\n    Return'
LLM = f"LLM({str(DEMO)!r}, kvp=1, overrides=['kv.tokens=8192'])"
OTHERS = "import comm, kernels\nprint(*[hasattr(comm, 'create_comm'), hasattr(kernels, 'own')])"
PROGRAM = f"from helix import LLM\nwith {LLM} as llm:\n    print(llm.generate({PROMPT!r}, max_tokens=4)[0].text)\n"

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module", params=["editable", "wheel"])
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp(request.param), request.param == "editable")


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """Directories to stand in; the second has a folder `helix`, the clone, which is no package."""
    (tmp_path / "other").mkdir()
    (tmp_path / "helix").symlink_to(ROOT)
    return {"checkout": ROOT, "parent": tmp_path, "other": tmp_path / "other"}


@pytest.mark.parametrize("place, script", [("checkout", False), ("parent", False), ("other", True)])
def test_a_program_decodes(programs: Path, places: dict[str, Path], place: str, script: bool, tmp_path: Path) -> None:
    (places["other"] / "mine.py").write_text(PROGRAM + OTHERS)
    words = ["mine.py"] if script else ["-c", PROGRAM]
    command = ["env", "-u", "PYTHONPATH", "-C", str(places[place]), str(programs / "python"), *words]
    ended = Job(command, log=tmp_path / "log").wait()
    assert ended.code == 0 and ended.output.startswith(TEXT), ended.output
    assert not script or ended.output.endswith("True True\n")


TORCHRUN = ["python", "-m", "torch.distributed.run", "--nproc-per-node=1", "-m", "helix", "run"]


@pytest.mark.parametrize("words", [["helix", "run"], pytest.param(TORCHRUN, marks=pytest.mark.slow)])
@pytest.mark.parametrize("programs", ["editable"], indirect=True)
def test_a_command_decodes(programs: Path, places: dict[str, Path], words: list[str]) -> None:
    """`test_wheel.py` has the commands of a wheel."""
    (places["parent"] / "p.jsonl").write_text(json.dumps({"prompt": PROMPT}) + "\n")
    given = [str(DEMO), "p.jsonl", "-o", "o.jsonl", "decode.max_tokens=4"]
    ended = job(programs, places["parent"], *words[1:], *given, program=words[0]).wait()
    assert ended.code == 0 and json.loads((places["parent"] / "o.jsonl").read_text())["text"] == TEXT, ended.output


@pytest.mark.slow
def test_ranks_of_torchrun_decode_in_a_program(programs: Path, places: dict[str, Path]) -> None:
    (places["other"] / "mine.py").write_text(PROGRAM)
    ended = job(programs, places["other"], *TORCHRUN[1:4], "mine.py", program="python").wait()
    assert ended.code == 0 and TEXT in ended.output, ended.output


@pytest.mark.slow
@pytest.mark.parametrize("programs", ["editable"], indirect=True)
def test_a_server_starts(programs: Path, places: dict[str, Path]) -> None:
    server = job(programs, places["parent"], "serve", str(DEMO), "kv.tokens=512", "serve.port=0")
    try:
        server.wait_for(server.log, "is served at ")
    finally:
        server.kill()


@pytest.fixture
def notebook(programs: Path, places: dict[str, Path], place: str) -> Iterator[Notebook]:
    opened = Notebook(programs, places[place])
    yield opened
    opened.close()


SLOW = [pytest.param(place, marks=pytest.mark.slow) for place in ("checkout", "other")]


@pytest.mark.parametrize("place", ["parent", *SLOW])
def test_a_notebook_decodes(notebook: Notebook, place: str) -> None:
    """The cells of the example, and what goes wrong in notebooks: interrupts, models that are made again."""
    document = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in document["cells"])
    others = f"True {place != 'checkout'}\n"  # whose folders come first there
    assert notebook.run(OTHERS) == others
    assert notebook.run(cells[0].replace('LLM("../assets/demo-model")', LLM)) == ""
    generated, answer, streamed = (notebook.run(cell) for cell in cells[1:-1])
    assert generated.startswith(TEXT) and generated.startswith(answer) and len(streamed) > 48
    long = f"print('begun')\nllm.generate({PROMPT!r}, max_tokens=8000, ignore_eos=True)"
    begin = time.monotonic()
    assert notebook.run(long, interrupted=True) == "begun\nKeyboardInterrupt: " and time.monotonic() - begin < 20
    assert notebook.run(cells[1]) == generated, "it stays usable"
    assert notebook.run(f"with {LLM} as second: print(second.generate({PROMPT!r}, max_tokens=16)[0].text)") == answer
    assert notebook.run(cells[-1]) == "" and notebook.run(OTHERS) == others
