"""Memory that runs out on a rank: the line names what was wanted and which keys take less."""

from __future__ import annotations

import pytest
import torch

from launch.inputs.compose import compose_config
from launch.job import memory
from launch.job.memory import shortage

GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB")
SHARED = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 360.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 202.38 MiB is "
    "free. Including non-PyTorch memory, this process has 31.75 GiB memory in use. Process 24 has 39.50 GiB memory in "
    "use. Process 16 has 32.00 GiB memory in use. Of the allocated memory 29.77 GiB is allocated by PyTorch"
)
CPU = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12")
NUMPY = MemoryError("Unable to allocate 1.50 KiB for an array with shape")
TRITON = RuntimeError("Triton Error [CUDA]: out of memory")
CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
HOST = "kv.offload=host kv.offload_gpu_bytes=9"


@pytest.mark.parametrize(
    "error, overrides, loaded, built, words",
    [
        (
            GPU,
            "",
            False,
            False,
            "rank 1 ran out of host memory while loading weights (20,971,520 bytes requested, 7 free)",
        ),
        (
            CPU,
            "kv.tokens=64",
            True,
            False,
            "allocating the KV cache (4,096 bytes requested, 7 free): lower kv.tokens=64, dec",
        ),
        (
            GPU,
            "decode.max_batch=4",
            True,
            True,
            "running steps (20,971,520 bytes requested, 7 free): lower kv.memory_fr",
        ),
        (GPU, "decode.max_batch=4", True, True, "decode.max_batch=4 or decode.prefill_chunk=auto, or raise layout"),
        (GPU, HOST, True, True, "lower kv.offload_gpu_bytes=9, decode.max_batch=auto or decode.prefill_chunk=auto"),
        (
            SHARED,
            "",
            True,
            True,
            "(377,487,360 bytes requested, 7 free, 76,772,540,416 held by other processes)",
        ),
        (NUMPY, "", True, True, "(1,536 bytes requested, 7 free)"),
        (TRITON, "", True, True, "(requested bytes unknown, 7 free)"),
        (CUBLAS, "", True, True, "(requested bytes unknown, 7 free)"),
        (RuntimeError("rank 1 waited 5 s"), "", True, True, None),
        (memory.RankError("out of memory"), "", True, True, None),
    ],
)
def test_the_line(
    error: Exception, overrides: str, loaded: bool, built: bool, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 7)
    found = shortage(error, compose_config(overrides.split()), 1, torch.device("cpu"), loaded, built)
    assert (found is None) if words is None else (words in str(found) and "\n" not in str(found)), found
