"""A real model behind the server, over two ranks: chats, schemas and calls of tools, by the official client."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.real.smollm2 import CHATS, MODEL, SYSTEM, continuation, ids_of, tokenizer
from tests.serving.api_server import changed
from tests.serving.test_server import Server, served

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
END = 2  # <|im_end|>
# SmolLM2's own template writes no tools; this one tells them as Qwen's and Hermes's models were taught.
TEMPLATE = Path(__file__).with_name("tools.jinja").read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("server"), f"model.path={MODEL}") as made:
        yield made


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same with a template that tells tools, as its owner puts it into the directory."""
    model = tmp_path_factory.mktemp("models") / "smollm2-tools"
    changed(model, {"chat_template.jinja": TEMPLATE}, MODEL)
    with served(tmp_path_factory.mktemp("server"), f"model.path={model}") as made:
        yield made


GREEDY = {"temperature": 0, "extra_body": {"repetition_penalty": 1}}  # in place of the checkpoint's sampling defaults


def chat(server: Server, messages: list[dict[str, str]], **more: Any) -> Any:
    name = server.client.models.list().data[0].id
    return server.client.chat.completions.create(
        **({"model": name, "messages": messages, "max_tokens": 200} | GREEDY | more)
    ).choices[0]


@pytest.mark.parametrize("name", CHATS)
def test_answers_are_those_of_transformers(name: str, server: Server) -> None:
    """Of the template's prompts; a stream is the same answer."""
    body = json.dumps({"messages": CHATS[name]}).encode()
    request = urllib.request.Request(f"{server.url}/tokenize", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        assert tuple(json.loads(answer.read())["tokens"]) == ids_of(CHATS[name])
    tokens = continuation(ids_of(CHATS[name]), 16).tokens
    until = tokens.index(END) if END in tokens else len(tokens)
    choice = chat(server, CHATS[name], max_tokens=16)
    assert choice.message.content == tokenizer().decode(tokens[:until]).strip()
    assert choice.finish_reason == ("stop" if END in tokens else "length")
    stream = server.client.chat.completions.create(
        model="smollm2-135m-instruct", messages=CHATS[name], max_tokens=40, stream=True, **GREEDY
    )
    reply = "".join(piece.choices[0].delta.content or "" for piece in stream)
    assert reply == chat(server, CHATS[name], max_tokens=40).message.content and (name != "talk" or "你好" in reply)


COUNTRY = {
    "type": "object",
    "properties": {
        "country": {"type": "string", "maxLength": 20},
        "continent": {"enum": ["Africa", "Asia", "Europe", "Other"]},
        "cities": {"type": "array", "items": {"pattern": "^[A-Z][a-z]{1,15}$", "type": "string"}, "maxItems": 3},
        "population": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 10**10}, {"type": "null"}]},
    },
    "required": ["country", "continent", "cities", "population"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature, seed", [(0.0, 0), (1.0, 1), (1.5, 2)])
def test_an_answer_follows_its_schema(temperature: float, seed: int, server: Server) -> None:
    """However it is drawn; the model alone would write prose."""
    schema = {"type": "json_schema", "json_schema": {"name": "country", "schema": COUNTRY}}
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Describe France as JSON."}]
    choice = chat(server, messages, temperature=temperature, seed=seed, response_format=schema)
    assert choice.finish_reason == "stop", choice
    found = json.loads(choice.message.content)
    assert found.keys() == set(COUNTRY["required"]) and len(found["country"]) <= 20
    assert found["continent"] in COUNTRY["properties"]["continent"]["enum"]
    assert len(found["cities"]) <= 3 and all(city.isascii() and city.istitle() for city in found["cities"])
    assert found["population"] is None or (type(found["population"]) is int and found["population"] >= 0)


PARAMETERS = {
    "get_weather": {
        "city": {"type": "string", "maxLength": 24}, "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "get_time": {"zone": {"enum": ["UTC", "CET"]}},
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": of, "required": [*of], "additionalProperties": False}}}
    for name, of in PARAMETERS.items()
]  # fmt: skip


@pytest.mark.parametrize(
    "choice, temperature", [("required", 0.0), ("required", 1.0), ("get_weather", 1.0), ("get_time", 0.0)]
)
def test_a_call_has_the_arguments_of_its_function(choice: str, temperature: float, calling: Server) -> None:
    named = {"type": "function", "function": {"name": choice}}
    messages = [{"role": "user", "content": "What is the weather in Paris for the next 3 days?"}]
    answer = chat(
        calling, messages, tools=TOOLS, tool_choice=choice if choice == "required" else named, temperature=temperature,
        seed=4, parallel_tool_calls=False,
    )  # fmt: skip
    assert answer.finish_reason == "tool_calls" and not answer.message.content
    (call,) = answer.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name in ("get_weather", "get_time") and choice in ("required", call.function.name)
    if call.function.name == "get_time":
        assert arguments in ({"zone": "UTC"}, {"zone": "CET"})
    else:
        assert arguments.keys() == {"city", "days"} and len(arguments["city"]) <= 24 and 1 <= arguments["days"] <= 9
    if temperature:
        return
    # The next turn, with what the function gave.
    messages += [answer.message.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}]
    reply = chat(calling, messages, tools=TOOLS, max_tokens=20)
    assert reply.message.content or reply.message.tool_calls
