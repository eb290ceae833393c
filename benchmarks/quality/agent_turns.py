"""Recorded turns of an agent that worked on this repository with three tools."""

from __future__ import annotations

import json
from pathlib import Path

from launch.inputs.compose import ROOT

TRACE = ROOT / "assets" / "agent-turns.jsonl"
Messages = list[dict[str, str]]


def turns(trace: Path = TRACE) -> list[tuple[Messages, str]]:
    """Reads each answer with the messages before it, one conversation after the other.

    Args:
        trace: JSON lines, each with the `messages` of a conversation, the last one an answer.

    Raises:
        ValueError: a line is not such a conversation.
    """
    found = []
    for number, line in enumerate(trace.read_text(encoding="utf-8").splitlines(), 1):
        messages = json.loads(line)["messages"]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers or answers[-1] != len(messages) - 1:
            raise ValueError(f"{trace}, line {number}: the last message must be an answer")
        found += [(messages[:i], messages[i]["content"]) for i in answers]
    return found
