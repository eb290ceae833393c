"""A request's sampling parameters over the checkpoint's defaults, in the engine's format."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from launch.client.errors import ApiError
from launch.client.frames import Ready, Submit
from launch.client.prompts import Reading
from launch.client.schemas import Chat, Completion, Generation

UNSET_TOKENS = 16  # default of max_tokens for completions
OPENAI = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
# The engine's defaults: values equal to them are not sent.
ENGINE = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "logit_bias": [],
    "logprobs": None,
    "prompt_logprobs": None,
}


def submits_of(
    body: Chat | Completion,
    reading: Reading,
    defaults: Mapping[str, Any],
    ready: Ready,
    grammar: str | None,
    salt: str | None = None,
) -> list[Submit]:
    """Creates the continuations of a body's prompts, `n` of each.

    Args:
        defaults: the checkpoint's, from `generation_config.json`.
        grammar: of `reading.form`, in llguidance's format.

    Raises:
        ApiError: 400, a token id is outside of the vocabulary, or a prompt and its answer do not fit.
    """
    chat, submits = isinstance(body, Chat), []
    for prompt in reading.prompts:
        limit = limit_of(body, len(prompt), None if chat else UNSET_TOKENS, ready)
        for index in range(body.n or 1):
            sampling = sampling_of(body, defaults, ready, logprobs_of(body), index)
            submits.append(Submit(0, limit, sampling, -body.priority, salt, grammar, ids=prompt))
    return submits


def logprobs_of(body: Chat | Completion) -> int | None:
    """Returns how many of the most likely tokens are told with each token; None: no log-probabilities."""
    if isinstance(body, Chat):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs


def sampling_of(
    request: Generation, defaults: Mapping[str, Any], ready: Ready, logprobs: int | None, index: int
) -> dict[str, Any]:
    """Collects the sampling parameters of choice `index` of a request.

    Args:
        defaults: the checkpoint's, from `generation_config.json`.
        logprobs: number of most likely tokens reported with each token; None for no log-probabilities.

    Raises:
        ApiError: a token id is outside of the vocabulary.
    """
    bias = sorted((int(name), value) for name, value in (request.logit_bias or {}).items())
    for param, ids in (("logit_bias", [i for i, _ in bias]), ("stop_token_ids", request.stop_token_ids or [])):
        if outside := [i for i in ids if i >= ready.vocab]:
            raise ApiError(400, f"{param} has {outside[0]}, and the vocabulary is [0, {ready.vocab})", param=param)
    given = {name: value for name in ENGINE if (value := getattr(request, name, None)) is not None}
    values = OPENAI | dict(defaults) | given
    values |= {"top_k": max(0, int(values["top_k"])), "logit_bias": bias, "logprobs": logprobs}
    values["prompt_logprobs"] = logprobs if getattr(request, "echo", False) else None
    # A seed determines all choices, and each draws differently.
    seed = secrets.randbits(63) if request.seed is None else (request.seed + index) % (1 << 63)
    if request.min_tokens and request.stop_token_ids:  # not drawn before `min_tokens`
        values["stop_token_ids"] = request.stop_token_ids
    sent = {name: value for name, value in values.items() if value != ENGINE.get(name)}
    return sent | {"seed": seed} if values["temperature"] > 0 else sent


def limit_of(request: Generation, prompt: int, unset: int | None, ready: Ready) -> int:
    """Computes how many tokens may be drawn after a prompt of `prompt` tokens.

    Args:
        unset: default of the request's limit; None for all that fit.

    Raises:
        ApiError: the prompt, or both together, do not fit.
    """
    wanted = getattr(request, "max_completion_tokens", None) or request.max_tokens
    if wanted == 0:
        wanted = 1  # the engine draws a token behind each prompt; the answer leaves it out
    room = ready.max_length
    what = "the model's context" if ready.context <= room else "what the KV cache can hold (kv.tokens)"
    if prompt == 0:
        raise ApiError(400, "the prompt is empty: it needs a token", param="prompt")
    if prompt + (wanted or 1) > room:
        new = f" and {wanted} new ones are {prompt + wanted}, which" if wanted else ""
        raise ApiError(
            400,
            f"the prompt's {prompt} tokens{new} exceed {what} of {room} tokens",
            param="messages" if hasattr(request, "messages") else "prompt",
            code="context_length_exceeded",
        )
    return wanted or min(unset or room, room - prompt)
