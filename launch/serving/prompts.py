"""The model-dependent part of a request: the prompt's token ids, and the grammar of the answer.

Its time grows with the size of the request, and it may run in another process.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from helix.answers.dialects import Dialect, calling, turn_of
from helix.answers.grammars import Parts, of_calls, of_shape
from launch.serving.errors import ApiError
from launch.serving.schemas import Chat, Generation, Tokenize, Tool
from launch.serving.tokens import Tokens


class Form(NamedTuple):
    """The parts of an answer's grammar, and the request field that sets it."""

    param: str
    parts: Parts


def read_chat(
    tokens: Tokens, dialect: Dialect | None, body: Chat, tools: Sequence[Tool], most: int, eos: Collection[int]
) -> tuple[np.ndarray, str, Form | None]:
    """Encodes a chat: the ids [n] int32 of its prompt, the prompt's part of the answer's turn, and the answer's form.

    Raises:
        ApiError: 400, the template refuses it, or it is far longer than `most` tokens.
    """
    ids, text = tokens.encode_chat(body, tools, most)
    begins = body.prompts_answer or body.begun is not None  # else the answer is plain text after a message
    turn = turn_of(dialect.template, text, body.begun) if dialect is not None and begins else ""
    return ids, turn, form_of(tokens, body, eos, dialect, turn)


def ids_of_chat(tokens: Tokens, body: Chat, most: int) -> np.ndarray:
    """Encodes a chat up to the answer: the ids [n] int32 of its prompt; errors as in `Tokens.encode_chat`."""
    return tokens.encode_chat(body, body.shown_tools, most)[0]


def form_of(
    tokens: Tokens, body: Generation, eos: Collection[int], dialect: Dialect | None = None, turn: str = ""
) -> Form | None:
    """Returns the form that a request demands of its answer; None: any text.

    Args:
        eos: the model's end tokens.
        dialect: None for completions.
        turn: the prompt's part of the answer's turn.

    Raises:
        ApiError: 400, the form is too large.
    """
    if isinstance(body, Chat) and body.has_to_call:
        try:
            spoken = calling(dialect, body.named is not None)
            calls = of_calls(spoken, body.callable_tools, body.may_call_again, turn, tokens.added, eos)
        except ValueError as error:
            raise unfollowed("tool_choice", error) from error
        return Form("tool_choice", calls)
    if (shape := body.shape) is None:
        return None
    begun = isinstance(body, Chat) and not body.prompts_answer
    try:
        return Form(shape.param, of_shape(shape, tokens.added, tokens.special, eos, dialect, turn, begun))
    except ValueError as error:
        raise unfollowed(shape.param, error) from error


def unfollowed(param: str, error: ValueError) -> ApiError:
    """Creates the refusal of a form, with the reason."""
    return ApiError(400, f"{param} cannot be followed: {' '.join(str(error).split()):.300}", param=param)


def ids_of(tokens: Tokens, body: Tokenize, max_length: int, most: int) -> bytes:
    """Computes the answer of /tokenize, as JSON."""
    if body.messages is not None:
        ids, _ = tokens.encode_chat(body, body.tools, most)
    else:
        ids = tokens.encode(body.prompt or "", most, body.add_special_tokens)
    return json.dumps({"count": len(ids), "max_model_len": max_length, "tokens": ids.tolist()}).encode()
