"""Bodies that are wrong: each is told so in OpenAI's form, and nothing of it reaches the ranks."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.front import front, until

pytestmark = pytest.mark.timeout(120)
POSTS = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
MESSAGES = [{"role": "user", "content": "x"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
# No values of these fields, whatever the others are.
WRONG: dict[str, list[Any]] = {
    "prompt": [None, 3, 1.5, True, {}, [{}], [None], ["x", 3], [3, "x"], [[["x"]]], [1.5], [-1], [1 << 31], [True]],
    "messages": [None, 3, "x", {}, [], ["x"], [{}], [{"role": "x"}], [{"role": "user", "content": 3}], [[MESSAGES]]],
    "tokens": [None, "x", 3, {}, ["x"], [-1], [1 << 40], [1.5], [[1]]],
    "model": [3, [], {}],
    "stream": ["x", 1, []],
    "stream_options": ["x", 1, [], {}],
    "max_tokens": ["x", -1, 1.5, True, [], {}, 1 << 31, 10**4299],
    "n": ["x", 0, -1, 129, 1.5, [], {}],
    "temperature": ["x", -0.1, 101, [], {}, True],
    "top_p": ["x", 0, -1, 1.1, [], {}],
    "top_k": ["x", -2, 1.5, 1 << 31, [], {}],
    "min_p": ["x", -0.1, 1.1, [], {}],
    "seed": ["x", 1.5, 1 << 63, [], {}],
    "stop": [3, [3], [""], "", ["x"] * 17, {}, [["x"]]],
    "stop_token_ids": ["x", 3, [-1], ["x"], [1.5], {}, [4096]],
    "min_tokens": ["x", -1, 1.5, [], {}, 1 << 31],
    "ignore_eos": ["x", 1, []],
    "logit_bias": ["x", 3, [], {"x": 1}, {"5": "x"}, {"5": 101}, {"-5": 1}, {"4096": 1}, {"5": None}],
    "presence_penalty": ["x", -2.1, 2.1, []],
    "frequency_penalty": ["x", -2.1, 2.1, []],
    "repetition_penalty": ["x", 0, 101, []],
    "priority": ["x", 1.5, 1 << 31, []],
    "cache_salt": [3, "", "x" * 257, []],
    "return_progress": ["x", 1],
    "response_format": ["x", 3, {}, {"type": "x"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}],
    "structured_outputs": ["x", 3, [], {}, {"x": 1}, {"regex": 3}, {"choice": [3]}, {"json": 3}, {"json": "["}],
    "guided_json": [3, [], "x"],
    "guided_regex": [3, [], {}],
    "guided_choice": [3, [], {}, "x", [3]],
    "guided_grammar": [3, [], {}],
    "skip_special_tokens": ["x", 1],
    "add_generation_prompt": ["x", 1, []],
    "continue_final_message": ["x", 1, True],
    "reasoning_effort": ["x", 3, []],
    "documents": ["x", 3, {}, [3], [{"a": 1}]],
    "include_reasoning": ["x", 1],
    "echo": ["x", 1],
    "logprobs": ["x", -1, 21, [], {}],
    "suffix": ["x"],
    "best_of": [2],
}
OF_CHATS = "add_generation_prompt", "continue_final_message", "reasoning_effort", "documents", "include_reasoning"
OF = {
    "/tokenize": ("prompt", "messages", "model", "add_generation_prompt", "continue_final_message"),
    "/detokenize": ("tokens", "model"),
    "/v1/chat/completions": tuple({*WRONG} - {"prompt", "tokens", "echo", "suffix", "best_of"}),
    "/v1/completions": tuple({*WRONG} - {"messages", "tokens", *OF_CHATS}),
}


def bodies() -> list[tuple[str, bytes]]:
    """Routes, and what is no body of theirs."""
    whole = json.dumps({"prompt": "naïve", "stop": ["\n"], "logit_bias": {"5": -1e-3}}).encode()
    raw = [b"", b"{", whole + b"}", whole + whole, b"null", b"1", b'"x"', b"[]", b"[{}]", b"\xff", b"\0", b"prompt=x"]
    raw += [b"\xef\xbb\xbf{", whole.decode().encode("utf-16"), gzip.compress(whole), b"{'prompt': 'x'}"]
    raw += [b'{"prompt": %s' % rest for rest in (b"x}", b'"x",}', b'"\n"}', b'"\\ud800"}', b'"\\x"}', b'"\xff"}')]
    raw += [b"[" * 100_000, b'{"prompt":' * 50_000]
    found = [(route, body) for route in POSTS for body in raw]
    found += [("/v1/completions", whole[:end]) for end in range(2, len(whole))]
    numbers = b"NaN", b"Infinity", b"1e999", b"01", b"+1", b".5"
    found += [("/v1/completions", b'{"prompt": "x", "temperature": %s}' % number) for number in numbers]
    for route, fields in OF.items():
        for field in fields:
            content = {k: v for k, v in GOOD[route].items() if (k, field) != ("prompt", "messages")}
            found += [(route, json.dumps(content | {field: value}).encode()) for value in WRONG[field]]
    return found


def test_malformed_bodies_are_refused_and_reach_no_rank(tmp_path: Path) -> None:
    async def check() -> None:
        async with front(tmp_path) as made, httpx.AsyncClient(base_url=made.url, timeout=30, verify=False) as client:
            wrong = bodies()
            assert len(wrong) >= 200
            for route, body in wrong:
                answer = await client.post(route, content=body)
                assert answer.status_code == 400, (route, body[:200], answer.status_code, answer.text[:200])
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}, answer.text
                assert error["type"] == "invalid_request_error" and error["message"] and len(answer.content) < 1000
            assert made.job.got == [] and made.core.flights == {} and made.core.state == "ready"
            answer = await client.post("/v1/completions", json=GOOD["/v1/completions"])
            assert answer.status_code == 200
            await until(lambda: made.core.flights == {})

    asyncio.run(check())


def test_an_answer_does_not_wait_for_the_clients_acknowledgement(tmp_path: Path) -> None:
    """Headers and body are two pieces; clients acknowledge the first after 40 ms, where the second does not come."""

    async def check() -> None:
        async with front(tmp_path) as made, httpx.AsyncClient(base_url=made.url, timeout=30, verify=False) as client:
            times = []
            for _ in range(40):
                begin = time.monotonic()
                assert (await client.get("/livez")).status_code == 200
                times.append(time.monotonic() - begin)
            assert sorted(times)[20] < 0.03, times

    asyncio.run(check())
