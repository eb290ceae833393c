"""OpenAI's Responses and Anthropic's Messages: exact events, and what becomes of their fields in the chat beneath."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from openai import AsyncOpenAI

from launch.client.errors import ApiError
from launch.client.schemas import Chat, parse_body
from launch.serving.messages import Messages
from launch.serving.messages import chat_of as of_messages
from launch.serving.response_items import Responses
from launch.serving.responses import chat_of as of_responses
from launch.serving.responses import convert
from tests.serving.api_server import scripted_reply
from tests.serving.chats import CALL, PARAMETERS, REFUSALS, USER, Talk

SAYS = f"Hm.\n</think>\n\nLooking.\n{CALL}"
CITY = '{"city": "Paris"}'
THINKING = {"chat_template_kwargs": {"thinking": True}}
ID = {"x-request-id": "r1"}
ADAPTERS = yaml.safe_load(Path(__file__).with_name("adapters.yaml").read_text())


def filled(value: Any, **facts: Any) -> Any:
    """A value of the table with what is known once there is an answer."""
    if isinstance(value, dict):
        return {name: filled(of, **facts) for name, of in value.items()}
    if isinstance(value, list):
        return [filled(of, **facts) for of in value]
    return facts[value[1:]] if isinstance(value, str) and value[:1] == "$" else value


def events(text: str) -> list[dict[str, Any]]:
    """A stream's events; each has its name twice."""
    found = []
    for event in text.split("\n\n"):
        if event.startswith("event: "):
            name, data = event.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def joined(found: list[dict[str, Any]], path: tuple[str, ...]) -> list[dict[str, Any]]:
    """Events with neighbors of one kind as one: how a text is cut depends on the tokens."""
    received: list[dict[str, Any]] = []
    for event in found:
        if received and event["type"].endswith("delta") and received[-1]["type"] == event["type"] and path[0] in event:
            of, more = received[-1], event
            for name in path[:-1]:
                of, more = of[name], more[name]
            if set(of) == set(more) and path[-1] in of:
                of[path[-1]] += more[path[-1]]
                continue
        received.append(event)
    return received


# ---- Responses

TOOL = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}


async def test_events_of_a_response(talk: Talk) -> None:
    api_server = await talk(SAYS)
    body = {"input": USER["content"], "tools": [TOOL], "stream": True, "metadata": {"a": "b"}} | THINKING
    answer = await api_server.post("/v1/responses", body, headers=ID)
    found = events(answer.text)
    assert [event.pop("sequence_number") for event in found] == list(range(len(found)))
    assert "[DONE]" not in answer.text
    received = joined(found, ("delta",))
    (submit,) = api_server.job.submits
    created, progress, *middle, completed = received
    assert created["type"] == "response.created" and progress["type"] == "response.in_progress"
    begun = created["response"]
    assert begun == progress["response"] and begun["output"] == [] and begun["usage"] is None
    assert (begun["id"], begun["status"], begun["metadata"]) == ("resp_r1", "in_progress", {"a": "b"})
    response = completed["response"]
    tokens, call_id = api_server.session.tokenizer, response["output"][2]["call_id"]
    count = len(tokens.encode_segments(SAYS)) + 1
    wanted = filled(
        ADAPTERS["responses"], call=call_id, prompt=len(submit.prompt), drawn=count, total=len(submit.prompt) + count,
        thought=len(tokens.encode_segments("Hm.")),
    )  # fmt: skip
    assert middle == wanted["events"] and completed["type"] == "response.completed"
    assert response["output"] == wanted["output"] and response["usage"] == wanted["usage"]
    whole = (await api_server.post("/v1/responses", body | {"stream": False}, headers=ID)).json()
    new = whole["output"][2]["call_id"]
    assert whole | {"created_at": 0} == json.loads(json.dumps(response).replace(call_id, new)) | {"created_at": 0}


async def test_the_official_client_reads_responses(model: Path, talk: Talk) -> None:
    api_server = await talk(SAYS)
    client = AsyncOpenAI(base_url=f"{api_server.url}/v1", api_key="-", max_retries=0)
    wanted: dict[str, Any] = {"model": model.name, "input": USER["content"], "instructions": "Be brief."}
    answer = await client.responses.create(**wanted, tools=[TOOL], extra_body=THINKING)
    assert answer.output_text == "Looking." and answer.status == "completed"
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    async with client.responses.stream(**wanted, tools=[TOOL], extra_body=THINKING) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert final.output_text == "Looking." and final.output[2].arguments == CITY
    turn = [{"role": "user", "content": "x"}, *(item.model_dump() for item in answer.output)]
    turn.append({"type": "function_call_output", "call_id": answer.output[2].call_id, "output": "sunny"})
    await client.responses.create(model=model.name, input=turn)
    text = api_server.session.tokenizer.backend.decode(api_server.job.submits[-1].prompt)
    assert "Paris<|im_end|>" in text and "<|im_start|>tool\nsunny" in text
    short = await client.responses.create(**wanted, max_output_tokens=16)
    assert short.usage.output_tokens_details.reasoning_tokens == 0
    with pytest.raises(openai.NotFoundError, match="previous_response_id='resp_1' is not stored"):
        await client.responses.create(**wanted, previous_response_id="resp_1")


async def test_a_response_that_is_cut_is_incomplete_and_one_that_fails_says_why(talk: Talk) -> None:
    api_server = await talk("x")
    for finish, kind in (("length", "response.incomplete"), ("error", "response.failed")):
        api_server.job.script = scripted_reply("x", finish)
        answer = await api_server.post("/v1/responses", {"input": "x", "stream": True})
        last = events(answer.text)[-1]
        assert last["type"] == kind and last["response"]["status"] == kind.removeprefix("response.")
        statuses = [i["status"] for i in last["response"]["output"]]
        assert statuses == (["incomplete"] if finish == "length" else [])
        done = [event["item"]["status"] for event in events(answer.text) if event["type"].endswith("item.done")]
        assert done == statuses
        error = last["response"]["error"]
        assert error == ({"code": "server_error", "message": "planted"} if finish == "error" else None)
        answer = await api_server.post("/v1/responses", {"input": "x"})
        assert answer.status_code == (500 if finish == "error" else 200)
    assert last["response"]["incomplete_details"] is None


def chat(schema: Any, convert: Callable[..., Chat], body: dict[str, Any], *more: Any) -> dict[str, Any]:
    found = convert(parse_body(schema, json.dumps(body).encode()), *more)
    return found.model_dump(exclude_unset=True, exclude_none=True)


@pytest.mark.parametrize("row", ADAPTERS["responses"]["chats"])
def test_a_response_is_a_chat(row: dict[str, Any]) -> None:
    assert chat(Responses, of_responses, row["body"]) == {"stream": False, "parallel_tool_calls": True} | row["chat"]


# ---- Messages

OWN = {"name": "get_weather", "input_schema": PARAMETERS}
ASKS = {"messages": [USER], "max_tokens": 200}


def test_an_error_is_in_the_text_of_a_result() -> None:
    """Templates have no field for it."""
    parts = [{"type": "text", "text": "Exit code 1"}, {"type": "image"}]
    for content, text in (
        ("no such file", "Error: no such file"),
        (parts, "Error: Exit code 1[image left out: this model reads only text]"),
        ("Errors are fine.", "Error: Errors are fine."),
        ("error: x", "error: x"),
        ("<tool_use_error>x</tool_use_error>", "<tool_use_error>x</tool_use_error>"),
        ("\nOSError: x", "\nOSError: x"),
    ):
        for is_error in (True, False):
            block = {"type": "tool_result", "tool_use_id": "c", "content": content, "is_error": is_error}
            found = chat(Messages, of_messages, ASKS | {"messages": [{"role": "user", "content": [block]}]}, ())
            assert found["messages"][0]["content"] == (text if is_error else text.removeprefix("Error: "))
            assert not any("is_error" in name for name in found)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_what_comes_back_in_a_response_is_json(number: str) -> None:
    for what in (
        '"tools": [{"type": "function", "name": "f", "parameters": {"x": NUMBER}}], "tool_choice": "none"',
        '"text": {"format": {"type": "text", "x": [NUMBER]}}',
    ):
        body = parse_body(Responses, f'{{"input": "x", {what.replace("NUMBER", number)}}}'.encode())
        with pytest.raises(ApiError, match="has no NaN or Infinity") as refused:
            of_responses(body)
        assert refused.value.status == 400
    body = parse_body(Responses, f'{{"input": [{{"role": "user", "content": "x", "x": {number}}}]}}'.encode())
    with pytest.raises(ApiError, match="input must be JSON, which has no NaN or Infinity"):
        convert(body, [], {})


async def test_events_of_a_message(model: Path, talk: Talk) -> None:
    api_server = await talk(SAYS)
    body = ASKS | {"tools": [OWN], "thinking": {"type": "enabled", "budget_tokens": 1024}, "stream": True}
    answer = await api_server.post("/v1/messages", body, headers=ID)
    found = joined(joined(events(answer.text), ("delta", "text")), ("delta", "thinking"))
    (submit,) = api_server.job.submits
    assert api_server.session.tokenizer.backend.decode(submit.prompt).endswith("assistant\n<think>\n")
    use = found[-5]["content_block"]["id"]
    assert use.startswith("call_")
    count = len(api_server.session.tokenizer.encode_segments(SAYS)) + 1
    facts = {"model": model.name, "prompt": len(submit.prompt), "drawn": count}
    assert found == filled(ADAPTERS["messages"]["events"], call=use, **facts)
    whole = (await api_server.post("/v1/messages", body | {"stream": False}, headers=ID)).json()
    assert whole == filled(ADAPTERS["messages"]["message"], call=whole["content"][2]["id"], **facts)
    counted = await api_server.post("/v1/messages/count_tokens", {k: v for k, v in body.items() if k != "max_tokens"})
    assert counted.json() == {"input_tokens": len(submit.prompt)}


@pytest.mark.parametrize("arguments", ['{"city": 1e999}', '{"city": "\\ud83d"}', "[" * 1200])
async def test_arguments_that_no_message_can_have_stay_text(arguments: str, talk: Talk) -> None:
    api_server = await talk(f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(arguments)}}}</tool_call>')
    answer = await api_server.post("/v1/messages", ASKS | {"tools": [OWN]})
    assert answer.status_code == 200 and answer.json()["content"][0]["input"] == {"arguments": arguments}, answer.text


@pytest.mark.parametrize("stream", [False, True])
async def test_how_a_message_ends(stream: bool, talk: Talk) -> None:
    api_server = await talk("Hello world.")
    for more, reason, stop, text in (
        ({"stop_sequences": ["nowhere", "wo", " w"]}, "stop_sequence", " w", "Hello"),
        ({"stop_sequences": ["nowhere"]}, "end_turn", None, "Hello world."),
        ({"stop_sequences": [" w"], "min_tokens": 99}, "end_turn", None, "Hello world."),
    ):
        answer = await api_server.post("/v1/messages", ASKS | more | {"stream": stream})
        found = events(answer.text) if stream else [answer.json()]
        end = found[-2]["delta"] if stream else found[0]
        assert (end["stop_reason"], end["stop_sequence"]) == (reason, stop)
        texts = (event["delta"].get("text", "") for event in found if event["type"] == "content_block_delta")
        assert ("".join(texts) if stream else found[0]["content"][0]["text"]) == text


async def test_errors_of_messages_have_their_form(talk: Talk) -> None:
    api_server = await talk("x")
    for row in REFUSALS["messages"]:
        body = {name: value for name, value in (ASKS | row["body"]).items() if name != row.get("without")}
        answer, status = await api_server.post("/v1/messages", body, headers=ID), row.get("status", 400)
        received, kind = answer.json(), "not_found_error" if status == 404 else "invalid_request_error"
        assert (answer.status_code, received["type"], received["error"]["type"]) == (status, "error", kind), received
        assert row["says"] in received["error"]["message"] and received["request_id"] == "r1", received
    answer = await api_server.post("/v1/messages", ASKS | {"metadata": {"user_id": "u"}, "service_tier": "auto"})
    assert answer.headers["x-ignored-fields"] == "metadata,service_tier"
    api_server.job.script = scripted_reply("", "error")
    answer = await api_server.post("/v1/messages", ASKS | {"stream": True}, headers=ID)
    error = {"type": "error", "error": {"type": "api_error", "message": "planted"}, "request_id": "r1"}
    assert events(answer.text)[1:] == [error]


@pytest.mark.parametrize("row", ADAPTERS["messages"]["chats"])
def test_a_message_is_a_chat(row: dict[str, Any]) -> None:
    more = {"stream": False, "max_tokens": 9, "continue_final_message": False}
    assert chat(Messages, of_messages, row["body"] | {"max_tokens": 9}, {"enable_thinking"}) == more | row["chat"]
