"""Jobs side by side on the GPUs of a machine, and the lists of such jobs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmarks import queue
from benchmarks.bench import BENCHMARKS, given
from benchmarks.queue import Queue, QueuedJob, read
from benchmarks.schema import bench_points, check, composed
from helix.setup.parts import make_layout
from launch.inputs.compose import ROOT

LISTS = sorted((ROOT / "benchmarks" / "lists").glob("*.txt"))


def test_jobs_have_gpus_of_their_own_in_the_order_of_the_list(tmp_path: Path) -> None:
    note = "echo $CUDA_VISIBLE_DEVICES > $ROWS/"
    jobs = [
        QueuedJob("a", 1, 9, f"{note}a; sleep 0.3"),
        QueuedJob("b", 1, 9, f"{note}b; sleep 0.6"),
        QueuedJob("both", 2, 9, f"{note}both"),
    ]
    jobs.append(QueuedJob("last", 1, 9, f"{note}last; exit 3"))
    said = [line.split("s  ")[1] for line in Queue(jobs, 2, tmp_path).run(20)]
    assert {name: (tmp_path / "rows" / name).read_text().strip() for name in ("a", "b", "both", "last")} == {
        "a": "0", "b": "1", "both": "0,1", "last": "0",
    }  # fmt: skip
    starts = [line.split()[0] for line in said if " on " in line]
    assert starts == ["a", "b", "both", "last"]
    assert said.index("both on 0, 1") > next(i for i, line in enumerate(said) if line.startswith("b: exit code 0"))
    assert said[-1].startswith("last: exit code 3")


def test_a_job_of_all_gpus_starts_early_and_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "WAITS", ("START_AFTER",))
    waits = "date +%s.%N > $ROWS/began; until [ -e $START_AFTER ]; do sleep 0.02; done; date +%s.%N > $ROWS/went"
    jobs = [QueuedJob("first", 2, 9, "sleep 0.8; date +%s.%N > $ROWS/ended"), QueuedJob("second", 2, 9, waits)]
    assert [*Queue(jobs, 2, tmp_path).run(20)][-1].split("  ")[-1].startswith("second: exit code 0")
    began, ended, went = (float((tmp_path / "rows" / name).read_text()) for name in ("began", "ended", "went"))
    assert began < ended < went


def test_late_jobs_are_ended_and_time_is_up(tmp_path: Path) -> None:
    jobs = [
        QueuedJob("late", 1, 0.3, "sleep 60"),
        QueuedJob("cut", 1, 60, "sleep 60"),
        QueuedJob("never", 1, 60, "true"),
    ]
    said = [*Queue(jobs, 1, tmp_path).run(1.5)]
    assert any("late: ended after its 0 s" in line for line in said)
    assert "cut: time is up" in said[-2] and said[-1] == "not begun: never"
    with pytest.raises(ValueError, match="wide takes 2 GPUs, and there are 1"):
        Queue([QueuedJob("wide", 2, 1, "true")], 1, tmp_path)


def test_lines() -> None:
    assert read("# no job\n\nname 2  3.5   echo a | cat\n") == [QueuedJob("name", 2, 3.5, "echo a | cat")]
    with pytest.raises(ValueError, match="line 1, 'name two 3 x': a job is NAME GPUS SECONDS COMMAND"):
        read("name two 3 x")


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_lists(path: Path) -> None:
    """Each command of a list is one that there is, with settings that go together."""
    jobs = read(path.read_text(encoding="utf-8"))
    assert len({job.name for job in jobs}) == len(jobs)
    for job in jobs:
        words = [word for word in shlex.split(job.command) if not re.fullmatch(r"[A-Z0-9_]+=.*", word)]
        if "benchmarks.layout_steps" in words:
            own = {key: text for key, _, text in (word.partition("=") for word in words[4:])}
            points = own.pop("points").split(",")
            own.pop("keep", None)
            settings = [f"{key}={text}" for key, text in own.items()]
            config = composed(["bench=decode", f"bench.points=[{','.join(points)}]", "model.load=random", *settings])
            check(config)
            assert bench_points(config.bench) and make_layout(config.layout).world_size >= job.gpus
        elif words[:2] == ["helix", "bench"]:
            assert words[2] in BENCHMARKS
            given(words[2], [word for word in words[3:] if not word.startswith(("models=", "ranks="))], job.gpus)
