"""The cases of benchmarks, by name, from `benchmarks/cases.yaml`."""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import yaml

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}


@cache
def _declared() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return found


def _value(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    if number := re.fullmatch(r"(\d+)([KM]?)", text):
        return int(number[1]) * UNITS[number[2]]
    return float(text) if re.fullmatch(r"\d+\.\d+", text) else text


def cases(name: str, gpu: bool = True) -> list[tuple[Any, ...]]:
    """Returns the arguments of each case in order.

    Without a GPU: those of `NAME-cpu` if listed, else the first case.
    """
    tiny = not gpu and f"{name}-cpu" in _declared()
    found: list[tuple[Any, ...]] = []
    for line in _declared()[f"{name}-cpu" if tiny else name]:
        fields = [field.split(",") for field in line.split()] if isinstance(line, str) else [[field] for field in line]
        found += product(*([_value(one) for one in field] for field in fields))
    return found if gpu or tiny else found[:1]
