"""Frames: messages come out as they went in, in whatever pieces their bytes come."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helix.engine.request import Logprobs, PromptLogprobs, Request, RequestUpdate
from helix.sampling_params import SamplingParams
from launch.client.compiler import MOST_BYTES
from launch.client.frames import (
    HEAD,
    MOST_HEADER,
    Cancel,
    Failed,
    FrameDecoder,
    Message,
    Queued,
    Ready,
    Stats,
    Stop,
    Unread,
    encode,
    encode_tokens,
)

IDS = np.array([0, 1, 2**31 - 1], dtype=np.int32)
SAMPLING = SamplingParams(temperature=0.5, seed=2**63 - 1, logit_bias={7: -1.5}, stop_token_ids=(3, 5))
MESSAGES: list[Message] = [
    Request(1, IDS, 16, SAMPLING, priority=-1, salt="é\ud83d", grammar='{"type": "object"}', drawn=2),
    Request(2, IDS[:0], 1),
    Cancel(1),
    Stop(),
    Ready("/models/m", "helix kvp=2", 2, 1 << 20, 1 << 19, 4096, 1 << 21, 8, (0, 7), True),
    RequestUpdate(1, cached_tokens=7, new_ids=(5,), logprobs=(Logprobs(-0.5, ((3, -0.5), (1, -2.0))),)),
    RequestUpdate(1, finish_reason="error", reason="too long"),
    RequestUpdate(1, cached_tokens=17, prefilled=10**6),
    RequestUpdate(1, scored=PromptLogprobs(3, IDS.reshape(1, 3), np.array([[-0.25, -3.5, -np.inf]], np.float32))),
    Queued(1),
    Failed("NaN"),
    Stats({"running": 1, "hit_tokens": 0.0}),
]


def same(a: Message, b: Message) -> bool:
    return type(a) is type(b) and plain(asdict(a)) == plain(asdict(b))


def plain(value: object) -> object:
    if isinstance(value, dict):
        return {name: plain(of) for name, of in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


@given(st.lists(st.sampled_from(MESSAGES), max_size=8), st.lists(st.integers(1, 200)))
def test_messages_come_out_as_they_went_in(messages: list[Message], cuts: list[int]) -> None:
    data, decoder, got = b"".join(map(encode, messages)), FrameDecoder(), []
    for cut in [*cuts, len(data)]:
        got += decoder.feed(data[:cut])
        data = data[cut:]
    assert len(got) == len(messages) and all(map(same, got, messages))


def test_tokens_of_a_step_are_read_by_request() -> None:
    """Ids that fill their bits are not negative; tokens of one request that stand together are one update."""
    told = FrameDecoder().feed(encode_tokens([1, 2**31 - 1, 1, 5, 7, 0]))
    assert told == [RequestUpdate(1, new_ids=(2**31 - 1, 5)), RequestUpdate(7, new_ids=(0,))]


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
        (message,) = FrameDecoder().feed(encode(Request(1, IDS, 1, grammar=grammar)))
        assert isinstance(message, Request) and message.grammar == grammar
    with pytest.raises(ValueError, match=str(MOST_HEADER)):
        encode(Request(1, IDS, 1, grammar="x" * MOST_HEADER))
