"""Messages between the front end and rank 0, over a Unix socket: token ids and numbers, no text and no pickle.

    [u32 bytes of the header][u32 bytes of the tail][header: JSON, `kind` and the fields][tail: token ids, int32]

Both ends are of one host: numbers are in its byte order. Prompts of a million tokens are bytes that nobody parses.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

HEAD = struct.Struct("=II")
MOST_HEADER, MOST_TAIL = 1 << 24, 1 << 30  # bytes; more is no frame
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
        sampling: those of `helix.sampling.SamplingParams` that differ from its defaults.
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
class Progress(Message):
    """So many of a prompt's tokens are in the cache; with 0 it has been admitted."""

    kind = "progress"
    id: int
    done: int
    total: int


@dataclass(frozen=True, eq=False)
class Stats(Message):
    """Gauges and counters of the engine, by name."""

    kind = "stats"
    values: dict[str, float]


KINDS = {kind.kind: kind for kind in (Submit, Abort, Stop, Ready, Delta, Progress, Stats)}


def encode(message: Message) -> bytes:
    """The frame of a message."""
    content = {f.name: getattr(message, f.name) for f in fields(message) if f.name != "ids"}
    header = json.dumps({"kind": message.kind, **content}, separators=(",", ":")).encode()
    tail = getattr(message, "ids", NO_IDS).astype(np.int32, copy=False).tobytes()
    return HEAD.pack(len(header), len(tail)) + header + tail


class Decoder:
    """Frames to messages, in whatever pieces the bytes come."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that these bytes complete.

        Raises:
            ValueError: they are no frame.
        """
        self._bytes += data
        begin = 0
        while len(self._bytes) - begin >= HEAD.size:
            header, tail = HEAD.unpack_from(self._bytes, begin)
            if header > MOST_HEADER or tail > MOST_TAIL or tail % 4:
                raise ValueError(f"no frame: a header of {header} bytes and a tail of {tail}")
            middle = begin + HEAD.size + header
            if len(self._bytes) < middle + tail:
                break
            yield _message(self._bytes[begin + HEAD.size : middle], self._bytes[middle : middle + tail])
            begin = middle + tail
        del self._bytes[:begin]


def _message(header: bytearray, tail: bytearray) -> Message:
    content = json.loads(header)
    kind = KINDS.get(content.pop("kind", None)) if isinstance(content, dict) else None
    if kind is None:
        raise ValueError(f"no frame: its header is {header[:60]!r}")
    values = {name: _frozen(value) for name, value in content.items()}
    if tail:
        values["ids"] = np.frombuffer(tail, dtype=np.int32)
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"no frame: {error}") from error


def _frozen(value: Any) -> Any:
    """JSON's lists as tuples, wherever they are."""
    if isinstance(value, dict):
        return {name: _frozen(one) for name, one in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
