"""Turns that were recorded while an agent worked on this repository, with three tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launch.inputs.compose import ROOT

TRACE = ROOT / "assets" / "agent-turns.jsonl"
Messages = list[dict[str, str]]


def turns(trace: Path = TRACE) -> list[tuple[Messages, str]]:
    """Reads what was said before each answer, and the answer, one conversation after the other.

    Args:
        trace: JSON lines, each with the `messages` of a conversation, the last one an answer.

    Raises:
        ValueError: a line is no such conversation.
    """
    found = []
    for number, line in enumerate(trace.read_text(encoding="utf-8").splitlines(), 1):
        messages = json.loads(line)["messages"]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers or answers[-1] != len(messages) - 1:
            raise ValueError(f"{trace}, line {number}: the last message must be an answer")
        found += [(messages[:i], messages[i]["content"]) for i in answers]
    return found


def turn_prompts(tokenizer: Any, new_tokens: int) -> list[dict[str, object]]:
    """Returns lines of a prompt file, one for each answer: what was said before, in the model's chat format."""
    said = (tokenizer.apply_chat_template(before, add_generation_prompt=True, tokenize=False) for before, _ in turns())
    ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in said)
    return [{"id": i, "prompt_ids": one, "max_tokens": new_tokens} for i, one in enumerate(ids)]
