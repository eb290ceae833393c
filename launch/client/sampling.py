"""A request's sampling parameters over the checkpoint's defaults."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from helix.engine.request import Request
from helix.sampling_params import OPTIONS, SamplingParams
from launch.client.errors import ApiError
from launch.client.frames import Ready
from launch.client.prompts import Reading
from launch.client.schemas import Chat, Completion, Generation

UNSET_TOKENS = 16  # default of max_tokens for completions


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
    given = {name: value for name in OPTIONS if (value := getattr(body, name, None)) is not None}
    values = {name: option.request_default for name, option in OPTIONS.items()} | dict(defaults) | given
    logprobs = logprobs_of(body)
    values |= {"logit_bias": bias, "logprobs": logprobs, "stop_token_ids": tuple(body.stop_token_ids or ())}
    values |= {"prompt_logprobs": logprobs if getattr(body, "echo", False) else None}
    values |= {"top_k": 0} if values["top_k"] == -1 else {}
    # A seed determines all choices, and each draws differently; a greedy answer needs none.
    seed = secrets.randbits(63) if body.seed is None else (body.seed + index) % (1 << 63)
    return SamplingParams(**values | {"seed": seed if values["temperature"] > 0 else 0})


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
    fits = prompt + (wanted or 1) <= ready.context
    most, what = (room, "what the KV cache can hold (kv.tokens)") if fits else (ready.context, "the model's context")
    if prompt == 0:
        raise ApiError(400, "the prompt is empty: it needs a token", param="prompt")
    if prompt + (wanted or 1) > room:
        new = f" and {wanted} new ones are {prompt + wanted}, which" if wanted else ""
        raise ApiError(
            400,
            f"the prompt's {prompt} tokens{new} exceed {what} of {most} tokens",
            param="messages" if hasattr(request, "messages") else "prompt",
            code="context_length_exceeded",
        )
    return wanted or min(unset or room, room - prompt)
