"""What people and files are told: streamed text, the summary, needles found."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.quality.needles import ANSWER_TOKENS, make, score
from helix.engine.draft_policy import Acceptance, DraftOutcome
from helix.engine.timings import Timings
from helix.errors import RankError
from helix.layout import HelixLayout
from launch.inputs.files import check_record
from launch.inputs.preflight import preflight
from launch.inputs.terminal import PromptsTerminal, SequentialOutput
from launch.job.membership import Job
from launch.job.report import Phases, percentile_us, summary, write_record
from tests.unit.test_config import compose_config
from tests.unit.test_files import largest_file

ROOT = Path(__file__).parents[2]


def test_one_text_at_a_time_and_none_lost() -> None:
    messages: list[str] = []
    text = SequentialOutput(messages.append)
    assert not text.started
    for name, piece, ended in (
        ("a", "one ", False), ("b", "uno ", False), ("a", "two ", False), ("b", "dos", True), ("c", "eins ", False),
        ("a", "three", True), ("c", "zwei", True), ("d", "", True),
    ):  # fmt: skip
        text.push(name, piece, ended)
    assert text.started
    assert "".join(messages) == "[a] one two three\n[b] uno dos\n[c] eins zwei\n[d] \n"
    # The first one is shown as it comes, not at its end.
    assert messages[0] == "[a] one " and "two " in messages


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("streams", [True, False])
def test_no_bar_is_left_behind_that_is_not_full(
    terminal: bool, streams: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first of two prompts speaks before the second is done; a bar cannot go on among text."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if terminal else "0")
    shown = PromptsTerminal(streams)
    shown.prefill(0, 8222)
    shown.prefill(8192, 8222)
    shown.show("a", "one \x1b[2J", False)
    shown.prefill(8222, 8222)
    shown.prefill(8222, 8222)  # asked five times a second until the run ends
    shown.prefill(8222, 9000)
    shown.prefill(9000, 9000)
    shown.show("b", "two", False)
    lines = screen(capsys.readouterr().out)
    bars = [line for line in lines if line.startswith("prefill")]
    assert [("8222/8222" in bar) for bar in bars] == ([] if streams else [True]), lines
    assert any("[a] one [2J" in line for line in lines) == streams, "a model's escapes are not obeyed"


def screen(written: str) -> list[str]:
    """The lines that a terminal shows where cursor movements erase lines and begin them anew."""
    lines, row = [""], 0
    for piece in re.split(r"(\x1b\[\??\d*[A-Za-z]|\n|\r)", written):
        if piece == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif piece == "\x1b[1A":
            row -= 1
        elif piece in ("\r", "\x1b[2K"):
            lines[row] = ""
        elif not piece.startswith("\x1b["):
            lines[row] += piece
    return lines


def test_summary_is_the_closed_formula() -> None:
    layout = HelixLayout.create("helix", 2, 2)
    counted = {"prefill_tokens": 8, "decode_tokens": 40, "sequence_steps": 40, "kv_tokens": [7, 5]}
    timings = Timings(prefill_s=1.0, ttl_s=[0.01] * 9 + [0.03], **counted)
    found = summary(layout, timings, [10, 10, 10, 10])
    assert found["kv_tokens_per_rank"] == [7, 5, 7, 5] and found["kv_bytes_per_rank"] == [70, 50, 70, 50]
    assert found["tokens_per_s_user"] == pytest.approx(10 / 0.12)
    assert found["tokens_per_s_gpu"] == pytest.approx(40 / 0.12 / 4)
    assert found["ttl_p50_us"] == pytest.approx(10_000) and found["ttl_p90_us"] == pytest.approx(12_000)
    assert found["speculation"] is None
    nothing = summary(layout, Timings(kv_tokens=[0, 0]), [1] * 4)
    assert nothing["ttl_p50_us"] is None and nothing["tokens_per_s_gpu"] is None
    assert percentile_us([], 50) is None


def test_what_became_of_drafts() -> None:
    timings = Timings(kv_tokens=[0], acceptance=Acceptance(4))
    timings.step(0.01, 0, [DraftOutcome(0, 0, 0), DraftOutcome(1, 0, 0)])
    timings.step(0.02, 2, [DraftOutcome(0, 2, 2), DraftOutcome(1, 2, 0)])
    timings.step(0.02, 2, [DraftOutcome(0, 1, 1)])
    found = summary(HelixLayout.create(), timings, [1])
    assert found["decode_tokens"] == 8 and found["tokens_per_step"] == pytest.approx(8 / 5)
    assert found["speculation"] == {
        "mean_drafts": pytest.approx(4 / 3),
        "mean_accepted": pytest.approx(3 / 5),
        "steps_by_drafts": {0: 1, 2: 2},
        "sequence_steps_by_accepted": {0: 3, 1: 1, 2: 1},
        "acceptance_by_position": [pytest.approx(2 / 3), 1.0],
    }


def test_a_record_is_known_for_one_and_a_full_disk_is_a_line(tmp_path: Path) -> None:
    path, output = tmp_path / "record.json", tmp_path / "out.jsonl"
    config = compose_config("decode.prompts=assets/prompts.jsonl", f"decode.output={output}", f"record={path}")
    plan = preflight(config, 1)
    job = cast(Job, SimpleNamespace(backend="gloo", device=torch.device("cpu")))
    for _ in range(2):  # over nothing, and over a record
        check_record(path)
        write_record(path, plan, job, Phases(), {"measured": 1})
    held = path.read_text()
    assert json.loads(held)["measured"] == 1
    messages = rf"record={path} cannot be written: File too large; all results are in decode\.output={output}"
    with largest_file(100), pytest.raises(RankError, match=messages):
        write_record(path, plan, job, Phases(), {"measured": 2})
    assert path.read_text() == held and list(tmp_path.iterdir()) == [path]


def test_needles_have_their_length_depth_and_answer() -> None:
    path = ROOT / "assets/demo-model/tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    prompts = make(path, [ROOT / "helix"], 1500, 3)
    for i, prompt in enumerate(prompts):
        word, number, index = str(prompt["id"]).split("-")
        text = str(prompt["prompt"])
        line = f"# The magic number for {word} is {number}.\n"
        assert index == str(i) and text.count(line) == 1 and text.endswith(f"\n# The magic number for {word} is")
        tokens = len(tokenizer.encode(text).ids)
        assert 1400 < tokens <= 1500 - ANSWER_TOKENS
        assert abs(text.index(line) / len(text) - (i + 0.5) / 3) < 0.15
    results = [json.dumps({"id": p["id"], "text": f" {str(p['id']).split('-')[1]}.\n"}) for p in prompts]
    wrong = json.dumps({"id": prompts[0]["id"], "text": " 1."})
    assert score([*results, wrong]) == (3, 4)
