"""Kills processes of a server that is idle, prefills, decodes or drains, and checks what its clients see.

    python -m tests.serving.kills [times=20] [record=FILE]

Ranks are killed in turn. Each time the server must refuse new requests within 2 s, and be back within 15 s plus the
time that new ranks take to load. The running request continues: its text equals that of an undisturbed run, in fp32.
If the front end is killed, all ranks exit within 15 s.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

from launch.job.lifeline import age_s
from tests.serving.load import append_row
from tests.serving.test_server import Server, served

RANKS = 2
REFUSED_S, BACK_S, GONE_S = 2.0, 15.0, 15.0  # limits to check
DEADLINE_S = 120.0  # for any wait
STATES = {"idle": 24, "prefill": 24, "decode": 200, "drain": 200}  # states, and output tokens of the request
SETTINGS = f"layout.kvp={RANKS}", "serve.restarts=1000", "decode.prefill_chunk=128", "serve.drain_s=60"
Row = dict[str, Any]


class Reader(Thread):
    """A client that reads an answer to its end, from a request that stays in a state for seconds.

    Attributes:
        reads, writes: set once part of the prompt is prefilled, and at the first text.
        text: received so far.
        wrong: the error, if any.
    """

    def __init__(self, server: Server, state: str, number: int) -> None:
        super().__init__(daemon=True)
        more = {"return_progress": True, "ignore_eos": True, "cache_salt": f"{state} {number}"}  # no prefix hits
        prompt = "# A line that is read, again and again.\n" * 100 if state == "prefill" else "def f"
        options = {"max_tokens": STATES[state], "temperature": 0.9, "seed": 5, "stream": True}
        self._answer = lambda: server.complete(prompt, **options, extra_body=more)
        self.reads, self.writes = Event(), Event()
        self.text = ""
        self.wrong: str | None = "it did not end"
        self.start()

    def run(self) -> None:
        try:
            for piece in self._answer():
                progress = (piece.model_extra or {}).get("prompt_progress")
                if progress is not None and 0 < progress["processed"] < progress["total"]:
                    self.reads.set()
                for choice in piece.choices:
                    self.text += choice.text
                    self.writes.set()
            self.wrong = None
        except Exception as error:
            self.wrong = f"{type(error).__name__}: {error}"

    def is_in(self, state: str) -> None:
        """Waits until the request is in a state."""
        begun = self.reads if state == "prefill" else self.writes
        assert begun.wait(DEADLINE_S), f"no {state}: {self.wrong}"
        assert state != "prefill" or not self.writes.is_set(), "the prompt has been read already"

    def ended(self) -> str:
        self.join(DEADLINE_S)
        assert self.wrong is None and not self.is_alive(), self.wrong
        return self.text


def reader_in(server: Server, state: str, number: int) -> Reader | None:
    """Starts a request in a state; in drain the server refuses others."""
    reader = None if state == "idle" else Reader(server, state, number)
    if reader is not None:
        reader.is_in(state)
    if state == "drain":
        server.process.send_signal(signal.SIGTERM)
        server.until_health(503, REFUSED_S)
    return reader


def kill_rank(server: Server, state: str, number: int, expected: str) -> Row:
    """Kills a rank; returns what happened to the server and the request."""
    victim = server.rank(number % RANKS)
    reader = reader_in(server, state, number)
    begin = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    server.until_health(503, DEADLINE_S)
    row: Row = {"refused_s": time.monotonic() - begin}
    assert row["refused_s"] < REFUSED_S, f"new requests were taken for {row['refused_s']:.1f} s"
    if state != "drain":
        server.until_health(200, DEADLINE_S)
        row["load_s"] = max(filter(None, map(age_s, server.ranks().values())))
        row["back_s"] = time.monotonic() - begin - row["load_s"]
        assert row["back_s"] < BACK_S, f"new ranks were started after {row['back_s']:.1f} s"
    text = (reader or Reader(server, state, number)).ended()
    assert text == expected, f"other tokens: {text!r} for {expected!r}"
    if state == "drain":
        assert (code := server.process.wait(DEADLINE_S)) == 0, f"exit code {code}"
        assert not server.members(), "ranks are left"
    return row


def kill_front(server: Server, state: str) -> Row:
    """Kills the front end; returns how long its ranks lived."""
    reader_in(server, state, 0)
    begin = time.monotonic()
    server.process.kill()
    server.process.wait()
    server.gone(GONE_S)
    return {"gone_s": time.monotonic() - begin}


def tried(killed: str, state: str, times: int, kill: Callable[[Server, int], Row], directory: Path) -> Row:
    """Returns the worst of some kills, and the error of the first that failed; some end their server."""
    rows: list[Row] = []
    summary: Row = {"killed": killed, "state": state}
    each = 1 if killed == "front end" or state == "drain" else times
    try:
        for begin in range(0, times, each):
            with served(directory, *SETTINGS) as server:
                rows += [kill(server, number) for number in range(begin, begin + each)]
    except AssertionError as error:
        summary["failed"] = str(error)
    worst = {f"most_{key}": round(max(row[key] for row in rows), 2) for key in (rows[0] if rows else ())}
    return summary | {"kills": len(rows)} | worst


def kills(times: int, directory: Path) -> Iterator[Row]:
    """Yields the row of each process and state."""
    with served(directory, *SETTINGS) as server:
        texts = {state: Reader(server, state, -1).ended() for state in STATES}
    for state, text in texts.items():
        yield tried("rank", state, times, lambda *at, s=state, t=text: kill_rank(at[0], s, at[1], t), directory)
    for state in STATES:
        few = -(-times // len(STATES))
        yield tried("front end", state, few, lambda *at, s=state: kill_front(at[0], s), directory)


def main(times: str = "20", record: str | None = None) -> int:
    """Prints and records rows; returns 1 if a limit is exceeded."""
    failed = False
    with tempfile.TemporaryDirectory(prefix="helix-kills-") as folder:
        for row in kills(int(times), Path(folder)):
            print(*(f"{key}={value}" for key, value in row.items()), flush=True)
            failed |= "failed" in row
            append_row(record, "kills", {"ranks": RANKS, **row})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(**dict(argument.split("=", 1) for argument in sys.argv[1:])))
