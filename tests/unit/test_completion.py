"""Completion of `helix` in a shell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.completion import candidates
from tests.e2e.command_line import ROOT


@pytest.mark.parametrize(
    "line, some",
    [
        ("helix s", ["serve", "sweep", "simulate"]),
        ("helix run ll", ["llama-3.1-405b", "llama-3.1-70b", "llama-3.1-8b"]),
        (
            "helix run demo lay",
            ["layout=", "layout.mode=", "layout.kvp=", "layout.tpa=", "layout.tpf=", "layout.ep=", "layout.dp="],
        ),
        ("helix serve demo layout=", ["layout=auto", "layout=dp", "layout=helix", "layout=medha", "layout=tp"]),
        ("helix serve demo --po", ["--port"]),
        ("helix serve demo kv.dtype=", ["kv.dtype=auto", "kv.dtype=fp8", "kv.dtype=fp8_all", "kv.dtype=k16v8"]),
        ("helix run demo --config-", ["--config-dir", "--config-name"]),
        ("helix run demo llam", []),  # the model is there
        ("helix run demo ", []),  # files are as good
        ("helix plan x", []),
    ],
)
def test_what_a_word_may_become(line: str, some: list[str]) -> None:
    assert candidates(line) == some


def test_bash_completes(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    (tmp_path / "helix").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m launch.cli "$@"\n')
    (tmp_path / "helix").chmod(0o755)
    script = """eval "$(helix --shell-completion bash)"
    complete -p helix
    COMP_LINE="helix run demo layout=t" COMP_POINT=23; _helix 2>/dev/null; echo "${COMPREPLY[@]}"
    helix --shell-completion csh"""
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([bash, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["complete -o default -F _helix helix", "layout=tp"], done
    assert done.returncode == 1 and done.stderr == "error: --shell-completion csh: must be one of bash, zsh, fish\n"
