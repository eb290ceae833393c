"""Serves over HTTP and measures first tokens, gaps and throughput from a separate client process.

`helix bench serve-http`: Qwen2.5-7B's shape with random weights over all GPUs, served by `python -m
launch.serve`. This process is the clients. Figures have the names of `vllm bench serve`: `ttft` is the time to the
first token, `itl` the gap between two chunks of a stream, `tpot` the mean time per token after the first. A chunk
can have several tokens: `over_step` is the mean `tpot` over the time of a step of `bench=decode`.

  streams    1 x 128K and 8 x 32K tokens of context, alone and with a prompt of 1K tokens each second
  grammars   the same 8 streams, each with a new JSON schema; the tokenizer is made up, of the model's vocabulary size
  offline    offline throughput: requests of one size, all at once, on a server that has just started
  next turn  100 new tokens after 128K of context, and after 1M over two GPUs and more

`helix bench serve-processes`: 256 streams on servers whose `serve.processes` is 1, 2 and 4.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread, Timer
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from benchmarks import jobs
from benchmarks.ranks.offline import OFFLINE_LOADS
from benchmarks.runner import BenchContext, Row
from helix.models import family_of
from launch.inputs.compose import ROOT, compose_config

K, M = 1 << 10, 1 << 20
SMALLER = 256  # without a GPU, contexts are shorter by this factor
START_S = 300.0  # for the server to become ready
ENDING_S = 60.0
ANSWER_S = 600.0
CLIENTS, REPEATS = 4, 2  # client processes, and runs of each number of the server's
TINY = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 16384, "rope_theta": 10000.0,
}  # fmt: skip


def response_format(number: int) -> dict[str, Any]:
    """Returns a JSON schema that no other number has; it is longer than any answer."""
    properties = {
        "name": {"type": "string", "maxLength": 24 + number},
        "kind": {"enum": ["one", "two", "three"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
    }
    item = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"schema": {"type": "array", "items": item, "minItems": 200}}}


@dataclass
class HTTPTiming:
    """What a client sees of one request, in seconds of the clock.

    Attributes:
        chunk_times: arrival of each chunk that has tokens.
    """

    sent: float
    chunk_times: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)


class HTTPClient:
    """Sends requests to a server.

    Raises:
        JobError: a request fails.
    """

    def __init__(self, url: str, vocab: int, seed: int = 1) -> None:
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), int(parts.port or 80)
        self._rng = np.random.default_rng(seed)
        self._vocab = vocab

    def tokens(self, count: int) -> list[int]:
        ids: list[int] = self._rng.integers(0, self._vocab, count).tolist()
        return ids

    async def stream(self, prompt: Sequence[int], new: int, after_s: float = 0.0, **more: Any) -> HTTPTiming:
        """Streams `new` tokens after a prompt, starting in `after_s` seconds."""
        await asyncio.sleep(after_s)
        wanted = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "ignore_eos": True}
        body = json.dumps({"prompt": list(prompt), "max_tokens": new} | wanted | more).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
        head += "Content-Type: application/json\r\n"
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
            seen = HTTPTiming(time.perf_counter())
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            if b" 200 " not in (status := await reader.readline()):
                error = (await reader.read()).partition(b"\r\n\r\n")[2]
                raise jobs.JobError(f"the server answered {status.decode().strip()}: {error.decode()[:300]}")
            async for line in reader:
                if line.startswith(b'data: {"error"'):
                    raise jobs.JobError(f"the server ended a stream: {line.decode()[:300]}")
                if line.startswith(b"data: {"):
                    piece, now = json.loads(line[6:]), time.perf_counter()
                    seen.usage = piece.get("usage") or seen.usage
                    # A long prefill has heartbeats, which are choices without text.
                    begun = seen.chunk_times or any(one["text"] or one["finish_reason"] for one in piece["choices"])
                    seen.chunk_times += [now] * bool(piece["choices"] and begun)
            writer.close()
        return seen


class ServerProcess(NamedTuple):
    """A running server.

    Attributes:
        pid: of its first process that answers HTTP, whose children are the others and the ranks.
    """

    url: str
    pid: int

    def front_ends(self) -> list[int]:
        """Returns the pids of all processes that answer HTTP (Linux)."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        others = [pid for pid in children if b"launch.serve_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return [self.pid, *map(int, others)]

    def cpu_s(self) -> float:
        """Returns the CPU seconds that these processes have used."""
        ticks = 0
        for pid in self.front_ends():
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(overrides: Sequence[str]) -> Iterator[ServerProcess]:
    """Starts a server on a free port.

    Raises:
        JobError: it does not start.
    """
    command = [sys.executable, "-m", "launch.serve", "serve.port=0", *overrides]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    kill_timer = Timer(START_S, process.kill)
    kill_timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if " is served at " in line:
                break
        else:
            raise jobs.JobError(f"the server did not start within {START_S:g} s: see its output above")
        kill_timer.cancel()
        Thread(target=_read, args=(process.stdout,), daemon=True).start()  # a full pipe would block the server
        yield ServerProcess(line.partition(" is served at ")[2].strip(), process.pid)
    finally:
        kill_timer.cancel()
        process.terminate()
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _read(log: IO[str]) -> None:
    for line in log:
        if "compiled while serving" in line:
            print(line, end="", flush=True)


def write_model(directory: Path, config: dict[str, Any]) -> None:
    """Writes a model's config and a made-up tokenizer of its vocabulary size."""
    rng, alphabet = random.Random(5), string.ascii_letters + string.digits
    words = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(words) < config["vocab_size"] - 1:
        words["Ġ" * rng.randrange(2) + "".join(rng.choices(alphabet, k=rng.randrange(2, 9)))] = None
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    # Other engines look at the type, not at the architecture.
    added = {"eos_token_id": config["vocab_size"] - 1, "model_type": family_of(config)}
    (directory / "config.json").write_text(json.dumps(config | added))


def row(seen: Sequence[HTTPTiming], seconds: float, step_s: float | None = None) -> Row:
    """Returns the figures of what clients saw over `seconds`."""
    gaps = [b - a for s in seen for a, b in zip(s.chunk_times, s.chunk_times[1:], strict=False)]
    new = [int(s.usage["completion_tokens"]) for s in seen]
    figures = {
        "ttft": [s.chunk_times[0] - s.sent for s in seen],
        "itl": gaps,
        "tpot": [(s.chunk_times[-1] - s.chunk_times[0]) / (n - 1) for s, n in zip(seen, new, strict=True) if n > 1],
    }
    found: Row = {}
    for name, values in figures.items():
        if not values:  # all tokens came in one chunk
            continue
        found[f"mean_{name}_ms"] = 1e3 * float(np.mean(values))
        found |= {f"p{p}_{name}_ms": 1e3 * float(np.percentile(values, p)) for p in (50, 90, 99)}
    prompts = sum(s.usage["prompt_tokens"] for s in seen)
    # Other servers leave the details out when nothing is cached.
    num_cached_tokens = sum((s.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for s in seen)
    found |= {"requests": len(seen), "output_throughput": sum(new) / seconds, "hit_rate": num_cached_tokens / prompts}
    if step_s is not None:
        found |= {"step_ms": 1e3 * step_s, "over_step": found["mean_tpot_ms"] / (1e3 * step_s)}
    return found


async def offline(client: HTTPClient, server: ServerProcess, small: int) -> AsyncIterator[Row]:
    """Yields rows of offline throughput, starting with the first requests a server gets.

    `front_us` is the front end's CPU time per new token: 150 is 15% of a core at 1,000 tokens a second.
    """
    for count, length, new in OFFLINE_LOADS:
        if small > 1:
            count, length, new = min(count, 8), max(length // small, 4), min(new, 4)
        prompts = [client.tokens(length) for _ in range(count)]
        begin, cpu_s = time.perf_counter(), server.cpu_s()
        seen = await asyncio.gather(*(client.stream(prompt, new) for prompt in prompts))
        seconds, cpu_s = time.perf_counter() - begin, server.cpu_s() - cpu_s
        found = row(seen, seconds) | {"seconds": seconds, "new": new, "front_us": 1e6 * cpu_s / (count * new)}
        yield {"trace": "offline", "batch": count, "length": length, "arrivals": 0, **found}


async def traces(
    client: HTTPClient, server: ServerProcess, ctx: BenchContext, steps: dict[int, float]
) -> AsyncIterator[Row]:
    """Yields the rows of all traces as they come.

    Args:
        steps: seconds of a decode step, by number of sequences.
    """
    small = 1 if ctx.gpu else SMALLER
    new = 512 if ctx.gpu else 48
    async for one in offline(client, server, small):
        yield one

    async def together(contexts: list[list[int]], arrivals: int = 0, grammars: bool = False) -> Row:
        begin = time.perf_counter()
        others = [client.stream(client.tokens(K // small), 16, 0.3 + i) for i in range(arrivals)]
        more: list[dict[str, Any]]
        more = [{"response_format": response_format(i)} if grammars else {} for i in range(len(contexts))]
        running = [client.stream(c + client.tokens(1), new, **m) for c, m in zip(contexts, more, strict=True)]
        seen = (await asyncio.gather(*running, *others))[: len(contexts)]
        return row(seen, time.perf_counter() - begin, steps[len(contexts)])

    long = client.tokens(128 * K // small)
    for contexts in ([long], [client.tokens(32 * K // small) for _ in range(8)]):
        batch, length = len(contexts), len(contexts[0])
        for context in contexts:
            await client.stream(context, 1)
        await together(contexts)  # compile whatever the first requests compile
        for trace, arrivals in (("streams", 0), ("streams", 4), *[("grammars", 0)] * (batch > 1)):
            found = await together(contexts, arrivals, trace == "grammars")
            yield {"trace": trace, "batch": batch, "length": length, "arrivals": arrivals, **found}
    for context in [long, *[client.tokens(M // small)] * (ctx.ranks > 1)]:
        await client.stream(context, 1)
        begin = time.perf_counter()
        follow_ups = [await client.stream(context + client.tokens(100), 4) for _ in range(7)][1:]
        found = row(follow_ups, time.perf_counter() - begin)
        yield {"trace": "next turn", "batch": 1, "length": len(context), "arrivals": 0, **found}


@dataclass(frozen=True)
class Setup:
    """What the servers of a benchmark serve.

    Attributes:
        model: settings of the ranks.
        steps: seconds of a decode step, by number of sequences.
        about: columns of all rows.
    """

    model: list[str]
    vocab: int
    steps: dict[int, float]
    about: Row


@contextmanager
def prepared(ctx: BenchContext, layout: str, points: dict[int, int]) -> Iterator[Setup]:
    """Writes the model, and measures the time of its steps in a separate job.

    Args:
        points: tokens of context, by number of sequences.
    """
    config = compose_config(["model=qwen2.5-7b"]).model.config if ctx.gpu else TINY
    assert config is not None
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), config)
        model = [f"model.path={directory}", "model.load=random", f"layout.{layout}={ctx.ranks}"]
        model += ["model.dtype=bfloat16"] if ctx.gpu else ["kv.tokens=32768", "decode.max_batch=16"]
        timed = [f"bench.points=[{','.join(f'{b}x{n}' for b, n in points.items())}]", "bench=decode"]
        done = jobs.measure(ctx.ranks, [*model, *timed, f"bench.steps={32 if ctx.gpu else 3}"])
        steps = {p["batch"]: p["ttl_p50_us"] / 1e6 for p in done["points"]}
        about = {"model": "qwen2.5-7b" if ctx.gpu else "tiny", "layout": f"helix {layout}={ctx.ranks}"}
        yield Setup(model, int(str(config["vocab_size"])) - 1, steps, about)


def _stream_share(url: str, vocab: int, seed: int, count: int, length: int, new: int) -> list[HTTPTiming]:
    """Sends the requests of one client process, all at once."""
    client = HTTPClient(url, vocab, seed)

    async def all_streams() -> list[HTTPTiming]:
        return await asyncio.gather(*(client.stream(client.tokens(length), new) for _ in range(count)))

    return asyncio.run(all_streams())


def processes(ctx: BenchContext) -> Iterator[Row]:
    """Yields rows of many streams on servers with 1, 2 and 4 processes.

    Several processes are the clients: a single one would need more time for a token than the server does.
    """
    count, length, new = (256, 512, 128) if ctx.gpu else (8, 64, 32)
    cores = len(os.sched_getaffinity(0))
    with (
        prepared(ctx, "tpa", {count: length + new // 2}) as setup,
        ProcessPoolExecutor(CLIENTS, multiprocessing.get_context("spawn")) as clients,
    ):
        for number in (1, 2, 4):
            with serving([*setup.model, f"serve.processes={number}"]) as server:
                for run in range(REPEATS + 1):  # the first one compiles
                    seeds, share = range(CLIENTS * run, CLIENTS * (run + 1)), count // CLIENTS
                    begin, cpu_s = time.perf_counter(), server.cpu_s()
                    shares = [
                        clients.submit(_stream_share, server.url, setup.vocab, seed, share, length, new)
                        for seed in seeds
                    ]
                    seen = [timing for one in shares for timing in one.result(ANSWER_S)]
                    seconds, cpu_s = time.perf_counter() - begin, server.cpu_s() - cpu_s
                    if run:
                        found = row(seen, seconds, setup.steps[count]) | {"front_us": 1e6 * cpu_s / (count * new)}
                        about = setup.about | {"cores": cores, "processes": number, "run": run}
                        yield about | {"batch": count, "length": length, "new": new, "seconds": seconds} | found


def measure(ctx: BenchContext) -> Iterator[Row]:
    """Yields the rows of all traces."""
    small = 1 if ctx.gpu else SMALLER
    with (
        prepared(ctx, "kvp", {1: 128 * K // small, 8: 32 * K // small}) as setup,
        serving(setup.model) as server,
        asyncio.Runner() as loop,
    ):
        rows = traces(HTTPClient(server.url, setup.vocab), server, ctx, setup.steps)

        async def following() -> Row | None:
            return await anext(rows, None)

        while (one := loop.run(following())) is not None:
            yield setup.about | one
