"""Recorded turns of agents, and what the benchmarks of drafts by lookup and of a layer compute and tabulate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.models import layer_drafts, turns
from benchmarks.quality import agent_turns
from benchmarks.records import layer_tables, rows
from helix.config import SpeculationConfig
from helix.models.loading import Checkpoint
from helix.setup.parts import make_eagle3
from launch.inputs.prompts import PromptFile
from launch.inputs.shapes import spec_of


def test_turns_are_what_was_said_before_each_answer(tmp_path: Path) -> None:
    said = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"messages": [*said, {"role": "assistant", "content": "d"}]}) + "\n")
    assert agent_turns.turns(trace) == [(said[:1], "b"), (said, "d")]
    trace.write_text(trace.read_text() + json.dumps({"messages": said}) + "\n")
    with pytest.raises(ValueError, match=r"trace.jsonl, line 2: the last message must be an answer"):
        agent_turns.turns(trace)


class Tokenizer:
    """A tokenizer whose chat format is a message a line, and whose tokens are bytes."""

    def apply_chat_template(self, messages: agent_turns.Messages, **options: bool) -> str:
        assert options == {"add_generation_prompt": True, "tokenize": False}
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant: "

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [*text.encode()]}


def test_the_turns_are_prompts(tmp_path: Path) -> None:
    written = tmp_path / "prompts.jsonl"
    lines = agent_turns.turn_prompts(Tokenizer(), turns.TURN)
    written.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = PromptFile(written)
    assert len(found) == len(lines) == len(agent_turns.turns()) > 80
    assert all(prompt.options["max_tokens"] == turns.TURN for prompt in found)


def test_random_text_repeats_nothing() -> None:
    (first, *others) = turns.prompts("random")
    assert len(others) == turns.BATCH - 1 and first["ignore_eos"] is True
    assert all(one["prompt_ids"] != first["prompt_ids"] for one in others)


def test_a_random_layer_is_one_for_the_model(tmp_path: Path) -> None:
    spec = spec_of("demo")
    layer_drafts.write_eagle3(spec, tmp_path)
    layer = make_eagle3(SpeculationConfig(drafter="eagle3", path=str(tmp_path)), spec)
    ids = Checkpoint(tmp_path).whole("d2t") + torch.arange(layer.vocab or 0)
    assert layer.hidden == spec.hidden and int(ids[-1]) < spec.vocab and bool((ids[1:] > ids[:-1]).all())


def test_gains_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = {"batch": 1, "length": 1 << 17}
    timed = [point | {"gamma": gamma, "ttl_p50_us": us} for gamma, us in ((0, 1000.0), (3, 1250.0), (6, 2000.0))]
    timed[1]["phase_us"] = {"draft": 100.0, "verify": 1100.0, "accept": 10.0, "choose": 40.0}
    timed[2]["phase_us"] = {"draft": 700.0, "verify": 1290.0, "accept": 10.0}
    found = [layer_drafts.gains("glm-4.6", row, timed) for row in timed]
    assert found[1] == {"step_over_plain": 1.25, "gain_published": 2.99 / 1.25}
    assert found[0]["gain_published"] is found[2]["gain_published"] is None
    assert layer_drafts.gains("glm-4.6", point | {"failed": "no room"}, timed) == {}

    monkeypatch.setattr(rows, "ROOT", tmp_path)
    assert layer_tables.layers("layer-drafts") == layer_tables.turns() == []
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    about = {"kind": "layer-drafts", "model": "glm-4.6", "layers": 92, "layout": "helix", "drafter": "mtp"}
    lines = [about | row | gain for row, gain in zip(timed, found, strict=True)]
    (results / "layer-drafts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, _, three, six = layer_tables.layers("layer-drafts")
    start = "| glm-4.6 | 1 x 128K | mtp |"
    assert three == f"{start} 3 | 1.25 ms | 1.10 ms | 0.10 ms | 0.05 ms | 1.25 x | 2.39 x |"
    assert six == f"{start} 6 | 2.00 ms | 1.29 ms | 0.70 ms | 0.01 ms | 2.00 x | - |"

    layer = {"model": "demo", "drafter": "mtp", "texts": "sources", "minutes": 1.0, "steps": 512, "kept": [0.5, 0.25]}
    (results / "trained-drafters.jsonl").write_text(json.dumps(layer) + "\n")
    assert layer_tables.trained()[2] == "| demo | mtp | sources | 1.0 | 512 | 0.50 0.25 |"

    row = {"text": "turns", "model": "small", "layout": "helix", "tokens_per_step": 2.5, "ttl_p50_us": 1000.0}
    row |= {"tokens_per_s_user": 2500.0, "gain": 2.25, "as_plain": 83, "prompts": 84}
    said = [row | {"drafting": "ngram, 4", "over_ngram": None}, row | {"drafting": "suffix, 4", "over_ngram": 1.25}]
    (results / "turns.jsonl").write_text("".join(json.dumps(line) + "\n" for line in said))
    assert (
        layer_tables.turns()[3] == "| turns | small | suffix, 4 | 2.50 | 1.00 ms | 2500 | 2.25 x | 1.250 x | 83 of 84 |"
    )
