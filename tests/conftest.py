"""Shared pytest set-up: where kernels run, GPU requirements and memory, and shutdown of worker pools."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import nullcontext
from datetime import date
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings

from tests.gpus import GPUS, RESIDENT_GB, WORKER, Memory, processes

# Triton reads this when a kernel is defined: set it before the first import of `kernels`.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests.pool import Pool, close_all, pool

BEGIN = time.monotonic()
SLOWEST = 20  # tests in a record

gc.set_threshold(50_000, 20, 20)  # imports leave millions of objects, which every collection would scan
torch.set_num_threads(1)  # tests are small: synchronizing threads would cost more than the work
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for subprocesses

settings.register_profile("helix", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("first-failure", settings.get_profile("helix"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("helix")

COLLECTED = pytest.StashKey[dict[str, bool]]()


def _gpus(n: int = 1, gb: float = 6.0) -> tuple[int, float]:
    """Arguments of `@pytest.mark.gpu`, `gpu(2)`, `gpu(n=2, gb=20)`: number of GPUs, and GB of memory on each."""
    return n, gb


KERNELS_GB = 2.0  # for tests of tests/kernels, which also run without a GPU
MEMORY = pytest.StashKey[Memory]()


def _needs(item: pytest.Item) -> tuple[int, float]:
    if (marker := item.get_closest_marker("gpu")) is not None:
        return _gpus(*marker.args, **marker.kwargs)
    return (1, KERNELS_GB) if "tests/kernels/" in item.nodeid else (0, 0.0)


def _visible() -> list[str]:
    default = ",".join(map(str, range(torch.cuda.device_count())))
    return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", default).split(",") if name]


def _gigabytes() -> list[float]:
    return [torch.cuda.get_device_properties(i).total_memory / 1e9 for i in range(torch.cuda.device_count())]


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Returns the number of xdist workers that fit the GPUs."""
    return processes(os.cpu_count() or 1, _gigabytes()) if config.getoption("gpu") and _visible() else None


def pytest_configure(config: pytest.Config) -> None:
    """Checks for GPUs, and registers their memory."""
    if not config.getoption("gpu"):
        return
    if not torch.cuda.is_available():
        raise pytest.UsageError("--gpu needs a GPU, and torch finds none")
    if WORKER is None:
        share = (config.getoption("numprocesses", None) or 1) / len(_visible())
        capacity = {name: gb - share * RESIDENT_GB for name, gb in zip(_visible(), _gigabytes(), strict=True)}
        os.environ[GPUS] = json.dumps([tempfile.mkdtemp(prefix="helix-gpus-"), capacity])
    folder, capacity = json.loads(os.environ[GPUS])
    config.stash[MEMORY] = Memory(Path(folder), capacity)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options --gpu, --part and --record."""
    parser.addoption("--gpu", action="store_true", help="only what needs a GPU, and tests/kernels; -n auto fits GPUs")
    parser.addoption("--part", metavar="I/N", help="only the I-th of N parts of the tests, which are about as long")
    parser.addoption("--record", type=Path, metavar="FILE", help="append to FILE how long the tests took")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Appends a record: commit, machine and date, number of tests and their time, the slowest tests."""
    if (path := config.getoption("record")) is None or hasattr(config, "workerinput"):  # xdist workers only see a part
        return
    seconds: Counter[str] = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        seconds[getattr(report, "nodeid", "")] += getattr(report, "duration", 0.0)
    counts = {name: len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed", "error", "skipped")}
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    minutes, rest = divmod(round(time.monotonic() - BEGIN), 60)
    summary = ", ".join(f"{count} {name}" for name, count in counts.items() if count or name == "failed")
    with path.open("a") as file:
        arguments = [text for text in config.invocation_params.args if not text.startswith("--record")]
        file.write(f"\n== {commit}, {os.cpu_count()} cores, {date.today()}: pytest {' '.join(arguments)}\n")
        file.write(f"{summary} in {minutes}m{rest:02}\n")
        file.writelines(f"{took:6.1f} s  {name}\n" for name, took in seconds.most_common(SLOWEST))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects tests by --gpu and --part."""
    gc.freeze()  # collected tests live to the end: exclude them from collections
    config.stash[COLLECTED] = {item.nodeid: item.get_closest_marker("slow") is not None for item in items}
    selected = [item for item in items if not config.getoption("gpu") or _needs(item)[0]]
    if part := config.getoption("part"):
        index, count = map(int, part.split("/"))
        selected = selected[index - 1 :: count]
    keep = set(selected)
    config.hook.pytest_deselected(items=[item for item in items if item not in keep])
    items[:] = selected


@pytest.hookimpl(wrapper=True, tryfirst=True)  # start a test's timeout after it has its memory
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """Holds a test's GPU memory while it runs."""
    (needed, gb), memory = _needs(item), item.config.stash.get(MEMORY, None)
    with memory.hold(_visible()[:needed], gb) if memory and needed <= len(_visible()) else nullcontext():
        done = yield
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return done


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests that need more GPUs."""
    if item.get_closest_marker("gpu") and (needed := _needs(item)[0]) > (present := torch.cuda.device_count()):
        pytest.skip(f"needs {needed} GPU(s), here are {present}")


def pytest_sessionfinish() -> None:
    """Closes the worker pools."""
    close_all()


@pytest.fixture(scope="session")
def gloo_pool() -> Callable[[int], Pool]:
    """Returns `pool`: `gloo_pool(world_size).run(fn, *args)`, see `tests.pool`."""
    return pool


@pytest.fixture
def collected(request: pytest.FixtureRequest) -> dict[str, bool]:
    """Returns the names of all collected tests, whether selected or not, and whether they are slow."""
    return request.config.stash[COLLECTED]
