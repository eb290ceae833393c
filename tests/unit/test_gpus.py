import multiprocessing
from pathlib import Path

import pytest

from tests import gpus
from tests.gpus import Memory, processes, rotated


def test_neighbors_begin_with_different_gpus() -> None:
    assert [rotated(["0", "1", "5"], f"gw{i}") for i in range(4)] == [
        ["0", "1", "5"], ["1", "5", "0"], ["5", "0", "1"], ["0", "1", "5"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "cores, gigabytes, count",
    [(16, [141.0], 14), (32, [141.0, 141.0], 28), (16, [80.0], 8), (64, [24.0], 2), (2, [8.0], 1)],
)
def test_processes_fit_cores_and_memory(cores: int, gigabytes: list[float], count: int) -> None:
    assert processes(cores, gigabytes) == count


def _hold(memory: Memory, names: list[str], gb: float, times: int, max_held_gb: "multiprocessing.Queue[float]") -> None:
    for _ in range(times):
        with memory.hold(names, gb):
            used = memory.reservations().values()
            max_held_gb.put(max(sum(by_gpu.get(name, 0.0) for by_gpu in used) for name in names))


def test_no_more_is_held_than_there_is_and_nobody_starves(tmp_path: Path) -> None:
    memory, max_held_gb = Memory(tmp_path, {"0": 10.0, "1": 10.0}), multiprocessing.Queue()
    work = [(["0"], 4.0), (["0", "1"], 7.0), (["1"], 3.0), (["1", "0"], 99.0)]  # alone, the last gets all
    held = [multiprocessing.Process(target=_hold, args=(memory, names, gb, 5, max_held_gb)) for names, gb in work]
    for process in held:
        process.start()
    sizes = [max_held_gb.get(timeout=60) for _ in range(20)]
    for process in held:
        process.join(60)
    assert max(sizes) == 10.0 and memory.reservations() == {}


def test_a_process_that_died_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(tmp_path, {"0": 10.0})
    memory._write({"4194305": {"0": 8.0}})  # beyond the largest pid
    with memory.hold(["0"], 9.0):
        monkeypatch.setattr(gpus, "DEADLINE_S", 0.0)
        with pytest.raises(TimeoutError, match=r"5.0 GB of GPUs \['0'\] did not become free"), memory.hold(["0"], 5.0):
            pass
