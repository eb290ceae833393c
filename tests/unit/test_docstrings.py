"""Summaries of docstrings: verb phrases for functions, noun phrases for properties, classes and modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = (  # folders and files in which every summary has its form, but in EXCEPT
    "comm",
    "helix/attention",
    "helix/setup",
    "helix/engine",
    "helix/devices.py",
    "helix/errors.py",
    "helix/files.py",
    "helix/layers",
    "helix/layout.py",
    "helix/library.py",
    "helix/models",
    "helix/place.py",
    "helix/placement.py",
    "helix/worker",
    "helix/sampling_params.py",
    "helix/planner",
    "helix/speculation",
    "helix/tokenizer.py",
    "kernels",
    "launch",
)
OTHERS = "benchmarks", "helix", "kernels", "launch", "tests"  # in which none begins in the middle of a sentence
THIRD_PERSON = """
    accepts accumulates adds admits advances allocates answers applies assigns attends binds builds cancels catches
    checks chooses closes collects combines commits compares compiles composes computes concatenates connects
    continues converts copies counts creates declares decodes descends describes divides drafts draws drops empties
    encodes ends escapes estimates exchanges executes fetches fills finds fits folds forbids frees gathers handles
    imports interleaves interpolates issues keeps kills launches leaves lets limits lists loads locates looks makes
    maps marks masks merges moves multiplies normalises opens orders overwrites packs parses plans plots predicts
    preempts prefetches prepares prints projects proposes puts queues raises reads records refuses releases removes
    replaces rescales resets resolves returns rotates rounds routes runs scales scores selects sends serves sets shares
    shifts shows sorts splits starts stores streams submits summarises sums swaps takes tells times turns unpacks
    updates views waits wakes writes yields zeroes
"""
NO_NOUN_PHRASE = """
    after although among anew around as at because before behind beside between beyond by can does each everything for
    from had has have how if in is it its may neither nobody nothing of on once one's only or so somebody such than
    that then there these they this those though to under unless until was were what whatever when where wherever
    which while who whoever whom whose why with within without
"""  # first words
VERBS, STOPS = frozenset(THIRD_PERSON.split()), frozenset(NO_NOUN_PHRASE.split())


def fault(summary: str, node: ast.AST) -> str | None:
    """Returns what is wrong with the summary of a definition or module; None if nothing is."""
    word = summary.split()[0].rstrip(",;:.").lower()
    function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        decorators = [ast.unparse(x).rpartition(".")[2] for x in node.decorator_list]
        if "property" not in decorators and "cached_property" not in decorators:
            return None if word in VERBS or node.name.startswith("test_") else "a function's begins with a verb"
    if word == "whether" and not function:
        return "only a property's begins with Whether"
    return "a noun phrase, of what is no function" if word in VERBS | STOPS else None


def faults(source: str) -> Iterator[str]:
    """Yields the line, fault and text of each wrong summary in a file's source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            summary = (ast.get_docstring(node) or "").partition("\n")[0]
            if summary and (wrong := fault(summary, node)):
                yield f"{getattr(node, 'lineno', 1)}: {wrong}: {summary}"


@pytest.mark.parametrize("room", ROOMS)
def test_summaries_have_their_form(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py")) if (ROOT / room).is_dir() else [ROOT / room]
    assert files
    assert [f"{file.relative_to(ROOT)}:{line}" for file in files for line in faults(file.read_text("utf-8"))] == []


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """Whether it is full."""',
        'def f():\n    """The pages of a slot."""',
        'async def f():\n    """Return the pages of a slot."""',
        'class A:\n    def f(self):\n        """Of a slot, the pages."""',
        'class A:\n    @property\n    def f(self):\n        """Returns the pages of a slot."""',
        'class A:\n    @functools.cached_property\n    def f(self):\n        """How many pages a slot has."""',
        'class A:\n    """Runs the steps."""',
        'class A:\n    """Whether a slot is full."""',
        'class A:\n    """Whose pages are shared."""',
        '"""What the ranks share: pages."""',
        '@triton.jit\ndef f(x):\n    """Index of the largest number."""',
    ],
)
def test_a_wrong_summary_is_found(source: str) -> None:
    assert len(list(faults(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""Pages of slots."""\ndef f():\n    """Returns whether it is full."""\ndef g(): ...',
        'class A:\n    """Requests by slot."""\n    @property\n    def f(self):\n        """Whether a slot is free."""',
        'def test_f():\n    """A slot that is freed is empty."""',
    ],
)
def test_a_right_summary_is_none(source: str) -> None:
    assert list(faults(source)) == []


def test_docstrings_begin_with_what_they_say() -> None:
    """None begins in the middle of a sentence, in rooms whose summaries have no form yet either."""
    found = []
    for file in (file for folder in OTHERS for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            said = ast.get_docstring(node) if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) else None
            if said and said.split()[0].rstrip(",;:") in ("Of", "As", "Those", "That"):
                found.append(f"{file.relative_to(ROOT)}: {said.splitlines()[0]}")
    assert found == []
