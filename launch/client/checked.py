"""Shared parts of the request schemas."""

from __future__ import annotations

from reprlib import Repr
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast

SAID = Repr()  # shortens values for messages


class FirstMistake(FailFast):
    """Validator that stops a list at its first error: errors of a million items take minutes and gigabytes."""

    def __hash__(self) -> int:  # in unions
        return hash(FirstMistake)


def or_null(default: Any) -> BeforeValidator:
    """Makes null as good as unset: clients send it for what they leave alone."""
    return BeforeValidator(lambda value: default if value is None else value)


T = TypeVar("T")
Some = Annotated[list[T], FirstMistake()]
Off = Annotated[bool, or_null(False)]
On = Annotated[bool, or_null(True)]


class Schema(BaseModel):
    """Base of all schemas: strict about types, and collects unknown fields separately."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, defer_build=True)
    route: ClassVar[str] = "completions"  # of the table of fields
