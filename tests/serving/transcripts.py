"""The answers in transcripts.yaml, for tests of parser, reader and server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launch.answers.answer_parser import AnswerPart
from launch.answers.chat_formats import CHAT_FORMATS, ChatFormat, assistant_turn
from launch.client.schemas import Tool

BY_NAME = {dialect.name: dialect for dialect in CHAT_FORMATS}
PARAMETERS = {
    "get_weather": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "get_time": {"zone": {"type": "string"}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in PARAMETERS.items()
]


@dataclass(frozen=True)
class Transcript:
    """A model's answer, and what a client receives of it."""

    id: str
    dialect: ChatFormat
    prompt: str
    answer: str
    thinking: str
    content: str
    calls: list[tuple[str, Any]]

    @property
    def turn(self) -> str:
        return assistant_turn(self.dialect, self.prompt)


def _transcript(row: dict[str, Any]) -> Transcript:
    unknown = row.keys() - {"id", "prompt", "answer", "thinking", "content", "calls"}
    assert not unknown, f"{row['id']}: {unknown}"
    dialect = BY_NAME[row["id"].partition(":")[0]]
    calls = [(name, arguments) for call in row.get("calls", ()) for name, arguments in call.items()]
    prompt, answer = row.get("prompt", next(iter(dialect.anchors), "")), row["answer"]
    return Transcript(
        row["id"], dialect, prompt, answer, row.get("thinking", ""), row.get("content", answer), calls
    )  # fmt: skip


KNOWN: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("dialects.yaml").read_text(encoding="utf-8"))
TRANSCRIPTS = [*map(_transcript, yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")))]


def validated(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns tools as in a parsed request."""
    return [Tool.model_validate(tool).model_dump(exclude_none=True) for tool in tools]


def text_of(parts: list[AnswerPart], kind: str) -> str:
    """Joins the text of parts of a kind."""
    return "".join(part.text for part in parts if part.kind == kind)
