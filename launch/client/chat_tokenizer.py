"""A checkpoint's tokenizer and chat template: text and conversations to token ids, and back."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from helix.files import read_json, read_text
from helix.sampling_params import OPTIONS
from helix.tokenizer import Tokenizer, default_template, load_tokenizer, without_tokenizer
from launch.client.chat_history import (
    CALL_MARKS,
    EFFORT_VARIABLES,
    TAGGED_CALLS,
    TOOL_VARIABLES,
    HistoryFormat,
    Message,
    find_history_format,
    fit,
)
from launch.client.chat_template import CUT, choose, render, variables
from launch.client.errors import ApiError
from launch.client.known_prefixes import KnownPrefixes
from launch.client.schemas import ChatMessage, Completion, Conversation, Tool, parse_body

CACHE_BYTES = 1 << 28  # of cached segments and their ids, 4 bytes per token
MIN_CACHED_CHARS = 64  # characters; shorter segments are not cached
MAX_CHARS_PER_TOKEN = 16  # beyond this many characters per allowed token, count tokens before encoding the whole text
COUNT_CHARS = 1 << 14  # characters per piece of that count
# Template variables that other request fields set, functions that templates may call, and parameters of transformers'
# `apply_chat_template`, which templates there cannot read as variables.
RESERVED_VARIABLES = {
    "messages", "documents", "add_generation_prompt", "raise_exception", "strftime_now", *TOOL_VARIABLES,
    "conversation", "chat_template", "continue_final_message", "tokenize", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs",
}  # fmt: skip
ACTION_LISTS = "directly-answer"  # the action of Command R's templates that asks for a text, from another prompt
# Texts to put around special tokens: tokenizers differ in stripping spaces and adding prefixes there.
PROBES = ("a b", " a", "a ", "\n\n", "é🙂", "1 23", "")
# Settings of transformers' `generate` that a checkpoint may have and that are not read here.
GENERATION_ONLY = (
    "max_new_tokens", "min_new_tokens", "num_beams", "stop_strings", "no_repeat_ngram_size", "bad_words_ids",
    "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
    "exponential_decay_length_penalty", "length_penalty", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h",
    "guidance_scale", "penalty_alpha", "watermarking_config",
)  # fmt: skip


class EncodedChat(NamedTuple):
    """A conversation up to the answer.

    Attributes:
        ids: [n] int32.
        left_out: fields of messages that the text does not have as they were sent.
        last_message_start: number of tokens before the content of the user's last message; 0: not asked for or unknown.
    """

    ids: np.ndarray
    text: str
    left_out: tuple[str, ...]
    last_message_start: int = 0


class ChatTokenizer:
    """Tokenizer of a checkpoint directory; thread-safe.

    Args:
        template: file with the chat template; None: the checkpoint's.

    Attributes:
        backend: None if the checkpoint has no tokenizer.
        added: ids of added tokens, such as end-of-turn tokens, by text.
        special: texts of the added tokens that are special.

    Raises:
        ValueError: the tokenizer cannot be read.
    """

    def __init__(self, path: str | None, template: str | None = None) -> None:
        self.backend = load_tokenizer(path)
        self._lacks = without_tokenizer(path)
        self._token_texts: dict[int, str] = {}  # cache: logprobs look up single tokens by the hundred thousand
        self._segments: OrderedDict[str, np.ndarray] = OrderedDict()
        self._known = KnownPrefixes[str]()
        self._inner = ""  # all added tokens without their last characters
        self._cached_bytes = 0
        self._special: re.Pattern[str] | None = None
        self.added: dict[str, int] = {}
        self.special: frozenset[str] = frozenset()
        self._lock = Lock()
        if self.backend is not None:
            if template is not None:
                self.backend.chat_templates = {"default": read_text(Path(template))}
            added_tokens = self.backend.added_tokens
            self.added = {token.content: i for i, token in added_tokens.items()}
            self.special = frozenset(token.content for token in added_tokens.values() if token.special)
            self._inner = " ".join(text[:-1] for text in self.added)
            longest_first = sorted(self.added, key=len, reverse=True)
            pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
            self._special = pattern if self._encodes_by_segment(pattern) else None
            for text in self.backend.chat_templates.values():
                self._history_format(text)  # rendering conversations takes longer than a short request

    @property
    def has_template(self) -> bool:
        return bool(self.template)

    @property
    def template(self) -> str:
        return default_template(self.backend.chat_templates) if self.backend is not None else ""

    def encode(self, text: str, limit: int, special: bool = True) -> np.ndarray:
        """Encodes a text to ids [n] int32; `special` adds BOS and EOS as the tokenizer does.

        Raises:
            ApiError: the text has far more than `limit` tokens.
        """
        self._check_length(text, limit, "prompt")
        return self._encode(text, special)

    def decode(self, ids: Sequence[int] | np.ndarray, special: bool = True) -> str:
        return self._require_backend().decode(ids, skip_special_tokens=not special)

    def token_text(self, token: int) -> str:
        """Decodes a single token; without a tokenizer, returns its number."""
        if token not in self._token_texts:
            self._token_texts[token] = self._token_text(token)
        return self._token_texts[token]

    def _token_text(self, token: int) -> str:
        if self.backend is None:
            return str(token)
        text = self.backend.decode([token])
        if str(self.backend.id_to_token(token)).startswith("▁"):  # SentencePiece strips the first leading space
            text = self.backend.decode([token, token])[len(text) :]
        return text

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of a single token, which may be part of a UTF-8 character."""
        text = self.token_text(token)
        if "\ufffd" in text:
            name = str(self._require_backend().id_to_token(token))
            if found := re.fullmatch("<0x([0-9A-F]{2})>", name):
                return bytes.fromhex(found[1])
            letters = byte_decoder()
            if all(letter in letters for letter in name):
                return bytes(letters[letter] for letter in name)
        return text.encode("utf-8", errors="surrogatepass")

    def encode_chat(
        self, chat: Conversation, tools: Sequence[Tool] | None, limit: int, finds_last_message: bool = False
    ) -> EncodedChat:
        """Encodes a conversation up to the answer.

        Raises:
            ApiError: there is no chat template, it rejects the conversation, or there are far more than `limit` ids.
        """
        tokenizer = self._require_backend()
        if not self.has_template:
            raise ApiError(
                400,
                "the model has no chat template: set serve.chat_template=FILE, or send prompts to /v1/completions",
                code="no_chat_template",
            )
        tool_dicts = [tool.model_dump(exclude_none=True) for tool in tools] if tools else None

        try:
            template = choose(tokenizer.chat_templates, tool_dicts is not None)
            template_variables = variables(template)
        except Exception as error:  # a jinja2 error, or several templates without a default
            what = f"the chat template cannot be read: {_one_line(error)}"
            raise ApiError(400, what, code="no_chat_template") from error
        form = self._history_format(template)
        if chat.must_call_tool and not form.tools:
            tool_dicts = None  # the structured output enforces the call
        if tool_dicts and not form.tools:
            raise ApiError(400, "tools are given, but the chat template does not use them", param="tools")
        if tool_dicts and ACTION_LISTS in template and not chat.must_call_tool:
            what = "tools are given, but the chat template has each answer be a list of actions, never text, as "
            what += "Command R's do: require a call, leave tools out, or set serve.chat_template=FILE"
            raise ApiError(400, what, param="tools")
        given = [_to_template_message(message) for message in chat.message_list]
        messages, tool_variables = fit(given, tool_dicts, form)
        more = tool_variables | {"documents": None, "add_generation_prompt": chat.adds_generation_prompt}
        more |= tokenizer.special_tokens | _variables(chat, template_variables - RESERVED_VARIABLES, template_variables)
        try:
            # Arguments may have half a surrogate pair as an escape, which tokenizers cannot read otherwise.
            text = render(template, messages, chat.continue_final_message, more)
            text = text.encode(errors="backslashreplace").decode()
        except Exception as error:  # templates are programs and may raise anything
            what = f"the chat template rejects the messages: {_one_line(error)}"
            raise ApiError(400, what, param="messages") from error
        self._check_length(text, limit, "messages")
        ids = self.encode_segments(text)
        begin = self._last_message_start(template, messages, more, text) if finds_last_message else 0
        rest = len(self.encode_segments(text[begin:])) if begin else len(ids)
        return EncodedChat(ids, text, _left_out(given, form), max(len(ids) - rest, 0))

    def _last_message_start(
        self, template: str, messages: list[dict[str, Any]], given: Mapping[str, Any], text: str
    ) -> int:
        """Returns the characters of the rendered `text` before the content of the user's last message; 0: unknown."""
        last = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=0)
        marked = [*messages[:last], messages[last] | {"content": CUT.strip()}]
        try:
            rendered = render(template, marked, False, {**given, "add_generation_prompt": False})
        except Exception:  # a template may refuse a conversation that ends here
            return 0
        before, found, _ = rendered.partition(CUT.strip())
        return len(before) if found and text.startswith(before) else 0

    def _history_format(self, template: str) -> HistoryFormat:
        special_tokens = frozenset(self._require_backend().special_tokens.items())
        begin, end = (mark if mark in self.added else "" for mark in CALL_MARKS)
        describes_tags = all(mark in template for mark in ("<tool_call>", "</tool_call>", "arguments"))
        marks = TAGGED_CALLS if describes_tags else (f"{begin}[", ", ", f"]{end}")
        return find_history_format(template, special_tokens, marks)

    def encode_segments(self, text: str) -> np.ndarray:
        """Encodes rendered text, including special tokens, to ids [n] int32.

        Caches the segments between special tokens, and long texts up to the last one: looking for special tokens, and
        for their segments, takes longer than comparing texts.
        """
        if self._special is None:
            return self._encode(text, False)
        known, ids = self._known.find(text)
        parts, end = [ids], len(known)
        found = [*self._special.finditer(text, end)]
        for token in found:
            parts += [self._segment(text[end : token.start()]), _array([self.added[token[0]]])]
            end = token.end()
        # Behind a token that is within another one, an equal text may have that one.
        last = next((i for i in reversed(range(len(found))) if found[i][0] not in self._inner), None)
        if last is not None:
            self._known.add(text[: found[last].end()], np.concatenate(parts[: 2 * last + 3]), known)
        return np.concatenate([*parts, self._segment(text[end:])])

    def _segment(self, text: str) -> np.ndarray:
        if len(text) < MIN_CACHED_CHARS:
            return self._encode(text, False)
        with self._lock:
            if (hit := self._segments.get(text)) is not None:
                self._segments.move_to_end(text)
                return hit
        ids = self._encode(text, False)
        with self._lock:
            if text not in self._segments:
                self._segments[text] = ids
                self._cached_bytes += ids.nbytes + len(text)
            while self._cached_bytes > CACHE_BYTES:
                old, evicted_ids = self._segments.popitem(last=False)
                self._cached_bytes -= evicted_ids.nbytes + len(old)
        return ids

    def _encode(self, text: str, special: bool) -> np.ndarray:
        return _array(self._require_backend().encode(text, special))

    def _encodes_by_segment(self, pattern: re.Pattern[str]) -> bool:
        """Returns whether encoding the segments between special tokens separately gives the ids of the whole text."""
        texts = [f"{a}{token}{b}" for token in self.added for a in PROBES for b in PROBES[:4]]
        texts.append("".join(f"{token}{a}" for token in self.added for a in PROBES))
        self._special = pattern
        split = [self.encode_segments(text) for text in texts]
        self._special = None
        return all(np.array_equal(a, self.encode_segments(t)) for a, t in zip(split, texts, strict=True))

    def _check_length(self, text: str, limit: int, param: str) -> None:
        """Refuses a text that is far too long without encoding all of it: 64 MiB would take a minute, and gigabytes.

        Encoding in pieces changes the number of tokens, but not by a factor of two.
        """
        if len(text) <= MAX_CHARS_PER_TOKEN * limit:
            return
        count = 0
        for begin in range(0, len(text), COUNT_CHARS):
            count += len(self._encode(text[begin : begin + COUNT_CHARS], False))
            if count > 2 * limit:
                what = (
                    f"the prompt's {len(text)} characters are more than {count} tokens, but there is room for {limit}"
                )
                raise ApiError(400, what, param=param, code="context_length_exceeded")

    def _require_backend(self) -> Tokenizer:
        if self.backend is None:
            raise ApiError(400, f"the model has {self._lacks}: pass prompts as token ids", code="no_tokenizer")
        return self.backend


def read_defaults(path: str | None) -> dict[str, Any]:
    """Reads the checkpoint's sampling defaults from `generation_config.json`.

    Raises:
        ValueError: the file cannot be read, or a value would be invalid in a request.
    """
    return sampling_defaults(_generation_config(path), f"{path}/generation_config.json")


def sampling_defaults(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the sampling defaults in a `generation_config.json`'s content; raises ValueError as `read_defaults`."""
    names = (name for name, option in OPTIONS.items() if option.from_checkpoint)
    found = {name: content[name] for name in names if content.get(name) is not None}
    try:
        parse_body(Completion, json.dumps({"prompt": ""} | found).encode())
    except ApiError as error:
        raise ValueError(f"{where}: {error.message}") from error
    return found


def unread_defaults(path: str | None) -> dict[str, Any]:
    """Reads what else in `generation_config.json` changes what transformers generates, but nothing here."""
    content = _generation_config(path)
    return {name: content[name] for name in GENERATION_ONLY if content.get(name) not in (None, 0, 1, [], "")}


def _generation_config(path: str | None) -> dict[str, Any]:
    file = None if path is None else Path(path) / "generation_config.json"
    return read_json(file) if file is not None and file.exists() else {}


def _variables(chat: Conversation, free: frozenset[str], template_variables: frozenset[str]) -> dict[str, Any]:
    """Collects the template variables that a request sets.

    Args:
        free: variables that requests may set by name.
        template_variables: all variables that the template reads.

    Raises:
        ApiError: 400, the template does not read one of the request's variables.
    """
    found: dict[str, Any] = dict(chat.chat_template_kwargs or {})
    if unread := sorted(found.keys() - free):
        what = f"chat_template_kwargs has {unread[0]!r:.80}, but the chat template's variables are {_names(free)}"
        raise ApiError(400, what, param="chat_template_kwargs")
    if chat.documents is not None:
        if "documents" not in template_variables:
            raise ApiError(400, "documents are given, but the chat template does not use them", param="documents")
        found["documents"] = chat.documents
    if chat.reasoning_effort is not None:
        names = {name for name in EFFORT_VARIABLES if name in free}
        if not names or "reasoning_effort" in found:
            twice = "is also in chat_template_kwargs"
            what = twice if names else f"is given, but the chat template's variables are {_names(free)}"
            raise ApiError(400, f"reasoning_effort {what}", param="reasoning_effort")
        effort, switch = chat.reasoning_effort, chat.reasoning_effort != "none"
        found = {name: effort if name == "reasoning_effort" else switch for name in names} | found
    return found


def _names(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "none"


@lru_cache
def byte_decoder() -> dict[str, int]:
    """Maps the characters of byte-level vocabularies to bytes."""
    # GPT-2's table (openai/gpt-2, encoder.py): printable bytes map to themselves, the others follow Latin-1.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _one_line(error: Exception) -> str:
    return f"{' '.join(str(error).split()):.300}"


def _to_template_message(message: ChatMessage) -> dict[str, Any]:
    """Converts a message for templates: content as one text, call arguments as objects, developers as the system.

    Arguments that are no JSON object stay text: if a model wrote them once, its conversation must go on.
    """
    plain = message.model_dump(exclude_none=True)
    if not isinstance(message.content, str):
        plain["content"] = message.text
    if message.role == "developer":
        plain["role"] = "system"
    for call in plain.get("tool_calls", ()):
        text = call["function"]["arguments"]
        try:
            value = json.loads(text.strip() or "{}")
        except (ValueError, RecursionError):
            value = text
        if value in (None, []):  # some clients write no arguments so
            value = {}
        call["function"]["arguments"] = value if isinstance(value, dict) else text
    return plain


def _left_out(messages: Sequence[Message], form: HistoryFormat) -> tuple[str, ...]:
    calling = [message for message in messages if message.get("tool_calls")]
    arguments = (call["function"]["arguments"] for message in calling for call in message["tool_calls"])
    names = ["arguments"] if any(isinstance(one, str) for one in arguments) else []
    if form.drops_text and any((message.get("content") or "").strip() for message in calling):
        names.append("content")
    return tuple(names)


def _array(ids: Sequence[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)
