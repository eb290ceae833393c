"""Copies of stripes between pages and host memory on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Thread
from typing import Any, Literal

import numpy as np
import pytest
import torch

from comm.loopback import LoopbackWorld
from helix.engine.request import Request
from helix.engine.scheduler_output import SchedulerOutput, StripeMove
from helix.layout import HelixLayout
from helix.worker import slabs as module
from helix.worker.host_store import HostStore
from helix.worker.slabs import ALIGNMENT, Slabs, parts_of, slab_bytes
from tests.e2e.checkpoints import checkpoint
from tests.e2e.parity import build_engine
from tests.sequences import generated

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STRIPE_PAGES = 3


def paged(device: str) -> list[torch.Tensor]:
    """Pages of all word sizes, of layers of 1 B to several pieces, and none."""
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((3, 12, 16, 2, 8), torch.bfloat16), ((2, 12, 5), torch.uint8), ((1, 12, 3, 3), torch.bfloat16),
        ((2, 12, 1, 7), torch.float32), ((5, 12, 64, 512), torch.float32), ((2, 12, 0), torch.float32),
    ]  # fmt: skip
    return [torch.randint(0, 255, shape, generator=generator).to(dtype).to(device) for shape, dtype in shapes]


@contextmanager
def slabs_of(tensors: list[torch.Tensor], count: int, reports: list[Any], *more: Any) -> Iterator[Slabs]:
    size, device = slab_bytes(tensors, STRIPE_PAGES), tensors[0].device
    store = HostStore((count, size), torch.uint8, device)
    found = Slabs(tensors, STRIPE_PAGES, store, size, device, reports.append, *more)
    yield found
    found.close()
    found.close()


def move(number: int, kind: Literal["store", "load"], slabs: list[int], pages: list[list[int]]) -> StripeMove:
    return StripeMove(number, kind, np.array(slabs, dtype=np.int32), np.array(pages, dtype=np.int32))


def test_parts_are_aligned_and_adjacent() -> None:
    parts = parts_of(paged("cpu"), STRIPE_PAGES)
    assert len(parts) == 5, "empty tensors have none"
    assert [p.begin for p in parts] == [0, *(p.end for p in parts[:-1])]
    assert all(p.begin % p.pages.element_size() == 0 for p in parts)
    total = sum(t[:, :STRIPE_PAGES].numel() * t.element_size() for t in paged("cpu"))
    assert parts[-1].end == total and slab_bytes(paged("cpu"), STRIPE_PAGES) == -(-total // ALIGNMENT) * ALIGNMENT
    assert slab_bytes([], 1) == ALIGNMENT, "also of a rank without heads"


@pytest.mark.parametrize("beside_steps", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_stripes_come_back_into_other_pages(device: str, beside_steps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 1 << 14)
    monkeypatch.setattr(module, "PIECE_BYTES_BESIDE_STEPS", 1 << 10)
    tensors, reports = paged(device), list[Any]()
    before = [t.clone() for t in tensors]
    with slabs_of(tensors, 4, reports) as slabs:
        slabs.beside_steps = beside_steps
        slabs.start([move(1, "store", [2, 0], [[1, 7, 3], [4, 5, 6]]), move(2, "load", [0], [[0, 0, 0]])], "store")
        slabs.drain()
        for t in tensors:
            t.view(torch.uint8).fill_(9)
        slabs.start([move(3, "load", [0, 2], [[9, 2, 11], [0, 8, 10]])], "load")
        slabs.drain()
    assert [(number, failed) for number, seconds, failed in reports if seconds > 0] == [(1, ()), (3, ())]
    for t, was in zip(tensors, before, strict=True):
        assert torch.equal(t[:, [9, 2, 11, 0, 8, 10]], was[:, [4, 5, 6, 1, 7, 3]])
        assert (t[:, [1, 3, 4, 5, 6, 7]].view(torch.uint8) == 9).all(), "other pages stay"


@pytest.mark.parametrize("device", DEVICES)
def test_a_snapshot_comes_back_from_several_slabs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers and the slabs end at different bytes."""
    monkeypatch.setattr(module, "PIECE_BYTES", 1 << 14)
    tensors, reports = paged(device)[:2], list[Any]()
    size = slab_bytes(tensors, STRIPE_PAGES)
    memory = [torch.randint(0, 255, (n,), dtype=torch.uint8, device=device) for n in (3, 40_000, size, 1)]
    total = sum(map(len, memory))
    slabs_needed = -(-total // size)
    before = [layer.clone() for layer in memory]
    with slabs_of(tensors, slabs_needed + 1, reports, lambda index: memory if index == 5 else []) as slabs:
        order = [*range(slabs_needed, 0, -1)]
        slabs.start([StripeMove(1, "store", np.array(order, dtype=np.int32), snapshot=5)], "store")
        slabs.drain()
        flat = slabs.slabs[order].flatten()[:total]
        assert torch.equal(flat, torch.cat(before).cpu())
        for layer in memory:
            layer.fill_(9)
        slabs.start([StripeMove(2, "load", np.array(order, dtype=np.int32), snapshot=5)], "load")
        slabs.drain()
    assert [(number, failed) for number, _, failed in reports] == [(1, ()), (2, ())]
    assert all(torch.equal(layer, was) for layer, was in zip(memory, before, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("error", [RuntimeError("no link"), MemoryError()], ids=repr)
def test_a_copy_that_fails_is_reported(error: Exception, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Slabs, move: StripeMove) -> None:
        raise error

    monkeypatch.setattr(Slabs, "_copy", broken)
    reports: list[Any] = []
    with slabs_of(paged(device), 4, reports) as slabs:
        slabs.start([move(1, "store", [2, 0], [[1, 7, 3], [4, 5, 6]])], "store")
        slabs.drain()
    assert reports[0][0] == 1 and reports[0][2] == (0, 1)


def test_an_error_of_the_device_ends_the_wait_for_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, blocking: bool) -> None:
            self.record = lambda: None

        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for name, fake in {"Stream": id, "set_device": id, "stream": nullcontext, "Event": Event}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    tensors, reports = paged("cpu"), list[Any]()
    store = HostStore((4, slab_bytes(tensors, STRIPE_PAGES)), torch.uint8, torch.device("cpu"))
    slabs = Slabs(tensors, STRIPE_PAGES, store, store.bytes // 4, torch.device("cuda"), reports.append)
    for number in (1, 2):
        slabs.start([move(number, "store", [2, 0], [[1, 7, 3], [4, 5, 6]])], "store")
    waits = Thread(target=slabs.drain, daemon=True)
    waits.start()
    waits.join(10)
    assert not waits.is_alive() and [(number, failed) for number, _, failed in reports] == [(1, (0, 1)), (2, (0, 1))]
    slabs.close()


def test_pieces_are_smaller_beside_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of a prompt's chunk alone, and batches with decode steps."""
    alone = LoopbackWorld(1).communicator(0, [0])
    engine = build_engine(checkpoint("qwen2"), HelixLayout.create(), alone, 16, slabs=8, prefill_chunk=16)
    found, launch = set(), engine.runner._launch

    def recorded(output: SchedulerOutput) -> Any:
        assert engine.runner.slabs is not None
        found.add((bool(output.prefill_chunks), output.decode_steps > 0, engine.runner.slabs.piece_bytes))
        return launch(output)

    monkeypatch.setattr(engine.runner, "_launch", recorded)
    generated(engine, [Request("any", tuple(range(40)), 20)])
    engine.close()
    assert {(True, False, 2 << 20), (False, True, 512 << 10)} <= found
    assert all(piece == (512 << 10 if decodes else 2 << 20) for _, decodes, piece in found)
