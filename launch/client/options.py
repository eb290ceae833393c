"""Sampling options of prompt files and of `LLM` calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from helix.config import DecodeConfig
from helix.sampling_params import OPTIONS, Parameter

F = TypeVar("F", bound=Callable[..., Any])
RULE = "{} default to the run's `decode` settings if unset or None; the defaults of the others are shown above."

EXTRA_OPTIONS = {
    "max_tokens": Parameter(
        "maximum new tokens, at least 1; the end token counts", hint=int, kind=int, default=DecodeConfig.max_tokens
    ),
    "stop": Parameter(
        "stop string or list of them; they are not part of the answer", hint=str | Sequence[str], default=()
    ),
}
_KEYS = {key.name for key in fields(DecodeConfig)}
DEFAULTED = [name for name in ("max_tokens", *OPTIONS, "stop") if name in _KEYS]  # default to `decode` settings
LINE_OPTIONS = {name: (EXTRA_OPTIONS | OPTIONS)[name] for name in (*DEFAULTED, *OPTIONS)}
CALL_OPTIONS = LINE_OPTIONS | {
    "n": Parameter("answers per prompt; answer i uses seed + i", hint=int, default=1),
    "schema": Parameter("JSON schema for the answer", hint=Mapping[str, Any] | None, default=None),
}


def with_defaults(options: Mapping[str, Any], decode: DecodeConfig) -> dict[str, Any]:
    """Fills options that are unset or None from `decode`, where it has them."""
    given = {name: value for name, value in options.items() if value is not None}
    return {name: getattr(decode, name) for name in DEFAULTED} | given


def table() -> list[str]:
    """Returns the Markdown table of prompt-file options, in lines."""
    rows = ["| key | | values | unset |", "|---|---|---|---|"]
    for name, option in LINE_OPTIONS.items():
        accepted = option.accepted.replace("2**", r"2\*\*") if name in OPTIONS else ""  # escape a power
        unset = f"`decode.{name}`" if name in DEFAULTED else "off"
        rows.append(f"| `{name}` | {option.says} | {accepted} | {unset} |")
    return rows


def takes_options(call: F) -> F:
    """Lists the options in the signature and docstring of a function with `**options`."""
    shown: Any = call
    signature = inspect.signature(call)
    named = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=option.hint)
        for name, option in CALL_OPTIONS.items()
    ]
    shown.__signature__ = signature.replace(parameters=[*named, *options])
    descriptions = {
        name: option.request_description if name in OPTIONS else option.says for name, option in CALL_OPTIONS.items()
    }
    lines = (f"    {name}: {text}." for name, text in descriptions.items())
    rule = RULE.format(", ".join(DEFAULTED))
    shown.__doc__ = "\n".join([inspect.cleandoc(call.__doc__ or ""), "", f"Options: {rule}", *lines])
    return call
