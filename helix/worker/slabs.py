"""This rank's host copies of stripes of the prefix cache, and the copies between them and pages.

A slab holds a stripe's pages of everything that is paged: keys, values, latents, scales, index keys, bounds, rows of
drafting layers, and the pages of a draft model. On GPUs a thread starts the copies on a stream of its own. They need
no kernels, which would queue behind those of a prompt. One call copies a page of many layers, because the thread may
wait for the GIL after each call. Few bytes are in flight, because small copies of the main stream queue behind them;
fewer beside decode steps, which these would make longer.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from queue import PriorityQueue
from time import perf_counter

import torch
from torch import Tensor

from helix.engine.scheduler_output import StripeMove
from helix.worker.host_store import HostStore
from helix.worker.stripe_files import StripeFiles

LOG = logging.getLogger("helix.worker")
PIECE_BYTES, PIECE_BYTES_BESIDE_STEPS = 2 << 20, 512 << 10
PIECES = 2  # in flight
ANY_DIRECTION = 4  # cudaMemcpyDefault
ALIGNMENT = 4096  # bytes of slabs: direct I/O reads and writes them
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True)
class Part:
    """One paged tensor's part of a slab.

    Attributes:
        pages: view of the tensor, [layers, pages, words].
        begin, end: its bytes in a slab, which hold [layers, pages of a stripe, words].
    """

    pages: Tensor
    begin: int
    end: int


def parts_of(tensors: Sequence[Tensor], stripe_pages: int) -> list[Part]:
    """Lays out the paged tensors, [layers, pages, ...] each, in a slab, widest words first so that all are aligned."""
    views = []
    for tensor in tensors:
        size = tensor[0, 0].numel() * tensor.element_size() if tensor.numel() else 0
        if size:
            word = next(width for width in WORDS if size % width == 0)
            views.append(tensor.view(*tensor.shape[:2], -1).view(torch.uint8).view(WORDS[word]))
    parts, begin = [], 0
    for view in sorted(views, key=lambda view: -view.element_size()):
        end = begin + len(view) * stripe_pages * view.shape[2] * view.element_size()
        parts.append(Part(view, begin, end))
        begin = end
    return parts


def slab_bytes(tensors: Sequence[Tensor], stripe_pages: int) -> int:
    """Counts the bytes of a slab, a multiple of ALIGNMENT, at least one."""
    parts = parts_of(tensors, stripe_pages)
    return -(-max(parts[-1].end if parts else 0, 1) // ALIGNMENT) * ALIGNMENT


class Slabs:
    """Executes moves on this rank.

    Args:
        tensors: everything that is paged, [layers, pages, ...] each.
        stripe_pages: pages of a stripe.
        store: host memory, uint8 [slabs, `slab_bytes`]; closed with this.
        max_bytes: bytes of a slab on the fullest rank.
        report: called with a move's report when it is done.
        snapshot_memory: returns the memory of a snapshot, contiguous uint8 tensors.

    Attributes:
        beside_steps: whether decode steps run; the runner sets it.
        snapshot_slabs: slabs that a snapshot takes, the same on all ranks; 0: there are none.
        files: the disk below, if any; it has `num_records` records.
        identity: of the files, the same on all ranks.
    """

    files: StripeFiles | None = None
    num_records = snapshot_slabs = 0
    identity = b""
    beside_steps = False

    def __init__(
        self,
        tensors: Sequence[Tensor],
        stripe_pages: int,
        store: HostStore,
        max_bytes: int,
        device: torch.device,
        report: Callable[[tuple[int, float, tuple[int, ...]]], None],
        snapshot_memory: Callable[[int], Sequence[Tensor]] = lambda index: [],
    ) -> None:
        self._snapshot_memory = snapshot_memory
        self.slabs, self.max_bytes, self._store = store.on_cpu, max_bytes, store
        self.device, self._report = device, report
        self._parts, self._stripe_pages = parts_of(tensors, stripe_pages), stripe_pages
        self._reasons = set[str]()  # that were logged
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._queue: PriorityQueue[tuple[int, int, StripeMove | None, torch.cuda.Event | None]] = PriorityQueue()
            self._order = count()
            self._idle = threading.Condition()
            self._num_queued = 0
            self._thread = threading.Thread(target=self._run, name="prefix moves", daemon=True)
            self._thread.start()

    @property
    def piece_bytes(self) -> int:
        return PIECE_BYTES_BESIDE_STEPS if self.beside_steps else PIECE_BYTES

    def start(self, moves: Sequence[StripeMove], kind: str) -> None:
        """Starts the moves of a kind, after all work queued on the current stream; the host does not wait for them."""
        if kind == "load" and self.files is not None:
            self.files.start(moves)
        chosen = [move for move in moves if move.kind == kind]
        if not chosen:
            return
        if self._thread is None:
            for move in chosen:
                self._execute(move)
            return
        event = torch.cuda.Event(blocking=True)
        event.record()
        for move in chosen:
            with self._idle:
                self._num_queued += 1
            self._queue.put((kind == "store", next(self._order), move, event))  # requests wait for loads

    def drain(self) -> None:
        """Waits until all moves from and to pages are done."""
        if self._thread is not None:
            with self._idle:
                self._idle.wait_for(lambda: not self._num_queued)

    def close(self) -> None:
        """Waits for all moves and frees the slabs, unless the disk hangs; a second call does nothing."""
        if self._thread is not None:
            self._queue.put((2, next(self._order), None, None))
            self._thread.join()
            self._thread = None
        files, self.files = self.files, None
        if files is None or files.close():
            self.slabs = torch.empty(0)
            self._store.close()

    def _run(self) -> None:
        torch.cuda.set_device(self.device)
        while True:
            _, _, move, event = self._queue.get()
            if move is None:
                return
            with torch.cuda.stream(self._stream):
                self._execute(move, event)
            with self._idle:
                self._num_queued -= 1
                self._idle.notify_all()

    def _execute(self, move: StripeMove, event: torch.cuda.Event | None = None) -> None:
        begin, failed = perf_counter(), tuple[int, ...]()
        try:
            if event is not None:
                event.synchronize()  # here, and not on the stream: the time of the copies does not include it
                begin = perf_counter()
            self._copy(move)
        except Exception as error:  # serving goes on without the prefix
            failed = tuple(range(len(move.slabs)))
            reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            if reason not in self._reasons:
                self._reasons.add(reason)
                LOG.warning("copies between pages and host memory failed (later ones are counted only): %s", reason)
        self._report((move.number, perf_counter() - begin, failed))

    def _copy_snapshot(self, move: StripeMove) -> None:
        # One layer after the other, in pieces that end where a slab does.
        size, at = self.slabs.shape[1], 0
        link = None if self._thread is None else _Link(self)
        for data in self._snapshot_memory(move.snapshot):
            done = 0
            while done < len(data):
                index, begin = divmod(at, size)
                piece = data[done : done + min(self.piece_bytes, size - begin)]
                host = self.slabs[int(move.slabs[index]), begin : begin + len(piece)]
                to, source = (host, piece) if move.kind == "store" else (piece, host)
                to.copy_(source, non_blocking=True)
                done, at = done + len(piece), at + len(piece)
                if link is not None:
                    link.sent(len(piece))
        if link is not None:
            link.finish()

    @torch.inference_mode()
    def _copy(self, move: StripeMove) -> None:
        if move.snapshot >= 0:
            self._copy_snapshot(move)
        elif self._thread is None:
            pages = torch.from_numpy(move.pages).long()
            for slab, columns in zip(move.slabs.tolist(), pages, strict=True):
                for part in self._parts:
                    host = self.slabs[slab, part.begin : part.end].view(part.pages.dtype)
                    host = host.view(len(part.pages), self._stripe_pages, -1)
                    if move.kind == "store":
                        host.copy_(part.pages[:, columns])
                    else:
                        part.pages[:, columns] = host
        else:
            link = _Link(self)
            for slab, columns in zip(move.slabs.tolist(), move.pages.tolist(), strict=True):
                for part in self._parts:
                    self._copy_part(part, slab, columns, move.kind == "store", link)
            link.finish()

    def _copy_part(self, part: Part, slab: int, columns: Sequence[int], stores: bool, link: _Link) -> None:
        pages, size = part.pages, part.pages.element_size()
        layers, width = len(pages), pages.shape[2] * size
        from_layer, from_slab = pages.stride(0) * size, self._stripe_pages * width
        begin = self.slabs.data_ptr() + slab * self.slabs.shape[1] + part.begin
        step = max(1, self.piece_bytes // width)
        for i, page in enumerate(columns):
            for first in range(0, layers, step):
                rows = min(step, layers - first)
                on_gpu = pages.data_ptr() + page * pages.stride(1) * size + first * from_layer, from_layer
                on_host = begin + i * width + first * from_slab, from_slab
                to, source = (on_host, on_gpu) if stores else (on_gpu, on_host)
                if error := _memcpy_2d()(*to, *source, width, rows, ANY_DIRECTION, link.stream):
                    raise RuntimeError(f"cudaMemcpy2DAsync failed with CUDA error {error}")
                link.sent(rows * width)


class _Link:
    """Limits the bytes in flight on the current stream."""

    def __init__(self, slabs: Slabs) -> None:
        self._slabs = slabs
        self.stream = torch.cuda.current_stream().cuda_stream
        self._in_flight: deque[torch.cuda.Event] = deque()
        self._bytes = 0

    def sent(self, size: int) -> None:
        self._bytes += size
        if self._bytes >= self._slabs.piece_bytes:
            self._mark()
            if len(self._in_flight) == PIECES:
                self._in_flight.popleft().synchronize()

    def finish(self) -> None:
        self._mark()
        while self._in_flight:
            self._in_flight.popleft().synchronize()

    def _mark(self) -> None:
        self._in_flight.append(torch.cuda.Event(blocking=True))
        self._in_flight[-1].record()
        self._bytes = 0


@cache
def _memcpy_2d() -> Callable[..., int]:
    # Torch has loaded this library, and has no such copy: of two strided tensors, one in host memory, it makes copies.
    cudart = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    cudart.cudaMemcpy2DAsync.argtypes = [pointer, size, pointer, size, size, size, ctypes.c_int, pointer]
    return cudart.cudaMemcpy2DAsync  # type: ignore[no-any-return]
