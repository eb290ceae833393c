"""Compiler of clients' grammars, in processes that are killed at a time limit: a grammar of a few lines can take a
minute and all memory, and no limit of llguidance prevents it.

Requests are JSON, the parts of a grammar; answers are JSON, the grammar or an error message.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llguidance.gbnf_to_lark import gbnf_to_lark

from launch.answers.grammar_matcher import GrammarMatcherFactory
from launch.answers.grammars import MAX_GRAMMAR_BYTES, Parts
from launch.client.worker_pool import RequestHandler, WorkerPool, serve_requests

COMPILE_S = 2.0
COMPILE_BYTES = 1 << 30
WAIT_S = 60.0  # for a process to be free, or to read the tokenizer
PROCESSES = 2
CACHE_SIZE = 32  # grammars whose answer is cached


@dataclass
class PendingCompilation:
    """A request that a process works at, and the number of those who wait for its answer."""

    task: asyncio.Task[bytes]
    waiting: int = 0


class GrammarCompiler:
    """Compiler of grammars for a model, a few at a time.

    Args:
        path: its `tokenizer.json`.
        vocab: tokens that the model can draw.
        eos: its end tokens.

    Attributes:
        workers: the processes.
    """

    def __init__(self, path: Path, vocab: int, eos: Collection[int]) -> None:
        arguments = [str(path), str(vocab), *map(str, sorted(eos))]
        self.workers = WorkerPool("launch.client.grammar_compiler", arguments, PROCESSES, WAIT_S, COMPILE_S)
        self._cache: OrderedDict[bytes, dict[str, str]] = OrderedDict()
        self._running: dict[bytes, PendingCompilation] = {}

    async def compile(self, parts: Parts) -> str:
        """Compiles parts to a grammar in llguidance's format; a part `ebnf` is a text in EBNF or in Lark's syntax.

        Raises:
            ValueError: it is invalid, takes too long or is too large.
            ApiError: 503, all processes are busy.
        """
        request = json.dumps(parts).encode()
        if len(request) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"it has {len(request)} bytes, and may have {MAX_GRAMMAR_BYTES}")
        result = self._cache.get(request)
        if result is None:
            try:
                result = self._cache[request] = json.loads(await self._request(request))
            except (TimeoutError, EOFError):  # not cached: the host may have been busy
                what = f"it takes more than {COMPILE_S:g} s or {COMPILE_BYTES >> 30} GiB to compile"
                raise ValueError(what) from None
            if len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
        if "mistake" in result:
            raise ValueError(result["mistake"])
        return result["grammar"]

    async def _request(self, request: bytes) -> bytes:
        """Sends a request once for all who have the same at a time; its process is killed when all have left."""
        running = self._running.get(request)
        if running is None:
            running = self._running[request] = PendingCompilation(asyncio.create_task(self.workers.ask(request)))
        running.waiting += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.waiting -= 1
            if not running.waiting:
                running.task.cancel()
                del self._running[request]

    async def close(self) -> None:
        """Ends the processes."""
        await self.workers.close()


def _work(path: str, vocab: str, *eos: str) -> RequestHandler:
    grammars = GrammarMatcherFactory(Path(path), int(vocab), [*map(int, eos)])
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + COMPILE_BYTES,) * 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides messages about exhausted memory

    def handle(request: bytes) -> bytes:
        try:
            result = {"grammar": to_llguidance(grammars, json.loads(request))}
        except RecursionError:
            result = {"mistake": "it is nested too deeply"}
        except ValueError as error:
            result = {"mistake": str(error)}
        return json.dumps(result).encode()

    return handle


def to_llguidance(grammars: GrammarMatcherFactory, parts: Parts) -> str:
    """Writes parts in llguidance's format.

    Raises:
        ValueError: they are no grammar.
        RecursionError: they are nested too deeply.
    """
    inner = [{key: value for key, value in part.items() if key != "ebnf"} | _lark(part) for part in parts]
    grammar = json.dumps({"grammars": inner})
    grammars.create_matcher(grammar)
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
    except Exception as error:  # it raises bare Exception
        raise ValueError(str(error)) from error


if __name__ == "__main__":
    serve_requests(lambda: _work(*sys.argv[1:]))
