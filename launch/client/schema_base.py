"""Shared parts of the request schemas."""

from __future__ import annotations

from reprlib import Repr
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast

SHORT_REPR = Repr()  # shortens values for messages


class FailOnFirst(FailFast):
    """Validator that stops a list at its first error: errors of a million items take minutes and gigabytes."""

    def __hash__(self) -> int:  # in unions
        return hash(FailOnFirst)


def null_as(default: Any) -> BeforeValidator:
    """Makes null as good as unset: clients send it for what they leave alone."""
    return BeforeValidator(lambda value: default if value is None else value)


T = TypeVar("T")
ListOf = Annotated[list[T], FailOnFirst()]
FalseByDefault = Annotated[bool, null_as(False)]
TrueByDefault = Annotated[bool, null_as(True)]


class Schema(BaseModel):
    """Base of all schemas: strict about types, and collects unknown fields separately."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, defer_build=True)
    route: ClassVar[str] = "completions"  # of the table of fields
