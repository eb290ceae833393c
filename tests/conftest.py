"""Shared set-up: where kernels run, what a GPU test needs, and the end of the worker pools."""

from __future__ import annotations

import gc
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings

# Triton reads this when a kernel is defined, so it has to be set before the first import of `kernels`.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests.pool import Pool, close_all, pool

BEGIN = time.monotonic()
SLOWEST = 20  # tests that a record names

gc.set_threshold(50_000, 20, 20)  # what is imported is millions of objects, each of which a collection looks at
torch.set_num_threads(1)  # tests are small: threads that wait for each other cost more than they compute
os.environ.setdefault("OMP_NUM_THREADS", "1")  # in processes that tests start, too

settings.register_profile("helix", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("first-failure", settings.get_profile("helix"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("helix")

COLLECTED = pytest.StashKey[dict[str, bool]]()


def _gpus(n: int = 1) -> int:
    """Returns the number of GPUs that `@pytest.mark.gpu`, `gpu(2)` or `gpu(n=2)` requires."""
    return n


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, metavar="FILE", help="append to FILE how long the tests took")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With `--record`, one paragraph: commit, machine and date; how many tests and how long; the slowest."""
    if (path := config.getoption("record")) is None or hasattr(config, "workerinput"):  # xdist's workers have a part
        return
    seconds: Counter[str] = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        seconds[getattr(report, "nodeid", "")] += getattr(report, "duration", 0.0)
    counts = {name: len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed", "error", "skipped")}
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    minutes, rest = divmod(round(time.monotonic() - BEGIN), 60)
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count or name == "failed")
    with path.open("a") as file:
        arguments = [text for text in config.invocation_params.args if not text.startswith("--record")]
        file.write(f"\n== {commit}, {os.cpu_count()} cores, {date.today()}: pytest {' '.join(arguments)}\n")
        file.write(f"{said} in {minutes}m{rest:02}\n")
        file.writelines(f"{took:6.1f} s  {name}\n" for name, took in seconds.most_common(SLOWEST))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gc.freeze()  # nor are they looked at once all tests are here: they stay to the end
    config.stash[COLLECTED] = {item.nodeid: item.get_closest_marker("slow") is not None for item in items}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("gpu"):
        needed, present = _gpus(*marker.args, **marker.kwargs), torch.cuda.device_count()
        if present < needed:
            pytest.skip(f"needs {needed} GPU(s), here are {present}")


def pytest_sessionfinish() -> None:
    close_all()


@pytest.fixture(scope="session")
def gloo_pool() -> Callable[[int], Pool]:
    """`gloo_pool(world_size).run(fn, *args)`: see `tests.pool`."""
    return pool


@pytest.fixture
def collected(request: pytest.FixtureRequest) -> dict[str, bool]:
    """Names of all tests that this session has found, whichever it runs, and whether they are slow."""
    return request.config.stash[COLLECTED]
