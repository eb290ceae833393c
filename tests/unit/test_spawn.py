"""Ranks as copies of their launcher, and jobs that somebody measures: what is made of their last words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launch.client.supervisor import cause
from launch.job.lifeline import age_s
from launch.job.report import Phases
from launch.job.spawn import captured_stderr
from tests.e2e.command_line import ROOT

# A launcher that has checked a run, as every launcher has, and starts ranks again and again.
LAUNCHER = """
import atexit, os, signal, sys, time
from contextlib import contextmanager
from pathlib import Path

import torch

from helix.transformers_import import import_transformers
from launch.inputs.compose import compose_config
from launch.inputs.preflight import prepare_run
from launch.job import spawn


def threads(moment):
    print(moment, len(os.listdir("/proc/self/task")), flush=True)


def state():
    sockets = sum(fd.is_socket() for fd in Path("/proc/self/fd").iterdir())
    handled = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if callable(signal.getsignal(n))]
    masked, name = signal.pthread_sigmask(signal.SIG_BLOCK, ()), Path("/proc/self/comm").read_text().strip()
    print(name, sockets, handled, masked, torch.get_num_threads(), os.environ["LOCAL_WORLD_SIZE"])
    return 0


def fail():
    if os.environ["RANK"] == "1":
        raise KeyError("a cause")
    time.sleep(60)


def die():
    os.kill(os.getpid(), signal.SIGSEGV)


@contextmanager
def directory():
    yield
    print("cleaned")


torch.cuda.device_count()
threads("plain")
import_transformers()
prepare_run(compose_config(["model=demo", "layout.kvp=2", "decode.prompts=assets/prompts.jsonl"]))
os.environ.pop("OMP_NUM_THREADS")
os.cpu_count = lambda: 6
os.register_at_fork(after_in_parent=lambda: threads("copied"))
atexit.register(print, "left")
print("once", end=" ")
with directory():
    for work in (state, lambda: 7, fail, die):
        print("returned", spawn.launch(2 if work in (state, fail) else 1, work, []), flush=True)
torch.cuda._is_in_bad_fork = lambda: True
say = "import os, sys; os.write(1, (os.environ['RANK'] + ' ' + str(sys.argv[1:]) + chr(10)).encode())"  # in one piece
print("anew", spawn.launch(2, state, ["-c", say, "k=v"]))
"""


def test_ranks_are_copies_that_leave_the_rest_to_their_launcher() -> None:
    """They have neither its signal handlers nor its sockets, and no thread is lost: it has none when they start.

    Beside GPUs, counting them begins one: it belongs to the driver's library, which a copy does not use.
    """
    ended = subprocess.run(
        [sys.executable, "-c", LAUNCHER], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""},
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    output = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stderr
    assert output[0] == "plain 1" or torch.cuda.is_available(), output
    copied = output[0].replace("plain", "copied")
    assert output[1] == f"once {copied}" and output.count(copied) == 1 + 1 + 2 + 1 + 2, output
    mine = [line for line in output if line.startswith("helix rank ")]
    anew = [line for line in output if line.endswith("['k=v']")]
    assert sorted(anew) == ["0 ['k=v']", "1 ['k=v']"], "CUDA is of no use in a copy: a rank begins anew"
    assert sorted(mine) == [f"helix rank {r} 0 [] set() 3 2" for r in range(2)]
    rest = [line for line in output[2:] if line not in [*mine, *anew, copied]]
    assert rest == ["returned 0", "returned 7", "returned 1", "returned 1", "cleaned", "anew 0", "left"]
    assert ended.stderr.count("KeyError: 'a cause'") == 1 and ended.stderr.count("Traceback") == 1, ended.stderr
    assert "rank 0 was killed by signal 11 (SIGSEGV)" in ended.stderr


def test_a_launcher_whose_parent_ignored_ended_children_has_their_exit_codes() -> None:
    """Children ignore from their start what their parent ignores, such as a shell after `trap '' CHLD`."""
    code = (
        "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "from launch.job import lifeline, spawn; lifeline.begin(); print(spawn.launch(2, lambda: 7, []))"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("7\n", "")


@pytest.mark.parametrize(
    "program, restartable, restarts, code",
    [("torchrun", True, 0, -9), ("torchrun", True, 1, 7), ("torchrun", False, 1, -9), ("others", False, 0, 7)],
)
def test_a_failed_rank_ends_the_torchrun_that_would_not_restart_it(
    program: str, restartable: bool, restarts: int, code: int, tmp_path: Path
) -> None:
    rank = f"from launch.job.lifeline import *; begin(); end_torchrun({restartable}); sys.exit(7)"
    (agent := tmp_path / program).write_text(
        f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {rank!r}]).returncode)"
    )
    variables = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_MAX_RESTARTS": str(restarts), "WORLD_SIZE": "1"}
    variables |= {"PYTHONPATH": str(ROOT), "LOCAL_WORLD_SIZE": "1"}
    assert subprocess.run([sys.executable, agent], env=os.environ | variables, timeout=60).returncode == code


def test_what_jobs_say_is_heard_and_shown(capfd: pytest.CaptureFixture[str]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with captured_stderr() as lines:
        subprocess.run([sys.executable, "-c", "import sys; print('error: no room', file=sys.stderr)"], check=True)
        os.write(2, b"rank 1 failed:\n")
    os.write(2, b"afterwards\n")
    assert lines == ["error: no room", "rank 1 failed:"] and len(os.listdir("/proc/self/fd")) == before
    assert capfd.readouterr().err == "error: no room\nrank 1 failed:\nafterwards\n"


@pytest.mark.parametrize("full", [False, True], ids=["pipe without reader", "full disk"])
def test_a_log_that_cannot_be_written_ends_nothing(full: bool) -> None:
    """Neither a server, nor its launcher or ranks, nor the exit code; and who listens to jobs still hears them."""
    code = (
        "import os, signal, sys\n"
        "from launch.job import lifeline, spawn\n"
        "def say():\n"
        "    print('said' * 9999, flush=True)\n"
        "    print('said' * 9999, file=sys.stderr)\n"
        "def rank():\n"
        "    say()\n"
        "    if os.environ['RANK'] == '1':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return 0\n"
        "lifeline.begin(serves=True)\n"
        "say()\n"
        "assert spawn.launch(1, rank, []) == 0\n"
        "assert spawn.launch(2, rank, []) == 1\n"
        "with spawn.captured_stderr() as lines:\n"
        "    for _ in range(3000):\n"
        "        os.write(2, b'x' * 99 + b'\\n')\n"
        "sys.exit(7 if len(lines) == 3000 else 8)\n"
    )
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed, open("/dev/full", "w") as disk:
        log = disk if full else closed
        ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=log, stderr=log, timeout=60)
    assert ended.returncode == 7


def test_how_long_a_process_is_there_begins_with_its_start() -> None:
    before = age_s(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as young:
        ages = age_s(os.getpid()), age_s(young.pid)
        young.kill()
    assert before is not None and None not in ages and ages[0] >= before > 0 and 0 <= ages[1] < ages[0]
    assert age_s(1 << 30) is None


def test_phases_are_told_with_what_went_before() -> None:
    phases = Phases()
    assert [*phases.seconds] == ["launcher_s", "imports_s"]
    phases.seconds = {"imports_s": 2.0, "first_request_s": 1.25, "build_s": 0.01}
    assert str(phases) == "3.3 s (imports 2.0, first request 1.2)"


def test_the_surest_cause_is_named() -> None:
    trace = ["rank 0 failed:", "Traceback (most recent call last):", 'File "x.py", line 3', "RuntimeError: NaN", ""]
    assert cause(trace) == "RuntimeError: NaN"
    assert cause([*trace, "error: no room"]) == "no room" and cause(["error: rank 1: x"]) == "rank 1: x"
    assert cause([*trace, "error: rank 3 was killed by signal 9"]) == "rank 3 was killed by signal 9"
    for line in ("rank 1 was stopped by a signal for more than", "the launcher was stopped by a signal for"):
        assert cause([*trace, f"error: {line}"]) == line
    assert cause(["a warning"]) == ""


def test_a_client_that_breaks_ends_its_ranks() -> None:
    """With its traceback; a rank that nobody tells to end would run on."""
    program = (
        "import time\n"
        "from launch.job import spawn\n"
        "async def broken(path):\n"
        "    raise RuntimeError('planted')\n"
        "spawn.launch(1, lambda: time.sleep(300), [], broken)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and ended.stderr.strip().endswith("RuntimeError: planted"), ended.stderr
