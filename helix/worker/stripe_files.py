"""This rank's stripes on disk: records of fixed size in segment files, read and written by threads.

    DIRECTORY/000000.seg, 000001.seg, ..      up to SEGMENT_BYTES each, allocated at the first write
    record                                    [ header, HEADER_UNIT or more | slab ]

A header identifies the content: rank, model and settings (`identity`), the chain hash, the tokens, and a CRC-32 of each
MiB of the slab and of the header itself. It is cleared before a slab is overwritten and written after it, so a process
that is killed leaves no record that is valid and wrong; after a loss of power the checksums tell. Whatever else is
there is a miss: another model's file, another rank's, half a record, flipped bits. The checksum is zlib's CRC-32, which
takes 1 ms per MiB and lets other threads run.

Reads and writes bypass the page cache where the file system supports it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import count
from pathlib import Path
from queue import PriorityQueue
from zlib import crc32

import numpy as np
from torch import Tensor

from helix.engine.scheduler_output import StripeHeader, StripeMove

LOG = logging.getLogger("helix.worker")
SEGMENT_BYTES = 1 << 30
HEADER_UNIT = 4096  # bytes
THREADS = 2
CRC_BYTES = 1 << 20
LOCK_S = 5.0  # how long to wait for a process that is being killed
MAGIC, VERSION = b"HXKV", 1
FIXED = struct.Struct("<4sI32s32s32sQIQI")  # magic, version, identity, key, parent, generation, start, depth, tokens
CRC = struct.Struct("<I")
ScannedRecord = tuple[int, StripeHeader]


def record_bytes(slab_bytes: int, stripe_tokens: int) -> int:
    """Counts the bytes of a record, whose slab begins at a multiple of HEADER_UNIT."""
    used = FIXED.size + CRC.size * (-(-slab_bytes // CRC_BYTES) + stripe_tokens + 1)
    return -(-used // HEADER_UNIT) * HEADER_UNIT + slab_bytes


class StripeFiles:
    """Records of one rank.

    Args:
        directory: of this rank and `identity`; created if it does not exist.
        identity: digest of all that the content of slabs depends on, this rank included.
        slabs: host memory, uint8 [n, bytes of a slab], page-aligned.
        records: how many records there are.
        stripe_tokens: tokens of a stripe.
        report: called with the report of each move, and once with `(0, 0.0, scanned)`, the records found at the start.

    Raises:
        OSError: the directory cannot be created, or another process uses it.
    """

    def __init__(
        self,
        directory: Path,
        identity: bytes,
        slabs: Tensor,
        records: int,
        stripe_tokens: int,
        report: Callable[[tuple[int, float, object]], None],
    ) -> None:
        self._directory, self._identity, self._report = directory, identity, report
        self._slabs, self._slab_bytes, self._tokens = slabs.numpy(), slabs.shape[1], stripe_tokens
        self._crcs = -(-self._slab_bytes // CRC_BYTES)
        self.record_bytes = record_bytes(self._slab_bytes, stripe_tokens)
        self.header_bytes = self.record_bytes - self._slab_bytes
        self._records = records
        self._per_segment = max(1, SEGMENT_BYTES // self.record_bytes)
        self._files: dict[int, int] = {}  # descriptors by segment
        self._lock = threading.Lock()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._locked = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._take_lock()
        self._queue: PriorityQueue[tuple[int, int, StripeMove | None]] = PriorityQueue()
        self._order = count()
        self._threads = [
            threading.Thread(target=self._run, args=(i == 0,), name=f"stripe files {i}", daemon=True)
            for i in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def _take_lock(self) -> None:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                return fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(self._locked)
                    raise OSError(errno.EBUSY, "another process uses it") from None
                time.sleep(0.05)

    def start(self, moves: Sequence[StripeMove]) -> None:
        """Starts writes and reads; requests wait for reads, so these go first."""
        for move in moves:
            if move.kind in ("write", "read"):
                self._queue.put((move.kind == "write", next(self._order), move))

    def close(self) -> bool:
        """Drops moves that have not begun; returns False if one still uses its slab after a second."""
        for _ in self._threads:
            self._queue.put((-1, next(self._order), None))
        for thread in self._threads:
            thread.join(timeout=1.0)
        if any(thread.is_alive() for thread in self._threads):
            return False
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        os.close(self._locked)
        return True

    # ---- threads

    def _run(self, scans: bool) -> None:
        header = mmap.mmap(-1, self.header_bytes)  # page-aligned
        if scans:
            self._report((0, 0.0, self.scan(header)))
        while (move := self._queue.get()[2]) is not None:
            begin, failed = time.perf_counter(), []
            for i, (slab, record, wanted) in enumerate(zip(move.slabs, move.records, move.headers, strict=True)):
                try:
                    if move.kind == "write":
                        self.write(header, record, wanted, self._slabs[slab])
                    elif not self.read(header, record, wanted, self._slabs[slab]):
                        failed.append(i)
                except Exception as error:
                    LOG.warning("%s of record %d in %s failed: %s", move.kind, record, self._directory, error)
                    failed.append(i)
            self._report((move.number, time.perf_counter() - begin, tuple(failed)))

    def scan(self, header: mmap.mmap) -> list[ScannedRecord]:
        """Reads the headers of all segments; skips what is not a record of this rank and model."""
        found = []
        for segment in range(-(-self._records // self._per_segment)):
            try:
                if not self._path(segment).exists():
                    continue
                for record in range(segment * self._per_segment, (segment + 1) * self._per_segment):
                    if record < self._records and (known := self._read_header(header, record)) is not None:
                        found.append((record, known[0]))
            except OSError as error:
                LOG.warning("%s cannot be read: %s", self._path(segment), error)
        return found

    def write(self, header: mmap.mmap, record: int, content: StripeHeader, slab: np.ndarray) -> None:
        """Writes a record; raises OSError."""
        file, at = self._open(record, create=True)
        header[:] = bytes(self.header_bytes)
        _exactly(os.pwritev(file, [header], at), self.header_bytes)
        _exactly(os.pwritev(file, [slab.data], at + self.header_bytes), self._slab_bytes)
        header[:] = self._packed(content, slab)
        _exactly(os.pwritev(file, [header], at), self.header_bytes)

    def read(self, header: mmap.mmap, record: int, wanted: StripeHeader, slab: np.ndarray) -> bool:
        """Reads a record into a slab; returns False if it holds something else, or is damaged."""
        known = self._read_header(header, record)
        if known is None:
            return False
        found, crcs = known
        if (found.key, found.parent, found.generation) != (wanted.key, wanted.parent, wanted.generation):
            return False
        file, at = self._open(record)
        if os.preadv(file, [slab.data], at + self.header_bytes) != self._slab_bytes:
            return False
        return crcs == self._checksums(slab)

    def _read_header(self, header: mmap.mmap, record: int) -> tuple[StripeHeader, bytes] | None:
        file, at = self._open(record)
        if os.preadv(file, [header], at) != self.header_bytes:
            return None
        magic, version, identity, key, parent, generation, start, depth, tokens = FIXED.unpack_from(header)
        if (magic, version, identity, tokens) != (MAGIC, VERSION, self._identity, self._tokens):
            return None
        crcs = FIXED.size + CRC.size * self._crcs
        end = crcs + CRC.size * tokens
        if CRC.unpack_from(header, end)[0] != crc32(header[:end]) or sha256(parent + header[crcs:end]).digest() != key:
            return None
        return StripeHeader(key, parent, generation, start, depth), header[FIXED.size : crcs]

    def _packed(self, content: StripeHeader, slab: np.ndarray) -> bytes:
        assert len(content.tokens) == self._tokens, "a record holds a whole stripe"
        fixed = FIXED.pack(
            MAGIC, VERSION, self._identity, content.key, content.parent, content.generation, content.start,
            content.depth, len(content.tokens),
        )  # fmt: skip
        data = fixed + self._checksums(slab) + content.tokens.astype("<i4").tobytes()
        return (data + CRC.pack(crc32(data))).ljust(self.header_bytes, b"\0")

    def _checksums(self, slab: np.ndarray) -> bytes:
        return b"".join(CRC.pack(crc32(slab[at : at + CRC_BYTES].data)) for at in range(0, self._slab_bytes, CRC_BYTES))

    # ---- segments

    def _path(self, segment: int) -> Path:
        return self._directory / f"{segment:06}.seg"

    def _open(self, record: int, create: bool = False) -> tuple[int, int]:
        """Returns the descriptor of a record's segment and the record's place in it."""
        segment, index = divmod(record, self._per_segment)
        with self._lock:
            file = self._files.get(segment)
            if file is None:
                flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
                try:
                    file = os.open(self._path(segment), flags | os.O_DIRECT, 0o600)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    file = os.open(self._path(segment), flags, 0o600)
                self._files[segment] = file
            if create:
                size = min(self._per_segment, self._records - segment * self._per_segment) * self.record_bytes
                if os.fstat(file).st_size < size:
                    os.posix_fallocate(file, 0, size)
        return file, index * self.record_bytes


def _exactly(done: int, size: int) -> None:
    if done != size:
        raise OSError(errno.EIO, f"{done} of {size} bytes were written")
