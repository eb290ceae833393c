"""A chat model: the demo model's tokenizer with a template like Qwen's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoTokenizer

from tests.serving.api_server import DEMO, ApiServer, text_of

Talk = Callable[..., Awaitable[ApiServer]]  # the fixture `talk`
BEGIN, END = SPECIAL = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = text_of("chat.jinja")
# Templates of other families: with a thinking switch, with an effort, with trimmed texts.
SWITCHED, EFFORT, TRIMMED = text_of("switched.jinja"), text_of("of-effort.jinja"), text_of("trimmed.jinja")
TEMPLATES = {"switched": SWITCHED, "of effort": EFFORT, "trimmed": TRIMMED}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
USER = {"role": "user", "content": "Hello, what is the weather like?"}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


REFUSALS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())


def chat_model(directory: Path, template: str = TEMPLATE) -> Path:
    """Writes the model."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


def tool(name: str) -> dict[str, Any]:
    """Returns a tool without parameters."""
    return {"type": "function", "function": {"name": name}}
