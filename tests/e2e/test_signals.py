"""Signals to the launcher, a rank or all, whatever the job is doing: everybody is gone; one line says why."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.e2e.checkpoints import checkpoint
from tests.e2e.command_line import ENTRY, Job, torchrun, write_lines

pytestmark = pytest.mark.timeout(400)

INT, TERM, KILL, STOP = signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP
# Whoever is stopped has to be so for a while; here it is a short one.
HASTY = "import sys; from launch.job import lifeline; from launch.run import entry; lifeline.STOPPED_S = 1.0; "
HASTY_ENTRY = [sys.executable, "-c", HASTY + "sys.exit(entry(sys.argv[1:]))"]
# Targets by phase and signal that are not slow.
QUICK = {("meeting", INT): "terminal", ("loading", STOP): "launcher", ("prefill", KILL): "rank"}


def met(pid: int) -> bool:
    """Whether a rank has a connection, which is to the store of its job."""
    try:
        return any("socket" in os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def reach(job: Job, phase: str, out: Path) -> None:
    victim = job.rank(1)
    if phase == "start":
        return
    if phase == "meeting":
        job.until(lambda: met(victim), f"rank 1 ({victim}) has no connection")
    else:
        file, words = {"loading": (job.log, "over gloo"), "prefill": (out, "short"), "decode": (out, "long")}[phase]
        job.wait_for(file, words)


@pytest.mark.parametrize(
    "phase, number, target, command",
    [
        *(pytest.param(phase, number, target, HASTY_ENTRY) for (phase, number), target in QUICK.items()),
        # Ranks have tied themselves to the life of an agent, which takes their first moments.
        pytest.param("meeting", KILL, "launcher", torchrun(3)),
        # It alone would ask a stopped rank to end and wait for half a minute more: the others kill it.
        pytest.param("decode", STOP, "rank", torchrun(3), marks=pytest.mark.slow),
        *(
            pytest.param(phase, number, target, ENTRY, marks=pytest.mark.slow)
            for phase in ("start", "meeting", "loading", "prefill", "decode")
            for number in (INT, TERM, KILL, STOP)
            for target in ("launcher", "rank")
        ),
    ],
)
def test_signals_end_everybody(
    phase: str, number: signal.Signals, target: str, command: list[str], tmp_path: Path
) -> None:
    """A job has phases that can be met: a short request, then a long prompt, then many tokens."""
    lines = [{"id": "short", "prompt_ids": [1, 2]}, {"id": "long", "prompt_ids": [1, 2, 3] * 700}]
    prompts = write_lines(tmp_path / "p.jsonl", *lines, {"id": "endless", "prompt_ids": [5], "max_tokens": 5000})
    job = Job(
        command, f"model.path={checkpoint('qwen3')}", "model.config.max_position_embeddings=9000", "layout.kvp=3",
        f"decode.prompts={prompts}", f"decode.output={tmp_path}/out.jsonl", "decode.max_tokens=4",
        "decode.max_batch=1", "decode.prefill_chunk=16", log=tmp_path / "log",
    )  # fmt: skip
    try:
        reach(job, phase, tmp_path / "out.jsonl")
        if target == "terminal":
            job.send(number)
        else:
            os.kill(job.process.pid if target == "launcher" else job.rank(1), number)
        end = job.wait()
    finally:
        job.kill()
    assert "Traceback" not in end.output, end.output
    if target == "rank":
        line = f"rank 1 was killed by signal {int(number)} ({number.name})"
        if number == STOP:
            line = "rank 1 was stopped" if command is ENTRY else "rank 1 sent no heartbeat for 15 s"
        assert end.code == 1 and line in end.output, end
        assert " ERROR " not in end.output and "rank 2" not in end.output, end.output
    elif number in (INT, TERM):
        assert end.code == 130 and "interrupted: results of finished requests" in end.output.splitlines()[-1], end
    else:
        assert end.code == -KILL, end  # a stopped launcher is killed by the ranks that it keeps waiting


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (1, 2)])
@pytest.mark.parametrize("number", [KILL, INT])
def test_pinned_memory_goes_back(number: signal.Signals, world: int, tmp_path: Path) -> None:
    """60 GB over all ranks, which the system has to unpin page by page before a killed rank is gone."""
    short, endless = {"id": "short", "prompt_ids": [1, 2], "max_tokens": 2}, {"id": "endless", "prompt_ids": [5, 6]}
    prompts, out = write_lines(tmp_path / "p.jsonl", short, endless), tmp_path / "out.jsonl"
    job = Job(
        ENTRY, "model=qwen2.5-7b", "model.load=random", f"layout.kvp={world}", "attention=block_sparse",
        "attention.from_tokens=0", "kv.offload=host", f"kv.offload_host_bytes={62e9 / world:.0f}", "kv.tokens=1048576",
        f"decode.prompts={prompts}", f"decode.output={out}", "decode.max_batch=2", "decode.max_tokens=1000000",
        "decode.stream=false", log=tmp_path / "log", gpus=True,
    )  # fmt: skip
    try:
        job.wait_for(out, "short", timeout_s=300.0)
        os.kill(job.rank(world - 1) if number == KILL else job.process.pid, number)
        end = job.wait()
    finally:
        job.kill()
    assert end.code == (1 if number == KILL else 130), end
