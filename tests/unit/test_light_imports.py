"""Commands that only answer or refuse a line import nothing that takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from launch.cli import COMMANDS
from tests.e2e.command_line import ROOT

TYPOS = {
    "--frob": "--frob",
    "decode.max_new_tokns=3": "decode.max_new_tokns is unknown",
    "layout=helx": "layout has no option helx",
    "layout.kvp=x": "layout.kvp=x must be an integer",
    "/no/model": "'/no/model' is not a directory",
}
LINES: dict[str, dict[str, str]] = {  # by command, the words that refuse a line; what composes no config is apart
    **dict.fromkeys(("run", "serve", "sweep"), TYPOS),
    "chat": {line: TYPOS[line] for line in ("--frob", "/no/model")},  # the rest it leaves to `helix serve`
    "plan": TYPOS | {"demo gpus=x": "gpus=x must be an integer", "demo kv=fp8": "kv=fp8 is now kv.dtype=fp8"},
    "info": {"json=x": "json=x must be -", "/no/model": TYPOS["/no/model"]},
    "convert": {"a.gguf": "expected FILE.gguf DIR", "a.gguf b dtype=x": "dtype=x must be one of"},
    "cache": {"list": "expected list DIR or clear DIR", "clear /no/folder": "/no/folder is not a directory"},
    "simulate": {"point demo hardware=h200 layout=x": "layout has no option x"},
    "demo": {},
}
PROGRAM = """
import contextlib, io, json, sys
from importlib import import_module

for name, line in json.loads(sys.argv.pop()):
    said = io.StringIO()
    sys.argv = ["-m", *line]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        main = import_module(f"launch.{name}").main
        try:
            code = main() if name == "demo" else main(line)
        except SystemExit as end:
            code = end.code
    heavy = [m for m in sys.modules if m.partition(".")[0] in ("torch", "transformers", "triton") or "kernels." in m]
    print(json.dumps([code, said.getvalue(), heavy]))
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_help_and_refusals_import_nothing_heavy(name: str) -> None:
    lines = {"--help": "helix " + name, **LINES[name]}
    given = json.dumps([(name, line.split()) for line in lines])
    done = subprocess.run([sys.executable, "-c", PROGRAM, given], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for (line, words), answer in zip(lines.items(), done.stdout.splitlines(), strict=True):
        code, output, heavy = json.loads(answer)
        refusal = code if isinstance(code, str) else output
        assert words in refusal and heavy == [], (line, code, output, heavy)
        assert refusal.startswith("error: ") == (line != "--help")
