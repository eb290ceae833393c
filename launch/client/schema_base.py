"""Shared parts of the request schemas."""

from __future__ import annotations

from reprlib import Repr
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast

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
