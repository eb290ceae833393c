"""Decoding from Python: ranks that an LLM starts, and ranks in which one is made."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helix.llm import LLM, as_prompts
from launch.cli import COMMANDS
from tests.e2e.checkpoints import DEMO, checkpoint, oracle
from tests.e2e.cli import ROOT, Job

LENGTHS = (7, 17)


def test_a_plain_process_starts_its_ranks_itself() -> None:
    wanted = oracle("qwen3", LENGTHS, 12)
    with LLM(checkpoint("qwen3"), kvp=2, max_length=40) as llm:
        ranks = [process.pid for process in llm._ranks]
        outputs = llm.generate([c.prompt for c in wanted], max_new_tokens=12)
        assert [o.output_ids[: len(c.tokens)] for o, c in zip(outputs, wanted, strict=True)] == [
            c.tokens for c in wanted
        ]
        refused = llm.generate([(1, 999), (1, 2)], max_new_tokens=2)
        assert refused[0].finish_reason == "error" and "outside the vocabulary" in (refused[0].reason or "")
        assert len(refused[1].output_ids) == 2
        (alone,) = llm.generate(wanted[0].prompt, max_new_tokens=12)
        assert alone.output_ids == outputs[0].output_ids
        # The cache has room for eight sequences of that length, and yet one may not take the room of two.
        (longer,) = llm.generate((1, 2, 3), max_new_tokens=38)
        assert longer.finish_reason == "error" and "max_length=40 (raise max_length)" in (longer.reason or "")
        assert len(llm.generate((1, 2, 3), max_new_tokens=37)[0].output_ids) == 37
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
    program = code[1] + 'print(len(llm.generate("import os", max_new_tokens=4)), "output of one text")\n'
    (tmp_path / "mine.py").write_text(program.replace('"DIR"', repr(str(DEMO))).replace("=64", "=4"))
    ended = Job(["env", f"PYTHONPATH={ROOT}", sys.executable, str(tmp_path / "mine.py")], log=tmp_path / "log").wait()
    assert ended.code == 0 and len(ended.output.splitlines()) >= 3 and "Error" not in ended.output, ended.output
    assert ended.output.endswith("\n1 output of one text\n")


def test_what_cannot_be_is_said_before_ranks_start() -> None:
    with pytest.raises(ValueError, match="tpa=4 does not fit"):
        LLM(checkpoint("qwen3"), tpa=4)
    with pytest.raises(ValueError, match="is not a directory"):
        LLM("/nowhere")
    with pytest.raises(ValueError, match="max_length=0 must be positive"):
        LLM(checkpoint("qwen3"), max_length=0)


@pytest.mark.parametrize(
    "given, prompts",
    [
        ("text", ["text"]),
        ("", [""]),
        (["a", "bc"], ["a", "bc"]),
        ([1, 2], [[1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (["text", (5,)], ["text", [5]]),
        ([[]], [[]]),
        ([], []),
    ],
)
def test_one_prompt_or_several(given: Any, prompts: list[Any]) -> None:
    assert as_prompts(given) == prompts


@pytest.mark.parametrize("given", [[b"text"], ["text", 5], [{"prompt": "text"}], [None], [[1, "a"]], [[1.5]]])
def test_what_is_no_prompt(given: Any) -> None:
    with pytest.raises(ValueError, match=r"prompt [01] is .*: give a text or a list of token ids"):
        as_prompts(given)


def test_the_command_names_all_commands() -> None:
    def helix(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "launch.cli", *arguments], cwd=ROOT, capture_output=True, text=True
        )

    assert all(name in helix("--help").stdout for name in COMMANDS)
    assert "known: run, serve, chat, info, plan, sweep" in helix("dance").stderr and helix("dance").returncode == 1
    ended = helix("run", f"model.path={DEMO}", "layout.kvp=0")
    assert ended.returncode == 1 and ended.stderr.startswith("error: layout.kvp=0")
