"""Messages between the front end and rank 0, over a Unix socket: token ids and numbers, no text and no pickle.

    [u32 bytes of the header][u32 bytes of the tail][i64 id, or 0][header: JSON, `kind` and the fields][tail: int32 ids]

Both ends are of one host: numbers are in its byte order. Prompts of a million tokens are bytes that nobody parses. Who
writes keeps the bounds of who reads. A frame that cannot be understood still says whose it is.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

HEAD = struct.Struct("=IIq")
MOST_HEADER, MOST_TAIL = 1 << 24, 1 << 30  # bytes; grammars, of which headers are made, are far below
NO_IDS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class Message:
    """What crosses the socket; `ids` travel as the tail."""

    kind: ClassVar[str]


@dataclass(frozen=True, eq=False)
class Submit(Message):
    """A continuation to draw.

    Attributes:
        ids: [n] int32, the prompt, with what was drawn of it before where it is submitted again.
        drawn: so many of the last ids were drawn: they are part of the answer, for penalties.
        max_new_tokens: to draw from now on.
        sampling: those of `helix.steps.sampling.SamplingParams` that differ from its defaults.
        priority: higher ones are admitted first.
        salt: continuations share cached prefixes with those of the same salt alone.
        grammar: that the continuation follows, as llguidance reads it; None: it is free.
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
class Abort(Message):
    """Nobody wants the rest; what follows of it says nothing."""

    kind = "abort"
    id: int


@dataclass(frozen=True, eq=False)
class Stop(Message):
    """The job is to end, and all that runs with it."""

    kind = "stop"


@dataclass(frozen=True, eq=False)
class Ready(Message):
    """The first message of a job: what it serves.

    Attributes:
        model: the checkpoint's directory; None for a shape alone.
        layout: in words, as the job prints it.
        context: most tokens of a sequence, as the model has it, and
        max_length: as the cache has room for.
        kv_tokens: tokens of all sequences together that the cache holds.
        max_batch: sequences at a time.
        eos: the model's own ends.
        guided: whether continuations can follow a grammar.
        random: whether the weights are.
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
    random: bool = False


@dataclass(frozen=True, eq=False)
class Delta(Message):
    """What is new of a continuation.

    Attributes:
        ids: [n] int32, drawn since the last one, the token that ends it included.
        finish_reason: None while it goes on, then stop (one of the model's own ends), length, abort or error.
        reason: why, where it is error.
        cached: prompt tokens that were in the cache, with the first ids.
        logprobs: of each id: its own, then pairs (id, logprob) of the most likely ones.
    """

    kind = "delta"
    id: int
    finish_reason: str | None = None
    reason: str | None = None
    cached: int | None = None
    logprobs: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()
    ids: np.ndarray = field(default_factory=lambda: NO_IDS)


@dataclass(frozen=True, eq=False)
class Queued(Message):
    """A continuation has been read, and waits to be admitted."""

    kind = "queued"
    id: int


@dataclass(frozen=True, eq=False)
class Progress(Message):
    """So many of a prompt's tokens are in the cache; the first one says that it has been admitted.

    Attributes:
        cached: so many were there before.
    """

    kind = "progress"
    id: int
    done: int
    total: int
    cached: int = 0


@dataclass(frozen=True, eq=False)
class Failed(Message):
    """The last message of a job that fails: the reason."""

    kind = "failed"
    reason: str


@dataclass(frozen=True, eq=False)
class Unread(Message):
    """A frame that is no message of those known here, in its place: whose it is, 0 where nobody's, and the reason."""

    id: int
    reason: str


@dataclass(frozen=True, eq=False)
class Stats(Message):
    """Gauges and counters of the engine, by name."""

    kind = "stats"
    values: dict[str, float]


KINDS = {kind.kind: kind for kind in (Submit, Abort, Stop, Ready, Delta, Queued, Progress, Failed, Stats)}


def encode(message: Message) -> bytes:
    """The frame of a message; errors as of `pieces`."""
    return b"".join(pieces(message))


def pieces(message: Message) -> tuple[bytes, memoryview]:
    """The frame of a message, in two pieces, of which the second one is the message's own ids.

    Raises:
        ValueError: it is larger than a frame may be.
    """
    content = {f.name: getattr(message, f.name) for f in fields(message) if f.name != "ids"}
    header = json.dumps({"kind": message.kind, **content}, separators=(",", ":")).encode()
    ids = np.ascontiguousarray(getattr(message, "ids", NO_IDS), dtype=np.int32)
    for part, size, most in (("header", len(header), MOST_HEADER), ("tail", ids.nbytes, MOST_TAIL)):
        if size > most:
            raise ValueError(f"a frame's {part} of {size} bytes is larger than {most}")
    return HEAD.pack(len(header), ids.nbytes, getattr(message, "id", 0)) + header, ids.view(np.uint8).data


class Decoder:
    """Frames to messages, in whatever pieces the bytes come."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that these bytes complete.

        Raises:
            ValueError: they are no frame, and nothing that follows them can be.
        """
        self._bytes += data
        begin, messages = 0, []
        while len(self._bytes) - begin >= HEAD.size:
            header, tail, of = HEAD.unpack_from(self._bytes, begin)
            if header > MOST_HEADER or tail > MOST_TAIL or tail % 4:
                raise ValueError(f"no frame: a header of {header} bytes and a tail of {tail}")
            middle = begin + HEAD.size + header
            if len(self._bytes) < middle + tail:
                break
            try:
                message = _message(self._bytes[begin + HEAD.size : middle], self._bytes[middle : middle + tail])
            except Exception as error:  # of whatever kind: one frame's is not the next one's
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
    """JSON's lists as tuples, wherever they are."""
    if isinstance(value, dict):
        return {name: _frozen(one) for name, one in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
