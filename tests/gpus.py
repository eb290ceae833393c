"""GPUs that the processes of a test run share: who sees which first, and how many GB tests may hold at a time.

Importing it, before torch looks for GPUs, turns the list that a process of xdist sees.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

GPUS = "HELIX_TEST_GPUS"  # in the environment of xdist's processes: a folder that they share, and each GPU's GB
WORKER = os.environ.get("PYTEST_XDIST_WORKER")
RESIDENT_GB = 3.5  # of a process of tests between its tests: contexts, its own and its ranks', and compiled kernels
DEADLINE_S = 900.0  # for the GB of a test: the tests that hold them end by their own timeouts


def rotated(gpus: list[str], worker: str) -> list[str]:
    """Names of `gpus` in the order in which `worker` ("gw3") sees them: neighbours do not begin with the same one."""
    first = int(worker.removeprefix("gw")) % len(gpus)
    return gpus[first:] + gpus[:first]


if WORKER and GPUS in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(rotated(list(json.loads(os.environ[GPUS])[1]), WORKER))


def processes(cores: int, gpus_gb: list[float]) -> int:
    """How many processes share `cores` and the GPUs: two cores stay free, and each process has 10 GB of a GPU."""
    return max(1, min(cores - 2, int(sum(gpus_gb) / 10)))


@dataclass(frozen=True)
class Memory:
    """The GB of each GPU that processes have taken, in a folder that they share.

    Attributes:
        capacity: GB of a GPU by its name, less what stays resident.
    """

    folder: Path
    capacity: dict[str, float]

    @contextmanager
    def hold(self, gpus: list[str], gb: float) -> Iterator[None]:
        """Waits until `gb` are free on each of `gpus`, first come, first served, and holds them.

        Raises:
            TimeoutError: they were not in `DEADLINE_S`.
        """
        gb = min([gb, *(self.capacity[name] for name in gpus)])  # alone, a test gets what there is
        deadline = time.monotonic() + DEADLINE_S
        with self._locked("gate"):
            while not self._take(gpus, gb):
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{gb} GB of GPUs {gpus} did not become free in {DEADLINE_S:.0f} s: {self.reservations()}"
                    )
                time.sleep(0.05)
        try:
            yield
        finally:
            with self._locked("ledger"):
                self._write(
                    {pid: reservations for pid, reservations in self._read().items() if pid != str(os.getpid())}
                )

    def reservations(self) -> dict[str, dict[str, float]]:
        """GB of each GPU by the process that holds them."""
        with self._locked("ledger"):
            return self._read()

    def _take(self, gpus: list[str], gb: float) -> bool:
        with self._locked("ledger"):
            reservations = {pid: by_gpu for pid, by_gpu in self._read().items() if Path("/proc", pid).exists()}
            free = {
                name: self.capacity[name] - sum(by_gpu.get(name, 0.0) for by_gpu in reservations.values())
                for name in gpus
            }
            fits = all(gb <= amount + 1e-6 for amount in free.values())
            self._write(reservations | ({str(os.getpid()): dict.fromkeys(gpus, gb)} if fits else {}))
            return fits

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with open(self.folder / f"{name}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # a process that dies lets go of it
            yield

    def _read(self) -> dict[str, dict[str, float]]:
        path = self.folder / "gpus.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def _write(self, reservations: dict[str, dict[str, float]]) -> None:
        (self.folder / "gpus.json").write_text(json.dumps(reservations))
