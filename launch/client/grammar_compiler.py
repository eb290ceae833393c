"""Compiles clients' grammars in worker processes that are killed at a time limit.

A grammar of a few lines can take a minute and all memory to compile, and llguidance has no limit that prevents it.
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
from launch.answers.grammar_rules import MAX_GRAMMAR_BYTES
from launch.answers.grammars import Parts
from launch.client.worker_pool import RequestHandler, WorkerPool, serve_requests

COMPILE_S = 2.0
COMPILE_BYTES = 1 << 30
WAIT_S = 60.0  # for a free worker process, or for it to load the tokenizer
PROCESSES = 2
CACHE_SIZE = 32  # cached compilations


@dataclass
class PendingCompilation:
    """A compilation in progress, and how many callers wait for it."""

    task: asyncio.Task[bytes]
    waiting: int = 0


class GrammarCompiler:
    """Compiles grammars for a model, a few at a time.

    Args:
        path: the model's `tokenizer.json`.
        vocab: number of tokens that the model can output.
        eos: the model's end tokens.
    """

    def __init__(self, path: Path, vocab: int, eos: Collection[int]) -> None:
        arguments = [str(path), str(vocab), *map(str, sorted(eos))]
        self.workers = WorkerPool("launch.client.grammar_compiler", arguments, PROCESSES, WAIT_S, COMPILE_S)
        self._cache: OrderedDict[bytes, dict[str, str]] = OrderedDict()
        self._running: dict[bytes, PendingCompilation] = {}

    async def compile(self, parts: Parts) -> str:
        """Compiles parts to a grammar in llguidance's format; the part `ebnf` may be GBNF or Lark.

        Raises:
            ValueError: the grammar is invalid, too large, or takes too long.
            ApiError: 503, all processes are busy.
        """
        request = json.dumps(parts).encode()
        if len(request) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"it has {len(request)} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")
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
        """Sends a request once for all concurrent callers; kills its process when all of them are cancelled."""
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
        await self.workers.close()


def _work(path: str, vocab: str, *eos: str) -> RequestHandler:
    grammars = GrammarMatcherFactory(Path(path), int(vocab), [*map(int, eos)])
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + COMPILE_BYTES,) * 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides out-of-memory messages

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
    """Converts parts to llguidance's format.

    Raises:
        ValueError: they are not a valid grammar.
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
    except Exception as error:  # gbnf_to_lark raises bare Exception
        raise ValueError(str(error)) from error


if __name__ == "__main__":
    serve_requests(lambda: _work(*sys.argv[1:]))
