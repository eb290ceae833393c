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
from launch.answers.dialects import dialect_of
from launch.client.tokens import Tokens
from tests.serving.chats import CALL, CHATS, COMPLETIONS, USER, WEATHER, Talk, tool
from tests.serving.front import READY, FakeJob, Front, Read, read, saying

PARIS = "get_weather", {"city": "Paris"}
WITH_TOOLS: dict[str, Any] = {"tools": [WEATHER, tool("now")]}
THINKING = {"chat_template_kwargs": {"thinking": True}}
TOLD = yaml.safe_load(Path(__file__).with_name("chats.yaml").read_text())


@pytest.mark.parametrize("name", TOLD)
async def test_what_reaches_a_client(name: str, guided: Front) -> None:
    """Whole and streamed."""
    row = TOLD[name]
    calls = [(tool, arguments) for call in row.get("calls", ()) for tool, arguments in call.items()]
    told = Read(row.get("thinking", ""), row["content"], calls, row["ends"])
    body = {"messages": [USER]} | WITH_TOOLS | row.get("body", {})
    if "begun" in row:
        body["messages"].append({"role": "assistant", "content": row["begun"]})
        body["continue_final_message"] = True
    if "structured_outputs" in body:
        del body["tools"]
    guided.job.script = saying(row["says"], "length" if "cut" in name else "stop", guided.job.ready.eos[1])
    for stream in (False, True):
        assert read(await guided.post(CHATS, body | {"stream": stream})) == told
        assert guided.core.flights == {}


async def test_a_call_that_has_to_come(guided: Front) -> None:
    """The engine is told what may come."""
    guided.job.script = saying(CALL)
    for wanted in ("required", tool("get_weather"), "auto"):
        await guided.post(CHATS, {"messages": [USER], "tool_choice": wanted} | WITH_TOOLS)
    any_tool, named, free = (submit.grammar for submit in guided.job.submits)
    assert "now" in any_tool and "get_weather" in named and "now" not in named and free is None


OSLO = '{"city": "Oslo"}'
LIST = f'[{{"name": "get_weather", "parameters": {OSLO}}}, {{"name": "now", "parameters": {{}}}}]'
IN_OSLO, NOW = ("get_weather", {"city": "Oslo"}), ("now", {})


@pytest.mark.parametrize(
    "template, wanted, says, calls",
    [
        ("plain", "required", LIST, [IN_OSLO, NOW]),
        ("plain", tool("get_weather"), OSLO, [IN_OSLO]),
        ("plain", "required", LIST[:-9], [IN_OSLO]),
        ("plain", "required", LIST[:30], []),
        ("plain", tool("get_weather"), OSLO[:-2], []),
        ("with tools", tool("get_weather"), OSLO, [IN_OSLO]),
        ("thinking", "required", LIST, [IN_OSLO, NOW]),
    ],
)
async def test_calls_of_a_model_of_no_known_family(
    template: str, wanted: Any, says: str, calls: list[Any], guided: Front
) -> None:
    """They are plain JSON, whether or not its template tells of tools; one that is cut is text."""
    shown = "{{ tools | tojson if tools }}" if template == "with tools" else ""
    thinks = "{# <think> #}" if template == "thinking" else ""
    front, tokenizer = guided, guided.session.tokens.tokenizer
    front.job.script = saying(f"<think>Hm.</think>{says}" if thinks else says, end=front.job.ready.eos[1])
    written = shown + thinks + "{{ messages[0].content }}<|im_end|>\n"
    tokenizer.chat_templates, front.session._dialect = {"default": written}, dialect_of(written)
    assert (front.session._dialect is None) == (not thinks)
    body: dict[str, Any] = {"messages": [USER], "tool_choice": wanted} | WITH_TOOLS
    rest = '{"name": "now", "paramete' if says == LIST[:-9] else ""
    for stream in (False, True):
        told = read(await front.post(CHATS, body | {"stream": stream}))
        assert told == Read("Hm." if thinks else "", rest if calls else says, calls, "tool_calls" if calls else "stop")
    submit = front.job.submits[-1]
    assert '\\"city\\"' in submit.grammar and ("now" in submit.grammar) == (wanted == "required")
    assert ("get_weather" in tokenizer.decode(submit.prompt)) == bool(shown)
    free = await front.post(CHATS, body | {"tool_choice": "auto"})
    assert free.status_code == (200 if shown else 400)


# ---- the official client


def client(front: Front) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{front.url}/v1", api_key="-", max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_official_client_reads_thoughts_and_calls(stream: bool, talk: Talk) -> None:
    """And sends them with the next turn."""
    front = await talk(TOLD["thought, text and call"]["says"])
    answer = await client(front).chat.completions.create(
        model=front.session.name, messages=[USER], tools=[WEATHER], stream=stream, extra_body=THINKING
    )
    if stream:
        choices = [piece.choices[0] async for piece in answer]
        said, reason = [choice.delta for choice in choices], choices[-1].finish_reason
    else:
        said, reason = [answer.choices[0].message], answer.choices[0].finish_reason
    assert reason == "tool_calls"
    assert "".join(getattr(one, "reasoning_content", None) or "" for one in said) == "Which city?"
    assert "".join(one.content or "" for one in said) == "Looking."
    (call,) = (call for one in said for call in one.tool_calls or ())
    assert (call.function.name, json.loads(call.function.arguments)) == PARIS and call.id.startswith("call_")
    turn = [USER, {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}]
    turn += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    await client(front).chat.completions.create(model=front.session.name, messages=turn)
    text = front.session.tokens.tokenizer.decode(front.job.submits[-1].prompt)
    assert "Paris<|im_end|>" in text and "<|im_start|>tool\nsunny" in text


async def test_a_conversation_is_the_templates_text(talk: Talk) -> None:
    front = await talk("Fine, thanks.")
    parts = [{"type": "text", "text": "Hello, what is "}, {"type": "text", "text": "the weather like?"}]
    for content in (USER["content"], parts):
        answer = await client(front).chat.completions.create(
            model=front.session.name, messages=[{"role": "user", "content": content}], max_completion_tokens=100
        )
        (choice,) = answer.choices
        assert (choice.message.content, choice.finish_reason) == ("Fine, thanks.", "stop")
        assert answer.usage.prompt_tokens == len(front.job.submits[-1].prompt)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client(front).chat.completions.create(model=front.session.name, messages=[USER], temperature=-1)
    first, second = front.job.submits
    assert np.array_equal(first.prompt, second.prompt) and first.max_tokens == 100
    text = front.session.tokens.tokenizer.decode(first.prompt)
    assert text == f"<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n"
    answer = await front.post("/tokenize", {"messages": [USER]})
    assert answer.json()["tokens"] == first.prompt.tolist()
    answer = await front.post("/detokenize", {"tokens": first.prompt.tolist()})
    assert answer.json()["prompt"] == text
    await front.post(CHATS, {"messages": [USER]})
    assert front.job.submits[-1].max_tokens == READY.kv_tokens - len(first.prompt), "what is left of the context"


async def test_several_choices_and_logprobs(talk: Talk) -> None:
    async def script(job: FakeJob, submit: Request) -> None:
        for token, finish in ((yes, None), (front.job.ready.eos[1], "stop")):
            await job.say(submit, [token], finish, logprobs=((-0.25, ((5, -0.25), (6, -1.5))),))

    front = await talk("")
    front.job.script = script
    yes = front.session.tokens.encode("Yes", 9)[0]
    answer = await client(front).chat.completions.create(
        model=front.session.name, messages=[USER], n=2, logprobs=True, top_logprobs=2, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        first = choice.logprobs.content[0]
        assert first.logprob == -0.25 and [t.logprob for t in first.top_logprobs] == [-0.25, -1.5]
        assert bytes(first.bytes).decode() == first.token == "Yes"[: len(first.token)]
    assert front.job.submits[0].sampling.logprobs == 2
    answer = await client(front).completions.create(model=front.session.name, prompt="x", logprobs=2)
    told = answer.choices[0].logprobs
    assert told.token_logprobs[0] == -0.25 and told.text_offset[0] == 0 and len(told.top_logprobs[0]) == 2


# ---- texts of tokens


async def test_special_tokens_are_text_where_they_are_wanted(talk: Talk) -> None:
    front = await talk("a<|im_start|>b")
    for wanted, text in ((True, "ab"), (False, "a<|im_start|>b")):
        body = {"prompt": "x", "skip_special_tokens": wanted, "max_tokens": 9}
        assert read(await front.post(COMPLETIONS, body)).content == text


def saved(vocab: dict[str, int], steps: list[Any], directory: Path) -> Tokens:
    """A tokenizer of words and bytes, as SentencePiece makes them."""
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(steps)
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(directory)
    return Tokens(str(directory))


def test_bytes_of_tokens_join_to_the_text(tmp_path: Path, model: Path) -> None:
    """Tokens of byte-level tokenizers, and bytes beside words as SentencePiece has them, even within a character."""
    tokens = Tokens(str(model))
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
