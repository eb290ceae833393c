"""Sessions of coding agents: what they send over several turns, and what they count as a sign of life."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from openai import AsyncOpenAI, NotFoundError

from helix.engine.request import Request, RequestUpdate
from launch.client.errors import ApiError
from launch.serving.response_store import ResponseStore, StoredResponse
from tests.serving.api_server import READY, ApiServer, FakeJob, Serve, read, text_of, tokens_of, until
from tests.serving.chats import CHATS, COMPLETIONS, END, REFUSALS, WEATHER, Talk
from tests.serving.test_adapters import events, filled

AGENTS = yaml.safe_load(Path(__file__).with_name("agents.yaml").read_text())
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
LS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
LOOKS = 'I look.\n</think>\n\nLooking.\n<tool_call>\n{"name": "ls", "arguments": {"path": "."}}\n</tool_call>'
SAYS = "Seen.\n</think>\n\nThere is a.py."
Agent = Callable[..., Awaitable[ApiServer]]  # the fixture `agent`


@pytest.fixture
def agent(serve: Serve, agent_model: Path) -> Agent:
    """A factory of front ends whose model says one text after another; await it with the texts."""
    (end,) = tokens_of(END, str(agent_model))

    async def start(*texts: str, **settings: Any) -> ApiServer:
        said = iter(texts)

        async def script(job: FakeJob, submit: Request) -> None:
            for token in tokens_of(next(said), str(agent_model)):
                await job.emit(submit, [token])
            await job.emit(submit, [end], "stop")

        ready = replace(READY, model=str(agent_model), vocab=4100, eos=(0, end))
        return await serve(FakeJob(script, ready), **settings)

    return start


def prompts(api_server: ApiServer) -> list[str]:
    decode = api_server.session.tokenizer.decode
    return [decode(submit.prompt) for submit in api_server.job.submits]


def check_prefix(api_server: ApiServer, at: int, says: str | None) -> None:
    """A prompt begins with the tokens of the prompt before and of its answer.

    Args:
        says: the answer; None: the client does not return its reasoning, and only the prompt is known.
    """
    before, after = (submit.prompt.tolist() for submit in api_server.job.submits[at : at + 2])
    model = str(api_server.job.ready.model)
    known = before + tokens_of(says + END, model) if says else before[: -len(tokens_of("<think>\n", model))]
    assert after[: len(known)] == known


# ---- heartbeats

HEARTBEATS = {
    COMPLETIONS: ({"prompt": "x"}, '"text":""'),
    CHATS: ({"messages": [{"role": "user", "content": "x"}], "tools": [WEATHER]}, '"delta":{"content":""}'),
    RESPONSES: ({"input": "x", "tools": [{"type": "function"} | WEATHER["function"]]}, "event: response.in_progress"),
    MESSAGES: (
        {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 900,
            "tools": [{"name": "get_weather", "input_schema": {"type": "object"}}],
        },
        "event: ping",
    ),
}


@pytest.mark.parametrize("path", HEARTBEATS)
async def test_no_silence_during_prefill_and_while_a_call_is_written(path: str, talk: Talk) -> None:
    """Events, not only comments, and none of them changes the answer."""
    first, last = asyncio.Event(), asyncio.Event()
    api_server = await talk("")
    model = str(api_server.job.ready.model)

    async def script(job: FakeJob, submit: Request) -> None:
        job.send(RequestUpdate(submit.id, 1, 1, 0))
        await first.wait()
        for token in tokens_of('So:\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "', model):
            await job.emit(submit, [token])
        while not last.is_set():  # tokens come all the time
            await job.emit(submit, tokens_of("a", model))
            await asyncio.sleep(0.01)
        for token in tokens_of('"}}\n</tool_call>', model):
            await job.emit(submit, [token])
        await job.emit(submit, [0], "stop")

    api_server.job.script = script
    api_server.session._serve.heartbeat_s = 0.05
    body, mark = HEARTBEATS[path]
    heard = 0
    async with api_server.client.stream("POST", path, json=body | {"stream": True}) as answer:
        lines: list[str] = []
        async for line in answer.aiter_lines():
            lines.append(line)
            heard += mark in line
            if heard == 4 and not first.is_set():
                first.set()
            elif path == COMPLETIONS or heard >= 8:  # completions have no calls: their text comes at once
                last.set()
    received = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    if path == RESPONSES:
        assert [event["sequence_number"] for event in received] == list(range(len(received)))
        done = received[-1]["response"]["output"]
        assert [item["type"] for item in done] == ["message", "function_call"] and len(done[1]["arguments"]) > 20
    elif path == MESSAGES:
        pings = [i for i, event in enumerate(received) if event["type"] == "ping"]
        # The block that has begun gets an empty delta too; before it there is none.
        empty = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": ""}}
        assert received[pings[-1] + 1] == empty and received[pings[0] + 1]["type"] == "ping"
        assert [event["type"] for event in received[-2:]] == ["message_delta", "message_stop"]
        assert received[-2]["delta"]["stop_reason"] == "tool_use"
    elif path == CHATS:
        assert len(received) < 60, "tokens of a call have no events of their own"
        assert read(answer_of(answer, lines)).ends == "tool_calls"


def answer_of(answer: Any, lines: list[str]) -> Any:
    """A streamed answer with the text that was read."""
    answer._content = "\n".join(lines).encode()
    return answer


async def test_heartbeats_are_as_often_as_configured(talk: Talk) -> None:
    """Also where other events come: they postpone it."""
    api_server = await talk("x " * 30)
    api_server.session._serve.heartbeat_s = 30.0
    text = (await api_server.post(RESPONSES, {"input": "x", "stream": True})).text
    assert text.count("event: response.in_progress") == 1


# ---- sessions over chat completions


@pytest.mark.parametrize("name", AGENTS)
async def test_a_session_over_chat_completions(name: str, agent: Agent) -> None:
    """A call, its result, the same request again, and a conversation that was compacted."""
    client = AGENTS[name]
    api_server = await agent(LOOKS, SAYS, SAYS, SAYS, "Hm.\n</think>\n\nA title.", heartbeat_s=30)
    tool = {"type": "function", "function": {"name": "ls", "description": "Lists.", "parameters": LS, "strict": False}}
    fields = client["fields"] | {"model": api_server.session.name, "tools": [tool]}
    messages = [{"role": "system", "content": "Be brief."}, *client.get("before", ())]
    messages.append(filled(client["user"], text="What is there?"))
    first = await api_server.post(CHATS, fields | {"messages": messages})
    told = read(first)
    assert (told.thinking, told.content, told.calls, told.ends) == (
        "I look.", "Looking.", [("ls", {"path": "."})], "tool_calls"
    )  # fmt: skip
    call = {"id": call_id(first), "type": "function", "function": {"name": "ls", "arguments": '{"path": "."}'}}
    known = {"content": "Looking.", "reasoning_content": "I look.", "tool_calls": [call]}
    back = {"role": "assistant"} | {field: known.get(field) for field in client["back"]}
    messages += [back, filled(client["result"], call=call["id"], name="ls")]
    for _ in range(2):  # the second is a retry
        second = await api_server.post(CHATS, fields | {"messages": messages})
        told = read(second)
        assert (told.thinking, told.content, told.calls, told.ends) == ("Seen.", "There is a.py.", [], "stop")
        assert second.headers.get("x-ignored-fields", "") == ",".join(
            sorted(
                {*client.get("ignored", "").split(","), *(["reasoning_effort"] if "reasoning_effort" in fields else [])}
                - {""}
            )
        )
    assert np.array_equal(api_server.job.submits[1].prompt, api_server.job.submits[2].prompt)
    check_prefix(api_server, 0, LOOKS if "reasoning_content" in client["back"] else None)
    assert ("[image_url left out: the model reads text only]" in prompts(api_server)[1]) == (name == "openhands")
    summary = [messages[0], filled(client["user"], text="So far: there is a.py. Go on.")]
    assert read(await api_server.post(CHATS, fields | {"messages": summary})).content == "There is a.py."
    bare = {"model": fields["model"], "tools": [], "messages": [{"role": "user", "content": "Name it."}]}
    assert read(await api_server.post(CHATS, bare)).content == "A title."


def call_id(answer: Any) -> str:
    """The id of an answer's call."""
    return next(line for line in answer.text.split('"id":"') if line.startswith("call_")).partition('"')[0]


async def test_agents_that_write_calls_as_text_get_them_as_text(agent: Agent) -> None:
    """Without tools in the request, such as aider's edit blocks and OpenHands' functions."""
    for text in (
        "Sure.\n\na.py\n```\n<<<<<<< SEARCH\nx\n=======\ny\n>>>>>>> REPLACE\n```",
        "<function=ls>\n<parameter=path>.</parameter>\n</function>",
        "<execute_command>\n<command>ls</command>\n</execute_command>",
        '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>',
    ):
        api_server = await agent(f"Hm.\n</think>\n\n{text}")
        body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "stream": True, "model": None}
        told = read(await api_server.post(CHATS, body))
        assert (told.thinking, told.content, told.ends) == ("Hm.", text, "stop")


async def test_refusals_and_parts_that_are_no_text(agent: Agent) -> None:
    api_server = await agent(SAYS)
    user, image = {"role": "user", "content": "x"}, {"type": "image_url", "image_url": {"url": "x"}}
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I do not."}], "refusal": None}
    answer = await api_server.post(CHATS, {"messages": [user, refused, user]})
    assert answer.status_code == 200 and "assistant\nI do not.<|im_end|>" in prompts(api_server)[0]
    answer = await api_server.post(CHATS, {"messages": [{"role": "user", "content": [image]}]})
    assert answer.status_code == 400 and "only text is read" in answer.json()["error"]["message"]


# ---- Codex

PATCH = '*** Begin Patch\n*** Add File: a.py\n+x = "1"\n*** End Patch'
CODEX_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "ls", "description": "Lists.", "strict": False, "parameters": LS},
    {
        "type": "custom", "name": "apply_patch", "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
    },
    {
        "type": "namespace", "name": "mcp__notes", "description": "Notes.",
        "tools": [{"type": "function", "name": "find", "strict": False, "parameters": LS}],
    },
    {"type": "web_search", "external_web_access": True},
    {"type": "local_shell"},
]  # fmt: skip
CODEX: dict[str, Any] = {
    "stream": True, "store": False, "tools": CODEX_TOOLS, "tool_choice": "auto", "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"}, "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "t1", "client_metadata": {"thread_id": "t1"}, "text": {"verbosity": "low"},
}  # fmt: skip
LEFT_OUT = "client_metadata,include,prompt_cache_key,reasoning.effort,reasoning.summary,text.verbosity"


def item(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "id": f"msg_{len(text)}", "role": role, "content": [{"type": kind, "text": text}]}


def called(name: str, arguments: Any) -> str:
    return f'Hm.\n</think>\n\n<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


async def test_a_session_of_codex(agent: Agent) -> None:
    texts = [
        called("ls", {"path": "."}),
        called("apply_patch", {"input": PATCH}),
        called("mcp__notes__find", {"path": "a"}),
    ]
    api_server = await agent(*texts, SAYS, SAYS)
    history = [item("developer", "Be brief."), item("developer", "No network."), item("user", "Add a.py.")]
    results = ("function_call_output", "a.py"), ("custom_tool_call_output", "Success."), ("function_call_output", [])
    told = []
    for turn in range(4):
        answer = await api_server.post(RESPONSES, CODEX | {"model": api_server.session.name, "input": history})
        assert answer.status_code == 200, answer.text
        assert (
            answer.headers["x-ignored-fields"]
            == f"{LEFT_OUT},tools.local_shell,tools.namespace.description,tools.web_search"
        )
        found = events(answer.text)
        items = [event["item"] for event in found if event["type"] == "response.output_item.done"]
        assert found[-1]["type"] == "response.completed" and found[-1]["response"]["output"] == items
        assert found[-1]["response"]["usage"]["total_tokens"] > 0 and found[-1]["response"]["store"] is False
        assert items[0]["type"] == "reasoning" and items[0]["content"][0]["text"] in ("Hm.", "Seen.")
        told.append(items[-1])
        history += items
        if turn < len(results):
            kind, output = results[turn]
            history.append({"type": kind, "id": f"fco_{turn}", "call_id": items[-1]["call_id"], "output": output})
            if turn:
                check_prefix(api_server, turn - 1, texts[turn - 1])
    check_prefix(api_server, 2, texts[2])
    ls, patch, find, message = ({name: one for name, one in of.items() if name not in ("id", "call_id")} for of in told)
    assert ls == {"type": "function_call", "status": "completed", "name": "ls", "arguments": '{"path": "."}'}
    assert patch == {"type": "custom_tool_call", "status": "completed", "name": "apply_patch", "input": PATCH}
    assert find == {
        "type": "function_call", "status": "completed", "name": "find", "namespace": "mcp__notes",
        "arguments": '{"path": "a"}',
    }  # fmt: skip
    assert message["content"][0]["text"] == "There is a.py."
    assert "input follows this lark grammar:" in prompts(api_server)[0] and "mcp__notes__find" in prompts(api_server)[0]
    # Compacted, with items of others: an image among the results, a search, and what only their servers read.
    history = [
        history[0], item("user", "So far: a.py was added. Go on."),
        {"type": "compaction", "encrypted_content": "gAAA"}, {"type": "web_search_call", "id": "ws", "action": {}},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "S"}], "encrypted_content": "gAAA"},
        {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": ""},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "x"}]},
    ]  # fmt: skip
    answer = await api_server.post(RESPONSES, {"input": history})
    assert answer.status_code == 200, answer.text
    left_out = "input.compaction,input.encrypted_content,input.output.input_image,input.summary,input.web_search_call"
    assert answer.headers["x-ignored-fields"] == left_out
    assert "tool\n[input_image left out: the model reads text only]<|im_end|>" in prompts(api_server)[-1]


async def test_events_of_a_custom_tools_call(agent: Agent) -> None:
    """Also where a model does not write the argument that it was told."""
    for arguments, given in (
        ({"input": PATCH}, PATCH),
        ({"patch": "x"}, '{"patch": "x"}'),
        ({"input": 3}, '{"input": 3}'),
        ({"input": "\ud83d"}, '{"input": "\\ud83d"}'),
        ("[" * 1200, "[" * 1200),
    ):
        api_server = await agent(called("apply_patch", arguments))
        choice = {"type": "custom", "name": "apply_patch"}
        answer = await api_server.post(RESPONSES, {"input": "x", "tools": CODEX_TOOLS[1:2], "stream": True})
        found = [event for event in events(answer.text) if event.get("output_index") == 1]
        names = [event["type"].removeprefix("response.") for event in found]
        kind = "custom_tool_call_input"
        assert names == ["output_item.added", f"{kind}.delta", f"{kind}.done", "output_item.done"]
        added, delta, done, whole = found
        assert (added["item"]["input"], delta["delta"], done["input"], whole["item"]["input"]) == (
            "",
            given,
            given,
            given,
        )
        assert added["item"]["id"] == delta["item_id"] == done["item_id"] == whole["item"]["id"]
    answer = await api_server.post(RESPONSES, {"input": "x", "tools": CODEX_TOOLS[3:], "tool_choice": choice})
    assert answer.status_code == 400 and "tool_choice is 'apply_patch', which is not in tools" in answer.text


async def test_what_a_response_cannot_have_is_refused(agent: Agent) -> None:
    api_server = await agent()
    for row in REFUSALS["responses"]:
        answer = await api_server.post(RESPONSES, row["body"])
        assert answer.status_code == row.get("status", 400) and row["says"] in answer.text.replace('\\"', '"'), (
            answer.text
        )
    assert api_server.job.submits == []


async def test_an_effort_is_ignored_where_the_template_has_none(talk: Talk) -> None:
    api_server = await talk("x")
    tokenizer = api_server.session.tokenizer.backend
    for template, ignored in (("trimmed.jinja", True), ("of-effort.jinja", False), ("switched.jinja", False)):
        tokenizer.chat_templates = {"default": text_of(template)}
        for path, body, name in (
            (RESPONSES, {"input": "x", "reasoning": {"effort": "low"}}, "reasoning.effort"),
            (CHATS, {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "low"}, "reasoning_effort"),
        ):
            answer = await api_server.post(path, body)
            assert answer.status_code == 200, answer.text
            assert answer.headers.get("x-ignored-fields") == (name if ignored else None)
    tokenizer.chat_templates = {"default": text_of("of-effort.jinja")}
    twice = {"reasoning": {"effort": "low"}, "chat_template_kwargs": {"reasoning_effort": "high"}}
    error = (await api_server.post(RESPONSES, {"input": "x"} | twice)).json()["error"]
    assert error["message"] == "reasoning.effort is also in chat_template_kwargs", error
    assert error["param"] == "reasoning.effort"


# ---- stored responses


async def respond(api_server: ApiServer, status: int = 200, **body: Any) -> dict[str, Any]:
    headers = {"x-api-key": body.pop("key", "")}
    answer = await api_server.post(RESPONSES, {"tools": CODEX_TOOLS} | body, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()  # type: ignore[no-any-return]


async def test_a_conversation_continues_from_a_stored_response(agent: Agent) -> None:
    """Its instructions are not kept, as OpenAI has it; items may be referred to."""
    api_server = await agent(LOOKS, SAYS, SAYS, SAYS)
    first = await respond(api_server, instructions="Be brief.", input="What is there?")
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a.py"}
    second = await respond(api_server, input=[result], previous_response_id=first["id"])
    assert (second["previous_response_id"], second["store"]) == (first["id"], True)
    third = await respond(api_server, input="And?", previous_response_id=second["id"])
    assert third["output"][-1]["content"][0]["text"] == "There is a.py."
    texts = prompts(api_server)
    assert texts[1] == texts[0].replace("<|im_start|>system\nBe brief.<|im_end|>\n", "") + (
        LOOKS + "<|im_end|>\n<|im_start|>tool\na.py<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    assert (
        texts[2] == texts[1] + SAYS + "<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    question = {"role": "user", "content": "What is there?"}
    references = [{"type": "item_reference", "id": first["output"][0]["id"]}, {"id": first["output"][1]["id"]}]
    fourth = await respond(
        api_server, input=[question, *references, {"type": "item_reference", "id": call["id"]}, result]
    )
    assert prompts(api_server)[3] == texts[1], "items and references to them are the same"
    missing = await respond(api_server, 404, input=[{"id": first["output"][0]["id"][:-1] + "7"}])
    assert "is not in its response: send the item itself" in missing["error"]["message"]
    missing = await respond(api_server, 404, input=[{"id": "fc_1"}])
    assert missing["error"]["message"].startswith("item_reference='fc_1' is not stored")
    assert fourth["output"][-1]["content"][0]["text"] == "There is a.py."


async def test_a_stored_response_is_read_and_deleted(agent: Agent) -> None:
    """With OpenAI's client: the response as it was answered, and the items of its conversation in pages."""
    api_server = await agent(LOOKS, SAYS, SAYS)
    client = AsyncOpenAI(base_url=f"{api_server.url}/v1", api_key="-", max_retries=0)
    first = await respond(
        api_server, instructions="Be brief.", input="What is there?", metadata={"a": '"output": null'}
    )
    result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "a.py"}
    answer = await api_server.post(RESPONSES, {"input": [result], "previous_response_id": first["id"], "stream": True})
    second = events(answer.text)[-1]["response"]
    for response in (first, second):
        assert (await client.responses.retrieve(response["id"])).to_dict() == response
        assert (await api_server.get(f"{RESPONSES}/{response['id']}")).json() == response
    pages = [
        item.to_dict() async for item in await client.responses.input_items.list(second["id"], limit=2, order="asc")
    ]
    number = second["id"].removeprefix("resp_")
    content = [{"type": "input_text", "text": "What is there?"}]
    question = {"id": f"item_{number}_0", "type": "message", "role": "user", "content": content}
    assert pages == [question, *first["output"], {"id": f"item_{number}_4", **result}]
    page = await client.responses.input_items.list(second["id"])
    assert [item.id for item in page.data] == [item["id"] for item in reversed(pages)]
    assert (page.first_id, page.last_id, page.has_more) == (pages[-1]["id"], pages[0]["id"], False)  # type: ignore[attr-defined]
    for path, status, words in (
        (f"{second['id']}?stream=true", 400, "events of responses are not stored"),
        (f"{second['id']}/input_items?limit=0", 400, "limit='0': Input should be greater than or equal to 1"),
        (f"{second['id']}/input_items?after=x", 400, "after='x' is not an item of this response"),
        ("resp_1", 404, "response_id='resp_1' is not stored"),
    ):
        answer = await api_server.get(f"{RESPONSES}/{path}")
        assert answer.status_code == status and words in answer.json()["error"]["message"], answer.text
    answer = await api_server.get(f"{RESPONSES}/{second['id']}/input_items?include=x")
    assert answer.headers["x-ignored-fields"] == "include"

    await client.responses.delete(first["id"])
    answer = await api_server.client.delete(f"{RESPONSES}/{first['id']}")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "response_not_found"
    third = await respond(api_server, input="And?", previous_response_id=second["id"])
    assert len((await client.responses.input_items.list(third["id"])).data) == 8
    answer = await api_server.client.delete(f"{RESPONSES}/{second['id']}")
    assert answer.json() == {"id": second["id"], "object": "response", "deleted": True}
    assert api_server.api.shared.store.count == 1 and api_server.api.shared.store.size > 0
    await client.responses.delete(third["id"])
    assert api_server.api.shared.store.count == api_server.api.shared.store.size == 0


async def test_a_response_is_found_whatever_characters_its_id_has(agent: Agent) -> None:
    api_server = await agent(SAYS)
    client = AsyncOpenAI(base_url=f"{api_server.url}/v1", api_key="-", max_retries=0)
    headers = {"x-request-id": "a/b?c=%2F#d/"}
    response = await client.responses.create(model=api_server.session.name, input="x", extra_headers=headers)
    assert response.id == "resp_a/b?c=%2F#d/"
    assert await client.responses.retrieve(response.id) == response
    assert (await client.responses.input_items.list(response.id)).data[0].content[0].text == "x"  # type: ignore[union-attr]
    await client.responses.delete(response.id)
    with pytest.raises(NotFoundError, match="is not stored"):
        await client.responses.retrieve(response.id)


async def test_only_the_owner_finds_a_stored_response_and_only_for_a_while(agent: Agent, tmp_path: Path) -> None:
    (path := tmp_path / "keys").write_text("ada key-1\nbob key-2\n")
    api_server = await agent(*[SAYS] * 6, api_keys=str(path), stored_responses=2)
    first = await respond(api_server, input="x", key="key-1")
    await respond(api_server, input="x", key="key-2", store=False)
    for key, status in ("key-2", 404), ("key-1", 200):
        answer = await respond(api_server, status, input="x", key=key, previous_response_id=first["id"])
    for ask in (api_server.get, api_server.client.delete):
        for path in ("", "/input_items")[: 1 + (ask == api_server.get)]:
            headers = {"x-api-key": "key-2"}
            assert (await ask(f"{RESPONSES}/{first['id']}{path}", headers=headers)).status_code == 404
    assert api_server.api.shared.store.count == 2
    await respond(api_server, input="x", key="key-1")
    gone = await respond(api_server, 404, input="x", key="key-1", previous_response_id=first["id"])
    assert gone["error"]["code"] == "response_not_found" and gone["error"]["param"] == "previous_response_id"
    assert "send the whole conversation as input" in gone["error"]["message"]
    # What continues it still has all of it.
    await respond(api_server, input="y", key="key-1", previous_response_id=answer["id"])
    assert prompts(api_server)[-1].count("user\nx") == 2


async def test_a_response_that_fails_is_not_stored(agent: Agent) -> None:
    api_server = await agent(SAYS)

    async def fail(job: FakeJob, submit: Request) -> None:
        await job.emit(submit, [], "error", reason="planted")

    api_server.job.script = fail
    assert (await api_server.post(RESPONSES, {"input": "x"})).status_code == 500
    assert (await api_server.post(RESPONSES, {"input": "x", "stream": True})).status_code == 200
    assert api_server.api.shared.store.count == api_server.api.shared.store.size == 0


def chain(node: StoredResponse | None) -> Iterator[StoredResponse]:
    while node is not None:
        yield node
        node = node.previous


def test_the_store_counts_what_it_holds() -> None:
    """Random conversations with branches, against a count of all that can be reached; limits are per owner."""
    rng = random.Random(1)
    store = ResponseStore(6, 4000)
    known: dict[str, list[StoredResponse]] = {"ada": [], "bob": []}
    dropped = 0
    for number in range(2000):
        owner = rng.choice([*known])
        # It may continue one that has been dropped since its request came.
        previous = rng.choice(known[owner][-9:]) if known[owner] and rng.random() < 0.7 else None
        new = StoredResponse(previous, (b"x" * rng.randrange(1, 900), b"y"))
        store.add(owner, f"resp_{rng.randrange(number + 1)}", new)
        known[owner].append(new)
        for shelf in store._shelves.values():
            held = {id(node): node.size for root in shelf.responses.values() for node in chain(root)}
            assert shelf.size == sum(held.values()) <= 4000 and len(shelf.responses) <= 6
        dropped += store.count < 12
    assert dropped > 0 and store.size == sum(shelf.size for shelf in store._shelves.values()) > 0
    with pytest.raises(ApiError, match="is not stored"):
        store.find("eve", "resp_1", "previous_response_id", "resp_1")
    assert "eve" not in store._shelves


# ---- names of the model


async def test_aliases_are_names_of_the_served_model(agent: Agent) -> None:
    api_server = await agent(SAYS, SAYS, SAYS, SAYS, aliases=["gpt-x", "claude-*", "opus[1m]"])
    name = api_server.session.name
    for model in (name, "gpt-x", "claude-haiku-4-5-20251001", "opus[1m]"):
        answer = await api_server.post(CHATS, {"model": model, "messages": [{"role": "user", "content": "x"}]})
        assert answer.status_code == 200 and answer.json()["model"] == name
    answer = await api_server.post(CHATS, {"model": "gpt-xy", "messages": [{"role": "user", "content": "x"}]})
    message = f"model='gpt-xy' is not served: use {name} or gpt-x or claude-* or opus[1m]; serve.aliases adds names"
    assert answer.status_code == 404 and answer.json()["error"]["message"] == message
    listed = (await api_server.get("/v1/models?client_version=0.171.0&limit=1000")).json()
    assert [one["id"] for one in listed["data"]] == [name, "gpt-x", "opus[1m]"] and listed["models"] == []
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (name, "opus[1m]", False)
    one = (await api_server.get("/v1/models/claude-x")).json()
    assert (one["id"], one["root"], one["type"], one["display_name"]) == ("claude-x", name, "model", name)
    assert one["max_input_tokens"] == one["max_model_len"] and one["created_at"].endswith("Z")
    for unknown in ("x", "opus1"):
        assert (await api_server.get(f"/v1/models/{unknown}")).status_code == 404


async def test_a_client_that_retries_takes_the_place_of_its_first_request(agent: Agent) -> None:
    """Its connection is closed: what it had asked for ends, and the same request is answered."""
    api_server = await agent(SAYS, SAYS)
    held = asyncio.Event()
    script = api_server.job.script

    async def hold(job: FakeJob, submit: Request) -> None:
        await held.wait()

    api_server.job.script = hold
    body = {"input": "x", "stream": True}
    _reader, writer = await api_server.connect(RESPONSES, body)
    await until(lambda: api_server.job.submits)
    writer.close()
    await until(lambda: api_server.job.aborts)
    api_server.job.script = script
    answer = await api_server.post(RESPONSES, body)
    assert events(answer.text)[-1]["type"] == "response.completed"
    assert np.array_equal(*(submit.prompt for submit in api_server.job.submits))
