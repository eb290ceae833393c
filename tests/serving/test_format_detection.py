"""The chat format is the one that reads back the call that a checkpoint's own template writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from launch.answers.answer_parser import Parser
from launch.answers.chat_formats import assistant_turn
from launch.client.chat_tokenizer import ChatTokenizer
from launch.client.format_detection import detect_chat_format
from launch.client.schemas import Chat, parse_body
from tests.serving.api_server import DEMO, READY, FakeJob, Serve, changed, read, scripted_reply, tokens_of
from tests.serving.chats import CHATS, TEMPLATE, USER
from tests.serving.transcripts import TOOLS, text_of

ROWS: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("family_templates.yaml").read_text())


def model_with(directory: Path, template: str, tokens: list[str], **more: Any) -> Path:
    """The demo model with a chat template and added tokens, and `more` in tokenizer_config.json."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | more))
    return directory


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.get("name", row["format"]))
def test_the_format_reads_back_what_the_template_writes(row: dict[str, Any], tmp_path: Path) -> None:
    """The template's marks are among other families'; the turn of an answer begins where the template begins it."""
    others = "{# <tool_call> <function= [TOOL_CALLS] <minimax:tool_call> <|channel|> <|start|> #}"
    tokenizer = ChatTokenizer(str(model_with(tmp_path / "model", others + row["template"], row.get("tokens", []))))
    found = detect_chat_format(tokenizer, None)
    assert found.name == row["format"] and "reads back" in found.reason and found.reads_calls
    assert found.chat_format is not None and list(found.chat_format.anchors) == row["begins"]

    said = f"What is {row['begins'][0]} <think>?"  # a user's marks do not begin an answer
    chat = parse_body(Chat, json.dumps({"messages": [USER | {"content": said}]}).encode())
    turn = assistant_turn(found.chat_format, tokenizer.encode_chat(chat, None, 1000)[1])
    assert said[-8:] not in turn
    parser = Parser(found.chat_format.fields, turn, TOOLS)
    parts = [*parser.feed("Hello"), *parser.finish()]
    opens = row["format"] in ("glm", "minimax", "hy3", "deepseek-v3.2", "qwen3-coder", "nemotron-list")
    assert text_of(parts, "thinking" if opens else "content") == "Hello"


def test_a_tool_mark_alone_decides_nothing(tmp_path: Path) -> None:
    template = "{{ '<tool_call>' if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    found = detect_chat_format(ChatTokenizer(str(model_with(tmp_path / "m", template, []))), None)
    assert (found.name, found.reads_calls) == (None, False) and "no known marks" in found.reason


def test_the_setting_overrides(model: Path) -> None:
    tokenizer = ChatTokenizer(str(model))
    assert detect_chat_format(tokenizer, str(model), "glm").name == "glm"
    assert detect_chat_format(tokenizer, str(model), "none").name is None
    with pytest.raises(ValueError, match=r"serve\.dialect=glm5 is unknown: use none, or one of gpt-oss, .*, thinking"):
        detect_chat_format(tokenizer, str(model), "glm5")


def test_without_a_template_the_family_tells(tmp_path: Path) -> None:
    settings = json.loads((DEMO / "tokenizer_config.json").read_text()) | {"chat_template": None}
    for kind, name in (("deepseek_v32", "deepseek-v3.2"), ("llama9", None)):
        config = json.loads((DEMO / "config.json").read_text()) | {"model_type": kind}
        model = str(changed(tmp_path / kind, {"tokenizer_config.json": settings, "config.json": config}))
        assert detect_chat_format(ChatTokenizer(model), model).name == name


OWN = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<own>{{ c.function | tojson }}</own>{% endfor %}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
RESPONSE = {"fields": {"content": {}, "tool_calls": {"open": "<own>", "close": "</own>", "content": "json"}}}


@pytest.mark.parametrize("closes, name", [("</own>", "response_template"), ("</other>", None)])
def test_a_checkpoints_own_response_template_is_used_if_it_passes(
    closes: str, name: str | None, tmp_path: Path
) -> None:
    response = json.loads(json.dumps(RESPONSE).replace("</own>", closes))
    response["fields"]["tool_calls"]["open"] = "<own>" if name else "<other>"
    model = str(model_with(tmp_path / "model", OWN, [], response_template=response))
    found = detect_chat_format(ChatTokenizer(model), model)
    assert found.name == name
    if found.chat_format is not None:
        parser = Parser(found.chat_format.fields, "", TOOLS)
        parts = parser.feed('So.<own>{"name": "get_time", "arguments": {"zone": "</own>"}}</own>') + parser.finish()
        assert text_of(parts, "content") == "So." and [p.text for p in parts if p.kind == "call"] == [
            '{"zone": "</own>"}'
        ]


SLOW = "(?:a|aa|a+)+<own>"  # takes time that doubles with each `a`


@pytest.mark.parametrize(
    "opens, content, reason",
    [
        (f"{SLOW}|<own>", "a" * 60 + "!", "takes too long"),
        ("(?:(?:(?:a{1000}){1000}){1000})?<own>", "", "an expression is too large"),
        (f"{'(' * 2000}<own>{')' * 2000}", "", "no chat format reads back"),
        ("(<own>", "", "no chat format reads back"),
    ],
    ids=["slow", "of many repetitions", "nested", "invalid"],
)
def test_a_response_template_that_would_hang_is_not_used(
    opens: str, content: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    response = json.loads(json.dumps(RESPONSE))
    response["fields"]["tool_calls"] = {"open_pattern": opens, "close": "</own>", "content": "json"}
    template = OWN.replace("{%- for c in", f"{content}{{%- for c in")
    model = str(model_with(tmp_path / "model", template, [], response_template=response))
    found = detect_chat_format(ChatTokenizer(model), model)
    assert found.name is None and reason in caplog.text


@pytest.mark.parametrize(
    "field, says",
    [
        ({"open_pattern": f"{SLOW}|<own>", "close": "</own>"}, "So." + "a" * 60),
        ({"open": "<own>", "close_pattern": f"{SLOW}|</own>"}, f"So.<own>{'a' * 60}"),
        ({"open": "<own>", "close_pattern": "(?:a|aa|a+)+b|</own>"}, '<own>{"name": 1}' + "a" * 60),
    ],
    ids=["before a call", "in a call", "after a call"],
)
async def test_an_answer_on_which_an_expression_hangs_is_text(
    field: dict[str, str], says: str, serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All of it, and the next answer is read as before."""
    response = {"fields": {"content": {}, "tool_calls": field | {"content": "json"}}}
    model = str(model_with(tmp_path / "model", OWN, [], response_template=response))
    job = FakeJob(scripted_reply(f"{says} and more"), replace(READY, model=model, vocab=4200))
    api_server = await serve(job)
    body = {"messages": [USER], "tools": TOOLS, "max_tokens": 999}
    assert 'format="response_template",tool_calls="true"} 1.0' in (await api_server.get("/metrics")).text
    for stream in (False, True):
        caplog.clear()
        received = read(await api_server.post(CHATS, body | {"stream": stream}))
        assert (received.content, received.calls) == (f"{says} and more", [])
        assert caplog.text.count("takes too long") == 1
    job.script = scripted_reply('<own>{"name": "get_time", "arguments": {}}</own>')
    assert read(await api_server.post(CHATS, body)).calls == [("get_time", {})]


def test_the_fixtures_template_is_qwens(model: Path) -> None:
    found = detect_chat_format(ChatTokenizer(str(model)), str(model))
    assert "<|im_start|>" in TEMPLATE and found.name == "qwen"


@pytest.mark.parametrize("dialect", [None, "none", "qwen"])
async def test_a_server_names_its_format_and_reads_calls(
    dialect: str | None, serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole and streamed; with another format or none the answer is text."""
    row = next(row for row in ROWS if row["format"] == "glm")
    model = str(model_with(tmp_path / "model", row["template"], ["<tool_call>", "</tool_call>", "<think>", "</think>"]))
    says = "Hm.</think>So.<tool_call>get_time<arg_key>zone</arg_key><arg_value>UTC</arg_value></tool_call>"
    job = FakeJob(scripted_reply(says), replace(READY, model=model, vocab=4200))
    with caplog.at_level("INFO"):
        api_server = await serve(job, dialect=dialect)
    reason = "reads back a call that the chat template writes" if dialect is None else f"serve.dialect={dialect}"
    name = {None: "glm", "none": None}.get(dialect, dialect)
    assert caplog.text.count(f"chat format: {name or 'none'} ({reason})") == 1
    info = f'helix:chat_format_info{{format="{name or "none"}",tool_calls="{str(name is not None).lower()}"}} 1.0'
    assert info in (await api_server.get("/metrics")).text
    (described,) = (await api_server.get("/v1/models")).json()["data"]
    assert (described["chat_format"], described["tool_calls"]) == (name, name is not None)
    for stream in (False, True):
        received = read(await api_server.post(CHATS, {"messages": [USER], "tools": TOOLS, "stream": stream}))
        if dialect is None:
            assert (received.thinking, received.content, received.calls) == (
                "Hm.",
                "So.",
                [("get_time", {"zone": "UTC"})],
            )
            assert received.ends == "tool_calls"
        else:
            assert received.calls == [] and received.ends == "stop"


SPELLED = "<tool_call>get_time<arg_key>zone</arg_key><arg_value>UTC</arg_value></tool_call>"


@pytest.mark.parametrize("many", [False, True], ids=["token by token", "many tokens at once"])
async def test_tokens_decide_what_a_mark_is(many: bool, serve: Serve, tmp_path: Path) -> None:
    """A call and the end of a thought that are spelled out in ordinary tokens are text, and so is a mark in a value."""
    row = next(row for row in ROWS if row["format"] == "glm")
    marks = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    model = str(model_with(tmp_path / "model", row["template"], marks))
    end = " </think>"
    spelled = [token for text in ("Hm", " </", "think", ">") for token in tokens_of(text, model)]
    ids = [*spelled, *tokens_of("</think>", model)]
    ids += [token for text in SPELLED for token in tokens_of(text, model)]
    ids += tokens_of("<tool_call>get_time<arg_key>zone</arg_key><arg_value>a", model)
    ids += [token for text in "</tool_call>" for token in tokens_of(text, model)]
    ids += tokens_of("b</arg_value></tool_call>", model)

    async def script(job: FakeJob, submit: Any) -> None:
        for at in range(0, len(ids), 5 if many else 1):
            await job.emit(submit, ids[at : at + (5 if many else 1)])
        await job.emit(submit, [0], "stop")

    api_server = await serve(FakeJob(script, replace(READY, model=model, vocab=4200)))
    received = read(await api_server.post(CHATS, {"messages": [USER], "tools": TOOLS, "max_tokens": 999}))
    assert (received.thinking, received.content) == ("Hm" + end, SPELLED)
    assert received.calls == [("get_time", {"zone": "a</tool_call>b"})]
