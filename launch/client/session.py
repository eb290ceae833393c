"""From a request body to its answer: the pipeline that the HTTP server, `LLM` and prompt files share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from glob import escape
from pathlib import Path
from typing import Any

from helix.config import ServeConfig
from launch.answers.answer_parser import JsonCallParser, Parser
from launch.answers.chat_formats import THINKING_FIELD, ChatFormat
from launch.answers.grammars import starts_with_think_mark
from launch.answers.mark_guard import marks_of
from launch.client.answer import Answer
from launch.client.chat_tokenizer import ChatTokenizer, read_defaults, unread_defaults
from launch.client.choice import Choice
from launch.client.engine_client import EngineClient
from launch.client.engine_messages import EngineInfo
from launch.client.errors import ApiError
from launch.client.format_detection import DetectedFormat, detect_chat_format
from launch.client.grammar_compiler import GrammarCompiler
from launch.client.input_processor import ProcessedPrompt, compile_grammar, process_prompt
from launch.client.sampling import make_requests
from launch.client.schemas import MAX_IGNORED_NAMES, Chat, Completion

LOG = logging.getLogger(f"helix.{__name__}")


class Session:
    """Submits request bodies to a model that ranks serve, and returns their answers.

    Attributes:
        name: the model's name in the API.
        tokenizer: set by `load`.
        detected: the chat format, and how it was chosen; set by `load`.
        compiler: see `compiler_for`.
        defaults: the checkpoint's sampling defaults, for HTTP requests.
        unread_defaults: what else its `generation_config.json` sets for transformers.
    """

    def __init__(self, serve: ServeConfig, engine_client: EngineClient) -> None:
        self.engine_client = engine_client
        self.name = serve.name or "model"
        self.tokenizer: ChatTokenizer
        self.detected: DetectedFormat
        self.compiler: GrammarCompiler | None = None
        self.defaults: Mapping[str, Any] = {}
        self.unread_defaults: Mapping[str, Any] = {}
        self._serve = serve

    def load(self, model: str | None) -> None:
        """Reads the model's tokenizer, chat template and sampling defaults; works before a job serves it.

        Args:
            model: checkpoint directory; None: a shape without a checkpoint.

        Raises:
            ValueError: a file cannot be read, or there is no chat format `serve.dialect`.
        """
        self.name = self._serve.name or (Path(model).resolve().name if model else "model")
        self.tokenizer = ChatTokenizer(model, self._serve.chat_template)
        self.defaults, self.unread_defaults = read_defaults(model), unread_defaults(model)
        for schema in (Chat, Completion):  # build validators here: at import it slows all commands
            schema.model_rebuild()
        self.detected = detect_chat_format(self.tokenizer, model, self._serve.dialect)
        LOG.info("chat format: %s (%s)", self.detected.name or "none", self.detected.reason)

    def compiler_for(self, engine_info: EngineInfo) -> GrammarCompiler | None:
        """Returns the grammar compiler, created on demand; None: the model does not support structured outputs."""
        if self.compiler is None and engine_info.guided and engine_info.model is not None:
            self.compiler = GrammarCompiler(
                Path(engine_info.model, "tokenizer.json"), engine_info.vocab, engine_info.eos
            )
        return self.compiler

    @cached_property
    def chat_format(self) -> ChatFormat | None:
        return self.detected.chat_format

    @cached_property
    def _marks(self) -> Mapping[int, str]:
        return {} if self.chat_format is None else marks_of(self.chat_format.fields, self.tokenizer.added)

    @cached_property
    def _hidden(self) -> frozenset[int]:
        """Special tokens that are no marks of the chat format."""
        return frozenset(self.tokenizer.added[text] for text in self.tokenizer.special) - self._marks.keys()

    async def open(
        self,
        body: Chat | Completion,
        *,
        defaults: Mapping[str, Any] | None = None,
        parse_output: bool = True,
        processed: ProcessedPrompt | None = None,
        cache_salt: str | None = None,
        request_id: str = "",
    ) -> Answer:
        """Submits the choices of a body; the caller must close the answer.

        Args:
            defaults: sampling parameters that the body leaves unset; None: the checkpoint's.
            parse_output: whether to split a chat's answer into reasoning, text and calls.
            processed: result of `process_prompt`, which takes long for large bodies; None: it runs here.
            cache_salt: share cached prefixes only with requests that have the same salt.

        Raises:
            ApiError: the request is refused.
        """
        engine_info = self.engine_client.refuse_unless_ready()
        if processed is None:
            processed = process_prompt(self.tokenizer, self.chat_format, body, engine_info)
        grammar, unenforced = await compile_grammar(processed.grammar_spec, self.compiler_for(engine_info), engine_info)
        assert body.model_extra is not None, "schemas collect unknown fields"
        body.model_extra.update(dict.fromkeys(unenforced[:MAX_IGNORED_NAMES]))
        defaults = self.defaults if defaults is None else defaults
        requests = make_requests(body, processed, defaults, engine_info, grammar, cache_salt)
        changed = asyncio.Event()
        parsers = [self._parser(body, processed) if parse_output else None for _ in requests]
        # From here on nothing fails before the answer owns the generations.
        generations = self.engine_client.start(requests, changed.set, request_id)
        choices = [
            Choice(index, generation, self.tokenizer, body, self.engine_client.abort, parser, self._marks, self._hidden)
            for index, (generation, parser) in enumerate(zip(generations, parsers, strict=True))
        ]
        return Answer(body, processed, choices, self.tokenizer, changed, request_id, self.name, self._serve.heartbeat_s)

    @property
    def model_names(self) -> list[str]:
        """The names that requests may ask for: the model's own, and its aliases, which may have wildcards."""
        return [self.name, *self._serve.aliases]

    def check_model(self, model: str | None) -> None:
        patterns = (escape(name).replace("[*]", "*") for name in self._serve.aliases)  # of wildcards, only `*` is one
        if model is None or any(fnmatchcase(model, pattern) for pattern in patterns) or model == self.name:
            return
        what = f"model={model!r:.80} is not served: use {' or '.join(self.model_names)}"
        raise ApiError(404, f"{what}; serve.aliases adds names", code="model_not_found")

    async def close(self) -> None:
        if self.compiler is not None:
            await self.compiler.close()

    def _parser(self, body: Chat | Completion, processed: ProcessedPrompt) -> Parser | None:
        if not isinstance(body, Chat):
            return None
        chat_format, turn = self.chat_format, processed.turn or ""
        fields = None if chat_format is None else chat_format.fields
        if fields is not None and starts_with_think_mark(body.structured_output, chat_format) and not turn.strip():
            fields = {name: field for name, field in fields.items() if name != THINKING_FIELD}
        if body.must_call_tool and (chat_format is None or chat_format.calls is None):
            return JsonCallParser(fields, turn, body.forced_function)
        given = [tool.model_dump(exclude_none=True) for tool in body.prompt_tools]
        return Parser(fields, turn, given, body.allows_several_calls)
