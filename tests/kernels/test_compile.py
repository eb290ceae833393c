"""The kernels compile for the GPU that they are made for, keep their accumulators in registers, and crowd no SM."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from kernels.attention.paged_tiles import ROOMY
from tests.kernels.compile_sm90 import cases, last_cases

ROOT = Path(__file__).parents[2]
PARTS = 4  # of all kernels: where none is in Triton's cache, each takes a minute
SLOW = pytest.mark.slow


def output(program: str, *arguments: str, **more: str) -> str:
    """What a program of the tests prints, whose kernels are compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)} | more
    command = [sys.executable, "-m", f"tests.kernels.{program}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_what_is_launched_ahead_is_compiled_at_the_end_and_writes_nothing(tmp_path: Path) -> None:
    assert output("compile_ahead", TRITON_CACHE_DIR=str(tmp_path)).split() == ["0", "4", "0.0"]
    assert len(list(tmp_path.rglob("*.cubin"))) == 4, "the next process finds them"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "which, part", [*product(["last"], range(2)), *(pytest.param("all", part, marks=SLOW) for part in range(PARTS))]
)
def test_sm_90(which: str, part: int) -> None:
    """The last case of each name; where there is time, all of them."""
    given, parts = (last_cases(), 2) if which == "last" else (list(cases()), PARTS)
    printed = output("compile_sm90", str(part), str(parts), which)
    lines = [line.split() for line in printed.splitlines()]
    wanted = given[part::parts]
    assert len(lines) == len(wanted)
    # A spilled accumulator shows as a stack frame of more than a few registers. fp32 is there to be compared with, not
    # to be fast: it only has to compile. MLA's 64 rows take half of all registers for the accumulator (512 bytes a
    # thread), and the addresses that are kept beside it have to leave; some of what the schedule found, on Hopper's.
    most = {"mla-decode-64": 384, "mla-prefill-64": 384, "mla-decode-sm90": 64, "mla-decode-few-sm90": 64}
    # Their forms over e4m3 unpack beside that.
    most |= {"mla-decode-64-fp8": 384, "mla-prefill-64-fp8": 384, "mla-decode-sm90-fp8": 160}
    # A tile of 128 pairs and 256 columns, by whose side addresses of weights in e4m3 leave.
    most |= {"moe-fp8-8192": 192}
    # Before and behind the loop over 128 rows of x: what was looked up for its sums, which waits in registers.
    most |= {"linear-fp8-sm90-send": 24, "qkv-append-fp8-sm90": 192}
    # Weights of heads, kept beside the queries of five tokens with 64 heads each.
    most |= {"index-scores-64-5": 96}
    # Where scores go, kept beside 128 rows of queries; of warps that go apart, what each loads again for an item.
    most |= {"decode-collects-ends": 96, "prefill-sm90": 24, "delta-chunks": 24}
    most |= {"experts-many": 256}  # where sums go, worked out before the loop over columns
    most |= {"angles": 32}  # large angles are reduced in an array of the library
    most |= dict.fromkeys(("many-rows-sm90", "many-rows-sm90-any", "many-rows-sm90-ends"), 128)
    assert [line for line in lines if line[1] == "bf16" and int(line[-1]) > most.get(line[0], 16)] == [], printed
    # Attention starts while programs of its predecessor still take room (kernels/attention/kv_append.py,
    # kernels/mla/append.py): as many of its own must fit an SM as are meant for it, eight warps' worth, or of latents
    # one.
    for line, (name, _, _, constants, options) in zip(lines, wanted, strict=True):
        if line[1] == "bf16" and (
            name.startswith("mla-decode") or (name.startswith("decode") and constants["D"] > ROOMY.value)
        ):
            meant = 8 // options["num_warps"] if name.startswith("decode") else 1
            assert int(line[3]) == meant, f"{line[3]} programs of {name} fit an SM, {meant} were meant to: {constants}"


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
