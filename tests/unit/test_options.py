"""The table of sampling parameters is the one place that declares them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from launch.client.options import CALL_OPTIONS
from launch.llm import LLM

ROOT = Path(__file__).parents[2]
PRODUCT = [file for folder in ("helix", "launch") for file in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("name, users", [
    ("frequency_penalty", {"helix/worker/shaping.py"}),
    ("presence_penalty", {"helix/worker/shaping.py"}),
    ("repetition_penalty",
     {"helix/worker/shaping.py", "launch/inputs/gguf.py", "launch/client/fields.py", "launch/convert.py"}),
    ("ignore_eos", set()),
])  # fmt: skip
def test_a_parameter_is_named_where_it_is_declared_and_where_it_is_used(name: str, users: set[str]) -> None:
    found = {str(file.relative_to(ROOT)) for file in PRODUCT if re.search(rf"\b{name}\b", file.read_text())}
    assert found == users | {"helix/sampling_params.py"}


@pytest.mark.parametrize("call", [LLM.generate, LLM.chat, LLM.stream])
def test_help_shows_every_option(call: object) -> None:
    shown = inspect.signature(call).parameters  # type: ignore[arg-type]
    assert {*CALL_OPTIONS} < {*shown} and "options" not in shown
    assert {name: (shown[name].default, shown[name].annotation) for name in CALL_OPTIONS} == {
        name: (option.default, option.hint) for name, option in CALL_OPTIONS.items()
    }
    assert all(f"\n    {name}: {option.says}" in str(call.__doc__) for name, option in CALL_OPTIONS.items())
