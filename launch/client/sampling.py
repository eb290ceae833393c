"""A request's sampling parameters over the checkpoint's defaults, in the engine's format."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from helix.events.request import Request
from helix.events.sampling_params import SamplingParams
from launch.client.errors import ApiError
from launch.client.frames import Ready
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


def requests_of(
    body: Chat | Completion,
    reading: Reading,
    defaults: Mapping[str, Any],
    ready: Ready,
    grammar: str | None,
    salt: str | None = None,
) -> list[Request]:
    """Creates the continuations of a body's prompts, `n` of each.

    Args:
        defaults: the checkpoint's, from `generation_config.json`.
        grammar: of `reading.form`, in llguidance's format.

    Raises:
        ApiError: 400, a token id is outside of the vocabulary, or a prompt and its answer do not fit.
    """
    chat, requests = isinstance(body, Chat), []
    for prompt in reading.prompts:
        limit = limit_of(body, len(prompt), None if chat else UNSET_TOKENS, ready)
        for index in range(body.n or 1):
            sampling = sampling_of(body, defaults, ready.vocab, index)
            requests.append(Request(0, prompt, limit, sampling, priority=-body.priority, salt=salt, grammar=grammar))
    return requests


def logprobs_of(body: Chat | Completion) -> int | None:
    """Returns how many of the most likely tokens are told with each token; None: no log-probabilities."""
    if isinstance(body, Chat):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs


def sampling_of(body: Chat | Completion, defaults: Mapping[str, Any], vocab: int, index: int) -> SamplingParams:
    """Makes the sampling parameters of choice `index` of a request.

    Args:
        defaults: the checkpoint's, from `generation_config.json`.
        vocab: number of tokens of the model.

    Raises:
        ApiError: a token id is outside of the vocabulary.
        ValueError: a value is out of the engine's range.
    """
    bias = {int(name): value for name, value in (body.logit_bias or {}).items()}
    for param, ids in (("logit_bias", bias), ("stop_token_ids", body.stop_token_ids or [])):
        if outside := [i for i in ids if i >= vocab]:
            raise ApiError(400, f"{param} has {outside[0]}, and the vocabulary is [0, {vocab})", param=param)
    given = {name: value for name in ENGINE if (value := getattr(body, name, None)) is not None}
    values = OPENAI | dict(defaults) | given
    logprobs = logprobs_of(body)
    values |= {"top_k": max(0, values["top_k"]), "logit_bias": bias, "logprobs": logprobs}
    values |= {"prompt_logprobs": logprobs if getattr(body, "echo", False) else None}
    if values["temperature"] > 0:  # a seed determines all choices, and each draws differently
        values["seed"] = secrets.randbits(63) if body.seed is None else (body.seed + index) % (1 << 63)
    return SamplingParams(**values, stop_token_ids=tuple(body.stop_token_ids or ()))


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
