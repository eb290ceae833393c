"""`make test` finds all tests, and runs those that planted faults rely on."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.faults.planted import FAULTS, Fault


def test_no_folder_of_tests_is_passed_over(pytestconfig: pytest.Config) -> None:
    folders = {file.parent.name for file in Path(__file__).parents[1].rglob("test_*.py")}
    passed_over = [folder for folder in folders for p in pytestconfig.getini("norecursedirs") if fnmatch(folder, p)]
    assert "dist" in folders and passed_over == []


def test_every_fault_is_noticed_without_the_slow_tests(collected: dict[str, bool]) -> None:
    """Where the file of its test is among those collected."""
    files = {name.partition("::")[0] for name in collected}
    for test in {test for fault in FAULTS for test in fault.tests if test.partition("::")[0] in files}:
        found = [slow for name, slow in collected.items() if name == test or name.startswith((f"{test}[", f"{test}::"))]
        assert False in found, f"{test} of tests/faults/planted is slow, or there is none"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_has_its_place(fault: Fault) -> None:
    """The text that it replaces occurs once: code that moved on takes its faults along."""
    assert (Path(__file__).parents[2] / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
