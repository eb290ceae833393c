"""Jobs of two GPUs of which one is lost."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.checkpoints import checkpoint
from tests.e2e.command_line import ENTRY, Ended, Job


@pytest.mark.gpu(2)
@pytest.mark.parametrize("stop_signal", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank_ends_a_job_of_gpus(stop_signal: signal.Signals, tmp_path: Path) -> None:
    """Its peer waits inside a kernel that never ends, and is gone within 30 seconds all the same."""
    ended = end_without_rank_1(start(tmp_path / "out.jsonl"), tmp_path / "out.jsonl", stop_signal)
    assert ended.code == 1 and "rank 1 " in ended.output, ended.output


@pytest.mark.gpu(2)
def test_no_token_of_a_step_that_gave_up_is_kept(tmp_path: Path) -> None:
    """What a rank computes after it has given its peer up must be no result, as decode.resume would keep it."""
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert start(whole, tokens=100).wait().code == 0
    # Where rank 0 waits is chance: in a kernel (test_graph_collectives.py:check_recovery) or, where rank 1 had
    # launched all of a run, for it to take the next decision; then who started it is the first to see it.
    ended = end_without_rank_1(start(cut, "comm.timeout_s=1", tokens=100), cut, signal.SIGSTOP)
    causes = (
        "(comm.timeout_s) for rank 1 in a collective",
        "rank 1 sent no heartbeat",
        "rank 1 was stopped by a signal",
    )
    named = [cause for cause in causes if cause in ended.output]
    print(named)
    assert ended.code == 1 and named, ended.output
    wanted = {line["id"]: line for line in map(json.loads, whole.read_text().splitlines())}
    found = [json.loads(line) for line in cut.read_text().splitlines()]
    assert 0 < len(found) < len(wanted) and all(line == wanted[line["id"]] for line in found)


def start(out: Path, *overrides: str, tokens: int = 400) -> Job:
    """A job of two GPUs that writes 200 results of so many tokens to `out`."""
    prompts = out.with_suffix(".prompts")
    prompts.write_text("".join(json.dumps({"prompt_ids": [i + 1, 2], "max_tokens": tokens}) + "\n" for i in range(200)))
    return Job(
        ENTRY, f"model.path={checkpoint('qwen3')}", f"decode.prompts={prompts}", f"decode.output={out}",
        "layout.kvp=2", "decode.max_batch=2", *overrides, log=out.with_suffix(".log"), gpus=True,
    )  # fmt: skip


def end_without_rank_1(job: Job, out: Path, stop_signal: signal.Signals) -> Ended:
    """Stops rank 1 after the first result, and sees the job end."""
    job.wait_for(out, "length")
    victim, peer = job.rank(1), job.rank(0)
    os.kill(victim, stop_signal)
    begin = time.monotonic()
    while peer in job.members():
        assert time.monotonic() - begin < 30, job.log.read_text()
        time.sleep(0.1)
    print(f"rank 1 {stop_signal.name}: its peer ended after {time.monotonic() - begin:.1f} s")
    if victim in job.members():
        os.kill(victim, signal.SIGKILL)
    return job.wait(30)
