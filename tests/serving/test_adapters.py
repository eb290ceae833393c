"""OpenAI's Responses and Anthropic's Messages: exact events, and what becomes of their fields in the chat beneath."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from launch.client.errors import ApiError
from launch.client.schemas import Chat, parsed
from launch.serving.messages import Messages
from launch.serving.messages import chat_of as of_messages
from launch.serving.responses import Responses
from launch.serving.responses import chat_of as of_responses
from tests.serving.chats import CALL, PARAMETERS, REFUSALS, USER, Talk

SAYS = f"Hm.\n</think>\n\nLooking.\n{CALL}"
CITY = '{"city": "Paris"}'
THINKING = {"chat_template_kwargs": {"thinking": True}}
ID = {"x-request-id": "r1"}


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
    """Events with neighbours of one kind as one: how a text is cut depends on the tokens."""
    told: list[dict[str, Any]] = []
    for event in found:
        if told and event["type"].endswith("delta") and told[-1]["type"] == event["type"] and path[0] in event:
            of, more = told[-1], event
            for name in path[:-1]:
                of, more = of[name], more[name]
            if set(of) == set(more) and path[-1] in of:
                of[path[-1]] += more[path[-1]]
                continue
        told.append(event)
    return told


# ---- Responses

TOOL = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}


async def test_events_of_a_response(talk: Talk) -> None:
    front = await talk(SAYS)
    body = {"input": USER["content"], "tools": [TOOL], "stream": True, "metadata": {"a": "b"}} | THINKING
    answer = await front.post("/v1/responses", body, headers=ID)
    found = events(answer.text)
    assert [event.pop("sequence_number") for event in found] == list(range(len(found)))
    assert "[DONE]" not in answer.text
    told = joined(found, ("delta",))
    (submit,) = front.job.submits
    created, progress, *middle, completed = told
    assert created["type"] == "response.created" and progress["type"] == "response.in_progress"
    begun = created["response"]
    assert begun == progress["response"] and begun["output"] == [] and begun["usage"] is None
    assert (begun["id"], begun["status"], begun["metadata"]) == ("resp_r1", "in_progress", {"a": "b"})
    thought = {"type": "reasoning_text", "text": "Hm."}
    said = {"type": "output_text", "text": "Looking.", "annotations": [], "logprobs": []}
    call_id = completed["response"]["output"][2]["call_id"]
    items = [
        {"id": "rs_r1_0", "type": "reasoning", "summary": [], "status": "completed", "content": [thought]},
        {"id": "msg_r1_1", "type": "message", "role": "assistant", "status": "completed", "content": [said]},
        {
            "id": "fc_r1_2", "type": "function_call", "status": "completed", "call_id": call_id,
            "name": "get_weather", "arguments": CITY,
        },
    ]  # fmt: skip
    first, second = ({"item_id": items[i]["id"], "output_index": i, "content_index": 0} for i in (0, 1))
    third = {"item_id": "fc_r1_2", "output_index": 2}
    empty = {"content": [], "status": "in_progress"}
    assert middle == [
        {"type": "response.output_item.added", "output_index": 0, "item": items[0] | empty},
        {"type": "response.content_part.added", "part": thought | {"text": ""}} | first,
        {"type": "response.reasoning_text.delta", "delta": "Hm."} | first,
        {"type": "response.reasoning_text.done", "text": "Hm."} | first,
        {"type": "response.content_part.done", "part": thought} | first,
        {"type": "response.output_item.done", "output_index": 0, "item": items[0]},
        {"type": "response.output_item.added", "output_index": 1, "item": items[1] | empty},
        {"type": "response.content_part.added", "part": said | {"text": ""}} | second,
        {"type": "response.output_text.delta", "delta": "Looking.", "logprobs": []} | second,
        {"type": "response.output_text.done", "text": "Looking.", "logprobs": []} | second,
        {"type": "response.content_part.done", "part": said} | second,
        {"type": "response.output_item.done", "output_index": 1, "item": items[1]},
        {
            "type": "response.output_item.added", "output_index": 2,
            "item": items[2] | {"arguments": "", "status": "in_progress"},
        },
        {"type": "response.function_call_arguments.delta", "delta": CITY} | third,
        {"type": "response.function_call_arguments.done", "name": "get_weather", "arguments": CITY} | third,
        {"type": "response.output_item.done", "output_index": 2, "item": items[2]},
    ]  # fmt: skip
    response = completed["response"]
    assert completed["type"] == "response.completed" and response["output"] == items
    tokens = front.session.tokens
    assert response["usage"] == {
        "input_tokens": len(submit.prompt),
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": len(tokens.encode_segments(SAYS)) + 1,
        "output_tokens_details": {"reasoning_tokens": len(tokens.encode_segments("Hm."))},
        "total_tokens": len(submit.prompt) + len(tokens.encode_segments(SAYS)) + 1,
    }
    whole = (await front.post("/v1/responses", body | {"stream": False}, headers=ID)).json()
    new = whole["output"][2]["call_id"]
    assert whole | {"created_at": 0} == json.loads(json.dumps(response).replace(call_id, new)) | {"created_at": 0}


async def test_the_official_client_reads_responses(model: Path, talk: Talk) -> None:
    front = await talk(SAYS)
    client = AsyncOpenAI(base_url=f"{front.url}/v1", api_key="-", max_retries=0)
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
    text = front.session.tokens.tokenizer.decode(front.job.submits[-1].prompt)
    assert "Paris<|im_end|>" in text and "<|im_start|>tool\nsunny" in text
    short = await client.responses.create(**wanted, max_output_tokens=16)
    assert short.usage.output_tokens_details.reasoning_tokens == 0
    with pytest.raises(openai.BadRequestError, match="previous_response_id is not supported: nothing is kept"):
        await client.responses.create(**wanted, previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="store is not supported"):
        await client.responses.create(**wanted, store=True)
    await client.responses.create(**wanted, store=False)


async def test_a_response_that_is_cut_is_incomplete_and_one_that_fails_says_why(talk: Talk) -> None:
    front = await talk("x")
    for finish, kind in (("length", "response.incomplete"), ("error", "response.failed")):

        async def script(job: Any, submit: Any, finish: str = finish) -> None:
            await job.say(submit, [100])
            await job.say(submit, [], finish, reason="planted")

        front.job.script = script
        answer = await front.post("/v1/responses", {"input": "x", "stream": True})
        last = events(answer.text)[-1]
        assert last["type"] == kind and last["response"]["status"] == kind.removeprefix("response.")
        said = [i["status"] for i in last["response"]["output"]]
        assert said == (["incomplete"] if finish == "length" else [])
        done = [event["item"]["status"] for event in events(answer.text) if event["type"].endswith("item.done")]
        assert done == said
        error = last["response"]["error"]
        assert error == ({"code": "server_error", "message": "planted"} if finish == "error" else None)
        answer = await front.post("/v1/responses", {"input": "x"})
        assert answer.status_code == (500 if finish == "error" else 200)
    assert last["response"]["incomplete_details"] is None


def chat(schema: Any, convert: Callable[..., Chat], body: dict[str, Any], *more: Any) -> dict[str, Any]:
    found = convert(parsed(schema, json.dumps(body).encode()), *more)
    return found.model_dump(exclude_unset=True, exclude_none=True)


def texts(kind: str, *parts: str) -> list[dict[str, str]]:
    return [{"type": kind, "text": part} for part in parts]


ASSISTANT = {"role": "assistant", "content": "Hi.", "reasoning_content": "Hm."}
CALLS = {"tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": "{}"}}]}
RETURNED = {"role": "tool", "tool_call_id": "c1", "content": "ab"}


@pytest.mark.parametrize(
    "body, expected",
    [
        ({"input": "x"}, {"messages": [{"role": "user", "content": "x"}]}),
        (
            {
                "instructions": "s", "temperature": 0.5, "seed": 3, "max_output_tokens": 7, "top_k": 5,
                "input": [
                    {"role": "user", "content": texts("input_text", "a", "b")},
                    {"type": "reasoning", "id": "r", "summary": [], "content": texts("reasoning_text", "Hm.")},
                    {"type": "message", "role": "assistant", "content": texts("output_text", "Hi.")},
                    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c1", "output": texts("input_text", "ab")},
                ],
            },
            {
                "messages": [
                    {"role": "system", "content": "s"}, {"role": "user", "content": "ab"}, ASSISTANT | CALLS, RETURNED,
                ],
                "temperature": 0.5, "seed": 3, "max_tokens": 7, "top_k": 5,
            },
        ),
        (
            {
                "input": "x", "tools": [TOOL | {"strict": True}],
                "tool_choice": {"type": "function", "name": "get_weather"}, "reasoning": {"effort": "low"},
                "parallel_tool_calls": False,
            },
            {
                "messages": [{"role": "user", "content": "x"}], "reasoning_effort": "low", "parallel_tool_calls": False,
                "tools": [
                    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}
                ],
                "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
            },
        ),
        (
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": PARAMETERS}}},
            {
                "messages": [{"role": "user", "content": "x"}],
                "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS}},
            },
        ),
    ],
)  # fmt: skip
def test_a_response_is_a_chat(body: dict[str, Any], expected: dict[str, Any]) -> None:
    assert chat(Responses, of_responses, body) == {"stream": False, "parallel_tool_calls": True} | expected


# ---- Messages

OWN = {"name": "get_weather", "input_schema": PARAMETERS}
ASKS = {"messages": [USER], "max_tokens": 200}


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_what_comes_back_in_a_response_is_json(number: str) -> None:
    for what in (
        '"tools": [{"type": "function", "name": "f", "parameters": {"x": NUMBER}}], "tool_choice": "none"',
        '"text": {"format": {"type": "text", "x": [NUMBER]}}',
    ):
        body = parsed(Responses, f'{{"input": "x", {what.replace("NUMBER", number)}}}'.encode())
        with pytest.raises(ApiError, match="NaN and Infinity are not") as refused:
            of_responses(body)
        assert refused.value.status == 400


async def test_events_of_a_message(model: Path, talk: Talk) -> None:
    front = await talk(SAYS)
    body = ASKS | {"tools": [OWN], "thinking": {"type": "enabled", "budget_tokens": 1024}, "stream": True}
    answer = await front.post("/v1/messages", body, headers=ID)
    found = joined(joined(events(answer.text), ("delta", "text")), ("delta", "thinking"))
    (submit,) = front.job.submits
    assert front.session.tokens.tokenizer.decode(submit.prompt).endswith("assistant\n<think>\n")
    use = found[-5]["content_block"]["id"]
    assert use.startswith("call_")
    usage = {"input_tokens": len(submit.prompt), "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    drawn = len(front.session.tokens.encode_segments(SAYS)) + 1
    message = {"id": "msg_r1", "type": "message", "role": "assistant", "model": model.name, "content": []}
    thought = {"type": "thinking", "thinking": "", "signature": ""}
    called = {"type": "tool_use", "id": use, "name": "get_weather", "input": {}}
    assert found == [
        {
            "type": "message_start",
            "message": message
            | {"stop_reason": None, "stop_sequence": None, "usage": usage | {"output_tokens": 0}},
        },
        {"type": "content_block_start", "index": 0, "content_block": thought},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm."}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Looking."}},
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_start", "index": 2, "content_block": called},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": CITY}},
        {"type": "content_block_stop", "index": 2},
        {
            "type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": usage | {"output_tokens": drawn},
        },
        {"type": "message_stop"},
    ]  # fmt: skip
    whole = (await front.post("/v1/messages", body | {"stream": False}, headers=ID)).json()
    use = whole["content"][2]["id"]
    assert whole == message | {
        "content": [
            thought | {"thinking": "Hm."}, {"type": "text", "text": "Looking."},
            called | {"id": use, "input": {"city": "Paris"}},
        ],
        "stop_reason": "tool_use", "stop_sequence": None, "usage": usage | {"output_tokens": drawn},
    }  # fmt: skip
    counted = await front.post("/v1/messages/count_tokens", {k: v for k, v in body.items() if k != "max_tokens"})
    assert counted.json() == {"input_tokens": len(submit.prompt)}


@pytest.mark.parametrize("stream", [False, True])
async def test_how_a_message_ends(stream: bool, talk: Talk) -> None:
    front = await talk("Hello world.")
    for more, reason, stop, text in (
        ({"stop_sequences": ["nowhere", "wo", " w"]}, "stop_sequence", " w", "Hello"),
        ({"stop_sequences": ["nowhere"]}, "end_turn", None, "Hello world."),
        ({"stop_sequences": [" w"], "min_tokens": 99}, "end_turn", None, "Hello world."),
    ):
        answer = await front.post("/v1/messages", ASKS | more | {"stream": stream})
        found = events(answer.text) if stream else [answer.json()]
        end = found[-2]["delta"] if stream else found[0]
        assert (end["stop_reason"], end["stop_sequence"]) == (reason, stop)
        texts = (event["delta"].get("text", "") for event in found if event["type"] == "content_block_delta")
        assert ("".join(texts) if stream else found[0]["content"][0]["text"]) == text


async def test_errors_of_messages_have_their_form(talk: Talk) -> None:
    front = await talk("x")
    for row in REFUSALS["messages"]:
        answer, status = await front.post("/v1/messages", ASKS | row["body"], headers=ID), row.get("status", 400)
        told, kind = answer.json(), "not_found_error" if status == 404 else "invalid_request_error"
        assert (answer.status_code, told["type"], told["error"]["type"]) == (status, "error", kind), told
        assert row["says"] in told["error"]["message"] and told["request_id"] == "r1", told
    answer = await front.post("/v1/messages", ASKS | {"metadata": {"user_id": "u"}, "service_tier": "auto"})
    assert answer.headers["x-ignored-fields"] == "metadata,service_tier"

    async def failing(job: Any, submit: Any) -> None:
        await job.say(submit, [], "error", reason="planted")

    front.job.script = failing
    answer = await front.post("/v1/messages", ASKS | {"stream": True}, headers=ID)
    error = {"type": "error", "error": {"type": "api_error", "message": "planted"}, "request_id": "r1"}
    assert events(answer.text)[1:] == [error]


@pytest.mark.parametrize(
    "body, expected",
    [
        ({"messages": [USER]}, {"messages": [USER]}),
        (
            {
                "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}], "top_k": 5,
                "stop_sequences": ["a"],
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Hi."},
                            {"type": "tool_use", "id": "c1", "name": "f", "input": {}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "ab"}]},
                            {"type": "text", "text": "More."},
                        ],
                    },
                ],
            },
            {
                "messages": [
                    {"role": "system", "content": "s"}, USER, ASSISTANT | CALLS, RETURNED,
                    {"role": "user", "content": "More."},
                ],
                "top_k": 5, "stop": ["a"],
            },
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "So"}]},
            {"messages": [USER, {"role": "assistant", "content": "So"}], "continue_final_message": True},
        ),
        (
            {
                "messages": [USER], "tools": [OWN | {"description": "d"}], "thinking": {"type": "disabled"},
                "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
                "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": PARAMETERS}},
            },
            {
                "messages": [USER], "tool_choice": "required", "parallel_tool_calls": False, "include_reasoning": False,
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "get_weather", "description": "d", "parameters": PARAMETERS},
                    }
                ],
                "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low",
                "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": PARAMETERS}},
            },
        ),
    ],
)  # fmt: skip
def test_a_message_is_a_chat(body: dict[str, Any], expected: dict[str, Any]) -> None:
    more = {"stream": False, "max_tokens": 9, "continue_final_message": False}
    assert chat(Messages, of_messages, body | {"max_tokens": 9}, {"enable_thinking"}) == more | expected
