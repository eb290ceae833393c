"""The kernels compile for the GPU that they are made for, keep their accumulators in registers, and crowd no SM."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from kernels.attention.paged_tiles import SMALL_HEAD_DIM
from tests.kernels.compile_sm90 import adds_a_constant_to_halves

ROOT = Path(__file__).parents[2]
PARTS = 2  # of all launches, for two processes
HANG_S = 1800  # a minute on a quiet machine; what fails then hangs


def output(program: str, *arguments: str, **more: str) -> str:
    """What a program of the tests prints, whose kernels are compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)} | more
    command = [sys.executable, "-m", f"tests.kernels.{program}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(HANG_S)
def test_what_is_launched_ahead_is_compiled_at_the_end_and_writes_nothing(tmp_path: Path) -> None:
    assert output("precompile", TRITON_CACHE_DIR=str(tmp_path)).split() == ["0", "4", "0.0"]
    assert len(list(tmp_path.rglob("*.cubin"))) == 4, "the next process finds them"


def kernels_of(path: Path) -> set[str]:
    """Triton's kernels in a file, which are launched by nothing else than the ops in it."""
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {node.name for node in functions if node.name.endswith("_kernel") and node.decorator_list}


@pytest.mark.timeout(HANG_S)
def test_every_kernel_is_compiled() -> None:
    defined = set().union(*map(kernels_of, (ROOT / "kernels").rglob("*.py")))
    assert len(defined) > 80 and defined - {*output("compile_sm90", "0", "0").split()} == set()


# Bytes of stack, where accumulators in registers leave no room for all that is kept beside them.
MAX_STACK = {
    # Accumulators of latents take half of all registers (512 bytes a thread); addresses beside them have to leave.
    "_mla_decode_kernel": 416,
    "_mla_prefill_kernel": 384,
    "_mla_decode_sm90_kernel": 312,  # 144 without key scores
    "_mla_decode_few_sm90_kernel": 64,
    "_gate_up_kernel": 192,  # a tile of 128 pairs and 256 columns, by whose side addresses of weights leave
    "_linear_fp8_sm90_kernel": 192,  # before and behind the loop over 128 rows of x: what was looked up for its sums
    "_linear_packed_sm90_kernel": 512,  # behind the loop over 128 rows of x: where its sums are sent
    "_index_scores_kernel": 96,  # weights of heads, kept beside the queries of five tokens with 64 heads each
    # Of warps that go apart, what each loads again for an item.
    "_flash_prefill_sm90_kernel": 24,
    "_chunks_kernel": 32,
    "_experts_many_kernel": 424,  # where sums go, and biases, worked out outside of the loop over columns
    "_angles_kernel": 32,  # large angles are reduced in an array of the library
    "_flash_decode_many_sm90_kernel": 128,
}
# Of launches, what Triton 3.6 spills of all 255 registers and 3.7 does not.
TRITON_3_6_STACK = {"decode-128-16-fp8-64": 32, "decode-128-8-fp8-128-any": 88, "decode-128-1-fp8-1-holes": 40}


def meant(name: str, warps: int) -> int | None:
    """Programs that are to fit an SM: attention starts while its predecessor's still take room (see `kv_append`)."""
    if name.startswith("mla-decode"):
        return 1
    if name.startswith("decode") and int(name.split("-")[1]) > SMALL_HEAD_DIM.value:
        return 8 // warps
    return None


@pytest.mark.timeout(HANG_S)
@pytest.mark.parametrize("part", range(PARTS))
def test_sm_90(part: int) -> None:
    lines = [line.split() for line in output("compile_sm90", str(part), str(PARTS)).splitlines()]
    assert len(lines) > 60
    for name, kernel, registers, programs, stack, warps in lines:
        what = f"{kernel} of {name}: {registers} registers, {stack} bytes of stack, {programs} programs fit an SM"
        # A spilled accumulator shows as a stack frame of more than a few registers.
        spilled = TRITON_3_6_STACK.get(name, 0) if triton.__version__.startswith("3.6") else 0
        assert int(stack) <= max(spilled, MAX_STACK.get(kernel, 16)), what
        if "_decode_" in kernel and (wanted := meant(name, int(warps))) is not None:
            assert int(programs) == wanted, f"{what}, {wanted} were meant to"


def test_a_constant_that_is_added_to_halves_is_noticed() -> None:
    """What ptxas was seen to lose, and what it does not lose."""
    lost = "mov.b32 \t%r48, {%rs1, %rs1};\nmov.b32 \t%r49, 8454145;\nadd.s16x2 \t%r50, %r48, %r49;"
    kept = "mov.b32 \t%r735, {%rs323, %rs324};\nadd.s16x2 \t%r739, %r738, %r735;"
    assert adds_a_constant_to_halves(lost) and not adds_a_constant_to_halves(kept)


def test_defaults_are_numbers() -> None:
    """A function that kernels call has no text as a default: Triton 3.6 takes it for no constant."""
    found = [
        f"{path}: {node.name}"
        for path in (ROOT / "kernels").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)
        if any(isinstance(value, ast.Constant) and isinstance(value.value, str) for value in node.args.defaults)
    ]
    assert found == []
