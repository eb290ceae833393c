"""Bodies that are wrong: each is told so in OpenAI's form, and nothing of it reaches the ranks."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from helix.config import ServeConfig
from launch.client.errors import ApiError
from launch.client.schemas import REFUSED, Chat, Completion, Detokenize, Tokenize, parse_body
from launch.serving.http import listen
from launch.serving.messages import Count, Messages
from launch.serving.response_items import Responses
from tests.serving.api_server import Serve
from tests.serving.chats import CHATS, COMPLETIONS, REFUSALS

POSTS = COMPLETIONS, CHATS, "/tokenize", "/detokenize"
MESSAGES = [{"role": "user", "content": "x"}]
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x", "max_tokens": 2},
    CHATS: {"messages": MESSAGES, "max_tokens": 2},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
WRONG: dict[str, list[Any]] = {
    **REFUSALS["wrong"],  # type: ignore[dict-item]
    "max_tokens": [*REFUSALS["wrong"]["max_tokens"], 10**4299],
    "stop": [*REFUSALS["wrong"]["stop"], ["x"] * 17],
    "cache_salt": [*REFUSALS["wrong"]["cache_salt"], "x" * 257],
}
CHAT_FIELDS = "add_generation_prompt", "continue_final_message", "reasoning_effort", "documents", "include_reasoning"
OF = {
    "/tokenize": ("prompt", "messages", "model", "add_generation_prompt", "continue_final_message"),
    "/detokenize": ("tokens", "model"),
    CHATS: tuple({*WRONG} - {"prompt", "tokens", "echo", "suffix", "best_of"}),
    COMPLETIONS: tuple({*WRONG} - {"messages", "tokens", *CHAT_FIELDS}),
}


COMPUTED = {
    "4096 tokens and 1 new tokens are 4097": {"prompt": [1] * 4096},
    "not a token id": {"prompt": "x", "logit_bias": {"0" * 5000: 1}},
    "301 keys": {"prompt": "x", "logit_bias": {str(i): "x" for i in range(301)}},
    "300 completions": {"prompt": [[1]] * 300},
}


def bodies_and_words() -> Iterator[tuple[str, bytes, int, str]]:
    """Routes, bodies, and status and words of their refusals."""
    for route, body in bodies():
        yield route, body, 400, ""
    for says, content in COMPUTED.items():
        yield COMPLETIONS, json.dumps(content).encode(), 400, says
    for part, path in {"completions": COMPLETIONS, "chats": CHATS, "other routes": ""}.items():
        for row in REFUSALS[part]:
            yield row.get("path", path), json.dumps(row["body"]).encode(), row.get("status", 400), row["says"]


def bodies() -> list[tuple[str, bytes]]:
    """Routes, and what is no body of theirs."""
    whole = json.dumps({"prompt": "naïve", "stop": ["\n"], "logit_bias": {"5": -1e-3}}).encode()
    raw = [b"", b"{", whole + b"}", whole + whole, b"null", b"1", b'"x"', b"[]", b"[{}]", b"\xff", b"\0", b"prompt=x"]
    raw += [b"\xef\xbb\xbf{", whole.decode().encode("utf-16"), gzip.compress(whole), b"{'prompt': 'x'}"]
    raw += [b'{"prompt": %s' % rest for rest in (b"x}", b'"x",}', b'"\n"}', b'"\\ud800"}', b'"\\x"}', b'"\xff"}')]
    raw += [b"[" * 100_000, b'{"prompt":' * 50_000]
    found = [(route, body) for route in POSTS for body in raw]
    found += [(COMPLETIONS, whole[:end]) for end in range(2, len(whole))]
    numbers = b"NaN", b"Infinity", b"1e999", b"01", b"+1", b".5"
    found += [(COMPLETIONS, b'{"prompt": "x", "temperature": %s}' % number) for number in numbers]
    for route, fields in OF.items():
        for field in fields:
            content = {k: v for k, v in GOOD[route].items() if (k, field) != ("prompt", "messages")}
            found += [(route, json.dumps(content | {field: value}).encode()) for value in WRONG[field]]
    return found


async def test_malformed_bodies_are_refused_and_reach_no_rank(serve: Serve) -> None:
    api_server = await serve()
    wrong = [*bodies_and_words()]
    assert len(wrong) >= 200
    for route, body, status, words in wrong:
        answer = await api_server.post(route, content=body)
        assert answer.status_code == status, (route, body[:200], answer.status_code, answer.text[:200])
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, answer.text
        assert words in error["message"] and error["message"] and "\n" not in error["message"], (route, body, error)
        assert status != 400 or (error["type"] == "invalid_request_error" and len(answer.content) < 1000)
    assert (
        api_server.job.received == []
        and api_server.engine_client.generations == {}
        and api_server.engine_client.state == "ready"
    )
    assert (await api_server.post(COMPLETIONS, GOOD[COMPLETIONS])).status_code == 200


@pytest.mark.parametrize(
    "schema, body",
    [
        (Completion, {"prompt": [{}] * 400_000}),
        (Completion, {"prompt": [[{}]] * 200_000}),
        (Completion, {"prompt": "x", "stop": [0] * 400_000}),
        (Chat, {"messages": MESSAGES, "chat_template_kwargs": {str(i): [] for i in range(200_000)}}),
    ],
    ids=["prompts", "lists of prompts", "stop", "chat_template_kwargs"],
)
def test_a_large_mistake_costs_no_more_than_a_small_one(schema: Any, body: dict[str, Any]) -> None:
    """Without an end at the first one, each takes seconds in which nobody else is answered."""
    with pytest.raises(ApiError) as refused:
        parse_body(schema, json.dumps(body).encode())
    cause = refused.value.__cause__
    assert cause is None or (isinstance(cause, ValidationError) and cause.error_count() < 10)


@settings(max_examples=100)
@given(st.data())
def test_whatever_a_body_holds_is_read_or_refused_by_name(data: st.DataObject) -> None:
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    )
    schema = data.draw(st.sampled_from([Completion, Chat, Tokenize, Detokenize, Responses, Messages, Count]))
    body = data.draw(st.dictionaries(st.sampled_from([*schema.model_fields, *REFUSED, "else"]), values, max_size=6))
    try:
        parse_body(schema, json.dumps(body).encode())
    except ApiError as error:
        refused = error
    else:
        return
    assert refused.status == 400 and refused.message and "\n" not in refused.message, refused.message


def test_an_answer_does_not_wait_for_the_clients_acknowledgement() -> None:
    """Headers and body are two pieces; clients acknowledge the first after 40 ms, where the second does not come."""
    with listen(ServeConfig(port=0))[0] as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
