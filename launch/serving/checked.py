"""The parts that all schemas of requests are made of."""

from __future__ import annotations

from reprlib import Repr
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast

SAID = Repr()  # values in messages, however large they are


class FirstMistake(FailFast):
    """Ends a list at its first mistake: to collect those of a million items takes minutes and gigabytes."""

    def __hash__(self) -> int:  # in unions
        return hash(FirstMistake)


T = TypeVar("T")
Some = Annotated[list[T], FirstMistake()]


class Schema(BaseModel):
    """Strict about types; fields that it does not know are kept apart."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
