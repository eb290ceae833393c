"""Prompt files and result files, in JSON lines."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, TextIO, overload

import numpy as np

from helix.config import Config, DecodeConfig
from helix.errors import RankError
from helix.files import check_file, parse_json, read_text
from helix.sampling_params import PARAMETERS, SamplingParams
from helix.schema import unknown_message
from launch.client.answer import RequestOutput
from launch.client.errors import ApiError
from launch.client.options import LINE_OPTIONS, with_defaults
from launch.client.schemas import Chat, Completion, parse_body
from launch.inputs.files import claim, replace

KEYS = ("id", "prompt", "prompt_ids", "messages", *LINE_OPTIONS, "response_format")
BATCH_KEYS = ("custom_id", "method", "url", "body")  # keys of OpenAI's batch format
SCHEMAS: dict[str, type[Chat | Completion]] = {"/v1/chat/completions": Chat, "/v1/completions": Completion}
MAX_IDS = 1 << 40  # token ids per prompt; the model's limit is checked later

BATCH_ID, SERVED = "batch_req_", 200
BOM = b"\xef\xbb\xbf"
TEMPLATE_TOKENS = 256  # estimate: a chat template doubles the tokens of messages and adds these

# JSON types of options, and their names in errors.
KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    float: ((int, float), "a number"),
    int: ((int,), "an integer"),
    bool: ((bool,), "true or false"),
    Sequence: ((list,), "a list of integers"),
    Mapping: ((dict,), "an object of token ids and numbers"),
}


@dataclass(frozen=True)
class PromptLine:
    """A line of a prompt file; one of `text`, `ids` and `body` is set.

    Attributes:
        options: values of LINE_OPTIONS that the line sets.
        body: request fields: messages or a structured output, or the body of a batch line.
        url: route of a batch line.
    """

    id: str | int
    text: str | None
    ids: tuple[int, ...] | None
    options: Mapping[str, Any]
    body: Mapping[str, Any] | None = None
    url: str | None = None

    @property
    def schema(self) -> type[Chat | Completion]:
        return SCHEMAS[self.url] if self.url is not None else Chat if "messages" in (self.body or {}) else Completion


class PromptFile(Sequence[PromptLine]):
    """Prompts of a JSON-lines file, which are read from the file each time: only 16 bytes per prompt are in memory.

    Args:
        path: the file; a prompt without an id gets its index, from 0.

    Attributes:
        max_new_tokens: the largest max_tokens of a line, 0 if none has any.
        sequences: number of answers; a line may have several.
        has_text: whether any prompt needs a tokenizer.
        has_bodies: whether any line has messages or a structured output, or is a batch line.
        has_unlimited: whether any line is a chat of a batch without max_tokens.

    Raises:
        ValueError: a line is not a prompt or an id is repeated (with file and line), or the file is unreadable.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offsets, self.max_new_tokens, self.sequences = path, array("q"), 0, 0
        self.has_text = self.has_bodies = self.has_unlimited = False
        keys, numbers = array("q"), array("q")  # hashes of ids, and line numbers
        try:
            check_file(path)
            with path.open("rb") as file:
                begin = 0
                for number, line in enumerate(file, 1):
                    if line.strip():
                        prompt = self._read(line, len(keys), number, begin)
                        self._offsets.append(begin)
                        keys.append(_hash(prompt.id))
                        numbers.append(number)
                        self._update_stats(prompt)
                    begin += len(line)
        except OSError as error:
            raise ValueError(f"decode.prompts={path} cannot be read: {error.strerror}") from error
        if not keys:
            raise ValueError(f"decode.prompts={path} has no prompts")
        self._offsets.append(begin)
        order = np.argsort(keys, kind="stable")
        same = np.asarray(keys)[order]
        for at in np.flatnonzero(same[1:] == same[:-1]):
            first, second = sorted(order[at : at + 2].tolist())
            if (name := self[second].id) == self[first].id:
                raise ValueError(f"{path}, line {numbers[second]}: id {name!r} was used on line {numbers[first]}")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __iter__(self) -> Iterator[PromptLine]:
        with self._path.open("rb") as file:
            for index in range(len(self)):
                yield self._at(file, index)

    @overload
    def __getitem__(self, index: int) -> PromptLine: ...
    @overload
    def __getitem__(self, index: slice) -> list[PromptLine]: ...
    def __getitem__(self, index: int | slice) -> PromptLine | list[PromptLine]:
        with self._path.open("rb") as file:
            if isinstance(index, slice):
                return [self._at(file, i) for i in range(*index.indices(len(self)))]
            return self._at(file, range(len(self))[index])

    def max_total_tokens(self, default: int, context: int, batch: int) -> int:
        """Returns an upper bound on the tokens of the largest batch, including new ones; a token has at least one byte.

        Args:
            default: new tokens of a prompt whose line sets no limit.
            context: maximum prompt and new tokens of a sequence.
            batch: number of prompts.
        """
        lengths = np.diff(self._offsets)
        if self.has_bodies:  # the chat template adds tokens
            lengths = 2 * lengths + TEMPLATE_TOKENS
        new = context if self.has_unlimited else min(max(default, self.max_new_tokens), context)
        return int(np.sort(np.minimum(lengths + new, context))[-batch:].sum())

    def _at(self, file: BinaryIO, index: int) -> PromptLine:
        file.seek(begin := self._offsets[index])
        return self._read(file.readline(), index, index, begin)

    def _read(self, line: bytes, index: int, number: int, begin: int) -> PromptLine:
        try:
            return _parse(line.removeprefix(b"" if begin else BOM).removesuffix(b"\n").decode(), index)
        except UnicodeDecodeError as error:
            where = f"byte {begin + error.start + 1} is invalid"
            raise ValueError(f"decode.prompts={self._path} is not UTF-8 text: {where}") from error
        except ValueError as error:
            raise ValueError(f"{self._path}, line {number}: {error}") from error

    def _update_stats(self, prompt: PromptLine) -> None:
        limit = prompt.options.get("max_tokens")
        self.max_new_tokens = max(self.max_new_tokens, limit if isinstance(limit, int) else 0)
        several = (prompt.body or {}).get("n")
        self.sequences += max(several, 1) if type(several) is int else 1
        self.has_text |= prompt.ids is None
        self.has_bodies |= prompt.body is not None
        self.has_unlimited |= limit is None and prompt.url is not None and prompt.schema is Chat


def _hash(name: str | int) -> int:
    return hash((name, str(name)))  # of integers alone -1 and -2 collide, and 0 and 2**61 - 1


def _parse(line: str, index: int) -> PromptLine:
    entry = parse_json(line)
    if not isinstance(entry, dict):
        raise ValueError(f"a prompt must be a JSON object, but this is {line.strip()[:60]}")
    if "custom_id" in entry:
        return _parse_batch(entry)
    unknown = sorted(set(entry) - set(KEYS))
    if unknown:
        raise ValueError(unknown_message(unknown[0], KEYS))
    name = entry.get("id", index)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise ValueError(f"id {name!r:.60} must be text or an integer")
    text, ids, messages = (entry.get(key) for key in ("prompt", "prompt_ids", "messages"))
    if sum(one is not None for one in (text, ids, messages)) != 1:
        raise ValueError(
            'needs exactly one of "prompt" (text), "prompt_ids" (token ids) and "messages" (a conversation)'
        )
    if text is not None and not isinstance(text, str):
        raise ValueError(f'"prompt" must be text, not {text!r:.60}')
    if ids is not None and not (isinstance(ids, list) and all(type(t) is int for t in ids)):
        raise ValueError(f'"prompt_ids" must be a list of integers, not {ids!r:.60}')
    stop = entry.get("stop", [])
    if not isinstance(stop, str) and not (isinstance(stop, list) and all(isinstance(s, str) for s in stop)):
        raise ValueError(f'"stop" must be a string or a list of strings, not {stop!r:.60}')
    stops = [("stop", content) for content in ([stop] if isinstance(stop, str) else stop)]
    for key, content in (("id", name), ("prompt", text), *stops):
        if isinstance(content, str) and (half := re.search("[\ud800-\udfff]", content)):
            raise ValueError(f'"{key}" has a lone surrogate at character {half.start()}, so it is not valid text')
    options = {key: entry[key] for key in LINE_OPTIONS if entry.get(key) is not None}
    for key in options.keys() - {"stop"}:
        kinds, what = KINDS[LINE_OPTIONS[key].kind]
        if type(value := options[key]) not in kinds:
            raise ValueError(f'"{key}" must be {what}, not {value!r:.60}')
    if bias := options.get("logit_bias"):
        if wrong := [token for token in bias if not re.fullmatch("[0-9]{1,10}", token)]:
            raise ValueError(f'"logit_bias" must be {KINDS[Mapping][1]}, but {wrong[0]!r:.60} is not a token id')
        options["logit_bias"] = {int(token): value for token, value in bias.items()}
    body = {key: entry[key] for key in ("messages", "response_format") if entry.get(key) is not None}
    if not body:
        return PromptLine(name, text, None if ids is None else tuple(ids), options)
    if messages is None:
        body["prompt"] = text if ids is None else ids
    prompt = PromptLine(name, None, None, options, body)
    try:
        parse_body(prompt.schema, json.dumps(body).encode(), MAX_IDS)
    except ApiError as error:
        raise ValueError(error.message) from error
    return prompt


def _parse_batch(entry: dict[str, Any]) -> PromptLine:
    """Parses a line of OpenAI's batch format; errors in its body become its result."""
    if set(entry) != set(BATCH_KEYS):
        raise ValueError(
            f"a batch line must have the keys {', '.join(BATCH_KEYS)}, but this one has {', '.join(sorted(entry))}"
        )
    name, method, url, body = (entry[key] for key in BATCH_KEYS)
    if not isinstance(name, str):
        raise ValueError(f"custom_id {name!r:.60} must be text")
    if method != "POST" or url not in SCHEMAS:
        raise ValueError(f"method {method!r:.20} and url {url!r:.60} must be POST and one of {', '.join(SCHEMAS)}")
    if not isinstance(body, dict):
        raise ValueError(f"body {body!r:.60} must be an object")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    return PromptLine(name, None, None, {} if limit is None else {"max_tokens": limit}, body, url)


def check_defaults(config: DecodeConfig) -> None:
    """Raises ValueError if a sampling default in `decode` is out of range."""
    try:
        _sampling(with_defaults({}, config))
    except ValueError as error:
        raise ValueError(f"decode: {error}") from error


def make_body(prompt: PromptLine, defaults: DecodeConfig) -> Chat | Completion:
    """Creates the request of a line; unless it is a batch line, `decode` has its defaults.

    Raises:
        ValueError: an option is out of range.
        ApiError: a body is invalid.
    """
    given = None if prompt.body is None else parse_body(prompt.schema, json.dumps(prompt.body).encode(), MAX_IDS)
    if prompt.url is not None:
        assert given is not None, "batch lines have a body"
        return given
    options = with_defaults(prompt.options, defaults)
    if options["max_tokens"] < 1:
        raise ValueError(f"max_tokens={options['max_tokens']} must be at least 1")
    _sampling(options)
    stop = options["stop"]
    options["stop"] = [text for text in ([stop] if isinstance(stop, str) else stop) if text]
    if given is None:  # skips validation: prompt files have the engine's ranges, not those of HTTP requests
        ids = None if prompt.ids is None else np.array(prompt.ids, dtype=object)
        return Completion.model_construct(prompt=prompt.text if ids is None else ids, **options)
    if isinstance(given, Chat) and (best := options.pop("logprobs", None)) is not None:
        options |= {"logprobs": True, "top_logprobs": best}
    return given.model_copy(update=options)


def _sampling(options: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(**{name: value for name, value in options.items() if name in PARAMETERS})


class RequestDigests:
    """Computes digests for result lines: 16 hex digits over prompt, options, model, KV dtype and policy."""

    def __init__(self, config: Config) -> None:
        self._defaults = with_defaults({}, config.decode)
        self._model = asdict(config.model) | {"path": config.model.path and str(Path(config.model.path).resolve())}
        if config.model.load == "random":
            self._model["seed"] = config.seed
        self._config = config

    def digest(self, prompt: PromptLine) -> str:
        config = self._config
        what: list[Any] = [prompt.text, prompt.ids, self._defaults | dict(prompt.options), self._model]
        if prompt.body is not None:
            what.append([prompt.id, prompt.url, prompt.body, self._template])
        if config.kv.dtype != "auto":  # lossy
            what.append(config.kv.dtype)
        if config.attention.policy != "dense":
            # The cache decides which keys share a block, and the layout from which blocks a rank selects.
            local = [config.layout.mode, config.layout.kvp] if config.attention.choice == "local" else []
            what.append([asdict(config.attention), config.blocks.page, config.blocks.append, local])
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]

    @cached_property
    def _template(self) -> str | None:
        template = self._config.serve.chat_template
        return template and read_text(Path(template))


def existing_results(config: Config, prompts: Sequence[PromptLine]) -> np.ndarray:
    """Finds error-free results that `decode.output` already has; none without `decode.resume`.

    Returns:
        Byte offset of each prompt's result, -1 if there is none, int64 [n].

    Raises:
        ValueError: the run would lose content of the file: results of other requests, something other than results, or
            any content without `decode.resume`.
    """
    path, offsets = Path(str(config.decode.output)), np.full(len(prompts), -1)
    if config.decode.output is None or not path.exists() or not path.stat().st_size:
        return offsets
    name = f"decode.output={path}"
    if not config.decode.resume:
        raise ValueError(f"{name} exists: set decode.resume=true to keep its results and run the rest, or move it away")
    digests = RequestDigests(config)
    known = np.fromiter(((_hash(p.id), int(digests.digest(p), 16)) for p in prompts), np.dtype("q,Q"), len(prompts))
    order = np.argsort(known["f0"], kind="stable")
    keys = known["f0"][order]
    with path.open("rb") as file:
        end = 0
        for number, text in enumerate(file, 1):
            begin, end = end, end + len(text)
            try:
                key, request, served = _read_line(parse_json(text.decode()))
                at = int(np.searchsorted(keys, _hash(key)))
            except (ValueError, TypeError, KeyError):
                torn = not text.endswith(b"\n") and any(_is_torn(text, prompt.id) for prompt in prompts)
                if text == b"\n" or torn:
                    continue
                raise ValueError(f"{name}, line {number}, is not a result: move the file away") from None
            if at == len(keys) or keys[at] != _hash(key):
                raise ValueError(f"{name} has a result {key!r}, but decode.prompts has no such id: move the file away")
            if request != f"{known['f1'][order[at]]:016x}":
                raise ValueError(
                    f"{name} has a result {key!r} of another prompt, or one decoded with other settings or another "
                    "model: use unique prompt ids, restore the settings, or move the file away"
                )
            if served:
                offsets[order[at]] = begin
    return offsets


def _read_line(line: dict[str, Any]) -> tuple[str | int, str, bool]:
    if "custom_id" in line:
        return line["custom_id"], line["id"].removeprefix(BATCH_ID), line["response"]["status_code"] == SERVED
    return line["id"], line["request"], line["finish_reason"] in ("stop", "length")


def _is_torn(text: bytes, name: str | int) -> bool:
    """Returns whether a line may be a prompt's result that was only partly written."""
    content = json.dumps(name, ensure_ascii=False)
    heads = f'{{"id": {content}, "prompt_tokens": ', f'{{"custom_id": {content}, "id": "{BATCH_ID}'
    return any(
        text.startswith(head) or head.startswith(text) for head in (h.encode(errors="backslashreplace") for h in heads)
    )


def _line(result: dict[str, Any]) -> str:
    return json.dumps(result, ensure_ascii=False) + "\n"


class ResultFile:
    """Writes results as requests finish, and sorts them in the order of the prompts at the end.

    The file is locked for this run until it is closed or the process ends.

    Args:
        config: config of the run; with `decode.output=None` nothing is written.
        prompts: all prompts of the run, in order.

    Attributes:
        count: number of prompts with a result.

    Raises:
        ValueError: as in `existing_results`, or the file is not writable.
    """

    def __init__(self, config: Config, prompts: Sequence[PromptLine]) -> None:
        self._path = None if config.decode.output is None else Path(config.decode.output)
        self.prompts, self._digests = prompts, RequestDigests(config)
        self._running: dict[str | int, tuple[int, str]] = {}  # index and digest of unfinished prompts, by id
        policy = config.attention.policy
        self._lossy = None if policy == "dense" else f"{policy} (lossy)"
        self._file: TextIO | None = None
        self._end = 0  # size of the file in bytes
        try:
            self._file = None if self._path is None else claim(self._path)
            self._offsets = existing_results(config, prompts)  # byte offsets of results; -1: none
            self.count = self._served = int(np.count_nonzero(self._offsets >= 0))
            self._rewrite()  # drops errors and a partly written last line
        except (OSError, ValueError) as error:
            if self._file:
                self._file.close()
            if isinstance(error, ValueError):
                raise
            raise ValueError(f"decode.output={self._path} cannot be written: {error.strerror}") from error

    @property
    def remaining(self) -> Iterator[PromptLine]:
        """Yields the prompts without a result; `add` accepts only prompts that were yielded."""
        for number, prompt in enumerate(self.prompts):
            if self._offsets[number] < 0:
                self._running[prompt.id] = number, self._digests.digest(prompt)
                yield prompt

    def add(self, name: str | int, output: RequestOutput) -> None:
        """Writes the result of a prompt; raises RankError if that fails."""
        line: dict[str, Any] = {
            "id": name,
            "prompt_tokens": output.prompt_tokens,
            "token_ids": list(output.token_ids),
            "text": output.text,
            "finish_reason": output.finish_reason,
            "request": self._running[name][1],
        }
        if output.reason is not None:
            line["reason"] = output.reason
        if output.logprobs:
            line["logprobs"] = [{"logprob": entry.sampled, "top_logprobs": entry.best} for entry in output.logprobs]
        if self._lossy is not None:
            line["attention"] = self._lossy
        self._add(name, line)

    def add_response(self, name: str | int, status: int, body: dict[str, Any]) -> None:
        response = {"status_code": status, "body": body}
        line = {"custom_id": name, "id": f"{BATCH_ID}{self._running[name][1]}", "response": response, "error": None}
        self._add(name, line)

    def _add(self, name: str | int, line: dict[str, Any]) -> None:
        text = _line(line)
        try:
            if self._file:
                self._file.write(text)
                self._file.flush()
        except OSError as error:
            raise self._write_error(error) from error
        number, _ = self._running.pop(name)
        self._offsets[number] = self._end
        self._end += len(text.encode(errors="backslashreplace"))
        self._served += _read_line(line)[2]
        self.count += 1

    def close(self) -> None:
        """Sorts the results; raises RankError if that fails."""
        try:
            self._rewrite()
            if self._file:
                self._file.close()
        except OSError as error:
            raise self._write_error(error) from error

    def _rewrite(self) -> None:
        """Rewrites the file with the existing results in the order of the prompts."""
        if self._path is None or self._file is None:
            return
        offsets = np.full_like(self._offsets, -1)

        def ordered() -> Iterator[str]:
            self._end = 0
            with Path(str(self._path)).open("rb") as old:
                for number in np.flatnonzero(self._offsets >= 0):
                    old.seek(self._offsets[number])
                    text = old.readline().removesuffix(b"\n") + b"\n"
                    offsets[number] = self._end
                    self._end += len(text)
                    yield text.decode()

        new = replace(self._path, ordered())
        self._offsets = offsets
        self._file.close()
        self._file = new

    def _write_error(self, error: OSError) -> RankError:
        return RankError(
            f"decode.output={self._path} cannot be written: {error.strerror}; {self._served} of {len(self.prompts)} "
            "results are complete; decode.resume=true runs the rest"
        )
