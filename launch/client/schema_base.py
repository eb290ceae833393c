"""Shared parts of the request schemas."""

from __future__ import annotations

from reprlib import Repr
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, FailFast, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema

SHORT_REPR = Repr()  # shortens values for messages


class FailOnFirst(FailFast):
    """Stops validating a list at its first error: errors of a million items take minutes and gigabytes."""

    def __hash__(self) -> int:  # needed in unions
        return hash(FailOnFirst)


def null_as(default: Any) -> BeforeValidator:
    """Treats null as unset: clients send it for fields that they leave unset."""
    return BeforeValidator(lambda value: default if value is None else value)


T = TypeVar("T")
ListOf = Annotated[list[T], FailOnFirst()]
FalseByDefault = Annotated[bool, null_as(False)]
TrueByDefault = Annotated[bool, null_as(True)]


class Schema(BaseModel):
    """Base class of all schemas: strict types; unknown fields are collected in `model_extra`."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, defer_build=True)
    route: ClassVar[str] = "completions"  # which route's fields apply


class ByType:
    """Selects the member of a union of schemas by `type`: without one the first, and for other types the last."""

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = get_args(union)
        # Tags have a space, so that they do not look like fields in an error's location.
        tags = {
            f"type {number}": _literals(member.model_fields["type"].annotation) for number, member in enumerate(members)
        }

        def tag(value: Any) -> str:
            kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
            first, *_, last = tags
            return first if kind is None else next((name for name, kinds in tags.items() if kind in kinds), last)

        tagged = tuple(Annotated[member, Tag(name)] for name, member in zip(tags, members, strict=True))
        return handler.generate_schema(Annotated[Union[tagged], Discriminator(tag)])  # noqa: UP007


def _literals(annotation: Any) -> list[Any]:
    parts = [annotation, *get_args(annotation)]
    return [value for part in parts if get_origin(part) is Literal for value in get_args(part)]


BY_TYPE = ByType()
