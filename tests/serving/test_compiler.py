"""Forms that cannot be followed are refused by name, whatever they cost, and nobody waits for them."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from launch.job.lifeline import status
from tests.serving.api_server import DEMO, READY, ROOT, ApiServer, FakeJob, Serve, until
from tests.serving.chats import COMPLETIONS, REFUSALS

# A minute, and none of llguidance's limits holds it: which texts all four expressions agree on.
SIGNS = {"A": ("", 12), "B": ("", 11), "C": ("~", 10), "D": ("", 13)}
HARD = "start: T\nT: A & B & C & D\n" + "".join(
    f"{name}: {sign}/(?s:.*{name.lower()}.{{{n}}}.*)/\n" for name, (sign, n) in SIGNS.items()
)
EASY = {"prompt": "x", "max_tokens": 1, "structured_outputs": {"regex": "[ab]{3}"}}
COMPUTED = [
    ({"regex": "(" * 30000 + ")" * 30000}, "exceed the maximum number of nested"),
    ({"grammar": "root ::= " + "(" * 30000}, "it is nested too deeply"),
    ({"grammar": HARD}, "it takes more than 60 s or 1 GiB to compile"),
    ({"json": {"description": "é" * (1 << 18)}}, "it has 1573.* bytes; at most 524288"),
]


@pytest.fixture
async def own(serve: Serve) -> ApiServer:
    return await serve(FakeJob(ready=replace(READY, guided=True)))


async def test_what_cannot_be_followed_is_refused_by_name(own: ApiServer) -> None:
    for form, words in [*COMPUTED, *((row["body"], row["says"]) for row in REFUSALS["forms"])]:
        own.session.compiler.workers._work_s = 0.5 if HARD in form.values() else 60
        answer = await own.post(COMPLETIONS, EASY | {"structured_outputs": form})
        error = answer.json()["error"]
        assert answer.status_code == 400 and "\n" not in error["message"], answer.text
        (kind,) = form.keys() - {"whitespace_pattern"}
        assert error["param"] == f"structured_outputs.{kind}"
        assert re.search(words, error["message"]), (str(form)[:200], error)
    assert own.job.submits == []
    answer = await own.post(COMPLETIONS, EASY)
    assert answer.status_code == 200 and own.job.submits[0].grammar is not None


async def test_nobody_waits_for_a_form_that_takes_long(own: ApiServer) -> None:
    """It ends with who waits for it: with the client that leaves."""
    workers = own.session.compiler.workers
    forms = [EASY | {"structured_outputs": {"choice": [text]}} for text in "ab"]
    await asyncio.gather(*(own.post(COMPLETIONS, form) for form in forms))
    await until(lambda: len(workers.idle) == 2)
    before, workers._work_s = {*workers.idle}, 600
    _reader, writer = await own.connect(COMPLETIONS, EASY | {"structured_outputs": {"grammar": HARD}})
    await until(lambda: len(workers.idle) == 1)
    (busy,) = before - {*workers.idle}
    for regex in ("a", "b"):
        others = await own.post(COMPLETIONS, EASY | {"structured_outputs": {"regex": regex}})
        assert others.status_code == 200 and (await own.get("/health")).status_code == 200
    assert busy.returncode is None
    writer.close()
    await until(lambda: busy.returncode is not None)
    assert len(own.job.submits) == 4 and own.engine_client.generations == {}


async def test_who_sends_the_same_waits_for_the_same_compilation(own: ApiServer) -> None:
    """It goes on while one of them is there."""
    compiler = own.session.compiler
    assert (await own.post(COMPLETIONS, EASY)).status_code == 200
    (only,) = compiler.workers.idle
    compiler.workers._work_s = 600
    together = [asyncio.create_task(compiler.compile([{"ebnf": HARD}])) for _ in range(3)]
    await until(lambda: not compiler.workers.idle)
    assert compiler.workers.processes == {only}
    together[0].cancel()
    ends = await asyncio.gather(together[0], return_exceptions=True)
    assert isinstance(ends[0], asyncio.CancelledError) and only.returncode is None
    only.kill()
    ends = await asyncio.gather(*together[1:], return_exceptions=True)
    assert [type(end) for end in ends] == [ValueError, ValueError]
    again = [asyncio.create_task(compiler.compile([{"ebnf": HARD}])) for _ in range(2)]
    await until(lambda: len(compiler.workers.processes) == 1 and not compiler.workers._starts)
    (other,) = compiler.workers.processes
    for task in again:
        task.cancel()
    await until(lambda: other.returncode is not None)


def test_processes_end_with_the_front_end() -> None:
    """In the middle of a compilation too, and where it is killed."""
    program = f"""
import asyncio
from pathlib import Path
from launch.client.grammar_compiler import GrammarCompiler

async def compile():
    made = GrammarCompiler(Path({str(DEMO / "tokenizer.json")!r}), 4096, (0,))
    print(await made.compile([{{"ebnf": 'root ::= "a"'}}]), flush=True)
    print(made.workers.idle[0].pid, flush=True)
    made.workers._work_s = 600
    await made.compile([{{"ebnf": {HARD!r}}}])

asyncio.run(compile())
"""
    api_server = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    grammar, pid = json.loads(api_server.stdout.readline()), int(api_server.stdout.readline())
    assert grammar["grammars"][0]["lark_grammar"].endswith('start: "a"\n')
    api_server.kill()
    api_server.wait()
    asyncio.run(until(lambda: status(pid)[:1] in ([], ["Z"])))
