"""Records of stripes on disk: whatever happens to them, a read gives the stripe or a miss."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helix.engine.scheduler_output import MoveKind, StripeHeader, StripeMove
from helix.worker import stripe_files as module
from helix.worker.host_store import HostStore
from helix.worker.stripe_files import StripeFiles, record_bytes

TOKENS, SLAB, RECORDS = 8, 3 * 4096, 5
CPU = torch.device("cpu")
SIZE = record_bytes(SLAB, TOKENS)


def header(seed: int, generation: int = 1, depth: int = 0) -> StripeHeader:
    tokens, parent = np.arange(seed, seed + TOKENS, dtype=np.int32), bytes([seed]) * 32
    return StripeHeader(sha256(parent + tokens.tobytes()).digest(), parent, generation, 0, depth, tokens)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 2 * SIZE + 1)  # two records each
    monkeypatch.setattr(module, "CRC_BYTES", 5000)
    monkeypatch.setattr(module, "LOCK_S", 0.1)


class Disk:
    """Files of one rank, with what they have reported."""

    def __init__(self, folder: Path, identity: bytes, records: int) -> None:
        self.store = HostStore((4, SLAB), torch.uint8, CPU)
        self.reports: list[Any] = []
        self.files = StripeFiles(folder, identity, self.store.on_cpu, records, TOKENS, self.reports.append)
        self.scanned = {record: found.key for record, found in self.wait(0)}
        self._number = 0

    def wait(self, number: int) -> Any:
        deadline = time.monotonic() + 20
        while not (found := [report for report in self.reports if report[0] == number]):
            assert time.monotonic() < deadline, "no report"
            time.sleep(0.001)
        return found[0][2]

    def move(self, kind: MoveKind, slab: int, record: int, content: StripeHeader, wait: bool = True) -> bool:
        """Returns whether it succeeded."""
        self._number += 1
        self.files.start(
            [StripeMove(self._number, kind, np.array([slab], dtype=np.int32), records=(record,), headers=(content,))]
        )
        return not wait or self.wait(self._number) == ()

    def write(self, record: int, content: StripeHeader, fill: int) -> bool:
        self.store.on_cpu[0] = fill
        return self.move("write", 0, record, content)

    def read(self, record: int, content: StripeHeader) -> int | None:
        """Returns what its slab is filled with, None for a miss."""
        self.store.on_cpu[1] = 255
        if not self.move("read", 1, record, content):
            return None
        (value,) = self.store.on_cpu[1].unique().tolist()
        return int(value)


@contextmanager
def disk(folder: Path, identity: bytes = b"i" * 32, records: int = RECORDS) -> Iterator[Disk]:
    found = Disk(folder, identity, records)
    yield found
    assert found.files.close()


def test_records_come_back_now_and_after_a_restart(tmp_path: Path) -> None:
    with disk(tmp_path / "a" / "r0") as one:
        assert one.scanned == {}
        assert all(one.write(record, header(record), 10 + record) for record in range(RECORDS))
        assert [one.read(record, header(record)) for record in range(RECORDS)] == [10, 11, 12, 13, 14]
    assert [(tmp_path / "a" / "r0" / f"{n:06}.seg").stat().st_size for n in range(3)] == [2 * SIZE, 2 * SIZE, SIZE]
    assert stat.S_IMODE((tmp_path / "a" / "r0").stat().st_mode) == 0o700
    with disk(tmp_path / "a" / "r0") as two:
        assert two.scanned == {record: header(record).key for record in range(RECORDS)}
        assert two.read(3, header(3)) == 13
        assert two.write(3, header(7, generation=2), 20), "a record is overwritten"
        assert two.read(3, header(3)) is None and two.read(3, header(7, generation=2)) == 20


def flip(at: int) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)

    return change


def cut(file: Path) -> None:
    os.truncate(file, SIZE + SIZE // 2)


def swap(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[SIZE:] + data[:SIZE])


@pytest.mark.parametrize(
    "damage, missed",
    [
        (flip(1), {0}), (flip(50), {0}), (flip(150), {0}), (flip(SIZE - 1), {0}), (flip(SIZE - SLAB), {0}),
        (flip(SIZE + 100), {1}), (cut, {1}), (swap, {0, 1}), (Path.unlink, {0, 1}),
        (lambda file: os.truncate(file, 0), {0, 1}), (lambda file: file.write_bytes(b"\0" * 2 * SIZE), {0, 1}),
    ],
)  # fmt: skip
def test_damage_is_a_miss(tmp_path: Path, damage: Callable[[Path], None], missed: set[int]) -> None:
    with disk(tmp_path) as one:
        assert one.write(0, header(0), 5) and one.write(1, header(1), 6)
    damage(tmp_path / "000000.seg")
    with disk(tmp_path) as two:
        assert {record for record in (0, 1) if two.read(record, header(record)) is None} == missed


@pytest.mark.parametrize("wanted", [header(1), header(0, generation=2)], ids=["another stripe", "an earlier write"])
def test_another_record_is_a_miss(tmp_path: Path, wanted: StripeHeader) -> None:
    with disk(tmp_path) as one:
        one.write(0, header(0), 5)
        assert one.read(0, wanted) is None and one.read(0, header(0)) == 5


def test_records_of_another_rank_or_model_are_none(tmp_path: Path) -> None:
    with disk(tmp_path / "r0", b"0" * 32) as one:
        one.write(0, header(0), 5)
    shutil.copytree(tmp_path / "r0", tmp_path / "r1")
    with disk(tmp_path / "r1", b"1" * 32) as two:
        assert two.scanned == {} and two.read(0, header(0)) is None


@pytest.mark.parametrize("calls", [1, 2])
def test_half_a_write_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """A write that is killed leaves no valid record, nor the one that was there."""
    right, left = os.pwritev, [calls]

    def killed(file: int, buffers: Any, at: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, "killed")
        return right(file, buffers, at)

    with disk(tmp_path) as one:
        assert one.write(0, header(0), 5)
        monkeypatch.setattr(os, "pwritev", killed)
        assert not one.write(0, header(1, generation=2), 6)
        monkeypatch.setattr(os, "pwritev", right)
        assert one.read(0, header(0)) is None and one.read(0, header(1, generation=2)) is None
    with disk(tmp_path) as two:
        assert two.scanned == {}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["posix_fallocate", "pwritev", "preadv"])
def test_errors_of_the_disk_are_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    with disk(tmp_path) as one:
        assert one.write(0, header(0), 5)
        right = getattr(os, call)
        monkeypatch.setattr(os, call, lambda *args: (_ for _ in ()).throw(OSError(number, os.strerror(number))))
        is_read = call == "preadv"
        assert one.write(2, header(2), 7) is is_read
        assert one.read(0, header(0)) == (None if is_read else 5), "reads go on"
        monkeypatch.setattr(os, call, right)
        assert one.write(2, header(2), 7) and one.read(2, header(2)) == 7


def test_a_hung_read_keeps_its_slab_and_no_other_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, right = threading.Event(), os.preadv
    found = Disk(tmp_path, b"i" * 32, RECORDS)
    assert found.write(0, header(0), 5) and found.write(1, header(1), 6)

    def hung(file: int, buffers: Any, at: int) -> int:
        if at == 0:
            hangs.wait(20)
        return right(file, buffers, at)

    monkeypatch.setattr(os, "preadv", hung)
    found.move("read", 2, 0, header(0), wait=False)
    assert found.read(1, header(1)) == 6
    assert not found.files.close(), "its slab must stay"
    hangs.set()
    assert found.wait(3) == () and found.store.on_cpu[2].unique().tolist() == [5]


def test_two_processes_do_not_share_a_directory(tmp_path: Path) -> None:
    with disk(tmp_path), pytest.raises(OSError, match="another process uses it"):
        Disk(tmp_path, b"i" * 32, RECORDS)
    with disk(tmp_path):
        pass


def test_a_smaller_disk_ignores_later_records(tmp_path: Path) -> None:
    with disk(tmp_path) as one:
        assert one.write(0, header(0), 5) and one.write(4, header(4), 6)
    with disk(tmp_path, records=3) as two:
        assert [*two.scanned] == [0]
