"""Programmatic dependent launch (PDL): overlaps the prologue of a kernel with the end of its predecessor.

A kernel starts while its predecessor finishes, reads data that no kernel of this step writes, and only then waits. Two
rules keep that safe. A kernel always waits, before it touches its predecessor's output or even if it touches none, so
that "my predecessor is done" holds transitively. And it lets its successor start only after that wait, so that a
successor that has not waited yet may read everything older than its predecessor. The exception is a reduction whose
predecessor sends (`kernels.peers.all_reduce_norm`): it receives tagged words before it waits, and may start a
projection at once, which reads only weights before its own wait.

A kernel that fills the GPU starts its successor late: waiting programs occupy SMs, and programs that find no room crowd
onto a few SMs later. If all programs of a kernel are resident at once, a successor may start early if it needs few
registers and hardly any shared memory, or if so few of its programs fit an SM that none can get too many.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def sm_count(device: torch.device) -> int:
    """Returns the number of SMs; 1 on a CPU, where the interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def pdl_options(t: torch.Tensor) -> dict[str, bool]:
    """Returns the launch options of a kernel that calls the two functions below, on the device of `t`."""
    on_gpu = t.is_cuda  # the interpreter has no PDL
    return {"PDL": on_gpu, "launch_pdl": on_gpu}


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Waits until the preceding kernel has written everything."""
    if PDL:
        gdc_wait()


@triton.jit
def start_successor(PDL: tl.constexpr):
    """Lets the next kernel start; call it after `wait_for_predecessor`."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def prefetch(at):
    """Prefetches the cache lines at pointers `at` into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def store_in_place(at, value, mask, PDL: tl.constexpr):
    """Stores integers from the threads that hold them; `tl.store` would first move scattered ones to others."""
    WIDE: tl.constexpr = value.dtype.primitive_bitwidth == 64
    if PDL:
        tl.inline_asm_elementwise(
            """{
            .reg .pred wanted;
            setp.ne.u32 wanted, $3, 0;
            @wanted st.global.""" + ("b64" if WIDE else "b32") + """ [$1], $2;
            mov.b32 $0, 0;
            }""",
            "=r,l,l,r" if WIDE else "=r,l,r,r", [at.to(tl.int64), value, mask.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(at, value, mask=mask != 0)
