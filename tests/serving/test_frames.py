"""Frames: messages come out as they went in, in whatever pieces their bytes come."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.client.compiler import MOST_BYTES
from launch.client.frames import (
    HEAD,
    MOST_HEADER,
    Cancel,
    Delta,
    Failed,
    FrameDecoder,
    Message,
    Progress,
    Queued,
    Ready,
    Stats,
    StepDeltas,
    Stop,
    Submit,
    Unread,
    encode,
)

IDS = np.array([0, 1, 2**31 - 1], dtype=np.int32)
MESSAGES: list[Message] = [
    Submit(1, 16, {"temperature": 0.5, "seed": 2**63 - 1}, -1, "é\ud83d", '{"type": "object"}', 2, IDS),
    Submit(2, 1),
    Cancel(1),
    Stop(),
    Ready("/models/m", "helix kvp=2", 2, 1 << 20, 1 << 19, 4096, 1 << 21, 8, (0, 7), True),
    Delta(1, None, None, 7, ((-0.5, ((3, -0.5), (1, -2.0))),), IDS[:1]),
    Delta(1, "error", "too long"),
    StepDeltas(np.array([1, 2**31 - 1, 1, 5, 7, 0], dtype=np.int32)),
    Queued(1),
    Progress(1, 0, 10**6, 17),
    Failed("NaN"),
    Stats({"running": 1, "hit_tokens": 0.0}),
]


def same(a: Message, b: Message) -> bool:
    return type(a) is type(b) and all(
        np.array_equal(getattr(a, f.name), getattr(b, f.name))
        if f.name == "ids"
        else getattr(a, f.name) == getattr(b, f.name)
        for f in fields(a)
    )


@given(st.lists(st.sampled_from(MESSAGES), max_size=8), st.lists(st.integers(1, 200)))
def test_messages_come_out_as_they_went_in(messages: list[Message], cuts: list[int]) -> None:
    data, decoder, got = b"".join(map(encode, messages)), FrameDecoder(), []
    for cut in [*cuts, len(data)]:
        got += decoder.feed(data[:cut])
        data = data[cut:]
    assert len(got) == len(messages) and all(map(same, got, messages))


def test_a_million_tokens_are_copied_and_not_parsed() -> None:
    ids = np.arange(1_000_000, dtype=np.int32)
    (message,) = FrameDecoder().feed(encode(Submit(1, 16, ids=ids)))
    assert isinstance(message, Submit) and np.array_equal(message.ids, ids)


@pytest.mark.parametrize("data", [HEAD.pack(1 << 30, 0, 1), HEAD.pack(2, 3, 1) + b"{}...", b"GET / HTTP/1.1\r\n\r\n"])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        FrameDecoder().feed(data)


@pytest.mark.parametrize(
    "header", [b"{}", b"[]", b"no", b"\xff", b"[" * 100_000, b'{"kind":"abort"}', b'{"kind":"stop","more":12}']
)
def test_a_frame_that_is_no_message_is_its_own_matter(header: bytes) -> None:
    """Its request is known, and those before and behind it are read."""
    bad = HEAD.pack(len(header), 4, 17) + header + b"tail"
    first, unread, last = FrameDecoder().feed(encode(MESSAGES[0]) + bad + encode(MESSAGES[2]))
    assert same(first, MESSAGES[0]) and same(last, MESSAGES[2])
    assert isinstance(unread, Unread) and unread.id == 17 and unread.reason


def test_what_is_written_can_be_read() -> None:
    """A grammar as large as may be compiled, however its characters are written; one that may not is not sent."""
    for character in '"', "\U0001f600":
        grammar = character * MOST_BYTES
        (message,) = FrameDecoder().feed(encode(Submit(1, 1, grammar=grammar)))
        assert isinstance(message, Submit) and message.grammar == grammar
    with pytest.raises(ValueError, match=str(MOST_HEADER)):
        encode(Submit(1, 1, grammar="x" * MOST_HEADER))
