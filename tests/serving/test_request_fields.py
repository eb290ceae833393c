"""Every field that a request may have is done, refused by name, or listed as ignored; the table says which."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as of_responses
from pydantic import ValidationError

from launch.client import schemas, structured_outputs
from launch.client.errors import ApiError
from launch.client.request_fields import (
    CHATS,
    COMPLETIONS,
    DONE,
    FIELDS,
    GROUPS,
    HARMLESS,
    MESSAGES,
    RESPONSES,
    find_field,
)
from launch.client.schema_base import Schema
from launch.client.schemas import Chat, Completion, parse_body
from launch.serving import messages, responses
from launch.serving.messages import Messages
from launch.serving.response_items import Responses
from tests.serving.api_server import Serve
from tests.serving.chats import REFUSALS

OTHERS = {name: of.split() for name, of in yaml.safe_load(Path(__file__).with_name("fields.yaml").read_text()).items()}
CHAT_PARAMS, COMPLETION_PARAMS = chat_params.CompletionCreateParamsBase, completion_params.CompletionCreateParamsBase
NAMES = {
    CHATS: [*OTHERS["both"], *OTHERS["chats"], *inspect.get_annotations(CHAT_PARAMS)],
    COMPLETIONS: [*OTHERS["both"], *OTHERS["completions"], *inspect.get_annotations(COMPLETION_PARAMS)],
    RESPONSES: [*inspect.get_annotations(of_responses.ResponseCreateParamsBase)],
    MESSAGES: OTHERS["messages"],
}
SCHEMAS = {CHATS: Chat, COMPLETIONS: Completion, RESPONSES: Responses, MESSAGES: Messages}
ROUTES = {
    CHATS: "/v1/chat/completions",
    COMPLETIONS: "/v1/completions",
    RESPONSES: "/v1/responses",
    MESSAGES: "/v1/messages",
}
SAID = {"messages": [{"role": "user", "content": "x"}]}
BODIES: dict[str, dict[str, Any]] = {
    CHATS: SAID | {"max_tokens": 1},
    COMPLETIONS: {"prompt": "x", "max_tokens": 1},
    RESPONSES: {"input": "x", "max_output_tokens": 1},
    MESSAGES: SAID | {"max_tokens": 1},
}


@pytest.mark.parametrize("route", ROUTES)
def test_the_table_has_every_field(route: str) -> None:
    assert [name for name in NAMES[route] if find_field(name, route) is None] == []
    found = [field for field in FIELDS if field.route in GROUPS[route]]
    assert {field.name for field in found if field.support == DONE} == {*SCHEMAS[route].model_fields}
    assert len(found) == len({field.name for field in found}), "each once"


@pytest.mark.parametrize("route", ROUTES)
async def test_fields_are_what_the_table_says(route: str, serve: Serve) -> None:
    api_server = await serve()

    async def post(more: dict[str, Any]) -> httpx.Response:
        return await api_server.post(ROUTES[route], BODIES[route] | more)

    if route != COMPLETIONS:
        api_server.session.tokenizer.backend.chat_templates = {"default": "{{ messages[0].content }}"}
    for field in FIELDS:
        if field.route not in GROUPS[route] or field.support == DONE:
            continue
        answer = await post({field.name: {"a": ["wanted"]}})
        if field.support == HARMLESS:
            assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == field.name
            continue
        error = answer.json()["error"]
        assert answer.status_code == 400, answer.text
        assert route == MESSAGES or error["param"] == field.name, answer.text
        assert field.name in error["message"] and field.description in error["message"]
        for value in (None, *field.neutral_values):
            answer = await post({field.name: value})
            assert answer.status_code == 200 and "x-ignored-fields" not in answer.headers, (field.name, value)
    if route in (RESPONSES, MESSAGES):
        return
    more = {"user": "u", "nobody": 1, "stream": True, "stream_options": {"include_obfuscation": False}}
    answer = await post(more | {"use_beam_search": False})
    assert answer.headers["x-ignored-fields"] == "nobody,stream_options.include_obfuscation,user"
    answer = await post({"a\0\x7f\nb": 1})
    assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, "a   b")


@pytest.mark.parametrize("route", ROUTES)
def test_null_is_as_good_as_unset(route: str) -> None:
    schema = SCHEMAS[route]
    for name, field in schema.model_fields.items():
        if not field.is_required():
            body = parse_body(schema, json.dumps(BODIES[route] | {name: None}).encode())
            assert getattr(body, name) == field.default, name


def test_null_is_as_good_as_unset_inside_of_fields() -> None:
    modules = structured_outputs, messages, responses, schemas
    kinds = [kind for module in modules for kind in vars(module).values() if inspect.isclass(kind)]
    for kind in (kind for kind in kinds if issubclass(kind, Schema)):
        for name, field in kind.model_fields.items():
            key = field.alias or name
            wrong: list[Any] = []
            try:
                kind.model_validate({key: None})
            except ValidationError as error:  # of what is required
                wrong = [one["loc"] for one in error.errors() if key in one["loc"]]
            assert field.is_required() or not wrong, (kind, name)


def test_the_best_of_as_many_are_all() -> None:
    for n in (None, 1, 3):
        parse_body(Completion, json.dumps({"prompt": "x", "n": n, "best_of": n or 1}).encode())
        with pytest.raises(ApiError, match="best_of is not supported"):
            parse_body(Completion, json.dumps({"prompt": "x", "n": n, "best_of": 4}).encode())


MANY = json.dumps({"enum": [1] * (1 << 18)})
LARGE_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"const": "x" * (1 << 20)}}}
LARGE_FORMAT = {"type": "json_schema", "json_schema": {"schema": {"const": "x" * (1 << 20)}}}
COMPUTED = [
    ({"structured_outputs": {"choice": ["a" * 40000, "b" * 40000]}}, "has 80000 characters; at most 65536"),
    ({"structured_outputs": {"regex": "a" * 65537}}, "structured_outputs.regex="),
    ({"guided_grammar": "a" * 65537}, "guided_grammar="),
    ({"guided_choice": ["a"] * 65537}, "guided_choice="),
    ({"guided_json": {"description": "x" * (1 << 24)}}, "guided_json is too large: at most 524288 char"),
    ({"structured_outputs": {"json": MANY}}, "structured_outputs.json is too large: at most 524288"),
    ({"guided_json": MANY}, "guided_json is too large: at most 524288"),
    ({"chat_template_kwargs": {"a": "x" * 40000, "b": "y" * 40000}}, "has 80000 characters of text; at most"),
    ({"guided_json": '{"not":' * 200 + "{}" + "}" * 200}, "guided_json has more than 128 levels"),
    ({"guided_json": '{"not":' * 9000 + "{}" + "}" * 9000}, "is not a JSON object"),
    ({"response_format": LARGE_FORMAT}, "response_format.json_schema is too large"),
    ({"tools": [LARGE_TOOL], "tool_choice": "required"}, "tools is too large"),
]


def test_what_contradicts_itself_is_refused() -> None:
    for more, words in [*COMPUTED, *((row["body"], row["says"]) for row in REFUSALS["both"])]:
        for route, schema in ((CHATS, Chat), (COMPLETIONS, Completion)):
            if route == COMPLETIONS and not more.keys() <= Completion.model_fields.keys():
                continue
            with pytest.raises(ApiError) as refused:
                parse_body(schema, json.dumps(BODIES[route] | more).encode())
            message = refused.value.message
            assert refused.value.status == 400 and words in message and "\n" not in message, (words, message)
