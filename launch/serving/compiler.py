"""Compiles what clients want answers to follow, in processes that end where that takes long: a grammar of a few lines
can take a minute and all memory, and none of llguidance's limits holds it.

A process reads lines of JSON: the parts of a grammar. It answers each with one: the grammar, or what is wrong with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from llguidance.gbnf_to_lark import gbnf_to_lark

from launch.serving.matcher import Grammars

ROOT = Path(__file__).parents[2]
COMPILE_S = 2.0
COMPILE_BYTES = 1 << 30
START_S = 60.0  # for a process to read the tokenizer
PROCESSES = 2
KEPT = 32  # grammars whose answer is remembered
MOST_BYTES = 1 << 19  # of a grammar's parts as JSON
Parts = Sequence[dict[str, Any]]


class Compiler:
    """Compiles grammars for a model, a few at a time.

    Args:
        path: of its `tokenizer.json`.
        vocab: tokens that the model can draw.
        eos: its end tokens.
    """

    def __init__(self, path: Path, vocab: int, eos: Collection[int]) -> None:
        self._arguments = [str(path), str(vocab), *map(str, sorted(eos))]
        self._room = asyncio.Semaphore(PROCESSES)
        self._idle: list[Process] = []
        self._known: OrderedDict[bytes, dict[str, str]] = OrderedDict()

    async def compile(self, parts: Parts) -> str:
        """The grammar of parts, as llguidance reads it; a part `ebnf` is a text in EBNF or in Lark's syntax.

        Raises:
            ValueError: it cannot be followed, or takes too long, or is too large.
        """
        line = json.dumps(parts).encode()
        if len(line) > MOST_BYTES:
            raise ValueError(f"it has {len(line)} bytes, and may have {MOST_BYTES}")
        answer = self._known.get(line)
        if answer is None:
            async with self._room:
                answer = await self._ask(line)
            self._known[line] = answer
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        if "mistake" in answer:
            raise ValueError(answer["mistake"])
        return answer["grammar"]

    async def close(self) -> None:
        """Ends the processes."""
        while self._idle:
            process = self._idle.pop()
            _end(process)
            await process.wait()

    async def _ask(self, line: bytes) -> dict[str, str]:
        process = self._idle.pop() if self._idle else await self._start()
        assert process.stdin is not None and process.stdout is not None
        answer = b""
        try:
            process.stdin.write(line + b"\n")
            with suppress(TimeoutError):
                async with asyncio.timeout(COMPILE_S):
                    answer = await process.stdout.readline()
        finally:
            if answer:
                self._idle.append(process)
            else:
                _end(process)
        if not answer:  # which is not remembered: the host may have been busy
            raise ValueError(f"it takes more than {COMPILE_S:g} s or {COMPILE_BYTES >> 30} GiB to compile")
        return dict(json.loads(answer))

    async def _start(self) -> Process:
        """A process that has read the tokenizer."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, *self._arguments),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            start_new_session=True,  # a terminal's control-C is not its
            limit=4 * MOST_BYTES,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                if not await process.stdout.readline():
                    raise TimeoutError
        except BaseException as error:
            _end(process)
            if isinstance(error, TimeoutError):
                raise RuntimeError("the process that compiles grammars did not start") from None
            raise
        return process


def _end(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()


def main(arguments: Sequence[str]) -> None:
    """Compiles what is read, until there is no more; then it ends at once, whatever it does."""
    path, vocab, *eos = arguments
    grammars = Grammars(Path(path), int(vocab), [*map(int, eos)])
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + COMPILE_BYTES,) * 2)
    lines: SimpleQueue[str] = SimpleQueue()
    Thread(target=_read, args=(lines,), daemon=True).start()
    print("ready", flush=True)
    while True:
        try:
            answer = {"grammar": _compiled(grammars, json.loads(lines.get()))}
        except RecursionError:
            answer = {"mistake": "it is nested too deeply"}
        except ValueError as error:
            answer = {"mistake": str(error)}
        print(json.dumps(answer), flush=True)


def _read(lines: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)  # from within a compilation too


def _compiled(grammars: Grammars, parts: Parts) -> str:
    written = [{key: value for key, value in part.items() if key != "ebnf"} | _lark(part) for part in parts]
    grammar = json.dumps({"grammars": written})
    grammars.begun(grammar)
    return grammar


def _lark(part: dict[str, Any]) -> dict[str, str]:
    text = part.get("ebnf")
    if text is None:
        return {}
    if "::=" not in text:
        return {"lark_grammar": text}
    try:
        return {"lark_grammar": gbnf_to_lark(text)}
    except RecursionError:
        raise
    except Exception as error:  # the class that it raises itself
        raise ValueError(str(error)) from error


if __name__ == "__main__":
    main(sys.argv[1:])
