"""Prompts of chats: what a template makes of a conversation, and what it cannot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tokenizers import AddedToken
from transformers import AutoTokenizer

from launch.answers.grammar_matcher import GrammarMatcherFactory
from launch.client import known_prefixes
from launch.client.chat_tokenizer import ChatTokenizer
from launch.client.schemas import Chat, parse_body
from tests.serving.api_server import DEMO, READY, ApiServer, FakeJob, Serve, changed
from tests.serving.chats import CHATS, COMPLETIONS, EFFORT, REFUSALS, TEMPLATE, TEMPLATES, USER, Talk

PROMPTS = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8"))
BEGUN = {"role": "assistant", "content": "It is  sunny, and "}


def render_turns(tokens: ChatTokenizer, template: str, turns: list[dict[str, Any]]) -> str:
    """The prompt behind a user's x."""
    tokens.backend.chat_templates = {"default": template}
    chat = parse_body(Chat, json.dumps({"messages": [{"role": "user", "content": "x"}, *turns]}).encode())
    return tokens.encode_chat(chat, None, 1000)[1]


@pytest.mark.parametrize("row", PROMPTS["earlier"])
def test_earlier_answers_are_in_the_prompt(row: dict[str, Any], model: Path) -> None:
    """Text beside an empty list of calls, further calls, and thoughts, under the template's own name.

    Templates such as DeepSeek's, which join texts, want a null content beside calls, and arguments as a text.
    """
    assert render_turns(ChatTokenizer(str(model)), PROMPTS["kinds"][row["template"]], row["turns"]) == row["prompt"]


@pytest.mark.parametrize("row", PROMPTS["transformers"])
async def test_prompts_are_those_of_transformers(row: dict[str, Any], talk: Talk, model: Path) -> None:
    api_server, template, turns = await talk("x"), TEMPLATES[row["template"]], [USER, BEGUN] if row["begun"] else [USER]
    api_server.session.tokenizer.backend.chat_templates = {"default": template}
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    ids = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False, **row["theirs"])
    for route in (CHATS, "/tokenize"):
        answer = await api_server.post(route, {"messages": turns} | row["request"])
        assert answer.status_code == 200 and "x-ignored-fields" not in answer.headers, answer.text
    submit = api_server.job.submits[-1]
    assert submit.prompt.tolist() == answer.json()["tokens"] == ids
    before = tokenizer.decode(ids[: submit.last_message_start])
    assert 0 < submit.last_message_start < len(ids) and USER["content"] not in before


NONSENSE = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
IN_NONSENSE = {"tools": [{"type": "function", "function": {"name": "x", "parameters": NONSENSE}}]}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"schema": NONSENSE}}}
COMPUTED = [
    {"template": EFFORT + "{{ padding }}", "body": {"chat_template_kwargs": {"padding": True}}, "says": "'padding'"},
    {
        "template": "{% for m in messages %}{{ m.role }}{% endfor %}",
        "body": {"messages": [USER, BEGUN], "continue_final_message": True},
        "says": "the chat template rejects the messages",
    },
]


async def test_what_no_template_reads_is_refused(talk: Talk) -> None:
    api_server = await talk("x")
    tokenizer = api_server.session.tokenizer.backend
    for row in [*REFUSALS["templates"], *COMPUTED]:
        template = row.get("template", TEMPLATE)
        tokenizer.chat_templates = {"default": TEMPLATES.get(template, template)}
        answer = await api_server.post(CHATS, {"messages": [USER]} | row["body"])
        assert answer.status_code == 400 and row["says"] in answer.json()["error"]["message"], (row, answer.text)
    tokenizer.chat_templates = {"default": "{% if %}"}
    for path in (CHATS, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"):
        answer = await api_server.post(path, {"messages": [USER], "max_tokens": 9, "input": "x"})
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and "the chat template cannot be read" in message, answer.text
    assert api_server.job.submits == []


async def test_what_a_prompt_does_not_have_as_it_was_sent_is_named(talk: Talk) -> None:
    """On each route, in its own words; text next to calls has no place where only one of them is written."""
    api_server = await talk("x")
    template = (
        "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}"
        "{% elif m.role == 'assistant' and loop.nextitem.role != 'user' %}{{ raise_exception('alternate') }}"
        "{% else %}{{ m.role[0] + m.content }}{% endif %}{% endfor %}"
    )
    api_server.session.tokenizer.backend.chat_templates = {"default": template}
    call = {"id": "c", "function": {"name": "f", "arguments": "{"}}
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}
    block = {"type": "tool_use", "id": "c", "name": "f", "input": {"arguments": "{"}}
    chat = {"messages": [USER, {"role": "assistant", "content": "b", "tool_calls": [call]}, USER]}
    response = {"input": [USER, {"role": "assistant", "content": "b"}, item, USER]}
    said = {"role": "assistant", "content": [{"type": "text", "text": "b"}, block]}
    message = {"messages": [USER, said, USER], "max_tokens": 9}
    prompts = set()
    for path, body, names in (
        (CHATS, chat, "messages.arguments,messages.content"),
        ("/v1/responses", response, "input.arguments,input.content"),
        ("/v1/messages", message, "messages.content"),
        ("/v1/messages/count_tokens", message, "max_tokens,messages.content"),
    ):
        answer = await api_server.post(path, body)
        assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, names), answer.text
        prompts.add(tuple(api_server.job.submits[-1].prompt.tolist()))
    assert len(prompts) == 1


async def test_what_cannot_be_followed_is_400(guided: ApiServer) -> None:
    for body, words in (
        (FORMAT, "response_format is not usable"),
        (IN_NONSENSE | {"tool_choice": "required"}, "tool_choice is not usable"),
    ):
        answer = await guided.post(CHATS, {"messages": [USER]} | body)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and words in message and "nonsense" in message and "\n" not in message


def test_tokens_of_a_conversation_in_segments(model: Path) -> None:
    """They are those of the whole, and what a turn before had is looked up."""
    tokens = ChatTokenizer(str(model))
    assert tokens._special is not None, "segments agree with the whole"
    turns = [
        "".join(f"<|im_start|>user\nline {i} of it: é🙂\n\n{'x ' * 40}<|im_end|>\n" for i in range(n)) for n in (20, 21)
    ]
    for turn in turns:
        assert tokens.encode_segments(turn).tolist() == tokens.backend.encode(turn, add_special_tokens=False)
    assert len(tokens._segments) == 21


def test_a_conversation_that_goes_on_is_not_read_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even up to a token that turns out to be another one, which begins alike; several conversations alternate."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([AddedToken("<|im_start|>u", special=True)], special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    tokens = ChatTokenizer(str(tmp_path))
    assert tokens._special is not None, "segments agree with the whole"
    monkeypatch.setattr(known_prefixes, "MIN_CHARS", 100)
    sizes: list[int] = []
    encode, segment = tokens.backend.encode, tokens._segment
    monkeypatch.setattr(tokens, "_segment", lambda text: sizes.append(len(text)) or segment(text))
    turns = ["<|im_end|>\n<|im_start|>", "user\n", f"{'é🙂 ' * 40}<|im_end|>", "x", "<|im_start|>", "", "a" * 99]
    for begin in ("a", "b", "c"):
        for turn in range(3):
            for length in range(1, len(turns) + 1):
                text = begin * 100 + "".join(turns * turn + turns[:length])
                sizes.clear()
                assert tokens.encode_segments(text).tolist() == encode(text, add_special_tokens=False)
                assert sum(sizes) < 400


def test_a_tokenizer_whose_segments_differ_takes_the_whole(model: Path, tmp_path: Path) -> None:
    """A special token that strips what stands around it joins its segments."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([AddedToken("<|strips|>", lstrip=True, rstrip=True, special=True)], special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    tokens = ChatTokenizer(str(tmp_path))
    assert tokens._special is None
    text = "a  <|strips|>  b"
    assert tokens.encode_segments(text).tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]


# ---- tokenizers that know more tokens than the model has logits for, or fewer

MORE = "<|more|>"  # token 4096, the first one beyond the logits
SAID: dict[str, Any] = {"messages": [{"role": "user", "content": f"a{MORE}"}]}
FORM = {"response_format": {"type": "json_object"}}
OBJECT = json.dumps({"grammars": [{"json_schema": {"type": "object"}}]})


@pytest.fixture
def larger(tmp_path: Path) -> Path:
    """The demo model, whose tokenizer has a token more than the model has logits for."""
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": 4096, "content": MORE})
    return changed(tmp_path / "model", {"tokenizer.json": tokenizer})


@pytest.mark.parametrize("vocab", [4096, 4097, 4200])
def test_masks_have_a_bit_for_each_logit(vocab: int, larger: Path) -> None:
    """End tokens beyond them cannot be drawn either."""
    grammars = GrammarMatcherFactory(larger / "tokenizer.json", vocab, [0, 9999])
    answer = grammars.create_matcher(OBJECT)
    assert len(answer.token_bitmask()) == -(-vocab // 32)
    (brace,) = np.unpackbits(answer.token_bitmask().view(np.uint8), bitorder="little").nonzero()[0].tolist()
    same = GrammarMatcherFactory(DEMO / "tokenizer.json", 4096, [0]).create_matcher(OBJECT)
    for token in (brace, brace + 2, 0):  # {}
        for one in (answer, same):
            one.accept_token(token)
        assert answer.token_bitmask()[:128].tolist() == same.token_bitmask().tolist()
    for token in range(4096, vocab, 50):
        named = json.dumps({"grammars": [{"lark_grammar": f"start: <[{token}]>"}]})
        assert grammars.create_matcher(named).token_bitmask()[token // 32] == 1 << token % 32
    with pytest.raises(ValueError, match="Token range end too large"):
        grammars.create_matcher(json.dumps({"grammars": [{"lark_grammar": f"start: <[{vocab}]>"}]}))


ASKED: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": f"a{MORE}", "max_tokens": 1}),
    ("completions", {"prompt": ["a", MORE], "max_tokens": 1, "stream": True}),
    ("chat/completions", SAID | {"max_tokens": 1}),
    ("chat/completions", SAID | {"max_tokens": 1, "stream": True}),
    ("responses", {"input": MORE}),
    ("messages", SAID | {"max_tokens": 1}),
]


async def test_a_text_with_a_token_beyond_the_logits_is_refused(larger: Path, serve: Serve) -> None:
    api_server = await serve(FakeJob(ready=replace(READY, model=str(larger), guided=True)))
    for path, body in ASKED:
        answer = await api_server.post(f"/v1/{path}", body)
        what = f"contains '{MORE}' (token 4096 of the tokenizer), but the model's vocabulary is [0, 4096)"
        assert answer.status_code == 400 and what in answer.json()["error"]["message"], answer.text
    # What the model has no token for may be in a form: as text, or not at all.
    answer = await api_server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1} | FORM)
    assert answer.status_code == 200, answer.text
