"""Shared parts of the request schemas."""

from __future__ import annotations

from reprlib import Repr
from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast

SAID = Repr()  # shortens values for messages


class FirstMistake(FailFast):
    """Validator that stops a list at its first error: errors of a million items take minutes and gigabytes."""

    def __hash__(self) -> int:  # in unions
        return hash(FirstMistake)


T = TypeVar("T")
Some = Annotated[list[T], FirstMistake()]
# Switches; null is as good as unset, as clients send it for what they leave alone.
Off = Annotated[bool, BeforeValidator(lambda value: False if value is None else value)]
On = Annotated[bool, BeforeValidator(lambda value: True if value is None else value)]


class Schema(BaseModel):
    """Base of all schemas: strict about types, and collects unknown fields separately."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    route: ClassVar[str] = "completions"  # of the table of fields
