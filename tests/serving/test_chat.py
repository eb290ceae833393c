"""Chats: thinking, tool calls and the official client's types, over a job that says what a test wants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import yaml
from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from helix.engine.request import Request
from launch.client.chat_tokenizer import ChatTokenizer
from tests.serving.api_server import READY, ApiServer, FakeJob, ReceivedChoice, read, scripted_reply
from tests.serving.chats import CALL, CHATS, COMPLETIONS, USER, WEATHER, Talk, tool
from tests.serving.transcripts import BY_NAME

PARIS = "get_weather", {"city": "Paris"}
WITH_TOOLS: dict[str, Any] = {"tools": [WEATHER, tool("now")]}
THINKING = {"chat_template_kwargs": {"thinking": True}}
TOLD = yaml.safe_load(Path(__file__).with_name("chats.yaml").read_text())


@pytest.mark.parametrize("name", TOLD)
async def test_what_reaches_a_client(name: str, guided: ApiServer) -> None:
    """Whole and streamed."""
    row = TOLD[name]
    calls = [(tool, arguments) for call in row.get("calls", ()) for tool, arguments in call.items()]
    received = ReceivedChoice(row.get("thinking", ""), row["content"], calls, row["ends"])
    body = {"messages": [USER]} | WITH_TOOLS | row.get("body", {})
    if "begun" in row:
        body["messages"].append({"role": "assistant", "content": row["begun"]})
        body["continue_final_message"] = True
    if "structured_outputs" in body:
        del body["tools"]
    guided.job.script = scripted_reply(row["says"], "length" if "cut" in name else "stop", guided.job.ready.eos[1])
    for stream in (False, True):
        assert read(await guided.post(CHATS, body | {"stream": stream})) == received
        assert guided.engine_client.generations == {}


async def test_a_call_that_has_to_come(guided: ApiServer) -> None:
    """The engine is told what may come."""
    guided.job.script = scripted_reply(CALL)
    for wanted in ("required", tool("get_weather"), "auto"):
        await guided.post(CHATS, {"messages": [USER], "tool_choice": wanted} | WITH_TOOLS)
    any_tool, named, free = (submit.grammar for submit in guided.job.submits)
    assert "now" in any_tool and "get_weather" in named and "now" not in named and free is None


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_strict_tool_is_followed_where_calls_are_optional(route: str, guided: ApiServer) -> None:
    """Its keywords without effect are named, and so is all of it if the grammar cannot be made."""
    guided.job.script = scripted_reply(CALL)
    strict = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}, "required": ["tags"]}

    async def post(parameters: dict[str, Any], **more: Any) -> tuple[str | None, str]:
        function = {"name": "set_tags", "parameters": parameters, "strict": True} | more
        body: dict[str, Any] = {"messages": [USER], "max_tokens": 99}
        match route:
            case "/v1/responses":
                body = {"input": "Hello", "tools": [{"type": "function"} | function]}
            case "/v1/messages":
                body["tools"] = [function | {"input_schema": function.pop("parameters")}]
            case _:
                body["tools"] = [{"type": "function", "function": function}]
        answer = await guided.post(route, body)
        assert answer.status_code == 200, answer.text
        return guided.job.submits[-1].grammar, answer.headers.get("x-ignored-fields", "")

    grammar, ignored = await post(strict)
    assert grammar is not None and "set_tags" in grammar
    assert ignored == "tools.set_tags:$.properties.tags.uniqueItems"
    assert await post(strict, strict=False) == (None, "")
    for unusable in ({"not": {}}, {"properties": {"x": {"type": "nonsense"}}}):  # found here, and by the compiler
        assert await post(unusable) == (None, "tools.strict")
    guided.session.chat_format = BY_NAME["llama3"]
    assert await post(strict) == (None, "tools.strict")


async def test_schema_keywords_without_effect_are_named(guided: ApiServer) -> None:
    guided.job.script = scripted_reply("{}")
    inner = {"$defs": {"a b": {"pattern": "^(?=x)y"}}, "oneOf": [{"items": {"uniqueItems": True}}, {"type": "null"}]}
    schema = {"type": "object", "properties": {"x": inner, "y": {"pattern": "^a$", "uniqueItems": False}}}
    names = ["$defs.a b.pattern", "oneOf", "oneOf[0].items.uniqueItems"]
    for body, field in (
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}, "response_format"),
        ({"structured_outputs": {"json": schema}}, "structured_outputs.json"),
        (
            {"tools": [WEATHER | {"function": {"name": "f", "parameters": schema}}], "tool_choice": "required"},
            "tools.f",
        ),
    ):
        answer = await guided.post(CHATS, {"messages": [USER]} | body)
        expected = [f"{field}:$.properties.x.{name}" for name in names]
        assert answer.headers["x-ignored-fields"] == ",".join(expected), answer.text
    wanted = {"format": {"type": "json_schema", "schema": schema}}
    unknown = {"response_format": {"type": "text"}}  # a field of chats only
    for path, body, field, others in (
        ("/v1/responses", {"input": "x", "text": wanted} | unknown, "text.format", ["response_format"]),
        ("/v1/messages", {"messages": [USER], "max_tokens": 9, "output_config": wanted}, "output_config.format", []),
    ):
        answer = await guided.post(path, body)
        expected = [*others, *(f"{field}:$.properties.x.{name}" for name in names)]
        assert answer.headers["x-ignored-fields"] == ",".join(expected), answer.text


OSLO = '{"city": "Oslo"}'
LIST = f'[{{"name": "get_weather", "parameters": {OSLO}}}, {{"name": "now", "parameters": {{}}}}]'
IN_OSLO, NOW = ("get_weather", {"city": "Oslo"}), ("now", {})


@pytest.mark.parametrize(
    "template, wanted, says, calls",
    [
        ("plain", "required", LIST, [IN_OSLO, NOW]),
        ("plain", tool("get_weather"), OSLO, [IN_OSLO]),
        ("plain", "required", LIST[:-9], [IN_OSLO]),
        ("plain", "required", LIST.partition('{"name": "now"')[0], [IN_OSLO]),
        ("plain", "required", LIST[:30], []),
        ("plain", tool("get_weather"), OSLO[:-2], []),
        ("with tools", tool("get_weather"), OSLO, [IN_OSLO]),
        ("thinking", "required", LIST, [IN_OSLO, NOW]),
    ],
)
async def test_calls_of_a_model_of_no_known_family(
    template: str, wanted: Any, says: str, calls: list[Any], guided: ApiServer
) -> None:
    """They are plain JSON, whether or not its template tells of tools; one that is cut is text."""
    shown = "{{ tools | tojson if tools }}" if template == "with tools" else ""
    thinks = "{# <think> #}" if template == "thinking" else ""
    api_server, tokenizer = guided, guided.session.tokenizer.backend
    api_server.job.script = scripted_reply(
        f"<think>Hm.</think>{says}" if thinks else says, end=api_server.job.ready.eos[1]
    )
    written = shown + thinks + "{{ messages[0].content }}<|im_end|>\n"
    tokenizer.chat_templates = {"default": written}
    api_server.session.chat_format = BY_NAME["thinking"] if thinks else None
    body: dict[str, Any] = {"messages": [USER], "tool_choice": wanted} | WITH_TOOLS
    rest = '{"name": "now", "paramete' if says == LIST[:-9] else ""
    for stream in (False, True):
        received = read(await api_server.post(CHATS, body | {"stream": stream}))
        assert received == ReceivedChoice(
            "Hm." if thinks else "", rest if calls else says, calls, "tool_calls" if calls else "stop"
        )
    submit = api_server.job.submits[-1]
    assert '\\"city\\"' in submit.grammar and ("now" in submit.grammar) == (wanted == "required")
    assert ("get_weather" in tokenizer.decode(submit.prompt)) == bool(shown)
    free = await api_server.post(CHATS, body | {"tool_choice": "auto"})
    assert free.status_code == (200 if shown else 400)


# ---- the official client


def client(api_server: ApiServer) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{api_server.url}/v1", api_key="-", max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_official_client_reads_thoughts_and_calls(stream: bool, talk: Talk) -> None:
    """And sends them with the next turn."""
    api_server = await talk(TOLD["thought, text and call"]["says"])
    answer = await client(api_server).chat.completions.create(
        model=api_server.session.name, messages=[USER], tools=[WEATHER], stream=stream, extra_body=THINKING
    )
    if stream:
        choices = [piece.choices[0] async for piece in answer]
        message, reason = [choice.delta for choice in choices], choices[-1].finish_reason
    else:
        message, reason = [answer.choices[0].message], answer.choices[0].finish_reason
    assert reason == "tool_calls"
    assert "".join(getattr(one, "reasoning_content", None) or "" for one in message) == "Which city?"
    assert "".join(one.content or "" for one in message) == "Looking."
    (call,) = (call for one in message for call in one.tool_calls or ())
    assert (call.function.name, json.loads(call.function.arguments)) == PARIS and call.id.startswith("call_")
    turn = [USER, {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}]
    turn += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    await client(api_server).chat.completions.create(model=api_server.session.name, messages=turn)
    text = api_server.session.tokenizer.backend.decode(api_server.job.submits[-1].prompt)
    assert "Paris<|im_end|>" in text and "<|im_start|>tool\nsunny" in text


async def test_a_conversation_is_the_templates_text(talk: Talk) -> None:
    api_server = await talk("Fine, thanks.")
    parts = [{"type": "text", "text": "Hello, what is "}, {"type": "text", "text": "the weather like?"}]
    for content in (USER["content"], parts):
        answer = await client(api_server).chat.completions.create(
            model=api_server.session.name, messages=[{"role": "user", "content": content}], max_completion_tokens=100
        )
        (choice,) = answer.choices
        assert (choice.message.content, choice.finish_reason) == ("Fine, thanks.", "stop")
        assert answer.usage.prompt_tokens == len(api_server.job.submits[-1].prompt)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client(api_server).chat.completions.create(model=api_server.session.name, messages=[USER], temperature=-1)
    first, second = api_server.job.submits
    assert np.array_equal(first.prompt, second.prompt) and first.max_tokens == 100
    text = api_server.session.tokenizer.backend.decode(first.prompt)
    assert text == f"<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n"
    answer = await api_server.post("/tokenize", {"messages": [USER]})
    assert answer.json()["tokens"] == first.prompt.tolist()
    answer = await api_server.post("/detokenize", {"tokens": first.prompt.tolist()})
    assert answer.json()["prompt"] == text
    await api_server.post(CHATS, {"messages": [USER]})
    assert api_server.job.submits[-1].max_tokens == READY.kv_tokens - len(first.prompt), "what is left of the context"


async def test_several_choices_and_logprobs(talk: Talk) -> None:
    async def script(job: FakeJob, submit: Request) -> None:
        for token, finish in ((yes, None), (api_server.job.ready.eos[1], "stop")):
            await job.emit(submit, [token], finish, logprobs=((-0.25, ((5, -0.25), (6, -1.5))),))

    api_server = await talk("")
    api_server.job.script = script
    yes = api_server.session.tokenizer.encode("Yes", 9)[0]
    answer = await client(api_server).chat.completions.create(
        model=api_server.session.name, messages=[USER], n=2, logprobs=True, top_logprobs=2, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        first = choice.logprobs.content[0]
        assert first.logprob == -0.25 and [t.logprob for t in first.top_logprobs] == [-0.25, -1.5]
        assert bytes(first.bytes).decode() == first.token == "Yes"[: len(first.token)]
    assert api_server.job.submits[0].sampling.logprobs == 2
    answer = await client(api_server).completions.create(model=api_server.session.name, prompt="x", logprobs=2)
    received = answer.choices[0].logprobs
    assert received.token_logprobs[0] == -0.25 and received.text_offset[0] == 0 and len(received.top_logprobs[0]) == 2


# ---- texts of tokens


async def test_special_tokens_are_text_where_they_are_wanted(talk: Talk) -> None:
    api_server = await talk("a<|im_start|>b")
    for wanted, text in ((True, "ab"), (False, "a<|im_start|>b")):
        body = {"skip_special_tokens": wanted, "max_tokens": 9}
        for path, more in ((COMPLETIONS, {"prompt": "x"}), (CHATS, {"messages": [USER]})):
            assert read(await api_server.post(path, body | more)).content == text


def saved(vocab: dict[str, int], steps: list[Any], directory: Path) -> ChatTokenizer:
    """A tokenizer of words and bytes, as SentencePiece makes them."""
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(steps)
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(directory)
    return ChatTokenizer(str(directory))


def test_bytes_of_tokens_join_to_the_text(tmp_path: Path, model: Path) -> None:
    """Tokens of byte-level tokenizers, and bytes beside words as SentencePiece has them, even within a character."""
    tokens = ChatTokenizer(str(model))
    assert any("\ufffd" in tokens.token_text(token) for token in tokens.encode("👩", 99).tolist())
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    text = "é👩\u200d🔬 日本\x00\n\ufffd"
    for one in (tokens, saved(vocab, [decoders.ByteFallback(), decoders.Fuse()], tmp_path)):
        assert b"".join(map(one.token_bytes, one.encode(text, 99).tolist())).decode() == text


def test_texts_of_tokens_keep_their_spaces(tmp_path: Path) -> None:
    """Tokenizers of Llama 2 and Mistral drop the first space of a text, which each token alone begins with."""
    vocab = {"<unk>": 0, "▁": 1, "▁a": 2, "a": 3, "▁▁": 4}
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokens = saved(vocab, steps, tmp_path)
    assert [tokens.token_text(token) for token in range(5)] == ["<unk>", " ", " a", "a", "  "]
