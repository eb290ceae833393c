"""GPUs that test processes share: their order in each process, and how many GB tests may hold at a time.

Import it before torch looks for GPUs: it rotates the list that an xdist worker sees.
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

GPUS = "HELIX_TEST_GPUS"  # in the environment of xdist workers: their shared folder, and each GPU's GB
WORKER = os.environ.get("PYTEST_XDIST_WORKER")
RESIDENT_GB = 3.5  # of a test process between tests: CUDA contexts of itself and its ranks, and compiled kernels
DEADLINE_S = 900.0  # to get a test's GB: the tests that hold them have timeouts


def rotated(gpus: list[str], worker: str) -> list[str]:
    """Returns `gpus` in the order that `worker` ("gw3") sees: neighbors start with different ones."""
    first = int(worker.removeprefix("gw")) % len(gpus)
    return gpus[first:] + gpus[:first]


if WORKER and GPUS in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(rotated(list(json.loads(os.environ[GPUS])[1]), WORKER))


def processes(cores: int, gpus_gb: list[float]) -> int:
    """Returns how many processes share the cores and GPUs: two cores stay free, and each process has 10 GB of a GPU."""
    return max(1, min(cores - 2, int(sum(gpus_gb) / 10)))


@dataclass(frozen=True)
class Memory:
    """The GB of each GPU that processes hold, in a shared folder.

    Attributes:
        capacity: GB per GPU name, less what stays resident.
    """

    folder: Path
    capacity: dict[str, float]

    @contextmanager
    def hold(self, gpus: list[str], gb: float) -> Iterator[None]:
        """Waits until `gb` are free on each of `gpus`, first come, first served, and holds them.

        Raises:
            TimeoutError: they were not free within `DEADLINE_S`.
        """
        gb = min([gb, *(self.capacity[name] for name in gpus)])  # a test that needs more gets a whole GPU
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
        """Returns the GB of each GPU by process."""
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
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the process dies
            yield

    def _read(self) -> dict[str, dict[str, float]]:
        path = self.folder / "gpus.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def _write(self, reservations: dict[str, dict[str, float]]) -> None:
        (self.folder / "gpus.json").write_text(json.dumps(reservations))
