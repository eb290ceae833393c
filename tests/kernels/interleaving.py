"""Runs ranks' kernels concurrently in Triton's interpreter, one access to shared memory at a time.

Each rank has a stream of launches, and each program of a launch is a thread. One thread runs until its next store,
atomic addition or poll of an LL buffer; the next one is picked at random. As on a GPU:

- the programs of a launch run concurrently, in any order;
- a launch begins once all programs of the one before it have called `start_successor` or ended, and
  `wait_for_predecessor` returns once all of those have ended;
- of a store of several words, some may be visible before the others.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter

BUILDER = interpreter.interpreter_builder
SPEEDS = 1, 1, 10, 1000  # each rank has one of these as its weight in the random pick


class _Abandoned(BaseException):
    """Ends the programs of a failed run."""


@dataclass
class _Launch:
    fn: Callable[..., None]
    grid: tuple[int, ...]
    args: dict[str, Any]
    tensors: tuple[Any, ...]  # keeps alive the memory that `args` points to
    programs: list[_Program] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return all(p.ended for p in self.programs)


class _Program(threading.Thread):
    def __init__(
        self, streams: Streams, name: str, launch: _Launch, before: _Launch | None, index: tuple[int, ...]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.ended = self.lets_start = False
        self.error: BaseException | None = None
        self.ready: Callable[[], bool] = lambda: True  # whether running it can have an effect
        self._streams, self._launch, self._before, self._index = streams, launch, before, index
        self._looked: tuple[int, int] | None = None
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self.start()

    def step(self) -> None:
        """Runs it to its next pause or its end; called by another thread."""
        self._go.release()
        self._paused.acquire()

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Lets others run; called by itself, like `look` and `wait`."""
        self.ready = ready
        self._paused.release()
        self._resume()

    def look(self, address: int) -> None:
        """Polls; not again before something has been stored."""
        self.pause(lambda: (address, self._streams.stores) != self._looked)
        self._looked = address, self._streams.stores

    def wait(self) -> None:
        self.pause(lambda: self._before is None or self._before.ended)

    def run(self) -> None:
        try:
            self._resume()
            self._launch.fn(**self._launch.args)
        except BaseException as error:
            self.error = error
        self.ended = True
        self._paused.release()

    def _resume(self) -> None:
        self._go.acquire()
        if self._streams.abandoned:
            raise _Abandoned
        BUILDER.set_grid_dim(*self._launch.grid)
        BUILDER.set_grid_idx(*self._index)


class Streams:
    """Launches of several ranks, which `run` interleaves.

    Args:
        modules: modules of the kernels.
    """

    def __init__(self, ranks: int, *modules: ModuleType) -> None:
        self.stores = 0
        self.abandoned = False
        self._modules = modules
        self._launches: list[list[_Launch]] = [[] for _ in range(ranks)]

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Makes kernels join a rank's stream instead of running."""

        def launch(executor: interpreter.GridExecutor, *args: Any, **kwargs: Any) -> None:
            known = inspect.signature(executor.fn).parameters
            called = inspect.getcallargs(executor.fn, *args, **{k: v for k, v in kwargs.items() if k in known})
            passed = {k: v if k in executor.constexprs else interpreter._implicit_cvt(v) for k, v in called.items()}
            grid = (*executor.grid, 1, 1)[:3]
            self._launches[rank].append(_Launch(executor.fn, grid, passed, tuple(called.values())))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreter.GridExecutor, "__call__", launch)
            yield

    def run(self, generator: random.Random) -> None:
        """Runs everything.

        Raises:
            AssertionError: deadlock.
        """
        live: list[list[_Program]] = [[] for _ in self._launches]
        with pytest.MonkeyPatch.context() as patch:
            self._instrument(patch, generator)
            try:
                while True:
                    for rank, programs in enumerate(live):
                        programs[:] = [p for p in programs if not p.ended]
                        self._begin(rank, programs)
                    if not any(live):
                        return
                    if generator.random() < 0.05 or self.stores == 0:
                        speeds = generator.choices(SPEEDS, k=len(live))
                    ready = [[p for p in programs if p.ready()] for programs in live]
                    chances = [speed * bool(programs) for speed, programs in zip(speeds, ready, strict=True)]
                    assert any(chances), f"all wait: {', '.join(p.name for programs in live for p in programs)}"
                    program = generator.choice(generator.choices(ready, chances)[0])
                    program.step()
                    if program.error is not None:
                        raise program.error
            finally:
                self.abandoned = True
                for program in (p for programs in live for p in programs if not p.ended):
                    program.step()

    def _begin(self, rank: int, live: list[_Program]) -> None:
        before = None
        for number, launch in enumerate(self._launches[rank]):
            if not launch.programs:
                if before is None or all(p.ended or p.lets_start for p in before.programs):
                    for index in product(*map(range, launch.grid)):
                        name = f"program {index} of launch {number} on rank {rank}"
                        launch.programs.append(_Program(self, name, launch, before, index))
                    live += launch.programs
                return
            before = launch

    def _instrument(self, patch: pytest.MonkeyPatch, generator: random.Random) -> None:
        load, store, add = BUILDER.create_masked_load, BUILDER.create_masked_store, BUILDER.create_atomic_rmw

        def paused_load(ptrs: Any, mask: Any, other: Any, cache: Any, eviction: Any, volatile: bool) -> Any:
            if volatile:
                _current().look(int(ptrs.data.flat[0]))
            return load(ptrs, mask, other, cache, eviction, volatile)

        def paused_store(ptrs: Any, value: Any, mask: Any, cache: Any, eviction: Any) -> None:
            at_first = np.random.default_rng(generator.getrandbits(32)).random(mask.data.shape) < generator.random()
            for part in (at_first, ~at_first):
                if (mask.data & part).any():
                    _current().pause()
                    self.stores += 1
                    store(ptrs, value, interpreter.TensorHandle(mask.data & part, mask.dtype), cache, eviction)

        def paused_add(*args: Any) -> Any:
            _current().pause()
            self.stores += 1
            return add(*args)

        def start_successor(PDL: Any) -> None:
            _current().lets_start = True

        patch.setattr(BUILDER, "create_masked_load", paused_load, raising=False)
        patch.setattr(BUILDER, "create_masked_store", paused_store)
        patch.setattr(BUILDER, "create_atomic_rmw", paused_add)
        for module in self._modules:
            patch.setattr(module, "wait_for_predecessor", lambda PDL: _current().wait())
            patch.setattr(module, "start_successor", start_successor)
        interpreter._patch_lang(self._launches[0][0].fn)


def _current() -> _Program:
    program = threading.current_thread()
    assert isinstance(program, _Program)
    return program
