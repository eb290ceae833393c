"""The page on architecture lists every file that a run passes through."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.e2e.cli import ROOT, Job

SECTION = (ROOT / "docs" / "architecture.md").read_text("utf-8").partition("## From the command to the token\n")[2]
SECTION = SECTION.partition("\n## ")[0]
# Prints the files whose functions and objects are used, imports apart.
TRACER = """
import os, runpy, sys, threading
root, seen = os.getcwd() + "/", set()

def tell(file):
    if file.startswith(root) and file[len(root):].partition("/")[0] in ("comm", "helix", "kernels", "launch"):
        os.write(log, (file[len(root):] + chr(10)).encode())

def note(frame, event, argument):
    code = frame.f_code
    made = code.co_filename == "<string>" and code.co_name == "__init__"  # of a dataclass
    if event != "call" or code in seen or not code.co_flags & 2 or not (made or code.co_filename.startswith(root)):
        return
    caller = frame.f_back
    while caller is not None:
        if caller.f_code.co_name == "<module>" and caller.f_globals.get("__name__") not in ("__main__", None):
            return
        caller = caller.f_back
    seen.add(code)
    module = sys.modules.get(type(frame.f_locals.get("self")).__module__)
    tell((getattr(module, "__file__", None) or "") if made else code.co_filename)

log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
sys.argv = sys.argv[2:]
sys.path.insert(0, root)
threading.setprofile(note)
sys.setprofile(note)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def listed(text: str) -> list[str]:
    return re.findall(r"^- `([^`]+)`", text, re.MULTILINE)


def lines(files: list[str]) -> int:
    return sum(len((ROOT / file).read_text("utf-8").splitlines()) for file in files)


def test_the_files_are_there_and_counted() -> None:
    """Lines change: those on the page may be a twentieth off."""
    files, last = listed(SECTION), [file for group in SECTION.split("\n**")[-3:] for file in listed(group)]
    counts = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+)\s(?:files|lines)", SECTION)]
    assert counts[::2] == [len(files), len(last)] and len(files) == len(set(files))
    assert counts[1::2] == [pytest.approx(lines(files), rel=0.05), pytest.approx(lines(last), rel=0.05)]


def test_every_file_of_a_run_is_listed(tmp_path: Path) -> None:
    (prompts := tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "Hello there", "max_tokens": 8}))
    given = [f"decode.prompts={prompts}", f"decode.output={tmp_path / 'out.jsonl'}", "kv.tokens=512"]
    program = [sys.executable, "-c", TRACER, str(tmp_path / "log"), "torchrun_entry.py", "model.path=assets/demo-model"]
    ended = Job(program, *given, log=tmp_path / "said").wait()
    assert ended.code == 0, ended.output
    traced = {file for file in (tmp_path / "log").read_text().split() if not file.endswith("/reference.py")}
    assert len(traced) > 60 and sorted(traced - {*listed(SECTION)}) == []
