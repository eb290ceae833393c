"""Compiles kernels for sm_90 without a GPU, as their ops launch them; prints resources, one kernel per line.

`python -m tests.kernels.compile_sm90 PART PARTS` takes one of PARTS parts of the launches. A line has the launch's
name, the kernel's, registers per thread, programs per SM, stack bytes, and warps. With PARTS=0 it compiles
nothing and prints the launched kernels.
A separate program: the tests' process runs kernels in the interpreter, and cannot compile them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.runtime import driver
from triton.runtime._async_compile import FutureKernel
from triton.runtime.jit import JITFunction

from kernels import dispatch
from kernels.precompile import precompile
from tests.kernels import launches_attention, launches_dense, launches_tokens
from tests.kernels.launches import Launch
from tests.kernels.precompile import NoGPU

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SMS = 132  # of an H100


class Unlaunched:
    """The result of a launch: a kernel that can be launched again, without effect."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: None


def launches() -> list[Launch]:
    """Returns all launches."""
    return [*launches_attention.all_of_them(), *launches_dense.all_of_them(), *launches_tokens.all_of_them()]


def run(some: list[Launch], tell: Callable[[Launch, JITFunction, Any], None], compiles: bool = True) -> None:
    """Runs ops on CPU tensors as if on an H100, and calls `tell` with each kernel they launch."""
    prepare, now = JITFunction.run, some[0]

    def launched(self: JITFunction, *args: Any, **options: Any) -> Unlaunched:
        tell(now, self, prepare(self, *args, **options) if compiles else None)
        return Unlaunched()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", launched)
        as_on_an_h100(patch)
        with precompile():
            for now in some:
                patch.setattr(torch.cuda, "get_device_capability", lambda *device, found=now.capability: found)
                now.run()


def as_on_an_h100(patch: pytest.MonkeyPatch) -> None:
    """Patches Triton and torch to see an H100."""
    driver.set_active(NoGPU())
    patch.setattr(dispatch, "on_gpu", lambda t: True)
    patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    patch.setattr(torch.cuda, "current_stream", lambda *device: None)
    for module in [*sys.modules.values()]:
        if getattr(module, "__name__", "").startswith(("kernels.", "benchmarks.")) and hasattr(module, "sm_count"):
            patch.setattr(module, "sm_count", lambda device: SMS)


def registers_and_stack(kernel: Any) -> tuple[int, int]:
    """Returns registers per thread, and stack bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0]
    return int(registers), int(stack)


def adds_a_constant_to_halves(ptx: str) -> bool:
    """Returns whether ptxas 12.8 would turn a constant added to two 16-bit halves of a register into 0."""
    constants = set(re.findall(r"mov\.b32\s+(%r\d+), -?\d", ptx))
    operands = {operand for pair in re.findall(r"add\.s16x2\s+%r\d+, (\S+), (\S+);", ptx) for operand in pair}
    return any(operand in constants or not operand.startswith("%") for operand in operands)


def programs_on_an_sm(kernel: Any, registers: int) -> int:
    """Returns how many programs fit an SM: 64K registers, allocated by eights per thread, 228 KiB of shared memory."""
    by_registers = 65536 // (triton.cdiv(registers, 8) * 8 * 32 * kernel.metadata.num_warps)
    return min(by_registers, (228 << 10) // (kernel.metadata.shared + 1024))  # a KiB of each is reserved by the system


def main(part: int, parts: int) -> None:
    """Compiles a part of the launches and prints their resources."""
    found: dict[int, tuple[str, str, Any]] = {}
    if not parts:
        run(launches(), lambda of, function, kernel: print(function.__name__), compiles=False)
        return
    run(
        launches()[part::parts],
        lambda of, function, kernel: found.setdefault(id(kernel), (of.name, function.__name__, kernel)),
    )
    for name, function, future in found.values():
        kernel = future.result() if isinstance(future, FutureKernel) else future
        assert not adds_a_constant_to_halves(kernel.asm["ptx"]), f"{function} of {name} adds to 16-bit halves"
        registers, stack = registers_and_stack(kernel)
        programs = programs_on_an_sm(kernel, registers)
        print(name, function, registers, programs, stack, kernel.metadata.num_warps, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
