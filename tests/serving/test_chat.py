"""Chats: templates, thinking, tool calls, and the official client's types, over a job that says what a test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from helix.engine.request import Request
from launch.answers.dialects import dialect_of
from launch.client.errors import ApiError
from launch.client.schemas import Chat, parsed
from launch.client.tokens import Tokens
from tests.serving.front import DEMO, READY, FakeJob, Front, front

pytestmark = pytest.mark.timeout(120)
SPECIAL = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Answer with <tool_call> for: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'developer' %}{{ raise_exception('no such role: developer') }}{% endif %}
<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}{{ call.function.arguments.city }}{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if thinking %}<think>
{% endif %}{% endif %}"""
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
USER = {"role": "user", "content": "Hello, what is the weather like?"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's tokenizer with special tokens of a chat, and a template."""
    directory = tmp_path_factory.mktemp("chat-model")
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def run(
    check: Callable[[Front], Awaitable[None]],
    directory: Path,
    model: Path,
    says: str,
    guided: bool = False,
    ends: str = "stop",
) -> None:
    """Runs a check beside a job that says a text and ends the turn, or is at its limit."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    logprobs = (-0.25, ((5, -0.25), (6, -1.5)))

    async def script(job: FakeJob, submit: Request) -> None:
        tokens = tokenizer(says, add_special_tokens=False)["input_ids"]
        for at, token in enumerate(tokens := [*tokens, end] if ends == "stop" else tokens, 1):
            more = {"logprobs": (logprobs,)} if submit.sampling.logprobs is not None else {}
            await job.say(submit, [token], ends if at == len(tokens) else None, **more)

    async def with_front() -> None:
        job = FakeJob(script, replace(READY, model=str(model), vocab=4100, eos=(0, end), guided=guided))
        async with front(directory, job) as made, asyncio.timeout(60):
            await check(made)

    asyncio.run(with_front())


def client(front: Front) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{front.url}/v1", api_key="-", max_retries=0)


def test_a_conversation_is_the_templates_text(tmp_path: Path, model: Path) -> None:
    async def check(front: Front) -> None:
        parts = [{"type": "text", "text": "Hello, what is "}, {"type": "text", "text": "the weather like?"}]
        for content in (USER["content"], parts):
            answer = await client(front).chat.completions.create(
                model=model.name, messages=[{"role": "user", "content": content}], max_completion_tokens=100
            )
            (choice,) = answer.choices
            assert (choice.message.content, choice.finish_reason) == ("Fine, thanks.", "stop")
            assert answer.usage.prompt_tokens == len(front.job.submits[-1].prompt)
        first, second = front.job.submits
        assert np.array_equal(first.prompt, second.prompt) and first.max_tokens == 100
        text = front.session.tokens.tokenizer.decode(first.prompt)
        assert text == f"<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n"
        answer = await front.post("/tokenize", {"messages": [USER]})
        assert answer.json()["tokens"] == first.prompt.tolist()
        answer = await front.post("/detokenize", {"tokens": first.prompt.tolist()})
        assert answer.json()["prompt"] == text

    run(check, tmp_path, model, "Fine, thanks.")


def test_what_is_left_of_the_context_is_the_limit(tmp_path: Path, model: Path) -> None:
    async def check(front: Front) -> None:
        await front.post("/v1/chat/completions", {"messages": [USER]})
        (submit,) = front.job.submits
        assert submit.max_tokens == READY.kv_tokens - len(submit.prompt)

    run(check, tmp_path, model, "x")


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_and_calls(stream: bool, tmp_path: Path, model: Path) -> None:
    call = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
    says = f"Which city?\n</think>\n\nLooking.\n<tool_call>\n{call}\n</tool_call>"

    async def check(front: Front) -> None:
        body: dict[str, Any] = {"model": model.name, "messages": [USER], "tools": [WEATHER], "stream": stream}
        answer = await client(front).chat.completions.create(
            **body, extra_body={"chat_template_kwargs": {"thinking": True}}
        )
        if stream:
            thinking, content, calls, reasons = "", "", [], []
            async for piece in answer:
                delta = piece.choices[0].delta
                thinking += getattr(delta, "reasoning_content", None) or ""
                content += delta.content or ""
                calls += delta.tool_calls or []
                reasons.append(piece.choices[0].finish_reason)
            assert [call.index for call in calls] == [0] and reasons[-1] == "tool_calls"
        else:
            message = answer.choices[0].message
            thinking, content, calls = message.reasoning_content, message.content, message.tool_calls
            assert answer.choices[0].finish_reason == "tool_calls"
        assert (thinking, content) == ("Which city?", "Looking.")
        assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [
            ("get_weather", {"city": "Paris"})
        ]
        assert calls[0].id.startswith("call_")
        # The next turn, as clients send it: the call comes back with its arguments as text.
        turn = [USER, {"role": "assistant", "content": None, "tool_calls": [c.model_dump() for c in calls]}]
        turn += [{"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"}]
        await client(front).chat.completions.create(model=model.name, messages=turn)
        text = front.session.tokens.tokenizer.decode(front.job.submits[-1].prompt)
        assert "Paris<|im_end|>" in text and "<|im_start|>tool\nsunny" in text

    run(check, tmp_path, model, says)


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice, calls", [("required", 2), (tool("get_weather"), 1)])
def test_a_call_that_has_to_come(choice: Any, calls: int, stream: bool, tmp_path: Path, model: Path) -> None:
    """The engine is told what may come; a named tool is called once."""

    async def check(front: Front) -> None:
        tools = [WEATHER, tool("now")]
        wanted: dict[str, Any] = {"model": model.name, "messages": [USER], "tools": tools, "tool_choice": choice}
        answer = await client(front).chat.completions.create(**wanted, stream=stream)
        if stream:
            pieces = [piece.choices[0] async for piece in answer]
            called = [call for piece in pieces for call in piece.delta.tool_calls or []]
            assert [call.index for call in called] == list(range(calls)) and pieces[-1].finish_reason == "tool_calls"
        else:
            (one,) = answer.choices
            called = one.message.tool_calls
            assert one.finish_reason == "tool_calls" and not one.message.content
        assert [json.loads(call.function.arguments) for call in called] == [{"city": "Paris"}] * calls
        (submit,) = front.job.submits
        assert ("now" in submit.grammar) == (choice == "required")
        await client(front).chat.completions.create(**wanted | {"tool_choice": "auto"})
        assert front.job.submits[1].grammar is None

    run(check, tmp_path, model, "\n".join([CALL] * 2), guided=True)


OSLO = '{"city": "Oslo"}'
LIST = f'[{{"name": "get_weather", "parameters": {OSLO}}}, {{"name": "now", "parameters": {{}}}}]'


@pytest.mark.parametrize(
    "template, choice, says, calls",
    [
        ("plain", "required", LIST, [("get_weather", {"city": "Oslo"}), ("now", {})]),
        ("plain", tool("get_weather"), OSLO, [("get_weather", {"city": "Oslo"})]),
        ("plain", "required", LIST[:-9], [("get_weather", {"city": "Oslo"})]),
        ("plain", "required", LIST[:30], []),
        ("plain", tool("get_weather"), OSLO[:-2], []),
        ("with tools", tool("get_weather"), OSLO, [("get_weather", {"city": "Oslo"})]),
        ("thinking", "required", LIST, [("get_weather", {"city": "Oslo"}), ("now", {})]),
    ],
)
def test_calls_of_a_model_of_no_known_family(
    template: str, choice: Any, says: str, calls: list[Any], tmp_path: Path, model: Path
) -> None:
    """They are plain JSON, whether or not its template tells of tools; one that is cut is text."""
    shown = "{{ tools | tojson if tools }}" if template == "with tools" else ""
    thinks = "{# <think> #}" if template == "thinking" else ""

    async def check(front: Front) -> None:
        tokenizer = front.session.tokens.tokenizer
        template = shown + thinks + "{{ messages[0].content }}<|im_end|>\n"
        tokenizer.chat_templates = {"default": template}
        front.session._dialect = dialect_of(template)
        assert (front.session._dialect is None) == (not thinks)
        wanted: dict[str, Any] = {"messages": [USER], "tools": [WEATHER, tool("now")], "tool_choice": choice}
        for stream in (False, True):
            answer = await front.post("/v1/chat/completions", wanted | {"stream": stream})
            lines = answer.text.splitlines() if stream else [f"data: {answer.text}"]
            told = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
            said = [one["delta" if stream else "message"] for one in told]
            called = [call for one in said for call in one.get("tool_calls", ())]
            assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in called] == calls
            assert not stream or [call["index"] for call in called] == list(range(len(calls)))
            text = "".join(one.get("content") or "" for one in said)
            rest = '{"name": "now", "paramete' if says == LIST[:-9] else ""
            assert (told[-1]["finish_reason"], text) == (("tool_calls", rest) if calls else ("stop", says))
            assert "".join(one.get("reasoning_content", "") for one in said) == ("Hm." if thinks else "")
        submit = front.job.submits[-1]
        assert '\\"city\\"' in submit.grammar and ("now" in submit.grammar) == (choice == "required")
        assert ("get_weather" in tokenizer.decode(submit.prompt)) == bool(shown)
        free = await front.post("/v1/chat/completions", wanted | {"tool_choice": "auto"})
        assert free.status_code == (200 if shown else 400)

    run(check, tmp_path, model, f"<think>Hm.</think>{says}" if thinks else says, guided=True)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_may_not_be_parallel_end_with_the_first(stream: bool, tmp_path: Path, model: Path) -> None:
    async def check(front: Front) -> None:
        answer = await front.post(
            "/v1/chat/completions",
            {"messages": [USER], "tools": [WEATHER], "parallel_tool_calls": False, "stream": stream},
        )
        assert answer.text.count('"get_weather"') == answer.text.count('"finish_reason":"tool_calls"') == 1
        assert "behind" not in answer.text and front.core.flights == {}

    run(check, tmp_path, model, f"One.\n{CALL}\n{CALL}\nbehind")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{"max_tokens": 400}, {"stop": "}"}], ids=["limit", "stop"])
def test_a_call_that_is_cut_is_told_as_text(more: Any, stream: bool, tmp_path: Path, model: Path) -> None:
    """By the limit or by a stop text: clients would run half a call."""
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"'

    async def check(front: Front) -> None:
        body = {"messages": [USER], "tools": [WEATHER], "stream": stream} | more
        answer = await front.post("/v1/chat/completions", body)
        lines = answer.text.splitlines() if stream else [f"data: {answer.text}"]
        told = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        said = [one["delta" if stream else "message"] for one in told]
        assert not any(one.get("tool_calls") for one in said)
        assert "".join(one.get("content") or "" for one in said) == f"Looking.\n{call}"
        assert told[-1]["finish_reason"] == ("stop" if "stop" in more else "length")

    run(
        check,
        tmp_path,
        model,
        f"Looking.\n{call}}}}}\n</tool_call>" if "stop" in more else f"Looking.\n{call}",
        ends="length",
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("says", ["<think> is no thought", "I <think> so"])
def test_a_choice_may_contain_marks_of_thoughts(says: str, stream: bool, tmp_path: Path, model: Path) -> None:
    async def check(front: Front) -> None:
        body = {"messages": [USER], "structured_outputs": {"choice": [says, "x"]}, "stream": stream}
        answer = await front.post("/v1/chat/completions", body)
        lines = answer.text.splitlines() if stream else [f"data: {answer.text}"]
        told = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        said = [one["delta" if stream else "message"] for one in told]
        assert "".join(one.get("content") or "" for one in said) == says
        assert not any(one.get("reasoning_content") for one in said)

    run(check, tmp_path, model, says, guided=True)


def test_several_choices_and_logprobs(tmp_path: Path, model: Path) -> None:
    async def check(front: Front) -> None:
        answer = await client(front).chat.completions.create(
            model=model.name, messages=[USER], n=2, logprobs=True, top_logprobs=2, seed=1
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        for choice in answer.choices:
            first = choice.logprobs.content[0]
            assert first.logprob == -0.25 and [t.logprob for t in first.top_logprobs] == [-0.25, -1.5]
            assert bytes(first.bytes).decode() == first.token == "Yes"[: len(first.token)]
        assert front.job.submits[0].sampling.logprobs == 2
        answer = await client(front).completions.create(model=model.name, prompt="x", logprobs=2)
        told = answer.choices[0].logprobs
        assert told.token_logprobs[0] == -0.25 and told.text_offset[0] == 0 and len(told.top_logprobs[0]) == 2

    run(check, tmp_path, model, "Yes")


def test_a_template_that_refuses_is_400(tmp_path: Path, model: Path) -> None:
    async def check(front: Front) -> None:
        for body, words in (
            ({"messages": [{"role": "developer", "content": "x"}]}, "no such role: developer"),
            ({"messages": [USER], "chat_template_kwargs": {"tokenize": True}}, "tokenize"),
            ({"messages": [USER], "chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs"),
            ({"messages": [USER], "tools": [WEATHER], "tool_choice": "required"}, "leave tool_choice out"),
            ({"messages": [USER], "tools": [WEATHER], "tool_choice": tool("x")}, "names 'x'"),
            ({"messages": [USER], "tools": [tool("a b")]}, "tools.0.function.name='a b'"),
            ({"messages": [USER], "response_format": {"type": "json_object"}}, "leave response_format out"),
            ({"messages": [USER], "response_format": {"type": "json_schema"}}, "json_schema needs a schema"),
        ):
            answer = await front.post("/v1/chat/completions", body)
            assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text

    run(check, tmp_path, model, "x")


def test_bytes_of_tokens_join_to_the_text(tmp_path: Path, model: Path) -> None:
    """Tokens of byte-level tokenizers, and bytes beside words as SentencePiece has them, even within a character."""
    text = "é👩\u200d🔬 日本\x00\n\ufffd"
    tokens = Tokens(str(model))
    assert any("\ufffd" in tokens.token_text(token) for token in tokens.encode("👩", 99).tolist())
    assert b"".join(map(tokens.token_bytes, tokens.encode(text, 99).tolist())).decode() == text
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(tmp_path)
    tokens = Tokens(str(tmp_path))
    assert b"".join(map(tokens.token_bytes, tokens.encode(text, 99).tolist())).decode() == text


def test_texts_of_tokens_keep_their_spaces(tmp_path: Path) -> None:
    """Tokenizers of Llama 2 and Mistral drop the first space of a text, which each token alone begins with."""
    vocab = {"<unk>": 0, "▁": 1, "▁a": 2, "a": 3, "▁▁": 4}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(tmp_path)
    tokens = Tokens(str(tmp_path))
    assert [tokens.token_text(token) for token in range(5)] == ["<unk>", " ", " a", "a", "  "]


@pytest.mark.parametrize("arguments, status", [("", 200), (" {} ", 200), ("{", 400), ("[" * 9000, 400)])
def test_arguments_of_earlier_calls(arguments: str, status: int, tmp_path: Path, model: Path) -> None:
    async def check(front: Front) -> None:
        turn = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        answer = await front.post("/v1/chat/completions", {"messages": [USER, turn, USER]})
        assert answer.status_code == status, answer.text
        assert status == 200 or "arguments of 'f' are not JSON" in answer.json()["error"]["message"]

    run(check, tmp_path, model, "x")


HAS_CALLS = "{% if m.tool_calls is defined and m.tool_calls is not none %}"
# Templates of three kinds: of Llama 3, Mistral (before its third version) and gpt-oss.
REFUSES = "{% if m.tool_calls|length != 1 %}{{ raise_exception('single tool-calls') }}{% endif %}"
LOSES = "{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}({{ m.content or m.thinking }})"
ONE, EACH = (
    "{{ m.tool_calls[0].function.arguments.a }}",
    "{% for c in m.tool_calls %}{{ c.function.arguments.a }}{% endfor %}",
)
KINDS = {
    "one": REFUSES + ONE,
    "several": EACH,
    "first": ONE,
    "thinking": LOSES + ONE,
    "reasoning": "({{ m.reasoning }})" + EACH,
}


def called(*calls: str, **more: Any) -> dict[str, Any]:
    functions = [{"name": "f", "arguments": json.dumps({"a": call})} for call in calls]
    return {"role": "assistant", "tool_calls": [{"id": f["arguments"], "function": f} for f in functions]} | more


def result(call: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": json.dumps({"a": call}), "content": f"={call}"}


@pytest.mark.parametrize(
    "kind, turns, wanted",
    [
        *[(kind, [{"role": "assistant", "content": "said", "tool_calls": []}], "said") for kind in KINDS],
        ("several", [called("A", "B"), result("A"), result("B")], "AB;=A;=B"),
        ("one", [called("A", "B"), result("A"), result("B")], "A;=A;B;=B"),
        ("first", [called("A", "B", "C"), result("B"), result("A")], "A;=A;B;=B;C"),
        ("thinking", [called("A", "B", reasoning_content="T"), result("A")], "(T)A;=A;()B"),
        ("thinking", [called("A", reasoning_content="T", content="text"), result("A")], "(T\n\ntext)A;=A"),
        ("thinking", [called("A", thinking="T")], "(T)A"),
        ("reasoning", [called("A", reasoning_content="T")], "(T)A"),
        ("reasoning", [called("A", reasoning_content="", reasoning="T")], "(T)A"),
    ],
)
def test_earlier_answers_are_in_the_prompt(kind: str, turns: list[Any], wanted: str, model: Path) -> None:
    """Text beside an empty list of calls, further calls, and thoughts, under the template's own name."""
    tokens = Tokens(str(model))
    shown = f"{HAS_CALLS}{KINDS[kind]}{{% else %}}{{{{ m.content }}}}{{% endif %}};"
    tokens.tokenizer.chat_templates = {"default": f"{{% for m in messages %}}{shown}{{% endfor %}}"}
    chat = parsed(Chat, json.dumps({"messages": [USER, *turns]}).encode())
    assert tokens.encode_chat(chat, None, 1000)[1] == f"{USER['content']};{wanted};"


def test_a_template_that_cannot_show_all_calls_is_told(model: Path) -> None:
    tokens = Tokens(str(model))
    last = "{{ messages[1].tool_calls[0].function.arguments.a if messages|length == 2 else raise_exception('two') }}"
    tokens.tokenizer.chat_templates = {"default": last}
    chat = parsed(Chat, json.dumps({"messages": [USER, called("A", "B")]}).encode())
    with pytest.raises(ApiError, match="several calls, and it reads the first alone"):
        tokens.encode_chat(chat, None, 1000)


@pytest.mark.parametrize("content", ["is none", "== ''"])
def test_templates_that_join_texts_read_calls(content: str, tmp_path: Path, model: Path) -> None:
    """Templates such as DeepSeek's want a null content beside calls, and arguments as a text."""

    async def check(front: Front) -> None:
        tokenizer = front.session.tokens.tokenizer  # type: ignore[union-attr]
        template = (
            "{% for m in messages %}{% if m.tool_calls %}{% if not m['content'] "
            + content
            + " %}{{ m['content'] + '!' }}{% endif %}{{ '(' + m.tool_calls[0].function.arguments + ')' }}"
            "{% else %}{{ m['content'] + ';' }}{% endif %}{% endfor %}"
        )
        tokenizer.chat_templates = {"default": template}
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":"é"}'}}
        turns = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
        turns.append({"role": "tool", "tool_call_id": "c", "content": "sunny"})
        answer = await front.post("/v1/chat/completions", {"messages": turns})
        assert answer.status_code == 200, answer.text
        assert tokenizer.decode(front.job.submits[-1].prompt) == f'{USER["content"]};({{"a": "é"}})sunny;'

    run(check, tmp_path, model, "x")


# Templates as families have them: of thoughts that a switch turns off, of an effort, of texts that are trimmed.
SWITCHED = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{%- if m.role == 'assistant' and '</think>' in m.content %}
{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}
{{ m.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}{# <tool_call> #}"""
OF_EFFORT = """\
{%- if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}
{%- macro head(role) %}<|im_start|>{{ role }}
{% endmacro %}Reasoning: {{ reasoning_effort }}, {{ style or 'plain' }}
{%- for d in documents or [] %} [{{ d.title }}]{% endfor %}
{% for m in messages %}{{ head(m.role) }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}
{%- endgeneration %}{%- else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""
TRIMMED = """\
{% for m in messages %}<|im_start|>{{ m.role }}

{{ m.content | trim }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant

{% endif %}"""
BEGUN = {"role": "assistant", "content": "It is  sunny, and "}
PLAIN: dict[str, Any] = {"add_generation_prompt": True}


@pytest.mark.parametrize(
    "template, turns, wanted, rendered",
    [
        (SWITCHED, [USER], {}, PLAIN),
        (SWITCHED, [USER], {"add_generation_prompt": False}, {}),
        (SWITCHED, [USER, BEGUN], {"continue_final_message": True}, {"continue_final_message": True}),
        (
            TRIMMED, [USER, BEGUN], {"continue_final_message": True, "add_generation_prompt": False},
            {"continue_final_message": True},
        ),
        (SWITCHED, [USER], {"reasoning_effort": "none"}, PLAIN | {"enable_thinking": False}),
        (SWITCHED, [USER], {"reasoning_effort": "low"}, PLAIN | {"enable_thinking": True}),
        (
            SWITCHED, [USER], {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            PLAIN | {"enable_thinking": False},
        ),
        (OF_EFFORT, [USER], {}, PLAIN),
        (OF_EFFORT, [USER], {"reasoning_effort": "high"}, PLAIN | {"reasoning_effort": "high"}),
        (OF_EFFORT, [USER], {"chat_template_kwargs": {"style": "terse"}}, PLAIN | {"style": "terse"}),
        (OF_EFFORT, [USER], {"documents": [{"title": "T"}]}, PLAIN | {"documents": [{"title": "T"}]}),
        (OF_EFFORT, [USER, BEGUN], {"continue_final_message": True}, {"continue_final_message": True}),
    ],
)  # fmt: skip
def test_prompts_are_those_of_transformers(
    template: str, turns: list[Any], wanted: dict[str, Any], rendered: dict[str, Any], tmp_path: Path, model: Path
) -> None:
    async def check(front: Front) -> None:
        front.session.tokens.tokenizer.chat_templates = {"default": template}
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = template
        ids = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False, **rendered)
        for route in ("/v1/chat/completions", "/tokenize"):
            answer = await front.post(route, {"messages": turns} | wanted)
            assert answer.status_code == 200 and "x-ignored-fields" not in answer.headers, answer.text
        assert front.job.submits[-1].prompt.tolist() == answer.json()["tokens"] == ids

    run(check, tmp_path, model, "x")


@pytest.mark.parametrize(
    "template, wanted, words",
    [
        (TRIMMED, {"reasoning_effort": "low"}, "is given, and the chat template's variables are none"),
        (TRIMMED, {"documents": [{"title": "T"}]}, "documents are given, and the chat template does not read them"),
        (TRIMMED, {"tools": [WEATHER]}, "tools are given, and the chat template does not read them"),
        (TRIMMED, {"chat_template_kwargs": {"enable_thinking": False}}, "has 'enable_thinking', and the chat"),
        (OF_EFFORT, {"chat_template_kwargs": {"enable": 1}}, "template's variables are reasoning_effort, style"),
        (OF_EFFORT, {"chat_template_kwargs": {"add_generation_prompt": False}}, "has 'add_generation_prompt'"),
        (OF_EFFORT, {"chat_template_kwargs": {"tokenize": True}}, "has 'tokenize'"),
        (OF_EFFORT + "{{ padding }}", {"chat_template_kwargs": {"padding": True}}, "has 'padding'"),
        (
            OF_EFFORT, {"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "high"},
            "reasoning_effort is in chat_template_kwargs too",
        ),
        (
            "{% for m in messages %}{{ m.role }}{% endfor %}",
            {"messages": [USER, BEGUN], "continue_final_message": True}, "the chat template refuses the messages",
        ),
        ("{% if %}", {}, "the chat template cannot be read"),
    ],
)  # fmt: skip
def test_what_no_template_reads_is_refused(
    template: str, wanted: dict[str, Any], words: str, tmp_path: Path, model: Path
) -> None:
    async def check(front: Front) -> None:
        front.session.tokens.tokenizer.chat_templates = {"default": template}
        answer = await front.post("/v1/chat/completions", {"messages": [USER]} | wanted)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
        assert front.job.submits == []

    run(check, tmp_path, model, "x")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "begun, says, thinking, content",
    [
        ("Hello,", " world. ", "", " world. "),
        ("<think>\nIs it", "  so?\n</think>\n\nYes.", "  so?", "Yes."),
        ("Is a <", " b?", "", " b?"),
        ("<think>\nYes.</th", "ink>\n\nNo.", "", "No."),
        ("Text, then <tool_", 'call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>', "", ""),
    ],
)
def test_an_answer_goes_on_where_a_message_ends(
    begun: str, says: str, thinking: str, content: str, stream: bool, tmp_path: Path, model: Path
) -> None:
    """New text is told, with its spaces, and as part of what the message was at."""

    async def check(front: Front) -> None:
        body = {"messages": [USER, {"role": "assistant", "content": begun}], "continue_final_message": True}
        answer = await front.post("/v1/chat/completions", body | {"tools": [WEATHER], "stream": stream})
        events = (
            [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")] if stream else [answer.text]
        )
        said = [json.loads(event)["choices"][0]["delta" if stream else "message"] for event in events]
        assert "".join(one.get("reasoning_content") or "" for one in said) == thinking
        assert "".join(one.get("content") or "" for one in said) == content
        calls = [call["function"]["name"] for one in said for call in one.get("tool_calls", ())]
        assert calls == ["get_weather"] * ("call>" in says)

    run(check, tmp_path, model, says)


def test_thoughts_are_told_unless_nobody_wants_them(tmp_path: Path, model: Path) -> None:
    async def check(front: Front) -> None:
        for stream in (False, True):
            for wanted in (True, False):
                body = {"messages": [USER], "include_reasoning": wanted, "stream": stream}
                answer = await front.post("/v1/chat/completions", body)
                assert ("Hm" in answer.text) == wanted and "Yes" in answer.text

    run(check, tmp_path, model, "<think>\nHm.\n</think>\n\nYes.")


def test_special_tokens_are_text_where_they_are_wanted(tmp_path: Path, model: Path) -> None:
    async def check(front: Front) -> None:
        for wanted, text in ((True, "ab"), (False, "a<|im_start|>b")):
            body = {"prompt": "x", "skip_special_tokens": wanted, "max_tokens": 9}
            answer = await front.post("/v1/completions", body)
            assert answer.json()["choices"][0]["text"] == text

    run(check, tmp_path, model, "a<|im_start|>b")


def test_what_cannot_be_followed_is_400(tmp_path: Path, model: Path) -> None:
    async def check(front: Front) -> None:
        bad = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
        wanted = {"tools": [{"type": "function", "function": {"name": "x", "parameters": bad}}]}
        wanted |= {"tool_choice": "required"}
        schema = {"type": "json_schema", "json_schema": {"schema": bad}}
        for body, words in (
            ({"response_format": schema}, "response_format cannot be followed"),
            (wanted, "tool_choice cannot be followed"),
        ):
            answer = await front.post("/v1/chat/completions", {"messages": [USER]} | body)
            message = answer.json()["error"]["message"]
            assert answer.status_code == 400 and words in message and "nonsense" in message and "\n" not in message

    run(check, tmp_path, model, "x", guided=True)


def test_the_synchronous_client(tmp_path: Path, model: Path) -> None:
    async def check(front: Front) -> None:
        def talk() -> None:
            client = OpenAI(base_url=f"{front.url}/v1", api_key="-", max_retries=0)
            assert [one.id for one in client.models.list()] == [model.name]
            assert client.models.retrieve(model.name).id == model.name
            with client.chat.completions.stream(model=model.name, messages=[USER]) as stream:
                assert stream.get_final_completion().choices[0].message.content == "Fine."
            with pytest.raises(openai.NotFoundError):
                client.models.retrieve("gpt-9")
            with pytest.raises(openai.BadRequestError, match="temperature"):
                client.chat.completions.create(model=model.name, messages=[USER], temperature=-1)

        await asyncio.to_thread(talk)

    run(check, tmp_path, model, "Fine.")


def test_tokens_of_a_conversation_in_segments(model: Path) -> None:
    """They are those of the whole, and what a turn before had is looked up."""
    tokens = Tokens(str(model))
    assert tokens._special is not None, "segments agree with the whole"
    turns = [
        "".join(f"<|im_start|>user\nline {i} of it: é🙂\n\n{'x ' * 40}<|im_end|>\n" for i in range(n)) for n in (20, 21)
    ]
    for turn in turns:
        assert tokens.encode_segments(turn).tolist() == tokens.tokenizer.encode(turn, add_special_tokens=False)
    assert len(tokens._segments) == 21


def test_a_tokenizer_whose_segments_differ_takes_the_whole(model: Path, tmp_path: Path) -> None:
    """A special token that strips what stands around it joins its segments."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    from tokenizers import AddedToken

    tokenizer.add_tokens([AddedToken("<|strips|>", lstrip=True, rstrip=True, special=True)], special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    tokens = Tokens(str(tmp_path))
    assert tokens._special is None
    text = "a  <|strips|>  b"
    assert tokens.encode_segments(text).tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
