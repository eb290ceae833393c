"""Out-of-memory errors of a rank: how much was requested, how much is free, and which keys to lower."""

from __future__ import annotations

import re

import torch

from helix.config import Config
from helix.errors import RankError
from helix.worker.kv_cache import free_bytes

# Messages of torch's allocators, CUDA, cuBLAS and numpy.
OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|unable to allocate|_ALLOC_FAILED", re.IGNORECASE)
SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
REQUESTED, OF_OTHERS = re.compile(f"allocate {SIZE}"), re.compile(rf"Process \d+ has {SIZE} memory in use")
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def _bytes(count: str, unit: str) -> int:
    return round(float(count) * UNITS[unit])


def shortage(
    error: Exception, config: Config, rank: int, device: torch.device, loaded: bool, built: bool
) -> RankError | None:
    """Converts an out-of-memory error to a RankError that says what to change; None for other errors.

    Args:
        loaded: whether the weights were already loaded.
        built: whether the engine with its caches was already built.
    """
    if isinstance(error, RankError) or not (isinstance(error, MemoryError) or OUT_OF_MEMORY.search(str(error))):
        return None
    found = REQUESTED.search(str(error))
    requested = f"{_bytes(*found.groups()):,} bytes requested" if found else "requested bytes unknown"
    memory = "GPU memory" if device.type == "cuda" else "host memory"
    free = f"{requested}, {free_bytes(device):,} free"
    if others := OF_OTHERS.findall(str(error)):
        free += f", {sum(_bytes(*size) for size in others):,} held by other processes"
    if not loaded:
        return RankError(
            f"rank {rank} ran out of {memory} while loading weights ({free}): use more ranks, or a layout with fewer "
            "weights per rank"
        )
    kv, decode = config.kv, config.decode
    if kv.offload == "host" and kv.offload_gpu_bytes is not None:
        cache = f"kv.offload_gpu_bytes={kv.offload_gpu_bytes:.0f}"
    else:
        cache = f"kv.memory_fraction={kv.memory_fraction}" if kv.tokens is None else f"kv.tokens={kv.tokens}"
    when = "running steps" if built else "allocating the KV cache"
    keys = f"lower {cache}, decode.max_batch={decode.max_batch} or decode.prefill_chunk={decode.prefill_chunk}"
    return RankError(f"rank {rank} ran out of {memory} while {when} ({free}): {keys}, or raise layout.kvp")
