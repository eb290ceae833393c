"""Signals to the launcher, a rank or all, whatever the job is doing: everybody is gone in time; one line says why."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.checkpoints import checkpoint
from tests.e2e.cli import ENTRY, Ended, Job, torchrun

pytestmark = pytest.mark.timeout(180)

INT, TERM, KILL, STOP = signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP
GONE_S = 30.0
PHASES = ("start", "meeting", "loading", "prefill", "decode")


def start(tmp_path: Path, command: list[str], ranks: int = 3) -> Job:
    """A job whose phases last long enough to be met: a short request, then a long prompt."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": "short", "prompt_ids": [1, 2]}, {"id": "long", "prompt_ids": [1, 2, 3] * 700}]
    lines += [{"id": "endless", "prompt_ids": [5], "max_tokens": 5000}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Job(
        command, f"model.path={checkpoint('qwen3')}", "model.config.max_position_embeddings=9000",
        f"layout.kvp={ranks}", f"decode.prompts={prompts}", f"decode.output={tmp_path}/out.jsonl",
        "decode.max_tokens=4", "decode.max_batch=1", "decode.prefill_chunk=16", log=tmp_path / "log",
    )  # fmt: skip


def wait_until(job: Job, holds: Callable[[], bool], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline and job.process.poll() is None, job.log.read_text()
        time.sleep(0.02)


def met(pid: int) -> bool:
    """Whether a rank has a connection, which is to the store of its job."""
    try:
        return any("socket" in os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def reach(job: Job, phase: str, out: Path) -> None:
    victim = job.rank(1)
    match phase:
        case "meeting":
            wait_until(job, lambda: met(victim))
        case "loading":
            job.wait_for(job.log, "over gloo")
        case "prefill":
            job.wait_for(out, "short")
        case "decode":
            job.wait_for(out, "long")


def ended(job: Job) -> Ended:
    """How the job ended, once none of its processes is left."""
    begin = time.monotonic()
    while job.members():
        seconds = time.monotonic() - begin
        if seconds > GONE_S:
            said = job.log.read_text()
            job.kill()
            raise AssertionError(f"after {seconds:.0f} s there still is {job.members()}:\n{said}")
        job.process.poll()  # or its launcher would stay as a zombie
        time.sleep(0.05)
    return Ended(job.process.wait(5), job.log.read_text(), time.monotonic() - begin)


def check(
    phase: str, number: signal.Signals, target: str, tmp_path: Path, command: list[str] = ENTRY, ranks: int = 3
) -> Ended:
    job = start(tmp_path, command, ranks)
    try:
        reach(job, phase, tmp_path / "out.jsonl")
        if target == "terminal":
            job.send(number)
        else:
            os.kill(job.process.pid if target == "launcher" else job.rank(1), number)
        end = ended(job)
    finally:
        job.kill()
    return end


def judge(end: Ended, number: signal.Signals, target: str) -> None:
    assert "Traceback" not in end.output, end.output
    if target == "rank":
        line = "rank 1 was stopped" if number == STOP else f"rank 1 was killed by signal {int(number)} ({number.name})"
        assert end.code == 1 and line in end.output, end
        assert "rank 0" not in end.output and "rank 2" not in end.output, end.output
    elif number in (INT, TERM):
        assert end.code == 130 and "interrupted: results of finished requests" in end.output.splitlines()[-1], end
    else:
        assert end.code == -KILL, end  # a stopped launcher is killed by the ranks that it keeps waiting


@pytest.mark.parametrize(
    "phase, number, target",
    [
        ("meeting", INT, "terminal"),
        ("loading", STOP, "launcher"),
        ("prefill", KILL, "rank"),
    ],
)
def test_signals_end_everybody(phase: str, number: signal.Signals, target: str, tmp_path: Path) -> None:
    judge(check(phase, number, target, tmp_path), number, target)


def test_no_rank_outlives_the_agent_that_started_it(tmp_path: Path) -> None:
    """Once ranks have tied themselves to its life, which takes their first moments."""
    assert check("meeting", KILL, "launcher", tmp_path, torchrun(2), 2).code == -KILL


@pytest.mark.slow
def test_a_stopped_rank_is_killed_by_its_peers(tmp_path: Path) -> None:
    """Under torchrun, which alone would ask it to end and wait for half a minute more."""
    end = check("decode", STOP, "rank", tmp_path, torchrun(3))
    assert end.code == 1 and "rank 1 gave no sign of life for 15 s" in end.output, end


@pytest.mark.slow
@pytest.mark.parametrize(
    "phase, number, target", [(p, n, t) for p in PHASES for n in (INT, TERM, KILL, STOP) for t in ("launcher", "rank")]
)
def test_every_signal_in_every_phase(phase: str, number: signal.Signals, target: str, tmp_path: Path) -> None:
    end = check(phase, number, target, tmp_path)
    if path := os.environ.get("HELIX_SIGNALS"):  # a table of what happened
        with Path(path).open("a") as file:
            said = (end.output.strip() or "-").splitlines()[-1]
            file.write(f"| {phase} | {number.name} | {target} | {end.seconds:.1f} | {end.code} | {said} |\n")
    judge(end, number, target)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (1, 2)])
@pytest.mark.parametrize("number", [KILL, INT])
def test_pinned_memory_goes_back(number: signal.Signals, world: int, tmp_path: Path) -> None:
    """60 GB over all ranks, which the system has to unpin page by page before a killed rank is gone."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": "short", "prompt_ids": [1, 2], "max_tokens": 2}, {"id": "endless", "prompt_ids": [5, 6]}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = Job(
        ENTRY, "model=qwen2.5-7b", "model.load=random", f"layout.kvp={world}", "attention=block_sparse",
        "attention.from_tokens=0", "kv.tier=host", f"kv.host_bytes={62e9 / world:.0f}", "kv.tokens=1048576",
        f"decode.prompts={prompts}", f"decode.output={out}", "decode.max_batch=2", "decode.max_tokens=1000000",
        "decode.stream=false", log=tmp_path / "log", gpus=True,
    )  # fmt: skip
    try:
        job.wait_for(out, "short", timeout_s=300.0)
        victim = job.rank(world - 1)
        locked = next(x for x in Path(f"/proc/{victim}/status").read_text().splitlines() if x.startswith("VmRSS"))
        os.kill(victim if number == KILL else job.process.pid, number)
        end = ended(job)
    finally:
        job.kill()
    print(f"{number.name}, {world} ranks, {locked.split()[1]} kB of one: all gone after {end.seconds:.1f} s")
    assert end.code == (1 if number == KILL else 130), end
