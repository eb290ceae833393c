"""Prompt files, beside ranks that a test writes: what is read when, and whose matter a mistake is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helix.config import Config
from launch.batch import decode
from launch.client.chat_tokenizer import ChatTokenizer
from launch.client.errors import REFUSED
from launch.client.grammar_compiler import GrammarCompiler
from launch.inputs.prompt_files import PromptFile
from tests.serving.api_server import DEMO, READY, FakeJob

FORM = {"response_format": {"type": "json_object"}}


class Panic(BaseException):
    """Error of a library in Rust."""


def batch(name: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def decoded(lines: Sequence[dict[str, Any]], directory: Path, job: FakeJob) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the results."""
    prompts, output = directory / "p.jsonl", directory / "o.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = Config()
    config.model.path, config.decode.prompts, config.decode.output = str(DEMO), str(prompts), str(output)

    async def run() -> int:
        await job.listen(path := directory / "job.sock")
        async with asyncio.timeout(100):
            code = await decode(config, PromptFile(prompts), path)
        await job.close()
        return code

    return asyncio.run(run()), [json.loads(line) for line in output.read_text().splitlines()]


def test_a_long_file_is_read_as_it_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first results come before the last lines are read; what breaks on one of them ends no other."""
    lines = [{"id": n, "prompt": "def f" if n % 5 else "x" * 300, "max_tokens": 2} for n in range(40)]
    lines[30] = {"id": 30, "prompt": "x = ", "max_tokens": 4} | FORM
    lines[31] = batch("31", prompt="x = ", max_tokens=4, **FORM)
    lines[35] = batch("35", prompt=["def f", "import os"], max_tokens=2)
    read: list[int] = []

    async def planted(compiler: GrammarCompiler, parts: Any) -> str:
        read.append(len((tmp_path / "o.jsonl").read_text().splitlines()))
        raise TypeError("planted")

    monkeypatch.setattr(GrammarCompiler, "compile", planted)
    code, found = decoded(lines, tmp_path, FakeJob(ready=replace(READY, max_batch=2, guided=True)))
    assert code == REFUSED and read[0] > 20
    assert [line.get("custom_id", line["id"]) for line in found] == [
        line.get("custom_id", line.get("id")) for line in lines
    ]
    assert "TypeError: planted" in found[30]["reason"] and found[31]["response"]["status_code"] == 500
    assert len(found[35]["response"]["body"]["choices"]) == 2
    assert [line["finish_reason"] for line in found if "text" in line].count("length") == 37


def test_a_line_that_is_refused_ends_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"id": "ids", "prompt_ids": [1, 2**40]},
        {"id": "hot", "prompt_ids": [1, 2, 3], "temperature": -1},
        {"id": "wrong", "prompt": "wrong"} | FORM,
        {"id": "plain", "prompt": "a", "max_tokens": 2},
        batch("panic", prompt="panic"),
    ]
    encode = ChatTokenizer.encode

    def failing(tokens: ChatTokenizer, text: str, *more: Any) -> np.ndarray:
        if text in ("wrong", "panic"):
            raise ValueError("planted") if text == "wrong" else Panic("planted")
        return encode(tokens, text, *more)

    monkeypatch.setattr(ChatTokenizer, "encode", failing)
    code, found = decoded(lines, tmp_path, FakeJob())
    ids, hot, wrong, plain, panic = found
    assert code == REFUSED and plain["finish_reason"] == "length"
    assert "1099511627776" in ids["reason"] and wrong["reason"] == "planted"
    assert "temperature=-1" in hot["reason"] and hot["prompt_tokens"] == 3
    assert panic["response"]["status_code"] == 500
    assert "Panic: planted" in panic["response"]["body"]["error"]["message"]
