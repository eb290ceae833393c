"""The model-dependent part of a request: the prompt's token ids, and the grammar of the answer.

Its time grows with the size of the request, and it may run in another process.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np

from launch.answers.dialects import Dialect, calling, turn_of
from launch.answers.grammars import Parts, of_calls, of_shape
from launch.client.compiler import Compiler
from launch.client.errors import ApiError
from launch.client.frames import Ready
from launch.client.schemas import Chat, Completion, Generation, Tokenize
from launch.client.tokens import Tokens


class Form(NamedTuple):
    """The parts of an answer's grammar, and the request field that sets it."""

    param: str
    parts: Parts


class Reading(NamedTuple):
    """A body in token ids.

    Attributes:
        prompts: the ids [n] int32 of each.
        echoed: the prompts' texts, where the answer repeats them.
        turn: the prompt's part of the answer's turn; None for completions.
        form: the form that the answer has to have; None: any text.
    """

    prompts: list[np.ndarray]
    echoed: list[str]
    turn: str | None
    form: Form | None


def read(tokens: Tokens, dialect: Dialect | None, body: Chat | Completion, ready: Ready) -> Reading:
    """Encodes a body's prompts.

    Raises:
        ApiError: 400, the template refuses it, it is far longer than a sequence may be, or an id is outside of the
            vocabulary.
    """
    if isinstance(body, Chat):
        ids, text = tokens.encode_chat(body, body.shown_tools, ready.max_length)
        _check_ids(tokens, ids, ready, "messages")
        begins = body.prompts_answer or body.begun is not None  # else the answer is plain text after a message
        turn = turn_of(dialect.template, text, body.begun) if dialect is not None and begins else ""
        return Reading([ids], [], turn, form_of(tokens, body, ready, dialect, turn))
    prompts: list[np.ndarray] = []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            prompt = tokens.encode(prompt, ready.max_length, body.add_special_tokens)
            _check_ids(tokens, prompt, ready, "prompt")
        elif len(prompt) and (largest := prompt.max()) >= ready.vocab:
            raise ApiError(400, f"prompt has {largest}, and the vocabulary is [0, {ready.vocab})", param="prompt")
        prompts.append(prompt)
    if not prompts:
        raise ApiError(400, "prompt must not be empty", param="prompt")
    echoed = [told if isinstance(told, str) else tokens.decode(told) for told in (body.prompts if body.echo else [])]
    return Reading(prompts, echoed, None, form_of(tokens, body, ready))


def _check_ids(tokens: Tokens, ids: np.ndarray, ready: Ready, param: str) -> None:
    """Refuses a text of which the tokenizer makes tokens that the model has no embedding and no logits for."""
    if len(ids) and (largest := int(ids.max())) >= ready.vocab:
        token = f"{tokens.token_text(largest)!r:.80}, token {largest} of the tokenizer"
        what = f"{param} contains {token}, and the model's vocabulary is [0, {ready.vocab}): leave it out"
        raise ApiError(400, what, param=param)


def ids_of_chat(tokens: Tokens, body: Chat, most: int) -> np.ndarray:
    """Encodes a chat up to the answer: the ids [n] int32 of its prompt; errors as in `Tokens.encode_chat`."""
    return tokens.encode_chat(body, body.shown_tools, most)[0]


def form_of(
    tokens: Tokens, body: Generation, ready: Ready, dialect: Dialect | None = None, turn: str = ""
) -> Form | None:
    """Returns the form that a request demands of its answer; None: any text.

    Args:
        dialect: None for completions.
        turn: the prompt's part of the answer's turn.

    Raises:
        ApiError: 400, the form is too large.
    """
    # What the model has no token for, it can only spell.
    added = {text: token for text, token in tokens.added.items() if token < ready.vocab}
    eos = [token for token in ready.eos if token < ready.vocab]
    if isinstance(body, Chat) and body.has_to_call:
        try:
            spoken = calling(dialect, body.named is not None)
            calls = of_calls(spoken, body.callable_tools, body.may_call_again, turn, added, eos)
        except ValueError as error:
            raise unfollowed("tool_choice", error) from error
        return Form("tool_choice", calls)
    if (shape := body.shape) is None:
        return None
    begun = isinstance(body, Chat) and not body.prompts_answer
    try:
        return Form(shape.param, of_shape(shape, added, tokens.special & added.keys(), eos, dialect, turn, begun))
    except ValueError as error:
        raise unfollowed(shape.param, error) from error


async def grammar_of(form: Form, compiler: Compiler | None, ready: Ready) -> str:
    """Compiles the grammar of a form.

    Raises:
        ApiError: 400, it is invalid, or the model has no compiler, with the reason.
    """
    if compiler is None:
        what = f"answers of this model cannot follow {form.param}: {ready.unguided}; leave {form.param} out"
        raise ApiError(400, what, param=form.param)
    try:
        return await compiler.compile(form.parts)
    except ValueError as error:
        raise unfollowed(form.param, error) from error


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
