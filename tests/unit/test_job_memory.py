"""Memory that runs out on a rank: the line names what was wanted and which keys take less."""

from __future__ import annotations

import pytest
import torch

from launch.inputs.compose import composed
from launch.job import memory
from launch.job.memory import shortage

GPU = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB of which 9.0 MiB is free."
)
CPU = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12"
SMALLER = "decode.prefill_chunk=auto, or take a larger layout.kvp"


@pytest.mark.parametrize(
    "error, overrides, loaded, built, words",
    [
        (
            torch.OutOfMemoryError(GPU),
            [],
            False,
            False,
            "while loading weights (20,971,520 bytes wanted, 7 free): take",
        ),
        (
            RuntimeError(CPU),
            ["kv.tokens=64"],
            True,
            False,
            "making the KV cache (4,096 bytes wanted, 7 free): lower kv.",
        ),
        (
            torch.OutOfMemoryError(GPU),
            ["kv.tokens=64"],
            True,
            False,
            f"kv.tokens=64, decode.max_batch=auto or {SMALLER}",
        ),
        (
            torch.OutOfMemoryError(GPU),
            ["decode.max_batch=4"],
            True,
            True,
            "kv.memory_fraction=0.9, decode.max_batch=4 or",
        ),
        (
            torch.OutOfMemoryError(GPU),
            ["kv.tier=host", "kv.gpu_bytes=9"],
            True,
            True,
            "running steps (20,971,520 bytes",
        ),
        (
            torch.OutOfMemoryError(GPU),
            ["kv.tier=host", "kv.gpu_bytes=9"],
            True,
            True,
            "lower kv.gpu_bytes=9, decode.max",
        ),
        (MemoryError("Unable to allocate 1.50 KiB for an array with shape"), [], True, True, "(1,536 bytes wanted"),
        (
            RuntimeError("Triton Error [CUDA]: out of memory"),
            [],
            True,
            True,
            "(an unknown number of bytes wanted, 7 free)",
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), [], True, True, "rank 1 ran out of host"),
    ],
)
def test_the_line(
    error: Exception, overrides: list[str], loaded: bool, built: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 7)
    found = shortage(error, composed(overrides), 1, torch.device("cpu"), loaded, built)
    assert found is not None and words in str(found) and "\n" not in str(found), found


def test_other_errors_stay_what_they_are() -> None:
    for error in (RuntimeError("rank 1 waited 5 s"), ValueError("no"), memory.RankError("out of memory")):
        assert shortage(error, composed([]), 0, torch.device("cpu"), True, True) is None
