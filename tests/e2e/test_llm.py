"""Decoding from Python: ranks that an LLM starts, and ranks in which one is made."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helix.llm import LLM
from launch.cli import COMMANDS
from tests.e2e.checkpoints import DEMO, checkpoint, oracle
from tests.e2e.cli import ROOT, Job

LENGTHS = (7, 17)


def test_a_plain_process_starts_its_ranks_itself() -> None:
    wanted = oracle("qwen3", LENGTHS, 12)
    with LLM(checkpoint("qwen3"), kvp=2, max_length=200) as llm:
        ranks = [process.pid for process in llm._ranks]
        outputs = llm.generate([c.prompt for c in wanted], max_new_tokens=12)
        assert [o.output_ids[: len(c.tokens)] for o, c in zip(outputs, wanted, strict=True)] == [
            c.tokens for c in wanted
        ]
        refused = llm.generate([(1, 999), (1, 2)], max_new_tokens=2)
        assert refused[0].finish_reason == "error" and "outside the vocabulary" in (refused[0].reason or "")
        assert len(refused[1].output_ids) == 2
        with pytest.raises(ValueError, match="temperature"):
            llm.generate([(1, 2)], temperature=-1.0)
        os.kill(ranks[1], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="ranks failed"):
            llm.generate([(1, 2)])
        with pytest.raises(RuntimeError, match="closed"):
            llm.generate([(1, 2)])
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks)


def test_the_six_lines_of_the_readme_are_a_whole_program(tmp_path: Path) -> None:
    """The script needs no guard around its main part, and nobody outlives it."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert code is not None
    (tmp_path / "mine.py").write_text(code[1].replace('"DIR"', repr(str(DEMO))).replace("=64", "=4"))
    ended = Job(["env", f"PYTHONPATH={ROOT}", sys.executable, str(tmp_path / "mine.py")], log=tmp_path / "log").wait()
    assert ended.code == 0 and len(ended.output.splitlines()) >= 2 and "Error" not in ended.output, ended.output


def test_what_cannot_be_is_said_before_ranks_start() -> None:
    with pytest.raises(ValueError, match="tpa=4 does not fit"):
        LLM(checkpoint("qwen3"), tpa=4)
    with pytest.raises(ValueError, match="is not a directory"):
        LLM("/nowhere")


def test_the_command_names_all_commands() -> None:
    def helix(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "launch.cli", *arguments], cwd=ROOT, capture_output=True, text=True
        )

    assert all(name in helix("--help").stdout for name in COMMANDS)
    assert "known: run, serve, sweep" in helix("dance").stderr and helix("dance").returncode == 1
    ended = helix("run", f"model.path={DEMO}", "layout.kvp=0")
    assert ended.returncode == 1 and ended.stderr.startswith("error: layout.kvp=0")
