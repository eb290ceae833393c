"""Supervision of a job: starts its ranks, connects to them, and restarts them after a failure."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from helix.config import ServeConfig
from helix.packages import ROOT, rank_environment
from launch.client.core import Core, Flight
from launch.client.errors import WRONG_SETTINGS

LOG = logging.getLogger("helix.serving")  # unlike a print, a log that cannot be written raises nothing
ENTRY = ROOT / "torchrun_entry.py"
LAUNCHER = "HELIX_LAUNCHER"  # environment variable of a launcher of ranks: the process that it must not outlive
# Lines of a failed job that tell the cause, the most reliable first: a lost process, an error line, an exception.
CAUSES = (r"(rank \d+|the launcher) was (killed|stopped)", r"error\b", r"[\w.]+(Error|Exception): ")
WINDOW_S = 600.0  # in which `serve.restarts` are counted
BACKOFF_S = (1.0, 2.0, 4.0)  # delays before the first restarts in the window; the last one repeats
LOOK_S = 0.05  # between two attempts to connect
BEAT_S = 1.0  # between two looks at the ranks' progress
ENDING_S = 20.0  # for ranks to end once they are told to
LAST_WORDS_S = 3.0  # for a launcher to print the reason, once a rank has failed


class GaveUp(Exception):
    """Error: no job will be started again."""


class Silence:
    """Time for which ranks that have work make no progress.

    Progress is the engine's own: `progress` in its statistics counts decisions and layers, and a chunk of a prompt may
    take the time that `chunk_s` announces. Statistics that arrive prove nothing: a thread sends them even if the engine
    hangs. Looks are counted, not time: a server that was suspended as a whole can resume.
    """

    def __init__(self) -> None:
        self._looks = 0
        self._seen: float | None = None

    def look(self, busy: bool, stats: Mapping[str, float]) -> float:
        """Returns the seconds of silence beyond what was announced; to be called every BEAT_S seconds."""
        progress = stats.get("progress")
        self._looks = self._looks + 1 if busy and progress == self._seen else 0
        self._seen = progress
        return self._looks * BEAT_S - stats.get("chunk_s", 0.0)


class Supervisor:
    """Supervisor of the job behind a core, while `keep` runs.

    Args:
        arguments: settings of the ranks; with `serve.attach`, the ranks are started elsewhere.
        directory: private, for sockets.
        log: descriptor of a file for what the ranks print; None: they print where this process does.

    Attributes:
        refused: whether the last job's settings were refused before its ranks started.
    """

    def __init__(
        self, core: Core, serve: ServeConfig, arguments: Sequence[str], directory: Path, log: int | None = None
    ) -> None:
        self._core = core
        self._serve = serve
        self._arguments = arguments
        self._directory = directory
        self._log = log
        self._jobs = 0
        self.refused = False
        self._stopping = False

    async def keep(self) -> None:
        """Keeps the job running until `stop` ends it.

        Raises:
            GaveUp: it did not start, or failed too often.
            ValueError: files of the model directory other than weights cannot be read.
        """
        failures: deque[float] = deque()
        while True:
            try:
                why = await (self._attached() if self._serve.attach else self._job())
            except TimeoutError as error:
                why = str(error)
            if self._stopping:
                return
            if self._core.ready is None and self._serve.attach is None:
                raise GaveUp("the ranks did not start")
            given_up = self._core.lost(why)
            if given_up is not None:
                LOG.warning("not tried again: %s", _described(given_up))
            failures.append(time.monotonic())
            while failures[0] < time.monotonic() - WINDOW_S:
                failures.popleft()
            if self._serve.attach is None and len(failures) > self._serve.restarts:
                raise GaveUp(f"serve.restarts={self._serve.restarts} restarts in ten minutes were not enough: {why}")
            LOG.warning("%s: %d requests wait for it to come back", why, len(self._core.flights))
            self._core.observer.restarted()
            await asyncio.sleep(BACKOFF_S[min(len(failures), len(BACKOFF_S)) - 1])

    async def stop(self) -> None:
        """Ends the job while `keep` runs; an attached job keeps running."""
        self._stopping = True
        if self._serve.attach is None:
            self._core.stop()

    async def _job(self) -> str:
        """Runs a job to its end and returns the reason of its end."""
        self._jobs += 1
        path = self._directory / f"{self._jobs}.sock"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(ENTRY), *self._arguments, f"serve.socket={path}"),
            env=os.environ | rank_environment() | {LAUNCHER: str(os.getpid())},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # a terminal's control-C reaches only this process: running requests end normally
        )
        ended = asyncio.create_task(process.wait())
        working = asyncio.create_task(self._work(path))
        try:
            await asyncio.wait((ended, working), return_when=asyncio.FIRST_COMPLETED)
            why = working.result() if working.done() else ""
            if working.done():
                await asyncio.wait((ended,), timeout=ENDING_S if self._stopping else LAST_WORDS_S)
            self.refused = process.returncode == WRONG_SETTINGS
            return why or f"the ranks ended ({_exit(process.returncode)})"
        finally:
            working.cancel()
            with suppress(asyncio.CancelledError, TimeoutError):
                await working
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the launcher and its ranks
            await ended

    async def _attached(self) -> str:
        why = await self._work(Path(str(self._serve.attach)))
        return why or "the connection to the ranks ended"

    async def _work(self, path: Path) -> str:
        """Exchanges messages with the ranks behind a socket until they leave; returns the reason, if known.

        Raises:
            TimeoutError: they hang.
        """
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(path)
                break
            except OSError:
                await asyncio.sleep(LOOK_S)
        core, hang_s, silence = self._core, self._serve.hang_s, Silence()
        serving = asyncio.create_task(core.serve(reader, writer))
        try:
            while not serving.done():
                await asyncio.wait((serving,), timeout=BEAT_S)
                busy = core.connected and (bool(core.flights) or self._stopping)
                if silence.look(busy, core.stats) > (min(hang_s, ENDING_S) if self._stopping else hang_s):
                    raise TimeoutError(f"the ranks made no progress for serve.hang_s={hang_s:g} s")
            return await serving
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving


def _described(flight: Flight) -> str:
    """Describes a request without its content."""
    request = flight.request
    grammar = "none" if request.grammar is None else f"{len(request.grammar)} characters"
    prompt = f"a prompt of {len(request.prompt)} tokens, {request.max_tokens} to draw"
    sampling = ", ".join(request.sampling.to_dict()) or "greedy"
    return f"request {flight.name}, {prompt}, grammar: {grammar}, sampling: {sampling}"


def _exit(code: int | None) -> str:
    return "one of them failed" if code is None else f"exit code {code}"


def cause(lines: Sequence[str]) -> str:
    """Finds the line that tells why a job failed; empty if there is none."""
    causes = (line for pattern in CAUSES for line in lines if re.match(pattern, line))
    return next(causes, "").removeprefix("error: ")
