"""Validates settings against dataclasses whose annotations say which values are allowed.

An annotation is `Literal[...]`, `Annotated[int, Range(1, 31)]` (or float), `FilePath`, `ImportPath`, a plain
type, a list of one, or a union of these, as in `Literal["auto"] | Annotated[int, Range(1)] | None`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

S = TypeVar("S")
UNITS = {"": 0, "K": 10, "M": 20}  # of integers, as powers of two: 128K
WORDS = {"True": "true", "False": "false", "None": "null"}
TYPE_NAMES: dict[Any, str] = {
    int: "an integer of at most 64 bits",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    list[str]: "a list of texts, such as [a,b]",
    list[int]: "a list of integers, such as [0,4]",
    list[float]: "a list of numbers, such as [0.05,0.1]",
    dict[str, Any]: "keys and values, such as {num_hidden_layers:4}",
}


class Range(NamedTuple):
    """Bounds of a number: inclusive `minimum` and `maximum`, exclusive `above`; None: no bound."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None

    def __str__(self) -> str:
        if self.above is not None:
            return f"above {self.above}" + ("" if self.maximum is None else f" and at most {self.maximum}")
        return f"of at least {self.minimum}" if self.maximum is None else f"from {self.minimum} to {self.maximum}"

    def has(self, value: float) -> bool:
        above = self.above is None or value > self.above
        return (
            above
            and (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
        )


@dataclass(frozen=True)
class LiteralText:
    """Marks strings that command lines take literally, whatever characters they contain."""

    def has(self, text: str) -> bool:
        return text != ""


@dataclass(frozen=True)
class Importable:
    """Marks strings of the form MODULE:NAME."""

    def has(self, text: str) -> bool:
        return re.fullmatch(r"[\w.]+:\w+", text) is not None


FilePath = Annotated[str, LiteralText()]
ImportPath = Annotated[str, Importable()]


def build(schema: type[S], content: Mapping[str, Any], prefix: str = "") -> S:
    """Builds a dataclass from nested mappings; missing keys get their defaults.

    Raises:
        ValueError: a key is unknown or a value is invalid; the message names key, value and what is allowed.
    """
    kinds = field_types(schema)
    for name in content:
        if name not in kinds:
            raise ValueError(unknown_key_message(schema, f"{prefix}{name}", [prefix + known for known in kinds]))
    return schema(
        **{
            name: build(kinds[name], value, f"{prefix}{name}.")
            if is_dataclass(kinds[name]) and isinstance(value, Mapping)
            else parse_value(f"{prefix}{name}", value, kinds[name])
            for name, value in content.items()
        }
    )


def field_types(schema: Any) -> dict[str, Any]:
    """Returns the annotations of a dataclass's fields, by name."""
    kinds = get_type_hints(schema, include_extras=True)
    return {field.name: kinds[field.name] for field in fields(schema)}


def leaves(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields the dotted key, annotation and default of every setting."""
    kinds = field_types(schema)
    for field in fields(schema):
        if is_dataclass(kinds[field.name]):
            yield from leaves(kinds[field.name], f"{prefix}{field.name}.")
        else:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            yield prefix + field.name, kinds[field.name], default


def parse_value(key: str, value: Any, kind: Any) -> Any:
    """Converts a value to its type: strings to numbers, 128K and 1M to integers.

    Raises:
        ValueError: it has another type; the message names key, value and what is allowed.
    """
    if is_dataclass(kind):
        keys = ", ".join(f"{key}.{name}" for name in field_types(kind))
        raise ValueError(f"{key}={format_value(value)}: set its keys instead: {keys}")
    try:
        return _convert(value, kind)
    except (ValueError, OverflowError):
        near = get_close_matches(format_value(value), choices(kind), n=1)
        hint = f" (did you mean {near[0]}?)" if near else "".join(map(_annotation_hint, alternatives(kind)))
        raise ValueError(f"{key}={format_value(value)} must be {describe_type(kind)}{hint}") from None


def _annotation_hint(kind: Any) -> str:
    return "".join(f": {one}" for one in get_args(kind) if get_origin(kind) is Annotated and isinstance(one, str))


def format_value(value: Any) -> str:
    """Formats a value as on a command line."""
    if isinstance(value, list):
        return f"[{','.join(map(format_value, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{format_value(one)}' for name, one in value.items())}}}"
    return value if isinstance(value, str) else WORDS.get(str(value), str(value))


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Returns the members of a union; otherwise the annotation itself."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def choices(kind: Any) -> list[str]:
    """Lists the literals that a value may be."""
    bare = (get_args(one)[0] if get_origin(one) is Annotated else one for one in alternatives(kind))
    return [word for one in bare if get_origin(one) is Literal for word in get_args(one)]


def is_literal_text(kind: Any) -> bool:
    """Returns whether command lines take a value literally, as for paths."""
    return any(LiteralText() in get_args(one) for one in alternatives(kind))


def describe_type(kind: Any) -> str:
    """Describes the allowed values, for messages."""
    origin, args = get_origin(kind), get_args(kind)
    if len(several := alternatives(kind)) > 1:
        return ", or ".join("null" if one is NoneType else describe_type(one) for one in several)
    if origin is Literal:
        return f"one of {', '.join(args)}" if len(args) > 1 else str(args[0])
    if origin is Annotated:
        if not isinstance(args[1], Range):
            path = "an import path MODULE:NAME" if Importable() in args else "a path"
            return path if args[0] is str else describe_type(args[0])
        return f"{'an integer' if args[0] is int else 'a number'} {args[1]}"
    return TYPE_NAMES[kind]


def _convert(value: Any, kind: Any) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if len(several := alternatives(kind)) > 1:
        for one in several:
            try:
                return _convert(value, one)
            except ValueError:
                continue
    elif origin is Literal:
        if (word := format_value(value)) in args:
            return word
    elif origin is Annotated:
        converted = _convert(value, args[0])
        if converted if isinstance(args[1], str) else args[1].has(converted):
            return converted
    elif origin is list:
        if isinstance(value, list):
            return [_convert(one, args[0]) for one in value]
    elif kind in (NoneType, bool) or origin is dict:
        value = {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value
        if isinstance(value, origin or kind):
            return value
    elif kind is Path:
        return Path(value)
    elif isinstance(value, str | int | float):
        if kind is str:
            return format_value(value)
        return _parse_integer(value) if kind is int else float("" if isinstance(value, bool) else value)
    raise ValueError


def _parse_integer(value: str | float) -> int:
    found = re.fullmatch(r"([+-]?\d+)([KM]?)", str(value).upper())
    if found is None or not -(1 << 63) <= (number := int(found[1]) << UNITS[found[2]]) < 1 << 63:
        raise ValueError
    return number


def unknown_message(text: str, known: Collection[str], near: Collection[str] = ()) -> str:
    """Returns the message for an unknown word: the known ones, and the closest of them and `near`."""
    found = get_close_matches(text, [*known, *near], n=1)
    return f"{text} is unknown; known: {', '.join(known)}" + (f" (did you mean {found[0]}?)" if found else "")


def unknown_key_message(schema: Any, key: str, siblings: Collection[str]) -> str:
    """Returns the message for an unknown key: its new name (the schema's `RENAMED`), or the known and closest keys."""
    if (new := getattr(schema, "RENAMED", {}).get(key)) is not None:
        return f"{key} is now {new.partition('=')[0]}"
    name = key.rpartition(".")[2]
    same = [one for one, _, _ in leaves(schema) if one.rpartition(".")[2] == name]
    if same:  # `kvp` instead of `layout.kvp`
        return f"{key} is unknown; known: {', '.join(siblings)} (did you mean {min(same, key=len)}?)"
    return unknown_message(key, siblings, [one for one, _, _ in leaves(schema)])
