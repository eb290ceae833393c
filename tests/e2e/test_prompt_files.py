"""Prompt files with conversations, forms of answers and lines of OpenAI's batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.checkpoints import DEMO
from tests.e2e.command_line import ENTRY, Job, lines_of, write_lines

CODE = "def read_json(path):"
CHAT = {"messages": [{"role": "user", "content": CODE}], "max_tokens": 8}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


def batch(name: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": f"/v1/{url}", "body": body}


LINES = [
    {"id": "plain", "prompt": CODE, "max_tokens": 8},
    {"id": "chat", **CHAT},
    {"id": "form", "prompt": "x = ", "response_format": FORM, "max_tokens": 40},
    {"id": "no form", "prompt": "x = ", "response_format": FORM | {"json_schema": {"schema": {"type": "none"}}}},
    batch("chat twice", "chat/completions", **CHAT, temperature=0, n=2, logprobs=True, model="demo-model"),
    batch("chat form", "chat/completions", **CHAT | {"max_tokens": 40}, temperature=0, response_format=FORM),
    batch("two", "completions", prompt=[CODE, "import os"], temperature=0, max_tokens=12, stop='"""', echo=True),
    batch("stop id", "completions", prompt=CODE, temperature=0, stop_token_ids=[430], ignore_eos=True),
    batch("scored", "completions", prompt=["import os", CODE], max_tokens=0, echo=True, logprobs=1),
    batch("wrong", "completions", prompt="x", temperature=-1),
    batch("other", "completions", prompt="x", model="gpt"),
    batch("long", "completions", prompt="x", max_tokens=40_000),
]


def test_they_mean_what_they_mean_to_a_server(tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "p.jsonl", *LINES)
    settings = [f"model.path={DEMO}", f"decode.prompts={prompts}", f"decode.output={tmp_path / 'o.jsonl'}"]
    ended = Job(ENTRY, *settings, "kv.tokens=2048", log=tmp_path / "log").wait()
    assert ended.code == 3, ended.output
    results = lines_of(tmp_path / "o.jsonl")
    assert [line.get("custom_id", line["id"]) for line in results] == [
        line.get("custom_id", line.get("id")) for line in LINES
    ]
    plain, chat, form, no_form, *others = results
    assert chat["token_ids"] == plain["token_ids"], "the template of the demo model is the text"
    assert json.loads(form["text"]) == {"a": "x"} and form["finish_reason"] == "stop"
    assert no_form["finish_reason"] == "error" and "is not usable" in no_form["reason"]
    responses = {line["custom_id"]: line["response"] for line in others}
    statuses = [response["status_code"] for response in responses.values()]
    assert statuses == [200, 200, 200, 200, 200, 400, 404, 400] and all(line["error"] is None for line in others)
    choices = responses["chat twice"]["body"]["choices"]
    assert [c["message"]["content"] for c in choices] == [plain["text"]] * 2
    assert len(choices[0]["logprobs"]["content"]) == 8
    assert json.loads(responses["chat form"]["body"]["choices"][0]["message"]["content"]) == {"a": "x"}
    first, second = responses["two"]["body"]["choices"]
    assert (first["text"], first["finish_reason"]) == (f"{CODE}\n    ", "stop") and second["text"][:9] == "import os"
    assert responses["stop id"]["body"]["choices"][0] | {"logprobs": 0} == {
        "index": 0, "finish_reason": "stop", "text": plain["text"].partition(' """')[0], "logprobs": 0
    }  # fmt: skip
    scored = responses["scored"]["body"]["choices"][1]["logprobs"]
    assert "".join(scored["tokens"]) == CODE and scored["token_logprobs"][0] is None
    assert len(scored["token_logprobs"]) == len(scored["tokens"]) and max(scored["token_logprobs"][1:]) < 0
    assert responses["wrong"]["body"]["error"]["param"] == "temperature"
    assert "use demo-model" in responses["other"]["body"]["error"]["message"]
    assert "40001, which exceed the model's context of 32768 tokens" in responses["long"]["body"]["error"]["message"]
