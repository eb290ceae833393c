"""Rank 0's end of the socket: what is wrong with one request is nobody else's matter, and the log says the rest."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helix.engine.inbox import Abort, Inbox
from helix.engine.request import Logprobs, PromptLogprobs, Request, RequestUpdate
from helix.sampling_params import SamplingParams
from launch.client.engine_messages import (
    HEAD,
    MAX_HEADER,
    Cancel,
    EngineInfo,
    Failed,
    FrameDecoder,
    MalformedMessage,
    Message,
    Queued,
    Stats,
    Stop,
    encode,
    encode_tokens,
)
from launch.client.grammar_compiler import MAX_GRAMMAR_BYTES
from launch.job import serve
from launch.job.serve import EngineServer
from tests.serving.api_server import DEMO, READY

IDS = np.array([5, 6], dtype=np.int32)


class Panicked(BaseException):
    """No Exception, as the panics of llguidance are none."""


class FrontendSocket:
    """The front end's end."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(60)
        self._socket.connect(str(path))
        self._messages = self._read()
        assert isinstance(self.next(), EngineInfo)

    def send(self, *messages: Message | bytes) -> None:
        self._socket.sendall(b"".join(m if isinstance(m, bytes) else encode(m) for m in messages))

    def next(self) -> Message | None:
        """The next one that is not of the clock; None at the end."""
        return next(self._messages, None)

    def close(self) -> None:
        self._socket.close()

    def _read(self) -> Iterator[Message]:
        decoder = FrameDecoder()
        while data := self._socket.recv(1 << 16):
            yield from (message for message in decoder.feed(data) if not isinstance(message, Stats))


@dataclass
class ServedInbox:
    link: EngineServer
    inbox: Inbox
    path: Path

    def requests(self, count: int) -> list[Any]:
        found: list[Any] = []
        while len(found) < count:
            assert self.inbox.wait(60)
            found += self.inbox.drain()
        return found


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[ServedInbox]:
    link = EngineServer(path := tmp_path / "job.sock", inbox := Inbox())
    assert link.load_grammars(DEMO, READY.vocab, READY.eos) is None
    link.open(READY, dict)
    yield ServedInbox(link, inbox, path)
    link.close()


@pytest.fixture
def frontend(rank: ServedInbox) -> Iterator[FrontendSocket]:
    yield (made := FrontendSocket(rank.path))
    made.close()


def with_sampling(number: int, sampling: dict[str, Any]) -> bytes:
    header = json.dumps({"kind": "request", "max_tokens": 4, "sampling": sampling}).encode()
    return HEAD.pack(len(header), IDS.nbytes, number) + header + IDS.tobytes()


def test_what_is_wrong_with_one_request_is_its_own(
    rank: ServedInbox, frontend: FrontendSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = rank.link._grammars.create_matcher  # type: ignore[union-attr]

    def failing(grammar: str, drawn: Any) -> Any:
        if grammar == "planted":
            raise Panicked("planted")
        return begun(grammar, drawn)

    monkeypatch.setattr(rank.link._grammars, "create_matcher", failing)
    bad = [
        with_sampling(1, {"temperature": "hot"}),
        with_sampling(2, {"heat": 1}),
        with_sampling(3, {"logit_bias": [3]}),
        Request(4, IDS, 4, grammar="no grammar"),
        Request(5, IDS, 4, grammar="planted"),
        HEAD.pack(2, 4, 6) + b"{}" + IDS[:1].tobytes(),
    ]
    frontend.send(*bad, Request(7, IDS, 4))
    received = [frontend.next() for _ in range(len(bad) + 1)]  # grammars take their time, and nobody waits for them
    refused = {message.id: message.reason for message in received if isinstance(message, RequestUpdate)}
    assert sorted(refused) == [1, 2, 3, 4, 5, 6] and all(refused.values()), received
    assert refused[5] == "Panicked: planted"
    assert [message.id for message in received if isinstance(message, Queued)] == [7]
    assert [request.id for request in rank.requests(1)] == ["1:7"]


def test_a_request_is_said_to_be_read_then_admitted_then_that_all_has_ended(
    rank: ServedInbox, frontend: FrontendSocket
) -> None:
    frontend.send(Request(1, IDS, 4))
    (request,) = rank.requests(1)
    assert isinstance(queued := frontend.next(), Queued) and queued.id == 1
    rank.link.send_update(RequestUpdate(request.id, 2, 1, 1, (), None, None))
    assert frontend.next() == RequestUpdate(1, cached_tokens=1, num_computed_tokens=1)
    rank.link.fail("RuntimeError: planted")
    rank.link.close()
    assert isinstance(failed := frontend.next(), Failed) and failed.reason == "RuntimeError: planted"
    assert frontend.next() is None, "the front end need not wait for the end of a process"


def test_what_is_no_frame_ends_the_connection_and_the_log_says_why(
    rank: ServedInbox, frontend: FrontendSocket, caplog: pytest.LogCaptureFixture
) -> None:
    """The next front end finds the ranks as they were."""
    frontend.send(HEAD.pack(1 << 31, 0, 1))
    assert frontend.next() is None
    assert "not a frame: a header of 2147483648 bytes" in caplog.text
    frontend.close()
    again = FrontendSocket(rank.path)
    again.send(Request(1, IDS, 4))
    assert rank.requests(1)[0].id == "2:1"
    again.close()


def test_tokens_of_a_step_are_one_message(rank: ServedInbox, frontend: FrontendSocket) -> None:
    """In order with all other news of their requests; those of a front end that has left are nobody's."""
    frontend.send(Request(1, IDS, 4), Request(2, IDS, 4))
    one, two = rank.requests(2)
    assert [type(frontend.next()) for _ in range(2)] == [Queued, Queued]

    def send_tokens(request: Any, ids: tuple[int, ...], finish: str | None = None) -> None:
        rank.link.send_update(RequestUpdate(request.id, 2, 0, 2, ids, finish, None))

    rank.link.flush()
    send_tokens(one, (5, 6))
    send_tokens(two, (7,))
    rank.link.flush()
    send_tokens(one, (8,))
    send_tokens(two, (9,), "stop")
    assert [frontend.next() for _ in range(4)] == [
        RequestUpdate(1, new_token_ids=(5, 6)),
        RequestUpdate(2, new_token_ids=(7,)),
        RequestUpdate(1, new_token_ids=(8,)),  # what came before an end
        RequestUpdate(2, num_computed_tokens=2, new_token_ids=(9,), finish_reason="stop"),
    ]

    send_tokens(one, (10,))
    frontend.close()
    frontend = FrontendSocket(rank.path)
    frontend.send(Request(1, IDS, 4))
    send_tokens(one, (11,))
    rank.link.flush()
    assert isinstance(frontend.next(), Queued), "and no token of another's first request"
    again = next(request for request in rank.requests(2) if not isinstance(request, Abort))
    send_tokens(again, (12,))
    rank.link.flush()
    assert frontend.next() == RequestUpdate(1, new_token_ids=(12,))
    frontend.close()


def test_each_front_end_gets_the_tokens_of_its_own_requests(rank: ServedInbox, frontend: FrontendSocket) -> None:
    """Under the ids that it gave; one that leaves takes its own requests along, and all hear why the ranks failed."""
    other = FrontendSocket(rank.path)
    frontend.send(Request(1, IDS, 4))
    other.send(Request(1, IDS, 4), Request(2, IDS, 4))
    requests = {request.id: request for request in rank.requests(3)}
    assert {*requests} == {"1:1", "2:1", "2:2"}
    assert [type(one.next()) for one in (frontend, other, other)] == [Queued] * 3
    for id, token in ("1:1", 5), ("2:1", 6), ("2:2", 7):
        rank.link.send_update(RequestUpdate(id, new_token_ids=(token,)))
    rank.link.send_update(RequestUpdate("2:2", new_token_ids=(8,), finish_reason="stop"))
    rank.link.flush()
    assert [other.next() for _ in range(3)] == [
        RequestUpdate(1, new_token_ids=(6,)),
        RequestUpdate(2, new_token_ids=(7,)),
        RequestUpdate(2, new_token_ids=(8,), finish_reason="stop"),
    ]
    assert frontend.next() == RequestUpdate(1, new_token_ids=(5,))

    other.close()
    assert [abort.id for abort in rank.requests(1)] == ["2:1"]
    rank.link.send_update(RequestUpdate("2:1", new_token_ids=(9,)))
    rank.link.send_update(RequestUpdate("1:1", new_token_ids=(9,)))
    rank.link.flush()
    rank.link.send_update(RequestUpdate("2:1", finish_reason="abort"))
    assert frontend.next() == RequestUpdate(1, new_token_ids=(9,))
    again = FrontendSocket(rank.path)
    rank.link.fail("planted")
    assert isinstance(frontend.next(), Failed) and isinstance(again.next(), Failed)
    again.close()


def test_a_front_end_that_reads_nothing_does_not_stop_the_others(
    rank: ServedInbox, frontend: FrontendSocket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve, "SEND_S", 1)
    stuck = FrontendSocket(rank.path)
    for one in (frontend, stuck):
        one.send(Request(1, IDS, 4))
        assert isinstance(one.next(), Queued)
    rank.requests(2)
    while "read nothing for 1 s" not in caplog.text:
        rank.link.send_update(RequestUpdate("2:1", new_token_ids=(7,) * 100_000))
        rank.link.flush()
    assert [abort.id for abort in rank.requests(1)] == ["2:1"]
    rank.link.send_update(RequestUpdate("1:1", new_token_ids=(5,)))
    rank.link.flush()
    assert frontend.next() == RequestUpdate(1, new_token_ids=(5,))
    stuck.close()


def test_who_left_before_it_was_served_is_nobody(tmp_path: Path) -> None:
    """Another job looks so whether the socket is in use, and front ends are killed."""
    link = EngineServer(path := tmp_path / "job.sock", Inbox())
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
    link.open(READY, dict)
    FrontendSocket(path).close()
    link.close()


# ---- frames: messages come out as they went in, in whatever pieces their bytes come

IDS = np.array([0, 1, 2**31 - 1], dtype=np.int32)
SAMPLING = SamplingParams(temperature=0.5, seed=2**63 - 1, logit_bias={7: -1.5}, stop_token_ids=(3, 5))
MESSAGES: list[Message] = [
    Request(
        1,
        IDS,
        16,
        SAMPLING,
        priority=-1,
        cache_salt="é\ud83d",
        grammar='{"type": "object"}',
        num_prior_output_tokens=2,
        last_message_start=2,
    ),
    Request(2, IDS[:0], 1),
    Cancel(1),
    Stop(),
    EngineInfo("/models/m", "helix kvp=2", 2, 1 << 20, 1 << 19, 4096, 1 << 21, 8, (0, 7), True),
    RequestUpdate(1, cached_tokens=7, new_token_ids=(5,), logprobs=(Logprobs(-0.5, ((3, -0.5), (1, -2.0))),)),
    RequestUpdate(1, finish_reason="error", reason="too long"),
    RequestUpdate(1, cached_tokens=17, num_computed_tokens=10**6),
    RequestUpdate(
        1, prompt_logprobs=PromptLogprobs(3, IDS.reshape(1, 3), np.array([[-0.25, -3.5, -np.inf]], np.float32))
    ),
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
    received = FrameDecoder().feed(encode_tokens([1, 2**31 - 1, 1, 5, 7, 0]))
    assert received == [RequestUpdate(1, new_token_ids=(2**31 - 1, 5)), RequestUpdate(7, new_token_ids=(0,))]


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
    assert isinstance(unread, MalformedMessage) and unread.id == 17 and unread.reason


def test_what_is_written_can_be_read() -> None:
    """A million tokens, and a grammar as large as may be compiled, however its characters are written."""
    ids = np.arange(1_000_000, dtype=np.int32)
    for character in '"', "\U0001f600":
        sent = Request(1, ids, 1, grammar=character * MAX_GRAMMAR_BYTES)
        (message,) = FrameDecoder().feed(encode(sent))
        assert same(message, sent)
    with pytest.raises(ValueError, match=str(MAX_HEADER)):
        encode(Request(1, IDS, 1, grammar="x" * MAX_HEADER))
