"""Shared set-up: where kernels run, what a GPU test needs, and the end of the worker pools."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from hypothesis import Phase, settings

# Triton reads this when a kernel is defined, so it has to be set before the first import of `kernels`.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests.pool import Pool, close_all, pool

torch.set_num_threads(1)  # tests are small: threads that wait for each other cost more than they compute

settings.register_profile("helix", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("first-failure", settings.get_profile("helix"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("helix")

COLLECTED = pytest.StashKey[dict[str, bool]]()


def _gpus(n: int = 1) -> int:
    """What `@pytest.mark.gpu`, `gpu(2)` and `gpu(n=2)` ask for."""
    return n


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
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
