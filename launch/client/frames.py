"""Messages between the front end and rank 0, over a Unix socket: token ids and numbers, no text and no pickle.

    [u32 bytes of the header][u32 bytes of the tail][i64 id, or 0][header: JSON, `kind` and the fields][tail: int32 ids]

Both ends run on one host: numbers are in its byte order. Token ids are raw bytes that need no parsing. Writers keep the
size limits of readers. A frame with an unreadable header still has its id.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

HEAD = struct.Struct("=IIq")
MOST_HEADER, MOST_TAIL = 1 << 24, 1 << 30  # bytes; grammars, the largest part of headers, are far below
NO_IDS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class Message:
    """Base of all messages on the socket; `ids` are sent as the tail."""

    kind: ClassVar[str]


@dataclass(frozen=True, eq=False)
class Submit(Message):
    """A continuation to generate.

    Attributes:
        ids: [n] int32, the prompt; when resubmitted, followed by the tokens drawn before.
        drawn: number of last ids that were drawn: they count as the answer, for penalties.
        max_new_tokens: tokens to draw from now on.
        sampling: fields of `helix.events.sampling_params.SamplingParams` that differ from its defaults.
        priority: higher ones are admitted first.
        salt: continuations share cached prefixes only with those of the same salt.
        grammar: grammar to follow, in llguidance's format; None: unconstrained.
    """

    kind = "submit"
    id: int
    max_new_tokens: int
    sampling: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    salt: str | None = None
    grammar: str | None = None
    drawn: int = 0
    ids: np.ndarray = field(default_factory=lambda: NO_IDS)


@dataclass(frozen=True, eq=False)
class Cancel(Message):
    """Cancellation of a request; its later frames are ignored."""

    kind = "cancel"
    id: int


@dataclass(frozen=True, eq=False)
class Stop(Message):
    """Order to end the job and all running continuations."""

    kind = "stop"


@dataclass(frozen=True, eq=False)
class Ready(Message):
    """The first message of a job: a description of what it serves.

    Attributes:
        model: the checkpoint's directory; None for a shape alone.
        layout: the layout as text.
        context: most tokens of a sequence by the model's limit.
        max_length: most tokens of a sequence by the model's and the cache's limits.
        kv_tokens: tokens of all sequences together that the cache holds.
        max_batch: sequences at a time.
        eos: the model's end tokens.
        guided: whether continuations can follow a grammar; `unguided`: else why not.
        random: whether the weights are random.
    """

    kind = "ready"
    model: str | None
    layout: str
    ranks: int
    context: int
    max_length: int
    vocab: int
    kv_tokens: int
    max_batch: int
    eos: tuple[int, ...]
    guided: bool = False
    unguided: str | None = None
    random: bool = False


@dataclass(frozen=True, eq=False)
class Delta(Message):
    """New tokens of a continuation, or its end.

    Attributes:
        ids: [n] int32, drawn since the last message, including the end token.
        finish_reason: None while it goes on, then stop (one of the model's end tokens), length, abort or error.
        reason: the error message, if finish_reason is error.
        cached: prompt tokens that were in the cache, sent with the first ids.
        logprobs: each id's own, then pairs (id, logprob) of the most likely ones.
    """

    kind = "delta"
    id: int
    finish_reason: str | None = None
    reason: str | None = None
    cached: int | None = None
    logprobs: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()
    ids: np.ndarray = field(default_factory=lambda: NO_IDS)


@dataclass(frozen=True, eq=False)
class StepDeltas(Message):
    """New tokens of many continuations that go on: a message for all that a step drew.

    Attributes:
        ids: [2 n] int32, the id of a continuation, then its token; tokens of one stand together, in their order.
    """

    kind = "deltas"
    ids: np.ndarray = field(default_factory=lambda: NO_IDS)


@dataclass(frozen=True, eq=False)
class Queued(Message):
    """Receipt: a continuation has been read, and waits for admission."""

    kind = "queued"
    id: int


@dataclass(frozen=True, eq=False)
class Progress(Message):
    """Prefill progress: `done` tokens of the prompt are in the cache; the first such message reports admission.

    Attributes:
        cached: tokens that were there before.
    """

    kind = "progress"
    id: int
    done: int
    total: int
    cached: int = 0


@dataclass(frozen=True, eq=False)
class Scored(Message):
    """Log-probabilities of consecutive tokens of a prompt; positions may come again, after a preemption or a crash.

    Attributes:
        begin: position of the first of them.
        ids: int32 [2, n, width]: `helix.events.request.PromptLogprobs`, ids and then the bits of the values.
    """

    kind = "scored"
    id: int
    begin: int
    width: int
    ids: np.ndarray = field(default_factory=lambda: NO_IDS)


@dataclass(frozen=True, eq=False)
class Failed(Message):
    """The last message of a failing job, with the reason."""

    kind = "failed"
    reason: str


@dataclass(frozen=True, eq=False)
class Unread(Message):
    """Placeholder of a frame that could not be decoded: its id, 0 if it has none, and the reason."""

    id: int
    reason: str


@dataclass(frozen=True, eq=False)
class Stats(Message):
    """Gauges and counters of the engine, by name."""

    kind = "stats"
    values: dict[str, float]


TYPES = (Submit, Cancel, Stop, Ready, Delta, StepDeltas, Queued, Progress, Scored, Failed, Stats)
KINDS = {kind.kind: kind for kind in TYPES}


def encode(message: Message) -> bytes:
    """Encodes a message as a frame; errors as in `pieces`."""
    return b"".join(pieces(message))


def pieces(message: Message) -> tuple[bytes, memoryview]:
    """Encodes a message as a frame in two pieces; the second is a view of the message's ids.

    Raises:
        ValueError: it exceeds the size limit of a frame.
    """
    content = {f.name: getattr(message, f.name) for f in fields(message) if f.name != "ids"}
    header = json.dumps({"kind": message.kind, **content}, separators=(",", ":")).encode()
    ids = np.ascontiguousarray(getattr(message, "ids", NO_IDS), dtype=np.int32)
    for part, size, most in (("header", len(header), MOST_HEADER), ("tail", ids.nbytes, MOST_TAIL)):
        if size > most:
            raise ValueError(f"a frame's {part} of {size} bytes is larger than {most}")
    return HEAD.pack(len(header), ids.nbytes, getattr(message, "id", 0)) + header, ids.view(np.uint8).data


class FrameDecoder:
    """Incremental decoder of frames to messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Returns the messages that these bytes complete.

        Raises:
            ValueError: they are not a frame, so that the rest of the stream is unreadable.
        """
        self._bytes += data
        begin, messages = 0, []
        while len(self._bytes) - begin >= HEAD.size:
            header, tail, of = HEAD.unpack_from(self._bytes, begin)
            if header > MOST_HEADER or tail > MOST_TAIL or tail % 4:
                raise ValueError(f"not a frame: a header of {header} bytes and a tail of {tail}")
            middle = begin + HEAD.size + header
            if len(self._bytes) < middle + tail:
                break
            try:
                message = _message(self._bytes[begin + HEAD.size : middle], self._bytes[middle : middle + tail])
            except Exception as error:  # any error of one frame leaves the next ones readable
                message = Unread(of, f"its frame cannot be read: {error}")
            messages.append(message)
            begin = middle + tail
        del self._bytes[:begin]
        return messages


def _message(header: bytearray, tail: bytearray) -> Message:
    content = json.loads(header)
    kind = KINDS.get(content.pop("kind", None)) if isinstance(content, dict) else None
    if kind is None:
        raise ValueError(f"its header is {bytes(header[:60])!r}")
    values = {name: _frozen(value) for name, value in content.items()}
    if tail:
        values["ids"] = np.frombuffer(tail, dtype=np.int32)
    return kind(**values)


def _frozen(value: Any) -> Any:
    """Converts JSON's lists to tuples, recursively."""
    if isinstance(value, dict):
        return {name: _frozen(one) for name, one in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
