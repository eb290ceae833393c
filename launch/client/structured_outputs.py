"""Request fields that constrain an answer: JSON schema, regex, choice, grammar, structural tags."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from launch.answers.grammars import StructuredOutput, Tag
from launch.answers.json_schemas import closed_schema
from launch.client.schema_base import SHORT_REPR, FalseByDefault, ListOf, Schema, null_as

MAX_EXPRESSION = 1 << 16  # characters of a regex or grammar, of all choices, or of all template variables
MAX_SCHEMA = 1 << 19  # characters plus items of a schema, or of the parameters of all tools
MAX_LEVELS = 128  # nesting levels of a schema
Expression = Annotated[str, Field(max_length=MAX_EXPRESSION)]
Choices = Annotated[ListOf[str], Field(min_length=1, max_length=MAX_EXPRESSION)]


class Structure(Schema):
    """A tagged section of JSON."""

    begin: str
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    end: str


class StructuralTags(Schema):
    """Free text with tagged sections of JSON that follow a schema."""

    type: Annotated[Literal["structural_tag"], null_as("structural_tag")] = "structural_tag"
    structures: ListOf[Structure] = Field(min_length=1)
    triggers: ListOf[Annotated[str, Field(min_length=1)]] = Field(min_length=1)

    @model_validator(mode="after")
    def _begin_with_triggers(self) -> StructuralTags:
        for tag in self.structures:
            if not any(tag.begin.startswith(trigger) for trigger in self.triggers):
                raise ValueError(f"has the begin {tag.begin!r:.80}, which starts with none of the triggers")
        return self

    @property
    def tags(self) -> list[Tag]:
        return [
            Tag(s.begin, next(t for t in self.triggers if s.begin.startswith(t)), s.schema_ or {}, s.end)
            for s in self.structures
        ]


class ResponseFormat(Schema):
    """The field `response_format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None
    format: Any = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        wanted = self.type == "json_schema" or (self.type == "json_object" and self.json_schema is not None)
        if wanted and not isinstance((self.json_schema or {}).get("schema"), dict):
            raise ValueError('json_schema needs a schema: {"name": NAME, "schema": {...}}')
        if self.type == "structural_tag":
            self._tags()
        if self.json_schema is not None:
            check_size("response_format.json_schema", self.json_schema)
        return self

    def _tags(self) -> StructuralTags:
        names = "structures", "triggers", "format"
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return parse_structural_tags("response_format", given)

    @property
    def structured_output(self) -> StructuredOutput | None:
        if self.type == "text":
            return None
        if self.type == "structural_tag":
            return StructuredOutput("response_format", self.type, self._tags().tags)
        schema = {"type": "object"} if self.json_schema is None else self.json_schema["schema"]
        return StructuredOutput("response_format", "json", schema)


class StructuredOutputs(Schema):
    """The field `structured_outputs`, which must have exactly one kind of constraint."""

    model_config = ConfigDict(extra="forbid")

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: Expression | None = None
    choice: Choices | None = None
    grammar: Expression | None = None
    json_object: Literal[True] | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: FalseByDefault = False
    disable_additional_properties: FalseByDefault = False
    whitespace_pattern: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = [name for name, value in self._kinds() if value is not None]
        if len(given) != 1:
            kinds = ", ".join(name for name, _ in self._kinds())
            raise ValueError(f"has {' and '.join(given) or 'no constraint'}, but needs exactly one of {kinds}")
        options = "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"
        set_options = [name for name in options if getattr(self, name) not in (None, False)]
        if set_options and given[0] not in ("json", "json_object"):
            raise ValueError(f"has {set_options[0]}, which needs json or json_object, but has {given[0]}")
        if set_options[:2] == [*options[:2]]:
            raise ValueError("has whitespace_pattern and disable_any_whitespace: send only one of them")
        return self

    def _kinds(self) -> Iterator[tuple[str, Any]]:
        yield from (("json", self.json_), ("regex", self.regex), ("choice", self.choice), ("grammar", self.grammar))
        yield from (("json_object", self.json_object), ("structural_tag", self.structural_tag))

    @property
    def structured_output(self) -> StructuredOutput:
        ((kind, value),) = ((kind, value) for kind, value in self._kinds() if value is not None)
        whitespace: dict[str, Any] = {}
        if self.disable_any_whitespace:
            whitespace = {"whitespace_flexible": False}
        elif self.whitespace_pattern is not None:
            whitespace = {"whitespace_pattern": self.whitespace_pattern}
        param = f"structured_outputs.{kind}"
        return make_structured_output(param, kind, value, whitespace, self.disable_additional_properties)


def make_structured_output(
    param: str, kind: str, value: Any, whitespace: dict[str, Any], forbid_additional: bool = False
) -> StructuredOutput:
    """Creates the constraint from a field's value; raises ValueError if the value is invalid."""
    if kind == "choice" and (total := sum(map(len, value))) > MAX_EXPRESSION:
        raise ValueError(f"{param} has {total} characters; at most {MAX_EXPRESSION} are allowed")
    if kind == "structural_tag":
        return StructuredOutput(param, kind, parse_structural_tags(param, _object(param, value)).tags)
    if kind == "json_object":
        value = {"type": "object"}
    elif kind != "json":
        return StructuredOutput(param, kind, value)
    schema = _object(param, value)
    check_size(param, schema)
    options = {"x-guidance": whitespace} if whitespace else {}
    return StructuredOutput(param, "json", closed_schema(schema) if forbid_additional else schema, options)


def _object(param: str, value: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(value, str):
        check_size(param, value)  # Python would parse 64 MiB of text into gigabytes
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{param}={SHORT_REPR.repr(value)} is not a JSON object")
    return found


def check_size(param: str, schema: Any) -> None:
    """Raises ValueError if a schema is too large; the check itself takes bounded time."""
    budget, stack = MAX_SCHEMA, [(schema, 0)]
    while stack and budget >= 0:
        value, level = stack.pop()
        if isinstance(value, dict | list):
            if level == MAX_LEVELS:
                raise ValueError(f"{param} has more than {MAX_LEVELS} levels")
            budget -= len(value)
            if budget >= 0:
                inside = [*value, *value.values()] if isinstance(value, dict) else value
                stack += [(one, level + 1) for one in inside]
        elif isinstance(value, str):
            budget -= len(value)
    if budget < 0:
        raise ValueError(f"{param} is too large: at most {MAX_SCHEMA} characters and items are allowed")


def parse_structural_tags(param: str, value: dict[str, Any]) -> StructuralTags:
    """Parses structural tags; raises ValueError if they are invalid."""
    check_size(param, value)
    if "format" in value:
        raise ValueError("structural_tag.format is not supported: send structures and triggers")
    try:
        return StructuralTags.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"structural_tag{where and '.'}{where}: {first['msg']}") from None
