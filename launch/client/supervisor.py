"""Supervises a job: starts its ranks, connects to them, and restarts them after a failure."""

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
from helix.log import FORMAT, message_lines
from helix.packages import ROOT, rank_environment
from launch.client.engine_client import EngineClient, Generation
from launch.client.errors import WRONG_SETTINGS

LOG = logging.getLogger(f"helix.{__name__}")
ENTRY = ROOT / "torchrun_entry.py"
LAUNCHER = "HELIX_LAUNCHER"  # environment variable for launchers: pid of the process that they must not outlive
# Lines of a failed job's output that name the cause, most reliable first: a lost process, an error, an exception.
CAUSES = (r"error: (rank \d+|the launcher) was (killed|stopped)", r"error: ", r"[\w.]+(Error|Exception): ")
WINDOW_S = 600.0  # time window of `serve.restarts`
BACKOFF_S = (1.0, 2.0, 4.0)  # delays before restarts within the window; the last one repeats
POLL_S = 0.05  # interval of connection attempts
BEAT_S = 1.0  # interval of progress checks
SHUTDOWN_S = 20.0  # for ranks to exit once asked to
FAILURE_OUTPUT_S = 3.0  # for the launcher to print the reason after a rank failed


class JobFailed(Exception):
    """No job can be started any more."""


class HangDetector:
    """Measures how long ranks that have work make no progress.

    Progress is `progress` in the engine's stats, which counts scheduler steps and layers; a prefill chunk may take the
    time that `chunk_s` announces. Receiving stats proves nothing: a thread sends them even if the engine hangs. Checks
    are counted, not time, so that a server that was suspended as a whole can resume.
    """

    def __init__(self) -> None:
        self._stalled_checks = 0
        self._last_progress: float | None = None

    def check(self, busy: bool, stats: Mapping[str, float]) -> float:
        """Returns the seconds without progress beyond what was announced; call it every BEAT_S seconds."""
        progress = stats.get("progress")
        self._stalled_checks = self._stalled_checks + 1 if busy and progress == self._last_progress else 0
        self._last_progress = progress
        return self._stalled_checks * BEAT_S - stats.get("chunk_s", 0.0)


class Supervisor:
    """Runs the job of an `EngineClient`.

    Args:
        arguments: settings of the ranks; unused with `serve.attach`, where the ranks are started separately.
        directory: private directory for sockets.
        log: file descriptor for the ranks' output, where their log is in JSON; None: inherit stdout and stderr.

    Attributes:
        path: leads to the socket of the current job's ranks, for the server's other processes.
        settings_refused: whether the last job rejected its settings before it started ranks.
    """

    def __init__(
        self,
        engine_client: EngineClient,
        serve: ServeConfig,
        arguments: Sequence[str],
        directory: Path,
        log: int | None = None,
    ) -> None:
        self._engine_client = engine_client
        self._serve = serve
        self._arguments = arguments
        self.path = Path(serve.attach or directory / "ranks.sock")
        self._directory = directory
        self._log = log
        self._jobs = 0
        self.settings_refused = False
        self._stopping = False

    async def run(self) -> None:
        """Keeps the job running until `stop` ends it.

        Raises:
            JobFailed: the job did not start, or failed too often.
            ValueError: files of the model directory, other than weights, or `serve.attach` cannot be read.
        """
        failures: deque[float] = deque()
        while True:
            try:
                why = await (self._attached() if self._serve.attach else self._job())
            except TimeoutError as error:
                why = str(error)
            if self._stopping:
                return
            if self._engine_client.engine_info is None and self._serve.attach is None:
                raise JobFailed("the ranks did not start")
            given_up = self._engine_client.on_job_lost(why)
            if given_up is not None:
                LOG.warning("not retrying the only new request: %s", _describe(given_up))
            failures.append(time.monotonic())
            while failures[0] < time.monotonic() - WINDOW_S:
                failures.popleft()
            if self._serve.attach is None and len(failures) > self._serve.restarts:
                raise JobFailed(f"more than serve.restarts={self._serve.restarts} failures in ten minutes: {why}")
            doing = "reconnecting" if self._serve.attach else "restarting"
            LOG.warning("%s: %s; requests waiting: %d", why, doing, len(self._engine_client.generations))
            self._engine_client.observer.on_restart()
            await asyncio.sleep(BACKOFF_S[min(len(failures), len(BACKOFF_S)) - 1])

    async def stop(self) -> None:
        """Ends the job while `run` runs; an attached job keeps running."""
        self._stopping = True
        if self._serve.attach is None:
            self._engine_client.stop()

    async def _job(self) -> str:
        self._jobs += 1
        path, link = self._directory / f"{self._jobs}.sock", self._directory / "link"  # ranks that die may still listen
        link.symlink_to(path)
        link.replace(self.path)
        log_format = {} if self._log is None else {FORMAT: "json"}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(ENTRY), *self._arguments, f"serve.socket={path}"),
            env=os.environ | rank_environment() | {LAUNCHER: str(os.getpid())} | log_format,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # control-C in a terminal reaches only this process: running requests can finish
        )
        ended = asyncio.create_task(process.wait())
        working = asyncio.create_task(self._work())
        try:
            await asyncio.wait((ended, working), return_when=asyncio.FIRST_COMPLETED)
            why = working.result() if working.done() else ""
            if working.done():
                await asyncio.wait((ended,), timeout=SHUTDOWN_S if self._stopping else FAILURE_OUTPUT_S)
            self.settings_refused = process.returncode == WRONG_SETTINGS
            return why or f"the ranks ended ({_exit(process.returncode)})"
        finally:
            working.cancel()
            with suppress(asyncio.CancelledError, TimeoutError):
                await working
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the launcher and its ranks
            await ended

    async def _attached(self) -> str:
        LOG.info("serve.attach=%s: waiting for the ranks", self.path)
        why = await self._work()
        return why or "the connection to the ranks closed"

    async def _work(self) -> str:
        """Exchanges messages with the ranks until they leave; returns why they left, if known.

        Raises:
            TimeoutError: the ranks hang.
        """
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self.path)
                break
            except OSError as error:
                if self._serve.attach and not isinstance(error, (FileNotFoundError, ConnectionError, BlockingIOError)):
                    raise ValueError(f"serve.attach={self.path} cannot be used: {error.strerror or error}") from error
                await asyncio.sleep(POLL_S)
        engine_client, hang_s, silence = self._engine_client, self._serve.hang_s, HangDetector()
        serving = asyncio.create_task(engine_client.serve(reader, writer))
        try:
            while not serving.done():
                await asyncio.wait((serving,), timeout=BEAT_S)
                # This process alone restarts ranks that hang, also while only others have requests.
                busy = engine_client.connected and (bool(engine_client.loads.in_flight) or self._stopping)
                if silence.check(busy, engine_client.stats) > (min(hang_s, SHUTDOWN_S) if self._stopping else hang_s):
                    raise TimeoutError(f"the ranks made no progress for serve.hang_s={hang_s:g} s")
            return await serving
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving


def _describe(generation: Generation) -> str:
    """Describes a request without its content, for the log."""
    request = generation.request
    grammar = "none" if request.grammar is None else f"{len(request.grammar)} characters"
    prompt = f"a prompt of {len(request.prompt)} tokens, max_tokens={request.max_tokens}"
    sampling = ", ".join(request.sampling.to_dict()) or "greedy"
    return f"request {generation.name}, {prompt}, grammar: {grammar}, sampling: {sampling}"


def _exit(code: int | None) -> str:
    return "one of them failed" if code is None else f"exit code {code}"


def cause(lines: Sequence[str]) -> str:
    """Finds the line that names the cause of a job's failure; empty if there is none."""
    texts = [text for line in lines for text in message_lines(line)]
    return next((text for pattern in CAUSES for text in texts if re.match(pattern, text)), "").removeprefix("error: ")
