"""Sends the same requests to several OpenAI-compatible servers, in turns, and compares first tokens, gaps and seconds.

python -m benchmarks.compare_servers write=DIR model=qwen2.5-7b   # a config and a tokenizer for all servers
python -m benchmarks.compare_servers helix=http://127.0.0.1:8000 vllm=http://127.0.0.1:8001 model=qwen2.5-7b gpus=1

  model=NAME    what they serve, and gpus=N by how many GPUs each: columns of the record
  runs=5        timed runs of each trace and server, after one that warms up
  traces=A,B    only these
  processes=8   client processes; a single one needs longer for a token than a server does

Prompts are random token ids, and no run repeats another's. Each server is asked alone, and who comes first alternates;
with at_once=true all are asked at the same time, if each has GPUs of its own and the host has cores enough. The table
divides each server's seconds by those of the server given last. `goodput` counts the requests a second whose first
token came within 2 s and whose tokens took at most 50 ms each. Rows have the columns of `helix bench serve-http`. Start
the servers first.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.models.http import ANSWER_S, HTTPClient, HTTPTiming, row, write_model
from benchmarks.runner import BenchContext, record
from launch.inputs.arguments import handle_help, parse
from launch.inputs.compose import compose_config

K = 1024
VOCAB = 100_000  # smaller than that of any model here
FIRST_S, TOKEN_S = 2.0, 0.05  # bounds of goodput


class Request(NamedTuple):
    """A prompt of random segments, (seed, tokens) each: equal seeds begin with equal tokens."""

    segments: tuple[tuple[int, int], ...]
    new: int
    after_s: float = 0.0


User = list[Request]  # each is sent when the one before has ended
Phase = list[User]


class Draw:
    """Draws seeds and numbers of one run."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def own(self, tokens: int) -> tuple[int, int]:
        """Returns a segment that nobody else has."""
        return int(self.rng.integers(1 << 62)), tokens

    def size(self, low: int, high: int) -> int:
        """Returns a size between two, uniform in its logarithm."""
        return int(np.exp(self.rng.uniform(np.log(low), np.log(high))))


def _burst(count: int, length: int, new: int) -> Callable[[Draw], list[Phase]]:
    return lambda draw: [[[Request((draw.own(length),), new)] for _ in range(count)]]


def _document(count: int, length: int, own: int, new: int) -> Callable[[Draw], list[Phase]]:
    """A first question about a document, then all others at once."""

    def make(draw: Draw) -> list[Phase]:
        document = draw.own(length)
        users = [[Request((document, draw.own(own)), new)] for _ in range(count)]
        return [[[Request((document, draw.own(own)), 1)]], users]

    return make


def _mixed(count: int) -> Callable[[Draw], list[Phase]]:
    def make(draw: Draw) -> list[Phase]:
        return [[[Request((draw.own(draw.size(256, 16 * K)),), draw.size(32, 512))] for _ in range(count)]]

    return make


def _poisson(count: int, rate: float) -> Callable[[Draw], list[Phase]]:
    """Arrivals at `rate` a second, of 256 to 8K tokens and 32 to 256 new ones."""

    def make(draw: Draw) -> list[Phase]:
        arrivals = np.cumsum(draw.rng.exponential(1 / rate, count))
        sizes = [(draw.size(256, 8 * K), draw.size(32, 256)) for _ in range(count)]
        return [[[Request((draw.own(n),), new, float(at))] for at, (n, new) in zip(arrivals, sizes, strict=True)]]

    return make


def _turns(users: int, turns: int, first: int, more: int, new: int) -> Callable[[Draw], list[Phase]]:
    """Conversations: each turn's prompt continues the one before."""

    def make(draw: Draw) -> list[Phase]:
        phase = []
        for _ in range(users):
            segments = [draw.own(first), *(draw.own(more) for _ in range(turns - 1))]
            phase.append([Request(tuple(segments[: turn + 1]), new) for turn in range(turns)])
        return [phase]

    return make


TRACES: dict[str, Callable[[Draw], list[Phase]]] = {
    "1 x 32K": _burst(1, 32 * K, 1),
    "8 x 32K": _burst(8, 32000, 128),
    "16 x 8K": _burst(16, 8 * K, 256),
    "64 x 1K": _burst(64, K, 256),
    "256 x 512": _burst(256, 512, 128),
    "mixed 96": _mixed(96),
    "24 x shared 60K": _document(24, 60 * K, 64, 256),
    "40 agents x shared 6K": _document(40, 6 * K, K, 256),
    "16 x 4 turns": _turns(16, 4, 8 * K, 512, 128),
    "poisson 6/s": _poisson(60, 6.0),
    "poisson 12/s": _poisson(120, 12.0),
    "4 x 112K": _burst(4, 112 * K, 256),  # this and the next two: Vegas' points (arXiv:2602.07223)
    "20 x 32K": _burst(20, 32 * K, 256),
    "20 x 112K": _burst(20, 112 * K, 256),
    "1 x 8K": _burst(1, 8 * K, 256),  # where gather-decode (section 4) times vLLM
}


async def _follow(client: HTTPClient, user: User, start: float) -> list[HTTPTiming]:
    prompts = [
        [int(t) for seed, n in request.segments for t in np.random.default_rng(seed).integers(100, VOCAB, n)]
        for request in user
    ]
    await asyncio.sleep(max(0.0, start - time.perf_counter()))
    return [await client.stream(p, r.new, r.after_s) for p, r in zip(prompts, user, strict=True)]


def _share(url: str, users: Phase, start: float) -> list[HTTPTiming]:
    """Sends one client process's requests, from `start` on, a time of the clock that all processes share."""

    async def every() -> list[list[HTTPTiming]]:
        client = HTTPClient(url, VOCAB)
        return await asyncio.gather(*(_follow(client, user, start) for user in users))

    return [timing for one in asyncio.run(every()) for timing in one]


def run_trace(clients: ProcessPoolExecutor, processes: int, url: str, phases: list[Phase]) -> dict[str, Any]:
    """Runs a trace's phases one after the other; returns the figures of its last one, and all seconds."""
    seconds, seen = 0.0, []
    for phase in phases:
        start = time.perf_counter() + 1.0  # until then all processes have made their prompts
        shares = [
            clients.submit(_share, url, phase[i::processes], start) for i in range(processes) if phase[i::processes]
        ]
        seen = [timing for share in shares for timing in share.result(ANSWER_S)]
        seconds += max(timing.chunk_times[-1] for timing in seen) - start
    good = [
        t.chunk_times[0] - t.sent <= FIRST_S
        and (t.chunk_times[-1] - t.chunk_times[0]) / max(1, int(t.usage["completion_tokens"]) - 1) <= TOKEN_S
        for t in seen
    ]
    return row(seen, seconds) | {"seconds": seconds, "goodput": sum(good) / seconds}


def compare(
    servers: dict[str, str], traces: Sequence[str], runs: int, processes: int, at_once: bool
) -> Iterator[dict[str, Any]]:
    """Yields a row per timed run, trace and server."""
    with (
        ProcessPoolExecutor(processes * len(servers), multiprocessing.get_context("spawn")) as clients,
        ThreadPoolExecutor(len(servers) if at_once else 1) as threads,
    ):
        for run, trace in product(range(runs + 1), traces):
            phases = TRACES[trace](Draw(1000 * run + list(TRACES).index(trace)))
            order = [*servers][:: 1 if run % 2 else -1]
            measured = [threads.submit(run_trace, clients, processes, servers[engine], phases) for engine in order]
            for engine, found in zip(order, measured, strict=True):
                figures = found.result()
                if run:
                    yield {"trace": trace, "engine": engine, "run": run, "at_once": at_once, **figures}


def show(rows: Sequence[dict[str, Any]], last: str) -> None:
    """Prints medians over the runs, and each server's seconds over those of server `last`."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for one in rows:
        found[one["trace"], one["engine"]].append(one)
    columns = ["seconds", "p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms", "goodput", "hit_rate"]
    table = Table("trace", "server", *(c.replace("_", " ") for c in columns), f"seconds over {last}'s", "least", "most")
    for (trace, engine), group in found.items():
        theirs = {one["run"]: one["seconds"] for one in found.get((trace, last), ())}
        ratios = sorted(one["seconds"] / theirs[one["run"]] for one in group if one["run"] in theirs)
        cells = [f"{np.median([one.get(c, np.nan) for one in group]):.3g}" for c in columns]
        three = [np.median(ratios), ratios[0], ratios[-1]] if ratios else []
        table.add_row(trace, engine, *cells, *(f"{ratio:.3f}" for ratio in three))
    Console(width=160).print(table)


def main(arguments: Sequence[str]) -> None:
    """Compares servers, NAME=URL each, or writes what they serve."""
    servers = dict(a.split("=", 1) for a in arguments if "://" in a)
    kinds: dict[str, Any] = {"model": str, "gpus": int, "output": Path, "write": Path}
    kinds |= {"runs": int, "traces": list[str], "processes": int, "at_once": bool}
    values = parse([a for a in arguments if "://" not in a], kinds, needed=("model",))
    if "write" in values:
        config = compose_config([f"model={values['model']}"]).model.config
        if config is None:
            sys.exit(f"error: model={values['model']} has no shape to write: take one of conf/model/ with a config")
        values["write"].mkdir(parents=True, exist_ok=True)
        write_model(values["write"], config)
        return
    if not servers or "gpus" not in values:
        sys.exit(
            "error: servers or gpus= are missing: add NAME=http://HOST:PORT for each server, and gpus=N (see --help)"
        )
    if unknown := set(values.get("traces", ())) - set(TRACES):
        sys.exit(f"error: traces= has {', '.join(sorted(unknown))}: there are {', '.join(TRACES)}")
    about = {"model": values["model"], "gpus": values["gpus"]}
    traces, runs, processes = values.get("traces", [*TRACES]), values.get("runs", 5), values.get("processes", 8)
    measured = compare(servers, traces, runs, processes, values.get("at_once", False))
    rows: list[dict[str, Any]] = []

    def printed() -> Iterator[dict[str, Any]]:
        for one in measured:
            rows.append(about | one)
            yield rows[-1]
            print(f"{one['trace']}, run {one['run']}, {one['engine']}: {one['seconds']:.2f} s", flush=True)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record("compare-servers", printed(), BenchContext(device, values["gpus"]), values.get("output"))
    show(rows, [*servers][-1])


if __name__ == "__main__":
    if not handle_help(sys.argv[1:], __doc__):
        main(sys.argv[1:])
