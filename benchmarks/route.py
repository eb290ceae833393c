"""Writes the list of files between a command and its first token in docs/architecture.md: `python -m benchmarks.route`.

It traces a one-rank CPU run over a prompt file. Files that only run on GPUs are listed here by hand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- route: python -m benchmarks.route -->\n", "<!-- end -->\n"
OF_GPUS = """
    helix/worker/warmup.py helix/worker/cuda_graphs.py kernels/precompile.py
    kernels/overlap.py kernels/paged_keys.py kernels/scaled.py kernels/dense/scaled_rows.py kernels/dense/embedding.py
    kernels/dense/rotary.py kernels/dense/rms_norm.py kernels/attention/placement.py kernels/dense/qkv_append.py
    kernels/attention/kv_append.py kernels/attention/flash_prefill.py kernels/attention/flash_prefill_sm90.py
    kernels/attention/split_prefill.py kernels/attention/flash_decode.py kernels/attention/split_kv.py
    kernels/attention/paged_tiles.py kernels/attention/merge_states_pack.py kernels/attention/merge_states.py
    kernels/dense/linear.py kernels/dense/linear_sm90.py kernels/dense/split_k_reduce_sm90.py
    kernels/peers/ll_protocol.py kernels/dense/silu_mul.py kernels/tokens/best_token.py kernels/tokens/commit.py
"""
# Prints the files whose functions are called or objects are created; imports do not count.
TRACER = """
import os, runpy, sys, threading
root, seen = os.getcwd() + "/", set()

def tell(file):
    if file.startswith(root) and file[len(root):].partition("/")[0] in ("comm", "helix", "kernels", "launch"):
        os.write(log, (file[len(root):] + chr(10)).encode())

def note(frame, event, argument):
    code = frame.f_code
    made = code.co_filename == "<string>" and code.co_name == "__init__"  # of a dataclass
    if event != "call" or code in seen or not code.co_flags & 2 or not (made or code.co_filename.startswith(root)):
        return
    caller = frame.f_back
    while caller is not None:
        if caller.f_code.co_name == "<module>" and caller.f_globals.get("__name__") not in ("__main__", None):
            return
        caller = caller.f_back
    seen.add(code)
    module = sys.modules.get(type(frame.f_locals.get("self")).__module__)
    tell((getattr(module, "__file__", None) or "") if made else code.co_filename)

log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
sys.argv = sys.argv[2:]
sys.path.insert(0, root)
threading.setprofile(note)
sys.setprofile(note)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def traced(timeout_s: float = 300.0) -> list[str]:
    """Returns the files that a run calls, in the order of their first calls, without reference kernels.

    Raises:
        RuntimeError: the run failed; the message is its output.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (prompts := folder / "prompts.jsonl").write_text(json.dumps({"prompt": "Hello there", "max_tokens": 8}))
        options = [f"decode.prompts={prompts}", f"decode.output={folder / 'out.jsonl'}", "kv.tokens=512"]
        program = [
            sys.executable,
            "-c",
            TRACER,
            str(folder / "log"),
            "torchrun_entry.py",
            "model.path=assets/demo-model",
        ]
        alone = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        ended = subprocess.run(
            [*program, *options], cwd=ROOT, env=alone, capture_output=True, text=True, timeout=timeout_s
        )
        if ended.returncode:
            raise RuntimeError(ended.stdout + ended.stderr)
        files = dict.fromkeys((folder / "log").read_text().split())
    return [file for file in ["torchrun_entry.py", *files, *OF_GPUS.split()] if "reference" not in file]


def lines(files: list[str]) -> int:
    """Counts the lines of files."""
    return sum(len((ROOT / file).read_text("utf-8").splitlines()) for file in files)


def table(files: list[str]) -> str:
    """Returns one table row per folder, in the order of first calls."""
    rooms: dict[str, list[str]] = {}
    for file in dict.fromkeys(files):
        rooms.setdefault(str(Path(file).parent), []).append(file)
    rows = [
        f"| `{room}/` | {', '.join(Path(file).stem for file in some)} | {lines(some):,} |\n"
        for room, some in rooms.items()
        if room != "."
    ]
    summary = f"{len(set(files))} files with {lines([*dict.fromkeys(files)]):,} lines.\n\n"
    return summary + "| room | files, in the order of their first calls | lines |\n|---|---|---|\n" + "".join(rows)


def main() -> None:
    """Rewrites the list in docs/architecture.md."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + table(traced()) + END + after, "utf-8")


if __name__ == "__main__":
    main()
