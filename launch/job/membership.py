"""Membership of a job: join, agree on the config, leave, and end all ranks when one fails.

Ranks first meet in the rendezvous store. Config errors are found before there is a process group: each rank posts its
result, and all ranks end together.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from comm.base import Communicator
from helix.devices import choose_backend, set_device
from helix.errors import RankError
from helix.log import print_error
from helix.rank_info import RankInfo
from launch.job.lifeline import end_torchrun, identity, kill

LOG = logging.getLogger(f"helix.{__name__}")

BEAT_S = 1.0  # heartbeat interval
REPORT_S = 3 * BEAT_S  # for the other ranks to see a reported error
SILENCE_S = 15.0  # without heartbeat or response before a rank or launcher counts as dead
LEAVE_S = 25.0  # for all ranks to leave a finished job
JOIN_S = 120.0  # for all ranks to start and check the config
PATIENCE_S = 10.0  # of JOIN_S, before rank 0 names the missing ranks


@dataclass
class Job:
    """A rank's membership of a job.

    Attributes:
        device: device of its tensors; set by `connect`.
        backend: symm_mem, emulated (both over NCCL), nccl or gloo; set by `connect`.
        timeout: of each collective; set by `connect`.
    """

    rank_info: RankInfo
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "gloo"
    timeout: timedelta = timedelta(minutes=5)

    def __post_init__(self) -> None:
        """Connects to the store and starts the watchdog; raises RuntimeError if the store cannot be reached."""
        self._owns_group = False
        # A launcher's store outlives jobs and restarts: keys start with the ids of both.
        run, attempt = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))
        self.store = dist.PrefixStore(f"helix/{run}/{attempt}", _connect_store(self.rank_info))
        self._watchdog = Watchdog(self.store, self.rank_info)
        self._watchdog.start()

    @property
    def leads(self) -> bool:
        return self.rank_info.rank == 0

    def agree(self, error: str | None, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Exchanges errors and facts of all ranks before any collective; returns the facts in rank order.

        Facts must be JSON-serializable. If any rank has an error or does not report, all ranks end.
        """
        rank, world = self.rank_info.rank, self.rank_info.world_size
        keys = [f"preflight/{r}" for r in range(world)]
        self.store.set(keys[rank], json.dumps({"error": error, "facts": facts}))
        for patience in (PATIENCE_S, JOIN_S - PATIENCE_S):
            try:
                self.store.wait(keys, timedelta(seconds=patience))
                break
            except dist.DistError:
                absent = ", ".join(str(r) for r, key in enumerate(keys) if not self.store.check([key]))
                if self.leads and patience == PATIENCE_S:
                    LOG.info("waiting for rank %s, up to %.0f s", absent, JOIN_S)
        else:
            self.end(f"error: rank {absent} did not report within {JOIN_S:.0f} s after the start")
        reports = [json.loads(self.store.get(key)) for key in keys]
        errors = {f["error"]: r for r, f in reversed(list(enumerate(reports))) if f["error"] is not None}
        lines = []
        for message, first in errors.items():
            alone = sum(f["error"] == message for f in reports) < world
            lines.append(f"error: {f'rank {first}: ' if alone and world > 1 else ''}{message}")
        if lines:
            self.end("\n".join(lines))
        return [f["facts"] for f in reports]

    def _print_once_per_host(self, lines: str) -> None:
        """Prints lines on local rank 0; the host's other ranks wait until it has."""
        printed = f"printed/{self.rank_info.host}"
        if self.rank_info.local_rank == 0:
            print(lines, file=sys.stderr, flush=True)
            with suppress(dist.DistError):  # the host with the store has ended
                self.store.set(printed, "")
            return
        try:  # the first rank to exit makes torchrun kill the others: none may exit before the lines are printed
            self.store.wait([printed], timedelta(seconds=10))
        except dist.DistError:
            print(lines, file=sys.stderr, flush=True)

    def connect(self, backend: str, facts: list[dict[str, Any]], timeout_s: float) -> None:
        """Creates the process group.

        Args:
            backend: may be auto.
            facts: `gpu_facts` of all ranks.

        Raises:
            ConfigError: a GPU backend without a GPU for each rank or, for symm_mem, without peer access.
        """
        rank_info = self.rank_info
        self.backend = choose_backend(backend, rank_info, facts)
        self.device = set_device(self.backend, rank_info)
        self.timeout = timedelta(seconds=timeout_s)
        transport = "gloo" if self.backend == "gloo" else "nccl"
        if dist.is_initialized():  # by a program that uses `LLM` under torchrun: it keeps its process group
            return
        self._owns_group = True
        dist.init_process_group(
            transport,
            store=dist.PrefixStore("group", self.store),
            rank=rank_info.rank,
            world_size=rank_info.world_size,
            timeout=self.timeout,
            device_id=self.device if transport == "nccl" else None,
        )

    def end(self, lines: str) -> NoReturn:
        """Ends this rank; local rank 0 prints the reason. Called on every rank."""
        self._watchdog.stop()  # leaving first is not dying
        self._print_once_per_host(lines)
        sys.stdout.flush()
        end_torchrun(restartable=False)
        os._exit(1)  # without destructors, see `_exit`

    def fail(self, error: BaseException) -> NoReturn:
        """Ends this rank after printing the traceback, or only the message of a RankError; reports it to all ranks."""
        if isinstance(error, RankError):
            if self._watchdog.reports(self.store):  # several ranks may have the same error
                print_error(error)
            self._watchdog.stop()  # it must not end this rank first: torchrun would print tracebacks
            self._watchdog.report_failure(f"error: {error}")
            time.sleep(REPORT_S)
            _exit()
        cause = f"rank {self.rank_info.rank} failed: {type(error).__name__}: {error}"
        # A broken connection does not tell which peer died; its launcher usually reports that sooner.
        if gone := self._watchdog.silent_ranks():
            cause = f"rank {', '.join(map(str, gone))} stopped responding, then {cause}"
        LOG.error("failed", exc_info=error)
        print_error(cause)
        self._watchdog.report_failure(cause)
        _exit()

    def leave(self, *comms: Communicator) -> None:
        """Ends the job once all ranks have called it; rank 0, whose host may have the store, leaves last.

        Args:
            comms: communicators, which it closes in reverse order.
        """
        # The watchdog stops here, and destroying a process group may wait for peers: hence the deadline.
        with deadline(LEAVE_S, f"rank {self.rank_info.rank} could not leave the job within {LEAVE_S:.0f} s"):
            self.store.set(f"left/{self.rank_info.rank}", "")
            self._watchdog.stop()
            if self.leads:
                self.store.wait([f"left/{r}" for r in range(self.rank_info.world_size)], timedelta(seconds=20))
            for comm in reversed(comms):
                comm.close()
            if self._owns_group:
                dist.destroy_process_group()


def _exit() -> NoReturn:
    """Exits without destructors: those of a broken process group may wait for peers."""
    end_torchrun()
    os._exit(1)


def _connect_store(rank_info: RankInfo) -> dist.Store:
    """Connects to the rendezvous store: the launcher's, or rank 0's if the launcher has none; raises RuntimeError."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    launcher_s = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank_info.rank == 0 and not launcher_s
    patience = timedelta(seconds=SILENCE_S if launcher_s else JOIN_S)  # a launcher's store exists before its ranks
    where = f"MASTER_ADDR={host} MASTER_PORT={port}"
    absent = f"{where}: {'the launcher' if launcher_s else 'rank 0'} did not respond within {patience.seconds} s"
    with deadline(patience.seconds + 10 * BEAT_S, f"rank {rank_info.rank}: {absent}"):
        try:
            store = dist.TCPStore(
                host, port, is_master=serves, timeout=patience, wait_for_workers=False, multi_tenant=True
            )
        except (dist.DistError, RuntimeError, ValueError) as error:
            why = str(error).partition("\n")[0]
            port_taken = f"{where}: this rank cannot listen there; set another port ({why})"
            raise RuntimeError(port_taken if serves else absent) from error
    store.set_timeout(timedelta(seconds=JOIN_S))
    return store


@contextmanager
def deadline(seconds: float, line: str) -> Iterator[None]:
    """Prints an error and ends this process if the context takes longer than `seconds`, even inside a call into C."""

    def give_up() -> None:
        print_error(line)
        _exit()

    guard = threading.Timer(seconds, give_up)
    guard.daemon = True
    guard.start()
    try:
        yield
    finally:
        guard.cancel()


class Watchdog:
    """Ends this process when another rank has failed or gone silent, so that no rank waits forever.

    Runs in a thread: the main thread may be inside a collective or a kernel that never returns.
    """

    def __init__(self, store: dist.Store, rank_info: RankInfo) -> None:
        self._store = store
        self._rank_info = rank_info
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        # Needs a separate connection: the main thread may block in the other one.
        clone = self._store.clone()  # type: ignore[attr-defined]
        clone.set_timeout(timedelta(seconds=SILENCE_S))
        self._thread = threading.Thread(target=self._watch, args=(clone,), name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread:
            self._thread.join(5 * BEAT_S)

    def silent_ranks(self) -> list[int]:
        """Waits three beats and returns the ranks without a heartbeat in that time; empty if the store is gone."""
        if self._rank_info.world_size == 1:
            return []

        def beats() -> list[int]:
            return [self._store.add(f"alive/{r}", 0) for r in range(self._rank_info.world_size)]

        try:
            before = beats()
            time.sleep(3 * BEAT_S)
            return [r for r, (a, b) in enumerate(zip(before, beats(), strict=True)) if a == b != 0]
        except dist.DistError:
            return []

    def reports(self, store: dist.Store) -> bool:
        """Returns whether this rank is the first of its host to report an error that all ranks see."""
        try:
            return store.add(f"reported/{self._rank_info.host}", 1) == 1
        except dist.DistError:
            return True

    def report_failure(self, message: str) -> None:
        """Posts why the job failed; if it starts with `error: `, the line is complete and each host prints it once."""
        try:
            self._store.compare_set("failed", "", message)
        except dist.DistError:
            return  # the store is gone, and the job with it

    def _watch(self, store: dist.Store) -> None:
        rank, world = self._rank_info.rank, self._rank_info.world_size
        others = [r for r in range(world) if r != rank]
        seen = dict.fromkeys(others, 0)
        silence = dict.fromkeys(others, 0)  # rounds without a beat, not time: a job suspended as a whole can resume
        try:
            store.set(f"process/{rank}", identity(os.getpid()))
            while not self._stopped.wait(BEAT_S):
                store.add(f"alive/{rank}", 1)
                beats = {r: store.add(f"alive/{r}", 0) for r in others}
                silence = {r: silence[r] + 1 if beats[r] == seen[r] != 0 else 0 for r in others}
                seen = beats
                silent = [r for r in others if silence[r] * BEAT_S > SILENCE_S and not store.check([f"left/{r}"])]
                if store.check(["failed"]):
                    why = store.get("failed").decode()
                    already_reported = why.startswith("error: ") and not self.reports(store)
                    self._end("" if already_reported else why)
                elif silent:
                    # torchrun would only send SIGTERM, and wait long if the rank is stopped.
                    kill(store.get(f"process/{silent[0]}").decode())
                    self._end(f"rank {silent[0]} sent no heartbeat for {SILENCE_S:.0f} s: it was killed or hangs")
        except dist.DistError as error:
            self._end(f"lost the rendezvous store: the launcher or the first host is gone ({error})")

    def _end(self, why: str) -> None:
        if not self._stopped.is_set():
            if why:  # empty if another rank of this host has printed the reason
                if why.startswith("error: "):
                    print_error(why.removeprefix("error: "))
                else:
                    LOG.error("ends: %s", why)
            _exit()
