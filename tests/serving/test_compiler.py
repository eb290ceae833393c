"""Forms that cannot be followed are refused by name, whatever they cost, and nobody waits for them."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.serving.front import DEMO, READY, ROOT, Check, FakeJob, Front, run, until

pytestmark = pytest.mark.timeout(120)
# A minute, and none of llguidance's limits holds it: which texts all four expressions agree on.
SIGNS = {"A": ("", 12), "B": ("", 11), "C": ("~", 10), "D": ("", 13)}
HARD = "start: T\nT: A & B & C & D\n" + "".join(
    f"{name}: {sign}/(?s:.*{name.lower()}.{{{n}}}.*)/\n" for name, (sign, n) in SIGNS.items()
)
EASY = {"prompt": "x", "max_tokens": 1, "structured_outputs": {"regex": "[ab]{3}"}}
# All that is wrong with each, in one line.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"regex": "("}, "structured_outputs.regex cannot be followed: .*unclosed group"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": r"(a)\1"}, "backreferences"),
    ({"regex": "[^\\s\\S]"}, "no text follows it"),
    ({"regex": "(" * 30000 + ")" * 30000}, "exceed the maximum number of nested"),
    ({"grammar": 'x ::= "a"'}, "No 'root' rule"),
    ({"grammar": "root ::= y"}, "Rule 'y' not found"),
    ({"grammar": 'root ::= "a'}, "Unexpected end of input"),
    ({"grammar": "root ::= " + "(" * 30000}, "it is nested too deeply"),
    ({"grammar": "start: x"}, "structured_outputs.grammar cannot be followed: .*unknown name"),
    ({"grammar": "start: @nobody"}, "nobody"),
    ({"grammar": 'start: s\ns: s "a"'}, "no text follows it"),
    ({"grammar": "start: <[99999]>"}, "99999"),
    ({"grammar": "nonsense"}, "structured_outputs.grammar cannot be followed"),
    ({"grammar": HARD}, "it takes more than 2 s or 1 GiB to compile"),
    ({"json": {"type": "nonsense"}}, "structured_outputs.json cannot be followed: .*nonsense"),
    ({"json": {"type": "string", "pattern": "("}}, "structured_outputs.json cannot be followed"),
    ({"json": {"description": "é" * (1 << 18)}}, "it has 1573.* bytes, and may have 524288"),
    ({"json": {}, "whitespace_pattern": "("}, "structured_outputs.json cannot be followed"),
]  # fmt: skip


def run_guided(check: Check, directory: Path) -> None:
    run(check, directory, FakeJob(ready=replace(READY, guided=True)))


def there(processes: Sequence[Process]) -> bool:
    """Tells whether all of them are alive."""
    return all(process.returncode is None for process in processes)


def test_what_cannot_be_followed_is_refused_by_name(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        for form, words in WRONG:
            answer = await front.post("/v1/completions", EASY | {"structured_outputs": form})
            error = answer.json()["error"]
            assert answer.status_code == 400 and "\n" not in error["message"], answer.text
            (kind,) = form.keys() - {"whitespace_pattern"}
            assert error["param"] == f"structured_outputs.{kind}"
            assert re.search(words, error["message"]), (str(form)[:200], error)
        assert front.job.submits == []
        answer = await front.post("/v1/completions", EASY)
        assert answer.status_code == 200 and front.job.submits[0].grammar is not None

    run_guided(check, tmp_path)


def test_nobody_waits_for_a_form_that_takes_long(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        forms = [EASY | {"structured_outputs": {"choice": [text]}} for text in "ab"]
        await asyncio.gather(*(front.post("/v1/completions", form) for form in forms))
        await until(lambda: len(front.session.compiler.workers.idle) == 2, 30)
        before = [*front.session.compiler.workers.idle]
        hard = asyncio.create_task(front.post("/v1/completions", EASY | {"structured_outputs": {"grammar": HARD}}))
        await asyncio.sleep(0.1)
        for regex in ("a", "b"):
            beside = await front.post("/v1/completions", EASY | {"structured_outputs": {"regex": regex}})
            assert beside.status_code == 200 and (await front.get("/health")).status_code == 200
        assert not hard.done()
        assert (await hard).status_code == 400
        await until(lambda: not there(before), 10)

    run_guided(check, tmp_path)


def test_a_client_that_leaves_ends_its_compilation(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        assert (await front.post("/v1/completions", EASY)).status_code == 200
        before = [*front.session.compiler.workers.idle]
        compiling = asyncio.create_task(front.session.compiler.compile([{"ebnf": HARD}]))
        await asyncio.sleep(0.1)
        compiling.cancel()
        await until(lambda: not there(before), 10)

    run_guided(check, tmp_path)


def test_who_sends_the_same_waits_for_the_same_compilation(tmp_path: Path) -> None:
    """It goes on while one of them is there."""

    async def check(front: Front) -> None:
        compiler = front.session.compiler
        assert (await front.post("/v1/completions", EASY)).status_code == 200
        (only,) = compiler.workers.idle
        together = [asyncio.create_task(compiler.compile([{"ebnf": HARD}])) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert compiler.workers.processes == {only}
        together[0].cancel()
        await asyncio.sleep(0.1)
        assert only.returncode is None
        ends = await asyncio.gather(*together, return_exceptions=True)
        assert [type(end) for end in ends] == [asyncio.CancelledError, ValueError, ValueError]
        assert only.returncode is not None
        again = [asyncio.create_task(compiler.compile([{"ebnf": HARD}])) for _ in range(2)]
        await until(lambda: len(compiler.workers.processes) == 1 and not compiler.workers._starts, 30)
        (other,) = compiler.workers.processes
        for task in again:
            task.cancel()
        await until(lambda: not there([other]), 10)

    run_guided(check, tmp_path)


def test_processes_end_with_the_front_end() -> None:
    """In the middle of a compilation too, and where it is killed."""
    program = f"""
import asyncio
from pathlib import Path
from launch.client.compiler import Compiler

async def compile():
    made = Compiler(Path({str(DEMO / "tokenizer.json")!r}), 4096, (0,))
    print(await made.compile([{{"ebnf": 'root ::= "a"'}}]), flush=True)
    print(made.workers.idle[0].pid, flush=True)
    await made.compile([{{"ebnf": {HARD!r}}}])

asyncio.run(compile())
"""
    front = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    grammar, pid = json.loads(front.stdout.readline()), int(front.stdout.readline())
    assert grammar["grammars"][0]["lark_grammar"].endswith('start: "a"\n')
    time.sleep(0.1)
    front.kill()
    front.wait()
    asyncio.run(until(lambda: state(pid) in (None, "Z"), 10))


def state(pid: int) -> str | None:
    """A letter; None where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return None
