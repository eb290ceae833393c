"""Counts the tests that went since a commit, and checks that each names the one that covers it.

`python -m tests.removed [COMMIT]`. Lines of tests/removed/*.tsv: the old test, the covering one (`path::test` or
`path::test[row]`, or `-`), and for `-` the reason. The exit code is 1 where a test is missing, or what covers it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
BASE, MOVED = (
    "684767b1",
    {
        "tests/e2e/test_bodies.py": "tests/e2e/test_prompt_files.py",
        "tests/e2e/test_way.py": "tests/e2e/test_architecture_page.py",
        "tests/e2e/test_wishes.py": "tests/e2e/test_sampling_params.py",
        "tests/e2e/test_turns.py": "tests/e2e/test_dual_batch_overlap.py",
        "tests/e2e/test_rehearsal.py": "tests/e2e/test_warmup.py",
        "tests/e2e/test_tiered.py": "tests/e2e/test_kv_offload.py",
        "tests/kernels/test_lse_combine.py": "tests/kernels/test_merge_states.py",
        "tests/kernels/test_shape_logits.py": "tests/kernels/test_process_logits.py",
        "tests/kernels/test_emulated_boxes.py": "tests/kernels/test_emulated_peers.py",
        "tests/kernels/test_tier.py": "tests/kernels/test_offload.py",
        "tests/dist/test_captured.py": "tests/dist/test_graph_collectives.py",
        "tests/serving/test_front.py": "tests/serving/test_api_server.py",
        "tests/serving/test_forms.py": "tests/serving/test_structured_outputs.py",
        "tests/serving/test_calls.py": "tests/serving/test_tool_calls.py",
        "tests/serving/test_dialects.py": "tests/serving/test_chat_formats.py",
        "tests/serving/test_link.py": "tests/serving/test_engine_server.py",
        "tests/serving/test_fields.py": "tests/serving/test_request_fields.py",
        "tests/unit/test_decide_ahead.py": "tests/unit/test_lookahead.py",
        "tests/unit/test_shaping.py": "tests/unit/test_logits_processor.py",
        "tests/unit/test_tiering.py": "tests/unit/test_offload_setup.py",
        "tests/unit/test_drawing.py": "tests/unit/test_draft_sampling.py",
        "tests/unit/test_lab_config.py": "tests/unit/test_benchmark_config.py",
        "tests/unit/test_pairs.py": "tests/unit/test_pairwise.py",
        "tests/unit/test_text.py": "tests/unit/test_text_stream.py",
        "tests/unit/test_start.py": "tests/unit/test_light_imports.py",
    },
)


def tests_of(source: str) -> Iterator[str]:
    for node in ast.parse(source).body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name.startswith("test"):
                yield inner.name


def is_test_file(path: str) -> bool:
    return path.startswith("tests/") and path.endswith(".py") and Path(path).name.startswith("test_")


def before(commit: str) -> set[str]:
    command = ["git", "ls-tree", "-r", "--name-only", commit, "tests"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split()
    paths = [path for path in names if is_test_file(path)]
    shown = {path: subprocess.check_output(["git", "show", f"{commit}:{path}"], cwd=ROOT, text=True) for path in paths}
    return {f"{MOVED.get(path, path)}::{test}" for path, source in shown.items() for test in tests_of(source)}


def now() -> set[str]:
    paths = (ROOT / "tests").rglob("test_*.py")
    return {f"{path.relative_to(ROOT)}::{test}" for path in paths for test in tests_of(path.read_text())}


def main(commit: str = BASE) -> int:
    there, problems, lines = now(), [], {}
    for file in sorted(Path(__file__).parent.glob("*.tsv")):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            old, covering, *reason = line.split("\t")
            lines[old] = covering
            if covering == "-":
                problems += [] if reason and reason[0] else [f"{file.name}:{number}: no reason"]
            elif covering.split("[")[0] not in there:
                problems.append(f"{file.name}:{number}: {covering} is not there")
    gone = before(commit) - there
    problems += [f"{test} went, and no line says what covers it" for test in sorted(gone - lines.keys())]
    for problem in problems:
        print(problem)
    bare = sum(lines[test] == "-" for test in gone & lines.keys())
    print(f"{len(gone)} tests went since {commit}: {len(gone & lines.keys()) - bare} covered, {bare} without a subject")
    print(f"{len(there)} test functions, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
