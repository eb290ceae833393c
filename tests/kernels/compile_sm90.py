"""Compiles the attention kernels for sm_90 without a GPU and prints registers and stack of each, one line a case.

A program of its own: the tests' process runs kernels under the interpreter, and cannot compile them.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.flash_decode import MIN_RUN, _flash_decode_kernel
from kernels.flash_prefill import _flash_prefill_kernel
from kernels.lse_combine import _lse_combine_kernel
from kernels.paged import tile_shape

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
CASES = [  # kernel, dtype, head dim, group, query tokens, page size
    ("decode", torch.bfloat16, 128, 4, 1, 64),
    ("decode", torch.bfloat16, 256, 16, 32, 16),
    ("decode", torch.float32, 128, 8, 8, 100),
    ("prefill", torch.bfloat16, 128, 8, 512, 64),
    ("prefill", torch.float32, 64, 4, 512, 16),
    ("combine", torch.bfloat16, 128, 1, 1, 1),
]


def compile_case(kernel: str, dtype: torch.dtype, dim: int, group: int, tokens: int, page: int) -> tuple[int, int]:
    """Registers and stack bytes of a thread."""
    if kernel == "combine":
        function, options = _lse_combine_kernel, {"num_warps": 1}
        constants = {"D": dim, "BLOCK_W": 8, "BLOCK_D": triton.next_power_of_2(dim)}
    else:
        function = _flash_decode_kernel if kernel == "decode" else _flash_prefill_kernel
        tile = tile_shape(tokens * group, (64 if dim <= 128 else 32) if kernel == "decode" else 128, dim, dtype)
        options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
        constants = {"GROUP": group, "D": dim, "PAGE": page, **tile}
        if kernel == "decode":
            constants |= {"HEADS": 8, "BLOCK_B": 8, "T": tokens, "EARLY": True}
            constants |= {"MIN_RUN": MIN_RUN, "PDL": True}
            constants |= {"ROWS": min(tile["BLOCK_M"], triton.next_power_of_2(tokens * group))}
    pointers = dict.fromkeys(("q", "k_cache", "v_cache", "partials", "out"), f"*{NAMES[dtype]}")
    pointers |= dict.fromkeys(("block_table", "lo", "hi", "cu_q"), "*i32") | {"scale_log2": "fp32"}
    pointers |= dict.fromkeys(("out_lse", "lse", "part", "part_lse"), "*fp32")
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(function.arg_names):
        signature[name] = "constexpr" if name in constants else pointers.get(name, "i32")
        if name in constants:
            values[(i,)] = constants[name]
        elif name not in ("B", "T", "W", "H", "scale_log2"):  # tensors and strides are multiples of 16
            attributes[(i,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(function, signature, values, attributes), target=GPUTarget("cuda", 90, 32), options=options
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0]
    return int(registers), int(stack)


if __name__ == "__main__":
    for case in CASES:
        print(*case[:1], NAMES[case[1]], *case[2:], *compile_case(*case), flush=True)
