"""Host memory for a cache: as large as wanted, pinned as a whole or not at all, on every rank alike."""

from __future__ import annotations

import ctypes
import mmap
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from comm.loopback import LoopbackWorld, run_ranks
from helix.errors import ConfigError
from helix.worker import host_store as module
from helix.worker.host_store import HostStore, available_memory, host_store, numa_node, prefer_numa_node

GPU = torch.device("cuda", 0)
MIB = 1 << 20


class Runtime:
    """CUDA, as far as pinning goes: it has room for some bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 3
        if sum(self.pinned.values()) + size > self.room:
            return 2
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime(10 * MIB)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: PROPERTIES)
    monkeypatch.setattr(module, "mapped", lambda address, size, device: bytes_at(address, size))
    return made


def bytes_at(address: int, size: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


PROPERTIES = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=1)


def test_exactly_the_bytes_that_are_wanted(runtime: Runtime) -> None:
    """In one registration: CUDA refuses copies that two of them share."""
    store = HostStore((3, 700_001), torch.bfloat16, GPU)
    assert store.tensor is not None and store.tensor.shape == (3, 700_001) and store.bytes == 4_200_006
    assert runtime.pinned == {store.tensor.data_ptr(): store.bytes}
    store.tensor.fill_(1)
    store.close()
    store.close()
    assert runtime.pinned == {} and store.tensor is None


def test_memory_that_cannot_be_pinned(runtime: Runtime) -> None:
    with pytest.raises(OSError, match="CUDA error 2"):
        HostStore((11 * MIB,), torch.int8, GPU)
    assert runtime.pinned == {}


@pytest.mark.gpu
def test_any_bytes_are_copied() -> None:
    store, data = HostStore((3 << 29,), torch.uint8, GPU), torch.arange(2 * MIB, device=GPU).to(torch.uint8)
    for end in ((1 << 30) + MIB, 3 << 29):
        store.on_cpu[end - len(data) : end].copy_(data, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(store.on_cpu[end - len(data) : end], data.cpu())
    store.close()


def test_a_cpu_pins_nothing(runtime: Runtime) -> None:
    store = HostStore((5, 7), torch.float32, torch.device("cpu"))
    assert store.tensor is not None and store.tensor.abs().sum() == 0 and runtime.pinned == {}
    store.close()


def test_every_rank_hears_of_one_that_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """With bytes, rank and limit; the others keep nothing."""
    monkeypatch.setattr(resource, "getrlimit", lambda what: (65536, 65536))
    closed: list[int] = []
    monkeypatch.setattr(HostStore, "close", lambda store: closed.append(store.bytes))

    def body(world: LoopbackWorld, rank: int) -> str:
        comm = world.communicator(rank, [0, 1, 2])
        with pytest.raises(ConfigError) as error:
            host_store((1 << (62 if rank == 1 else 10),), torch.int8, comm)
        return str(error.value)

    messages = run_ranks(3, body, timeout_s=30.0)
    assert len(set(messages)) == 1 and closed == [1024, 1024]
    for part in ("rank 1", f"{1 << 62} bytes", "65536 bytes", "lower kv.offload_host_bytes"):
        assert part in messages[0]


@pytest.mark.parametrize("limit, available", [(None, 7 << 10), ("max\n", 7 << 10), ("4096\n", 4096), ("9999\n", 7168)])
def test_a_container_s_limit_counts(
    limit: str | None, available: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("MEMINFO", "MemFree: 1 kB\nMemAvailable:       7 kB\n"), ("CONTAINER_LIMIT", limit)):
        monkeypatch.setattr(module, name, tmp_path / name)
        if text is not None:
            (tmp_path / name).write_text(text)
    assert available_memory() == available


@pytest.mark.parametrize("text, node", [("1\n", 1), ("-1\n", None), (None, None)])
def test_the_gpus_own_node(
    text: str | None, node: int | None, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DEVICES", tmp_path)
    (tmp_path / "0000:dc:01.0").mkdir()
    if text is not None:
        (tmp_path / "0000:dc:01.0" / "numa_node").write_text(text)
    assert numa_node(GPU) == node


def test_memory_is_asked_of_a_node() -> None:
    """Or of any, where Linux refuses; either way it can be written."""
    memory = mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for node in (0, 63, 64):
        prefer_numa_node(node, ctypes.addressof(ctypes.c_char.from_buffer(memory)), MIB)
    memory[:5] = b"hello"
    assert memory[:5] == b"hello"
