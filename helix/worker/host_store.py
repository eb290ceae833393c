"""Host memory that GPU kernels read and write: pinned, mapped, and of exact size.

torch's pinned allocator rounds up to a power of two, so this maps memory itself and registers it with CUDA, as a whole:
CUDA refuses copies from or to memory of two registrations. With unified addressing the GPU uses the same address, so
torch can wrap it as a GPU tensor (`__cuda_array_interface__`): its kernels run in stream order and access the memory
over PCIe.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import platform
import re
import resource
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from comm.base import Communicator
from helix.errors import ConfigError

LOG = logging.getLogger("helix.worker")
PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
PREFERRED = 1  # MPOL_PREFERRED
MBIND = {"x86_64": 237, "aarch64": 235}  # system call numbers
DEVICES = Path("/sys/bus/pci/devices")
MEMINFO, CONTAINER_LIMIT = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")


class HostStore:
    """A tensor of `device` that lies in host memory; on a CPU, ordinary memory.

    Attributes:
        tensor: [*shape]; None after `close`.
        on_cpu: the same memory as a CPU tensor, for copies.

    Raises:
        OSError: the memory cannot be pinned; nothing stays pinned.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.bytes = math.prod(shape) * dtype.itemsize
        self._pinned: int | None = None  # address
        self._memory: mmap.mmap | None = mmap.mmap(-1, self.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        numbers = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.tensor: torch.Tensor | None = None
        self.on_cpu = numbers.view(dtype).view(*shape)
        if device.type == "cuda":
            self._pin(numbers.data_ptr(), device)
            numbers = mapped(numbers.data_ptr(), self.bytes, device)
        self.tensor = numbers.view(dtype).view(*shape)

    def _pin(self, at: int, device: torch.device) -> None:
        assert self._memory is not None
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        if (node := numa_node(device)) is not None:
            prefer_numa_node(node, at, self.bytes)
        self._runtime: Any = torch.cuda.cudart()
        if error := int(self._runtime.cudaHostRegister(at, self.bytes, PORTABLE_MAPPED)):
            self.close()
            raise OSError(f"cudaHostRegister failed with CUDA error {error}")
        self._pinned = at

    def close(self) -> None:
        """Frees the memory; no kernel may use it any more. A second call does nothing."""
        self.tensor, self.on_cpu = None, torch.empty(0)
        if self._pinned is not None:
            self._runtime.cudaHostUnregister(self._pinned)
            self._pinned = None
        self._memory = None


def host_store(
    shape: Sequence[int],
    dtype: torch.dtype,
    comm: Communicator,
    key: str = "kv.offload_host_bytes",
) -> HostStore:
    """Creates this rank's store, whose shape may differ between ranks; a collective call.

    Raises:
        ConfigError: a rank cannot pin the memory that option `key` asks for; raised on every rank, and none keeps any.
    """
    store, reason = None, ""
    size = math.prod(shape) * dtype.itemsize
    if comm.rank == 0 and comm.device.type == "cuda":
        LOG.info("%s: pinning %.1f GB of host memory on each rank, some 2 GB a second", key, size / 1e9)
    try:
        store = HostStore(shape, dtype, comm.device)
    except (OSError, ValueError, OverflowError) as error:  # the last two: more than the address space
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        locked = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
        reason = (
            f"rank {comm.rank} cannot pin {size} bytes of host memory for {key} "
            f"({error}; the limit of locked memory, ulimit -l, is {locked}): lower {key} or raise the limit"
        )
    reasons = [error for error in comm.all_gather_object(reason) if error]
    if reasons:
        if store is not None:
            store.close()
        raise ConfigError(reasons[0])
    assert store is not None
    return store


def available_memory() -> int:
    """Returns the available bytes of this host's memory; in a container, at most its limit (cgroup v2).

    Raises:
        RuntimeError: this is not Linux.
    """
    found = re.search(r"^MemAvailable: *(\d+) kB", MEMINFO.read_text(), re.MULTILINE) if MEMINFO.exists() else None
    if found is None:
        raise RuntimeError(f"cannot tell how much memory is available: {MEMINFO} has no MemAvailable: run on Linux")
    limit = CONTAINER_LIMIT.read_text().strip() if CONTAINER_LIMIT.exists() else "max"
    return min([int(found[1]) * 1024, *([int(limit)] if limit.isdigit() else [])])


def mapped(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Returns `size` bytes of registered memory as a GPU tensor, uint8."""
    interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)


def numa_node(device: torch.device) -> int | None:
    """Returns the NUMA node of a GPU's PCIe link; None if the machine does not report it."""
    properties = torch.cuda.get_device_properties(device)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"  # type: ignore[attr-defined]
    file = DEVICES / address / "numa_node"
    node = int(file.read_text()) if file.exists() else -1
    return None if node < 0 else node


def prefer_numa_node(node: int, address: int, size: int) -> None:
    """Prefers a NUMA node for memory that is not allocated yet; has no effect if Linux refuses."""
    if number := MBIND.get(platform.machine()):
        nodes = (ctypes.c_ulong * (node // 64 + 1))()
        nodes[node // 64] = 1 << node % 64
        libc = ctypes.CDLL(None)
        libc.syscall(number, ctypes.c_void_p(address), ctypes.c_ulong(size), PREFERRED, nodes, 64 * len(nodes) + 1, 0)
