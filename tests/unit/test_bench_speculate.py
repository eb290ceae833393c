"""What the benchmark of speculation computes from what was timed, and what it asks the demo model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models.speculate import GAMMAS, PARTS, REST, expected_tokens, split, with_gains
from benchmarks.quality.copy_prompts import GIVEN, LINES, copy_prompts
from benchmarks.records import rows, tables
from launch.inputs.compose import ROOT

# Of prompts alone.
ELSEWHERE = {"_unpack_kernel", "_unpack_pages_kernel", "_inputs_kernel", "_systems_kernel", "_chunks_kernel"}


def test_every_kernel_of_a_step_is_in_one_part() -> None:
    sources = [file.read_text() for file in (ROOT / "kernels").rglob("*.py")]
    kernels = {name for source in sources for name in re.findall(r"^def (_\w+_kernel)\(", source, re.M)}
    kernels -= {name for name in kernels if "prefill" in name} | ELSEWHERE
    assert len(kernels) > 30
    for name in kernels:
        assert len([part for part, names in PARTS.items() if re.search(names, name)]) == 1, name


def test_parts_are_the_kernels_sums() -> None:
    found = split(
        {
            "_flash_decode_kernel": 5.0,
            "_merge_parts_kernel": 1.0,
            "nvjet_sm90_tst_64x8_64x16_2x1_v_bz_TNT": 3.0,
            "void cublasLt::splitKreduce_kernel<32, 16, int, float>": 0.5,
            "_replay_kernel": 0.25,
            "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": 2.0,
            "_commit_kernel": 0.125,
            "void at::native::vectorized_elementwise_kernel<2, at::native::(anonymous namespace)::where_": 1.5,
        }
    )
    assert found == {
        "draft": 0.25, "attention": 6.0, "exchange": 2.0, "projections": 3.5, "all-reduce": 0.0, "acceptance": 0.125,
        REST: 1.5,
    }  # fmt: skip


def point(gamma: int, ttl_us: float, tokens: float) -> dict[str, Any]:
    return {
        "batch": 2, "length": 64, "gamma": gamma, "ttl_p50_us": ttl_us, "ttl_p90_us": 1.5 * ttl_us,
        "tokens_per_step": tokens, "tokens_per_s_user": 1e6 * tokens / ttl_us, "speculation": None,
        "kernel_us": {"_linear_kernel": 30.0, "_replay_kernel": 10.0},
    }  # fmt: skip


FAILED = {"batch": 4, "length": 64, "gamma": 0, "failed": "does not fit"}


def test_gains() -> None:
    """Two drafts kept at 0.5 give 1.75 tokens; here two came, of steps a quarter longer."""
    assert [expected_tokens(n, 0.5) for n in (0, 1, 2)] == [1.0, 1.5, 1.75]
    assert expected_tokens(max(GAMMAS), 1.0) == 16 and expected_tokens(7, 0.0) == 1
    two, failed, none = with_gains([point(2, 1250.0, 2.0), FAILED, point(0, 1000.0, 1.0)], 0.5)
    assert two["gain"] == pytest.approx(2 / 1.25) and two["gain_at_rate"] == pytest.approx(1.75 / 1.25)
    assert none["gain"] == none["gain_at_rate"] == 1 and failed == FAILED
    assert two["split_us"]["projections"] == 30 and two["split_us"]["draft"] == 10


def test_tables_of_results_and_of_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROOT", tmp_path)
    assert tables.speculate() == tables.edits() == [], "without a record there is no table"
    about = {"kind": "synthetic", "model": "a-7b", "layout": "helix kvp=2 tpa=2 -> tpf=4 ep=1"}
    lines = [about | row for row in with_gains([point(0, 1000.0, 1.0), point(2, 1250.0, 2.0), FAILED], 0.5)]
    lines.append(
        {"kind": "edits", "drafting": "4", "layout": "helix kvp=4 tpa=1", "tokens_per_step": 2.5, "ttl_p50_us": 1000.0,
         "tokens_per_s_user": 2500.0, "gain": 2.25, "speculation": {"mean_drafts": 4.0}, "as_plain": 8, "prompts": 8}
    )  # fmt: skip
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "speculate.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    heads, rule, plain, two, failed = tables.speculate()
    assert len({row.count("|") for row in (heads, rule, plain, two, failed)}) == 1
    shares = "25.0% | 0.0% | 0.0% | 75.0% | 0.0% | 0.0% | 0.0%"
    assert two == f"| a-7b | 2 x 64 | 2 | 1.25 ms (1.88) | 2.00 | 1600.0 | 1.60 | 1.40 | {shares} |"
    assert "does not fit" in failed
    assert tables.edits()[2:] == ["| 4 | helix kvp=4 tpa=1 | 2.50 | 1.00 ms | 2500 | 2.25 | 4.0 | 8 of 8 |"]


def test_edits_begin_a_copy_in_which_one_name_is_another(tmp_path: Path) -> None:
    lines = ["def f(width: int, depth: int) -> int:", "    return width * depth + width", *["# width"] * LINES]
    (tmp_path / "long.py").write_text("\n".join(lines))
    (tmp_path / "short.py").write_text("\n".join(lines[: LINES - 1]))
    (prompt,) = copy_prompts(7, tmp_path)
    assert prompt["id"] == "long.py" and prompt["max_tokens"] == 7
    before, _, after = str(prompt["prompt"]).partition("\n\n\n# The same file with width renamed to new_width.\n")
    assert before == "\n".join(lines[:LINES])
    assert after == "\n".join(lines[:GIVEN]).replace("width", "new_width")


def test_edits_of_this_repository() -> None:
    prompts = copy_prompts(256)
    assert prompts == copy_prompts(256) and len({prompt["id"] for prompt in prompts}) == len(prompts) >= 8
