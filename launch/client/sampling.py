"""Combines a request's sampling parameters with the checkpoint's defaults."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from helix.engine.request import EMPTY_PROMPT, Request, outside_vocabulary
from helix.sampling_params import OPTIONS, SamplingParams
from launch.client.engine_messages import EngineInfo
from launch.client.errors import ApiError
from launch.client.input_processor import ProcessedPrompt
from launch.client.schemas import Chat, Completion, GenerationFields

DEFAULT_MAX_TOKENS = 16  # for completions, as in OpenAI's API


def make_requests(
    body: Chat | Completion,
    processed: ProcessedPrompt,
    defaults: Mapping[str, Any],
    engine_info: EngineInfo,
    grammar: str | None,
    cache_salt: str | None = None,
) -> list[Request]:
    """Creates the engine requests of a body: `n` for each of its prompts.

    Args:
        defaults: sampling defaults from the checkpoint's `generation_config.json`.
        grammar: the compiled `processed.grammar_spec`, in llguidance's format.

    Raises:
        ApiError: 400, a token id is outside of the vocabulary, or a prompt and its answer are too long.
    """
    chat, requests = isinstance(body, Chat), []
    shared: dict[str, Any] = {"priority": -body.priority, "cache_salt": cache_salt, "grammar": grammar}
    shared["last_message_start"] = processed.last_message_start
    for prompt in processed.prompts:
        limit = resolve_max_tokens(body, len(prompt), None if chat else DEFAULT_MAX_TOKENS, engine_info)
        for index in range(body.n or 1):
            sampling = make_sampling_params(body, defaults, engine_info.vocab, index)
            requests.append(Request(0, prompt, limit, sampling, **shared))
    return requests


def num_logprobs(body: Chat | Completion) -> int | None:
    """Returns how many of the most likely tokens to return per token; None: no log-probabilities."""
    if isinstance(body, Chat):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs


def make_sampling_params(
    body: Chat | Completion, defaults: Mapping[str, Any], vocab: int, index: int
) -> SamplingParams:
    """Creates the sampling parameters of choice `index` of a request.

    Args:
        defaults: sampling defaults from the checkpoint's `generation_config.json`.

    Raises:
        ApiError: a token id is outside of the vocabulary.
        ValueError: a value is out of the engine's range.
    """
    bias = {int(name): value for name, value in (body.logit_bias or {}).items()}
    for param, ids in (("logit_bias", bias), ("stop_token_ids", body.stop_token_ids or [])):
        if outside := [i for i in ids if i >= vocab]:
            raise ApiError(400, outside_vocabulary(param, outside[0], vocab), param=param)
    given = {name: value for name in OPTIONS if (value := getattr(body, name, None)) is not None}
    values = {name: option.request_default for name, option in OPTIONS.items()} | dict(defaults) | given
    logprobs = num_logprobs(body)
    values |= {"logit_bias": bias, "logprobs": logprobs, "stop_token_ids": tuple(body.stop_token_ids or ())}
    values |= {"prompt_logprobs": logprobs if getattr(body, "echo", False) else None}
    values |= {"top_k": 0} if values["top_k"] == -1 else {}
    # The seed determines all choices, each with a different one; greedy sampling needs none.
    seed = secrets.randbits(63) if body.seed is None else (body.seed + index) % (1 << 63)
    return SamplingParams(**values | {"seed": seed if values["temperature"] > 0 else 0})


def resolve_max_tokens(request: GenerationFields, prompt: int, unset: int | None, engine_info: EngineInfo) -> int:
    """Returns the limit of new tokens after a prompt of `prompt` tokens.

    Args:
        unset: default limit; None: as many as fit.

    Raises:
        ApiError: the prompt, or the prompt with its new tokens, is too long.
    """
    requested = getattr(request, "max_completion_tokens", None) or request.max_tokens
    new = requested or 1  # the engine samples at least one token; an answer of none leaves it out
    capacity = engine_info.max_length
    if prompt == 0:
        raise ApiError(400, EMPTY_PROMPT, param="prompt")
    if (total := prompt + new) > capacity:
        limit = f"the KV cache's capacity (kv.tokens) of {capacity}"
        if total > engine_info.context:
            limit = f"the model's context of {engine_info.context}"
        what = f"the prompt's {prompt} tokens and {new} new tokens are {total}, which exceed {limit} tokens"
        param = "messages" if hasattr(request, "messages") else "prompt"
        raise ApiError(400, what, param=param, code="context_length_exceeded")
    return min(unset or capacity, capacity - prompt) if requested is None else new
