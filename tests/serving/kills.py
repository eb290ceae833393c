"""Kills processes of a server while it is idle, reads a prompt, decodes or ends, and looks at what its clients see.

    python -m tests.serving.kills [times=20] [record=FILE]

Ranks die in turn. Each time the server has to refuse new requests within 2 s, and to be back within 15 s beyond the
time that new ranks take to load. The request under way goes on: its text is that of an undisturbed run, in fp32. Where
the front end dies, no rank is left after 15 s.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from launch.job.lifeline import status
from launch.job.report import provenance
from tests.serving.test_server import Server

STATES = "idle", "prefill", "decode", "drain"
RANKS = 2
REFUSED_S, BACK_S, GONE_S = 2.0, 15.0, 15.0  # what is promised
DEADLINE_S = 120.0  # of whatever is waited for
LENGTHS = {"idle": 24, "prefill": 24, "decode": 200, "drain": 200}  # of answers, tokens
SETTINGS = f"layout.kvp={RANKS}", "serve.restarts=100000", "decode.prefill_chunk=128", "serve.drain_s=60"
Row = dict[str, Any]


def body(state: str, number: int) -> dict[str, Any]:
    """A request that is in a state for seconds; no prefix of it is in the cache."""
    prompt = "# A line that is read, again and again.\n" * 100 if state == "prefill" else "def f"
    more = {"temperature": 0.9, "seed": 5, "max_tokens": LENGTHS[state], "cache_salt": f"{state} {number}"}
    return {"prompt": prompt, "stream": True, "return_progress": True, "ignore_eos": True} | more


class Reader(Thread):
    """A client that reads an answer to its end.

    Attributes:
        reads: set once a part of the prompt has been read.
        writes: set with the first text.
        text: so far.
        wrong: what went wrong; None where nothing did.
    """

    def __init__(self, server: Server, content: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(content).encode())
        self.reads, self.writes = Event(), Event()
        self.text = ""
        self.wrong: str | None = "it did not end"
        self.start()

    def run(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=DEADLINE_S) as answer:
                for line in answer:
                    if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                        self._take(json.loads(line[6:]))
            self.wrong = self.wrong if self.wrong != "it did not end" else None
        except (OSError, ValueError) as error:
            self.wrong = f"{type(error).__name__}: {error}"

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.wrong = event["error"]["message"]
            return
        told = event.get("prompt_progress")
        if told is not None and 0 < told["processed"] < told["total"]:
            self.reads.set()
        for choice in event["choices"]:
            self.text += choice["text"]
            self.writes.set()

    def is_in(self, state: str) -> None:
        """Waits until the request is in a state."""
        begun = self.reads if state == "prefill" else self.writes
        assert begun.wait(DEADLINE_S), f"no {state}: {self.wrong}"
        assert state != "prefill" or not self.writes.is_set(), "the prompt has been read already"

    def ended(self) -> str:
        """The whole text.

        Raises:
            AssertionError: there is none.
        """
        self.join(DEADLINE_S)
        assert self.wrong is None and not self.is_alive(), self.wrong
        return self.text


@contextmanager
def started(directory: Path) -> Iterator[Server]:
    server = Server(directory, *SETTINGS)
    try:
        yield server
    finally:
        server.kill()


def age_s(server: Server) -> float:
    """For how long there has been any of the ranks."""
    ticks = [int(fields[19]) for pid in server.members() if _is_rank(pid) and (fields := status(pid))]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - min(ticks) / os.sysconf("SC_CLK_TCK")


def _is_rank(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith("helix rank")
    except OSError:
        return False


def kill_rank(server: Server, state: str, number: int, expected: str) -> Row:
    """Kills a rank; what became of the server and of the request.

    Raises:
        AssertionError: it is not what is promised.
    """
    victim = server.rank(number % RANKS)
    reader = None if state == "idle" else Reader(server, body(state, number))
    if reader is not None:
        reader.is_in(state)
    if state == "drain":
        drain(server)
    begin = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    server.until(503, DEADLINE_S)
    row: Row = {"refused_s": time.monotonic() - begin}
    assert row["refused_s"] < REFUSED_S, f"new requests were taken for {row['refused_s']:.1f} s"
    if state != "drain":
        server.until(200, DEADLINE_S)
        row["load_s"] = age_s(server)
        row["back_s"] = time.monotonic() - begin - row["load_s"]
        assert row["back_s"] < BACK_S, f"new ranks were started after {row['back_s']:.1f} s"
    text = (reader or Reader(server, body(state, number))).ended()
    assert text == expected, f"other tokens: {text!r} for {expected!r}"
    if state == "drain":
        assert (code := server.process.wait(DEADLINE_S)) == 0, f"exit code {code}"
        assert not server.members(), "ranks are left"
    return row


def kill_front(server: Server, state: str) -> Row:
    """Kills the front end; how long its ranks live.

    Raises:
        AssertionError: longer than is promised.
    """
    if state != "idle":
        Reader(server, body(state, 0)).is_in(state)
    if state == "drain":
        drain(server)
    begin = time.monotonic()
    server.process.kill()
    server.process.wait()
    while left := server.members():
        assert time.monotonic() < begin + GONE_S, f"processes {left} are left"
        time.sleep(0.02)
    return {"gone_s": time.monotonic() - begin}


def drain(server: Server) -> None:
    """Tells a server to end, and waits until it refuses new requests."""
    server.process.send_signal(signal.SIGTERM)
    server.until(503, REFUSED_S)


def rank_kills(state: str, times: int, expected: str, directory: Path) -> Iterator[Row]:
    """Kills ranks in a state; where the server ends in that state, each time another one."""
    numbers = [[number] for number in range(times)] if state == "drain" else [[*range(times)]]
    for part in numbers:
        with started(directory) as server:
            for number in part:
                yield kill_rank(server, state, number, expected)


def front_kills(state: str, times: int, directory: Path) -> Iterator[Row]:
    """Kills front ends in a state."""
    for _ in range(times):
        with started(directory) as server:
            yield kill_front(server, state)


def tried(process: str, state: str, kills: Iterator[Row]) -> Row:
    """The worst of some kills, and what was wrong with the first that failed."""
    rows: list[Row] = []
    summary: Row = {"killed": process, "state": state}
    try:
        for row in kills:
            rows.append(row)
            print(".", end="", flush=True)
    except AssertionError as error:
        summary["failed"] = str(error)
    print(flush=True)
    worst = {f"most_{key}": round(max(row[key] for row in rows), 2) for key in ({} if not rows else rows[0])}
    return summary | {"kills": len(rows)} | worst


def kills(times: int, directory: Path) -> Iterator[Row]:
    """Kills ranks, then front ends, and yields the outcomes, one row per state."""
    with started(directory) as server:
        texts = {state: Reader(server, body(state, -1)).ended() for state in STATES}
    for state in STATES:
        yield tried("rank", state, rank_kills(state, times, texts[state], directory))
    for state in STATES:
        yield tried("front end", state, front_kills(state, -(-times // len(STATES)), directory))


def main(arguments: list[str]) -> int:
    """Returns 1 where a promise is broken."""
    given = dict(argument.split("=", 1) for argument in arguments)
    if unknown := set(given) - {"times", "record"}:
        sys.exit(f"error: {', '.join(sorted(unknown))} unknown; known: times, record")
    times = int(given.get("times", 20))
    rows: list[Row] = []
    facts = {"name": "kills", "ranks": RANKS, **provenance(torch.device("cpu"))}
    with tempfile.TemporaryDirectory(prefix="helix-kills-") as folder:
        for row in kills(times, Path(folder)):
            rows.append(row)
            if "record" in given:
                with Path(given["record"]).open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**facts, **row}) + "\n")
    columns = ["killed", "state", "kills", "most_load_s", "most_refused_s", "most_back_s", "most_gone_s", "failed"]
    table = Table(*columns, title="seconds; load: of new ranks; back: beyond that")
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    Console(width=140).print(table)
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
