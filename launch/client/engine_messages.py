"""Messages between the client and rank 0 over a Unix socket: token ids and numbers, no text and no pickle.

    [u32 bytes of the header][u32 bytes of the tail][i64 id, or 0][header: JSON, `kind` and the fields][tail: int32 ids]

Both ends run on one host and use its byte order. Token ids are raw bytes, without parsing. Writers enforce the size
limits of readers. A frame with an unreadable header still has its id.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np

from helix.engine.request import Logprobs, PromptLogprobs, Request, RequestUpdate
from helix.sampling_params import SamplingParams

HEAD = struct.Struct("=IIq")
MAX_HEADER, MAX_TAIL = 1 << 24, 1 << 30  # bytes; grammars, the largest headers, stay far below
# Fields of an update that are sent only if they differ from the default.
UPDATE_KEYS = ("cached_tokens", "num_computed_tokens", "finish_reason", "reason")
NO_IDS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class Cancel:
    """Cancels a request; its later frames are ignored."""

    kind: ClassVar[str] = "cancel"
    id: int


@dataclass(frozen=True, eq=False)
class Stop:
    """Ends the job and all running requests."""

    kind: ClassVar[str] = "stop"


@dataclass(frozen=True, eq=False)
class EngineInfo:
    """The first message of a job: what it serves.

    Attributes:
        model: checkpoint directory; None for a shape without a checkpoint.
        context: maximum tokens per sequence that the model supports.
        max_length: maximum tokens per sequence within the model's and the KV cache's limits.
        kv_tokens: KV cache capacity in tokens, over all sequences.
        max_batch: maximum sequences per batch.
        eos: the model's end tokens.
        guided: whether structured outputs are supported; `unguided`: the reason if not.
        random: whether the weights are random.
        takes_snapshots: whether requests should say where the last message begins, see `Request`.
    """

    kind: ClassVar[str] = "ready"
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
    takes_snapshots: bool = False


@dataclass(frozen=True, eq=False)
class Queued:
    """A request has been received and waits for admission."""

    kind: ClassVar[str] = "queued"
    id: int


@dataclass(frozen=True, eq=False)
class Failed:
    """The last message of a failing job."""

    kind: ClassVar[str] = "failed"
    reason: str


@dataclass(frozen=True, eq=False)
class MalformedMessage:
    """Stands for a frame that could not be decoded; `id` is 0 if the frame has none."""

    id: int
    reason: str


@dataclass(frozen=True, eq=False)
class Stats:
    """Gauges and counters of the engine by name."""

    kind: ClassVar[str] = "stats"
    values: dict[str, float]


KINDS = {kind.kind: kind for kind in (Cancel, Stop, EngineInfo, Queued, Failed, Stats)}
Message = Request | RequestUpdate | Cancel | Stop | EngineInfo | Queued | Failed | Stats | MalformedMessage


def encode(message: Message) -> bytes:
    """Encodes a message as a frame; raises as `encode_parts`."""
    return b"".join(encode_parts(message))


def encode_parts(message: Message) -> tuple[bytes, memoryview]:
    """Encodes a message as a frame in two pieces; the second is a view of the message's token ids.

    Raises:
        ValueError: the message exceeds the size limit of a frame.
    """
    match message:
        case Request():
            return _frame("request", int(message.id), _header_of_request(message), np.asarray(message.prompt))
        case RequestUpdate():
            return _frame("update", int(message.id), *_update_parts(message))
        case MalformedMessage():
            raise AssertionError("a MalformedMessage is only received, never sent")
    return _frame(message.kind, getattr(message, "id", 0), asdict(message), NO_IDS)


def encode_tokens(pairs: Sequence[int]) -> bytes:
    """Encodes the new tokens of all requests of a step that continue as one frame.

    Args:
        pairs: alternating request id and token; the tokens of a request are adjacent and in order.
    """
    return b"".join(_frame("tokens", 0, {}, np.array(pairs, dtype=np.int32)))


def _header_of_request(request: Request) -> dict[str, Any]:
    names = "max_tokens", "priority", "cache_salt", "last_message_start", "grammar", "num_prior_output_tokens"
    return {"sampling": request.sampling.to_dict()} | {name: getattr(request, name) for name in names}


def _update_parts(update: RequestUpdate) -> tuple[dict[str, Any], np.ndarray]:
    header: dict[str, Any] = {name: value for name in UPDATE_KEYS if (value := getattr(update, name))}
    if update.logprobs:
        header["logprobs"] = [(entry.sampled, entry.best) for entry in update.logprobs]
    ids = np.asarray(update.new_token_ids, dtype=np.int32)
    if (part := update.prompt_logprobs) is not None:
        header["prompt_logprobs"] = part.begin, *part.ids.shape
        ids = np.concatenate([ids, part.ids.reshape(-1), part.values.reshape(-1).view(np.int32)])
    return header, ids


def _frame(kind: str, request_id: int, content: dict[str, Any], ids: np.ndarray) -> tuple[bytes, memoryview]:
    header = json.dumps({"kind": kind, **content}, separators=(",", ":")).encode()
    ids = np.ascontiguousarray(ids, dtype=np.int32)
    for part, size, limit in (("header", len(header), MAX_HEADER), ("tail", ids.nbytes, MAX_TAIL)):
        if size > limit:
            raise ValueError(f"a frame's {part} of {size} bytes is larger than {limit}")
    return HEAD.pack(len(header), ids.nbytes, request_id) + header, ids.view(np.uint8).data


class FrameDecoder:
    """Decodes a byte stream of frames to messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Returns the messages that these bytes complete.

        Raises:
            ValueError: this is not a frame, and the rest of the stream is unreadable.
        """
        self._bytes += data
        begin, messages = 0, list[Message]()
        while len(self._bytes) - begin >= HEAD.size:
            header, tail, request_id = HEAD.unpack_from(self._bytes, begin)
            if header > MAX_HEADER or tail > MAX_TAIL or tail % 4:
                raise ValueError(f"not a frame: a header of {header} bytes and a tail of {tail}")
            middle = begin + HEAD.size + header
            if len(self._bytes) < middle + tail:
                break
            try:
                messages += _decode_frame(
                    request_id, self._bytes[begin + HEAD.size : middle], self._bytes[middle : middle + tail]
                )
            except Exception as error:  # a bad frame leaves the next ones readable
                messages.append(MalformedMessage(request_id, f"its frame cannot be decoded: {error}"))
            begin = middle + tail
        del self._bytes[:begin]
        return messages


def _decode_frame(request_id: int, header: bytearray, tail: bytearray) -> list[Message]:
    content = json.loads(header)
    kind = content.pop("kind", None) if isinstance(content, dict) else None
    ids = np.frombuffer(tail, dtype=np.int32)
    if kind == "tokens":
        grouped = groupby(ids.reshape(-1, 2).tolist(), itemgetter(0))
        return [RequestUpdate(name, new_token_ids=tuple([token for _, token in pairs])) for name, pairs in grouped]
    if kind == "request":
        content["sampling"] = SamplingParams.from_dict(_to_tuples(content["sampling"]))
        return [Request(request_id, ids, **content)]
    values = {name: _to_tuples(value) for name, value in content.items()}
    if kind == "update":
        if (shape := values.pop("prompt_logprobs", None)) is not None:
            begin, rows, width = shape
            ids, *both = np.split(ids, [len(ids) - 2 * rows * width, len(ids) - rows * width])
            scored, bits = (part.reshape(rows, width) for part in both)
            values["prompt_logprobs"] = PromptLogprobs(begin, scored, bits.view(np.float32))
        values["logprobs"] = tuple(Logprobs(*entry) for entry in values.get("logprobs", ()))
        return [RequestUpdate(request_id, new_token_ids=tuple(ids.tolist()), **values)]
    if kind not in KINDS:
        raise ValueError(f"unknown kind; its header is {bytes(header[:60])!r}")
    return [KINDS[kind](**values)]


def _to_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _to_tuples(one) for name, one in value.items()}
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value
