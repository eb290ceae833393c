"""Options of calls from Python: signatures and docstrings show those that the table of options declares."""

from __future__ import annotations

import inspect

import pytest

from launch.client.options import CALL_OPTIONS
from launch.llm import LLM


@pytest.mark.parametrize("call", [LLM.generate, LLM.chat, LLM.stream])
def test_help_shows_every_option(call: object) -> None:
    shown = inspect.signature(call).parameters  # type: ignore[arg-type]
    assert {*CALL_OPTIONS} < {*shown} and "options" not in shown
    assert {name: (shown[name].default, shown[name].annotation) for name in CALL_OPTIONS} == {
        name: (option.default, option.hint) for name, option in CALL_OPTIONS.items()
    }
    assert all(f"\n    {name}: {option.says}" in str(call.__doc__) for name, option in CALL_OPTIONS.items())
