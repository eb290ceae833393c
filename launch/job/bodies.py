"""Prompts of a file as requests, and their results: plain ones, conversations and forms, lines of OpenAI's batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from helix.answers.dialects import Dialect, dialect_of
from helix.answers.matcher import BegunGrammar, Grammars
from helix.config import Config
from helix.events.request import Output, Request
from helix.models import DecoderSpec
from launch.client.compiler import written
from launch.client.core import Flight
from launch.client.errors import ApiError
from launch.client.frames import Ready, Submit
from launch.client.prompts import Form, Reading, read, unfollowed
from launch.client.sampling import submits_of
from launch.client.schemas import Chat, Completion, parsed
from launch.client.tokens import Tokens, read_defaults
from launch.inputs.prompts import MOST_IDS, SERVED, PromptLine, ResultFile, to_request
from launch.job.serve import request_of
from launch.serving.answers import answer_of, parsers_of


@dataclass
class BatchLine:
    """A line of a batch while its continuations run: outputs and prompts by the names of their requests, in order."""

    name: str | int
    body: Chat | Completion
    reading: Reading
    outputs: dict[str | int, Output | None] = field(default_factory=dict)
    prompts: dict[str | int, np.ndarray] = field(default_factory=dict)


class Desk:
    """Rank 0's view of a prompt file: its prompts as requests to the engine, and their outputs as results.

    Args:
        tokenizer: that of plain prompts; None if the model has none.

    Attributes:
        refused: number of prompts whose result is a refusal, so far.
    """

    def __init__(self, config: Config, spec: DecoderSpec, tokenizer: Any | None, results: ResultFile) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._results = results
        self._path = config.model.path
        self._model = config.serve.name or Path(self._path or "model").resolve().name
        most, eos = spec.max_positions, tuple(sorted(spec.eos))
        self._ready = Ready(self._path, "", 1, most, most, spec.vocab, most, 1, eos)
        self._lines: dict[str | int, BatchLine] = {}
        self._grammars: dict[str | int, BegunGrammar] = {}
        self._unlimited: set[str | int] = set()
        self.refused = 0

    def requests(self) -> Iterator[Request | Output]:
        """Yields requests for prompts without a result, and outputs of those that are refused, as prompts are read.

        A line of a batch that is refused gets its result at once instead.
        """
        for prompt in self._results.remaining:
            try:
                if prompt.url is not None:
                    made: list[Request | Output] = [*self._of_line(prompt)]
                else:
                    made = [self._of_body(prompt) if prompt.body is not None else self._of(prompt)]
            except (KeyboardInterrupt, SystemExit, MemoryError):
                raise
            except BaseException as error:  # also panics of tokenizers and llguidance: the other prompts go on
                refusal = error if isinstance(error, ApiError) else _unread(error)
                if prompt.url is not None:
                    self._respond(prompt.id, refusal.status, refusal.body())
                    continue
                made = [Output(prompt.id, 0, (), "", "", "error", refusal.message)]
            yield from made

    def fitted(self, request: Request, max_length: int) -> Request:
        """Returns the request, shortened to what the cache has room for if its body has no limit."""
        if request.id not in self._unlimited:
            return request
        self._unlimited.remove(request.id)
        return replace(request, max_new_tokens=max(1, min(request.max_new_tokens, max_length - len(request.prompt))))

    def add(self, output: Output) -> None:
        """Writes the result that a final output completes; raises RankError where it cannot be."""
        grammar = self._grammars.pop(output.id, None)
        if grammar is not None and grammar.mistake is not None and output.finish_reason != "error":
            output = replace(output, finish_reason="error", reason=grammar.mistake)
        line = self._lines.pop(output.id, None)
        if line is None:
            self.refused += output.finish_reason == "error"
            self._results.add(output)
            return
        line.outputs[output.id] = output
        if None not in line.outputs.values():
            self._respond(line.name, *self._answer(line))

    @cached_property
    def _names(self) -> set[str | int]:
        """Ids that the name of one answer of several could have, too."""
        return {prompt.id for prompt in self._results.prompts if str(prompt.id).endswith("]")}

    @cached_property
    def _tokens(self) -> Tokens:
        return Tokens(self._path, self._config.serve.chat_template)

    @cached_property
    def _dialect(self) -> Dialect | None:
        return dialect_of(self._tokens.template)

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        return read_defaults(self._path)

    @cached_property
    def _compiler(self) -> Grammars:
        return Grammars(Path(str(self._path)) / "tokenizer.json", self._ready.vocab, self._ready.eos)

    def _of(self, prompt: PromptLine) -> Request | Output:
        return to_request(prompt, self._config.decode, self._tokenizer)

    def _of_body(self, prompt: PromptLine) -> Request | Output:
        _, reading = self._read(prompt)
        (ids,) = reading.prompts
        request = self._of(replace(prompt, ids=tuple(ids.tolist())))
        if reading.form is None or isinstance(request, Output):
            return request
        written = self._written(reading.form)
        self._grammars[prompt.id] = grammar = self._compiler.begun(written)
        return replace(request, grammar=grammar)

    def _of_line(self, prompt: PromptLine) -> list[Request]:
        body, reading = self._read(prompt)
        if body.stream:
            raise ApiError(400, "stream=true: the answers of a batch come whole", param="stream")
        if body.model not in (None, self._model):
            raise ApiError(404, f"model={body.model!r:.80} is not here: {self._model} is", code="model_not_found")
        written = None if reading.form is None else self._written(reading.form)
        submits = submits_of(body, reading, self._defaults, self._ready, written)
        line, requests = BatchLine(prompt.id, body, reading), []
        for index, submit in enumerate(submits):
            name = prompt.id
            if len(submits) > 1:
                name = f"{name}[{index}]"
                while name in self._names:
                    name = f"{name}[{index}]"
                self._names.add(name)
            request, grammar = request_of(str(name), submit, self._compiler if written is not None else None)
            if grammar is not None:
                self._grammars[name] = grammar
            if not prompt.options and isinstance(body, Chat):
                self._unlimited.add(name)
            sampling = replace(request.sampling, stop_token_ids=body.stop_token_ids or ())
            requests.append(replace(request, id=name, stop=tuple(body.stop or ()), sampling=sampling))
            line.outputs[name], line.prompts[name] = None, submit.ids
            self._lines[name] = line
        return requests

    def _read(self, prompt: PromptLine) -> tuple[Chat | Completion, Reading]:
        body = parsed(prompt.schema, json.dumps(prompt.body).encode(), MOST_IDS)
        return body, read(self._tokens, self._dialect, body, self._ready)

    def _written(self, form: Form) -> str:
        try:
            return written(self._compiler, form.parts)
        except (ValueError, RecursionError) as error:
            raise unfollowed(form.param, ValueError(str(error))) from error

    def _answer(self, line: BatchLine) -> tuple[int, dict[str, Any]]:
        """Returns the status and the body that a server answers with."""
        flights = []
        for output in line.outputs.values():
            assert output is not None, "all have ended"
            flight = Flight(Submit(0, 0, ids=line.prompts[output.id]), None, "", lambda: None)
            for part in output.scored:
                flight.score(part.begin, part.ids, part.values)
            flight.drawn = [*output.output_ids]
            flight.logprobs = [(place.drawn, place.best) for place in output.logprobs]
            flight.end(str(output.finish_reason), output.reason)
            flights.append(flight)
        (changed := asyncio.Event()).set()
        body, reading, tokens = line.body, line.reading, self._tokens
        parsers = parsers_of(body, reading, self._dialect, len(flights))
        answer = answer_of(
            body, reading, flights, parsers, tokens, self._ready.eos, self._model, changed, lambda *of: None
        )  # fmt: skip
        try:
            return SERVED, asyncio.run(answer.whole())
        except ApiError as error:
            return error.status, error.body()

    def _respond(self, name: str | int, status: int, body: dict[str, Any]) -> None:
        self.refused += status != SERVED
        self._results.add_response(name, status, body)


def _unread(error: BaseException) -> ApiError:
    """Creates the refusal of a prompt that cannot be made a request, with the reason."""
    if isinstance(error, ValueError):
        return ApiError(400, f"{' '.join(str(error).split()):.300}")
    return ApiError(500, f"it could not be read: {type(error).__name__}: {' '.join(str(error).split()):.300}")
