"""Conversations as templates read them, whatever ids, roles and fields a client sends."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.client.chat_tokenizer import ChatTokenizer, EncodedChat
from launch.client.errors import ApiError
from launch.client.schemas import Chat, parse_body
from tests.serving.api_server import DEMO, changed

HISTORIES = yaml.safe_load(Path(__file__).with_name("histories.yaml").read_text(encoding="utf-8"))


def encoded(tokenizer: ChatTokenizer, body: dict[str, Any]) -> EncodedChat:
    chat = parse_body(Chat, json.dumps(body).encode())
    return tokenizer.encode_chat(chat, chat.prompt_tools, 9999)


def prompt(tokenizer: ChatTokenizer, body: dict[str, Any]) -> str:
    return encoded(tokenizer, body).text


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> ChatTokenizer:
    return ChatTokenizer(str(model))


@pytest.mark.parametrize("row", HISTORIES["cases"], ids=lambda row: row["template"])
def test_a_conversation_fits_the_template(row: dict[str, Any], tokenizer: ChatTokenizer) -> None:
    tokenizer.backend.chat_templates = {"default": HISTORIES["templates"][row["template"]]}  # type: ignore[union-attr]
    body = {"messages": row.get("messages", HISTORIES["chat"]), "tools": row.get("tools")}
    assert encoded(tokenizer, body)[1:3] == (row["prompt"], (*row.get("left_out", ()),))


OWN = yaml.safe_load(Path(__file__).with_name("family_templates.yaml").read_text(encoding="utf-8"))
TEMPLATES = HISTORIES["templates"] | {f"family {row.get('name', row['format'])}": row["template"] for row in OWN}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_goes_on_after_any_arguments(name: str, tokenizer: ChatTokenizer) -> None:
    """Models write calls that are no JSON object; the next requests of their sessions have them."""
    tokenizer.backend.chat_templates = {"default": TEMPLATES[name]}  # type: ignore[union-attr]

    def after(arguments: str) -> EncodedChat:
        call = {"id": "abcDEF123", "function": {"name": "f", "arguments": arguments}}
        result = {"role": "tool", "tool_call_id": "abcDEF123", "content": "b"}
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}, result]
        return encoded(tokenizer, {"messages": turns})

    empty = after("{}")
    assert [after(text)[1:3] for text in ("", " {} ", "null", "[]")] == [(empty.text, ())] * 4
    half = r"\ud83d"  # of a surrogate pair
    assert after(f'{{"b": "{half}"}}')[1:3] == (after('{"b": "Half."}').text.replace("Half.", half), ())
    takes_text = name in ("text arguments", "family kimi")
    for text in ('{"b": "c', '{"b": 1}}', "[1]", "7", '"x"', "[" * 9000):
        broken = after(text)
        wrapped = empty.text.replace("{}", text) if takes_text else after(json.dumps({"arguments": text})).text
        assert broken[1:3] == (wrapped, ("arguments",))


def test_tools_of_command_r_are_refused(tokenizer: ChatTokenizer) -> None:
    """Its template has each answer be a list of actions; a text answer takes a second prompt."""
    template = (
        "{% for t in tools %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
        "Write 'Action:' and a list of actions. Use the `directly-answer` tool if no other is needed."
    )
    tokenizer.backend.chat_templates = {"default": "{{ messages[0].content }}", "tool_use": template}  # type: ignore[union-attr]
    body = {"messages": [{"role": "user", "content": "a"}]}
    assert prompt(tokenizer, body) == "a"
    body |= {"tools": [{"type": "function", "function": {"name": "f"}}]}
    with pytest.raises(ApiError, match=r"a list of actions, never text.*: require a call, leave tools out, or set"):
        prompt(tokenizer, body)
    assert prompt(tokenizer, body | {"tool_choice": "required"}).startswith("fa")


@pytest.mark.parametrize("name", HISTORIES["templates"])
def test_a_longer_conversation_begins_with_the_shorter_one(name: str, tokenizer: ChatTokenizer) -> None:
    """Whatever is merged or renamed: what the cache has of a conversation is the beginning of the next request."""
    tokenizer.backend.chat_templates = {"default": HISTORIES["templates"][name]}  # type: ignore[union-attr]
    chat = [
        turn for turn in HISTORIES["chat"] if name != "gemma 2" or not turn.get("tool_calls", turn["role"] == "tool")
    ]
    ends = [at for at, turn in enumerate(chat) if turn["role"] == "assistant"] + [len(chat)]
    prompts = [prompt(tokenizer, {"messages": chat[:end]}) for end in ends]
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(prompts))


@pytest.mark.parametrize("name", TEMPLATES)
def test_where_the_users_last_message_begins(name: str, tokenizer: ChatTokenizer) -> None:
    """All before it is the same whatever the message says, and whatever answers and results come after it."""
    tokenizer.backend.chat_templates = {"default": TEMPLATES[name]}  # type: ignore[union-attr]
    first = [{"role": "user", "content": "Read " + 20 * "this "}, {"role": "assistant", "content": "Done."}]

    def starts(content: str) -> EncodedChat:
        body = {"messages": [*first, {"role": "user", "content": content}]}
        return tokenizer.encode_chat(parse_body(Chat, json.dumps(body).encode()), None, 9999, True)

    one, other = starts("Why?"), starts("How often does it say so?")
    begin = one.last_message_start
    assert begin == other.last_message_start and 20 < begin < len(one.ids)
    assert one.ids[:begin].tolist() == other.ids[:begin].tolist()
    assert tokenizer.decode(one.ids[begin:], special=False).lstrip().startswith("Why?")
    assert encoded(tokenizer, {"messages": first[:1]}).last_message_start == 0, "not asked for"


def test_a_template_that_refuses_to_end_there_has_no_last_message(tokenizer: ChatTokenizer) -> None:
    template = (
        "{% if messages[-1].role == 'user' and not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}"
    )
    tokenizer.backend.chat_templates = {"default": template + "{{ messages }}"}  # type: ignore[union-attr]
    chat = parse_body(Chat, json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode())
    assert tokenizer.encode_chat(chat, None, 9999, True).last_message_start == 0


# ---- DeepSeek-V3.2, whose checkpoint has no template

CALLS = [
    {"id": "1", "function": {"name": "f", "arguments": '{"x": "1", "n": {"k": [1, true, null]}}'}},
    {"id": "2", "function": {"name": "g", "arguments": "{}"}},
]
RESULTS = [{"role": "tool", "tool_call_id": i, "content": f"r{i}"} for i in "21"]
TURN = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "ok", "reasoning": "hm", "tool_calls": CALLS},
    *RESULTS,
]
RENDERED = """\
ok

<｜DSML｜function_calls>
<｜DSML｜invoke name="f">
<｜DSML｜parameter name="x" string="true">1</｜DSML｜parameter>
<｜DSML｜parameter name="n" string="false">{"k": [1, true, null]}</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="g">

</｜DSML｜invoke>
</｜DSML｜function_calls></s>

<function_results>
<result>r1</result>
<result>r2</result>
</function_results>

"""


@pytest.mark.parametrize(
    ("thinking", "turns", "ending"),
    [
        (True, TURN[:2], "<s>S<｜User｜>U<｜Assistant｜><think>"),
        (False, TURN[:2], "<s>S<｜User｜>U<｜Assistant｜></think>"),
        (True, TURN, f"<s>S<｜User｜>U<｜Assistant｜><think>hm</think>{RENDERED}<think>"),
        (False, TURN, f"<s>S<｜User｜>U<｜Assistant｜></think>{RENDERED}</think>"),
        (
            True,
            [*TURN, {"role": "assistant", "content": "done"}, {"role": "user", "content": "V"}, TURN[0]],
            f"<s>S<｜User｜>U<｜Assistant｜></think>{RENDERED}</think>done</s><｜User｜>V\n\nS<｜Assistant｜><think>",
        ),
    ],
)
def test_the_prompt_of_deepseek_v32(thinking: bool, turns: list[dict[str, Any]], ending: str, tmp_path: Path) -> None:
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    settings |= {"chat_template": None, "bos_token": "<s>", "eos_token": "</s>"}
    config = json.loads((DEMO / "config.json").read_text()) | {"model_type": "deepseek_v32"}
    directory = changed(tmp_path / "model", {"tokenizer_config.json": settings, "config.json": config})
    tokenizer, body = ChatTokenizer(str(directory)), {"messages": turns, "chat_template_kwargs": {"thinking": thinking}}
    assert prompt(tokenizer, body) == ending
    tools = [{"type": "function", "function": {"name": name, "description": "é"}} for name in "fg"]
    text = prompt(tokenizer, body | {"tools": tools})
    begin, _, rest = text.partition("\n\n## Tools\n\n")
    functions = "".join(f'{{"name": "{name}", "description": "é"}}\n' for name in "fg")
    assert begin == "<s>S" and rest.partition("<functions>\n")[2] == f"{functions}</functions>\n{ending[4:]}"
    assert (
        "<think>...thinking about results</think>\n\nHere are the functions available in JSONSchema format:\n" in rest
    )
