"""A checkpoint's tokenizer and its chat template: texts and conversations to token ids, and back."""

from __future__ import annotations

import json
import re
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from helix.library import import_transformers
from helix.tokenizer import load_tokenizer
from launch.serving.errors import ApiError
from launch.serving.schemas import Message, Tool

KEPT_BYTES = 1 << 28  # of segments whose ids are kept, 4 bytes a token
SHORT = 64  # characters; shorter segments are not worth keeping
DENSE = 16  # characters of a token, at which a text is counted before it is read whole
COUNTED = 1 << 14  # characters at a time
# Arguments of `apply_chat_template` that are not the template's.
TAKEN = ("conversation", "messages", "tools", "chat_template", "tokenize", "return_dict", "add_generation_prompt")
# Around special tokens, where tokenizers differ in what they strip and prefix.
PROBES = ("a b", " a", "a ", "\n\n", "é🙂", "1 23", "")


class Tokens:
    """The tokenizer of a checkpoint directory; its methods may be called from any thread.

    Attributes:
        tokenizer: the transformers library's; None where the directory has none.
        added: its own tokens, such as ends of turns, by their texts.

    Raises:
        ValueError: it cannot be read.
    """

    def __init__(self, path: str | None) -> None:
        if path is not None and "torch" not in sys.modules:  # 335 MB that nobody needs here
            import_transformers()
        self.tokenizer = load_tokenizer(path)
        self._segments: OrderedDict[str, np.ndarray] = OrderedDict()
        self._held = 0  # bytes of these
        self._special: re.Pattern[str] | None = None
        self.added: dict[str, int] = {}
        self._lock = Lock()
        if self.tokenizer is not None:
            backend = self.tokenizer.backend_tokenizer
            backend.no_truncation()
            backend.no_padding()
            self.added = {token.content: i for i, token in self.tokenizer.added_tokens_decoder.items()}
            longest_first = sorted(self.added, key=len, reverse=True)
            pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
            self._special = pattern if self._falls_into_segments(pattern) else None

    @property
    def has_template(self) -> bool:
        return self.tokenizer is not None and bool(self.tokenizer.chat_template)

    @property
    def template(self) -> str:
        """The template of a chat, of the first that there are; empty without one."""
        template = self.tokenizer.chat_template if self.tokenizer is not None else None
        if isinstance(template, dict):
            return str(template.get("default") or next(iter(template.values()), ""))
        return template or ""

    def encode(self, text: str, most: int, special: bool = True) -> np.ndarray:
        """The ids [n] int32 of a text, with what the tokenizer puts around it where `special`.

        Raises:
            ApiError: they are far more than `most`.
        """
        self._check_length(text, most, "prompt")
        return self._whole(text, special)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._needed().decode(ids))

    def token_text(self, token: int) -> str:
        """The text of one token by itself; its number where there is no tokenizer."""
        return str(token) if self.tokenizer is None else str(self.tokenizer.decode([token]))

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, more: Mapping[str, Any] | None, most: int
    ) -> tuple[np.ndarray, str]:
        """The ids [n] int32 of a conversation up to where the answer begins, and its text.

        Raises:
            ApiError: there is no template, or it cannot take this conversation, or its ids are far more than `most`.
        """
        tokenizer = self._needed()
        if not self.has_template:
            raise ApiError(
                400, "the model has no chat template: continue texts with /v1/completions", code="no_chat_template"
            )
        more = dict(more or {})
        if taken := sorted(more.keys() & set(TAKEN)):
            raise ApiError(
                400, f"chat_template_kwargs has {taken[0]}, which is no variable", param="chat_template_kwargs"
            )
        conversation = [_plain(message) for message in messages]
        given = [tool.model_dump(exclude_none=True) for tool in tools] if tools else None

        try:
            text = tokenizer.apply_chat_template(
                conversation, tools=given, tokenize=False, add_generation_prompt=True, **more
            )
        except Exception as error:  # a template is a program, and says so in whatever way it likes
            what = " ".join(str(error).split())
            raise ApiError(400, f"the chat template refuses the messages: {what:.300}", param="messages") from error
        self._check_length(text, most, "messages")
        return self.encode_segments(text), text

    def encode_segments(self, text: str) -> np.ndarray:
        """The ids [n] int32 of a text whose special tokens are written out; what was tokenized before is looked up."""
        if self._special is None:
            return self._whole(text, False)
        parts, end = [], 0
        for found in self._special.finditer(text):
            parts += [self._segment(text[end : found.start()]), _array([self.added[found[0]]])]
            end = found.end()
        return np.concatenate([*parts, self._segment(text[end:])])

    def _segment(self, text: str) -> np.ndarray:
        if len(text) < SHORT:
            return self._whole(text, False)
        with self._lock:
            if (known := self._segments.get(text)) is not None:
                self._segments.move_to_end(text)
                return known
        ids = self._whole(text, False)
        with self._lock:
            if text not in self._segments:
                self._segments[text] = ids
                self._held += ids.nbytes + len(text)
            while self._held > KEPT_BYTES:
                old, gone = self._segments.popitem(last=False)
                self._held -= gone.nbytes + len(old)
        return ids

    def _whole(self, text: str, special: bool) -> np.ndarray:
        # Not the tokenizer itself: it changes the backend's settings, which another thread may be using.
        return _array(self._needed().backend_tokenizer.encode(text, add_special_tokens=special).ids)

    def _falls_into_segments(self, pattern: re.Pattern[str]) -> bool:
        """Whether segments between special tokens, tokenized apart, have the ids of the whole."""
        texts = [f"{a}{token}{b}" for token in self.added for a in PROBES for b in PROBES[:4]]
        texts.append("".join(f"{token}{a}" for token in self.added for a in PROBES))
        self._special = pattern
        apart = [self.encode_segments(text) for text in texts]
        self._special = None
        return all(np.array_equal(a, self.encode_segments(t)) for a, t in zip(apart, texts, strict=True))

    def _check_length(self, text: str, most: int, param: str) -> None:
        """Refuses what is far too long after a part of it: 64 MiB would be a minute, and gigabytes.

        Cuts change how a text falls into tokens, but not by half of them.
        """
        if len(text) <= DENSE * most:
            return
        count = 0
        for begin in range(0, len(text), COUNTED):
            count += len(self._whole(text[begin : begin + COUNTED], False))
            if count > 2 * most:
                what = f"the prompt's {len(text)} characters are more than {count} tokens, and there is room for {most}"
                raise ApiError(400, what, param=param, code="context_length_exceeded")

    def _needed(self) -> Any:
        if self.tokenizer is None:
            raise ApiError(400, "the model has no tokenizer: give prompts as token ids", code="no_tokenizer")
        return self.tokenizer


def read_defaults(path: str | None) -> dict[str, Any]:
    """What `generation_config.json` of a checkpoint says of sampling."""
    file = None if path is None else Path(path) / "generation_config.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file is not None and file.exists() else {}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: content[name] for name in names if content.get(name) is not None}


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates take it: text in one piece, arguments of tool calls as objects."""
    plain = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        plain["content"] = "".join(part.text for part in message.content)
    for call in plain.get("tool_calls", ()):
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except ValueError:
            raise ApiError(
                400, f"arguments of {call['function']['name']!r:.80} are no JSON", param="messages.tool_calls"
            ) from None
    return plain


def _array(ids: Sequence[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)
