"""Joining a job and leaving it: who am I, do all ranks agree, and the end of everyone when one fails.

Ranks meet in the rendezvous store first. Whatever can be wrong with what the user set is found before a process group
exists: each rank posts its verdict, and all of them end alike.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from comm.base import Communicator

BEAT_S = 1.0  # between two signs of life of a rank
SAID_S = 3 * BEAT_S  # for the others to hear that one rank has said what is wrong
SILENCE_S = 15.0  # without one: the rank is taken for dead
LEAVING_S = 40.0  # for all ranks to leave a job that is done
MEETING_S = 120.0  # for all ranks to have checked what the user set


class AlikeError(ValueError):
    """Something is wrong on every rank alike: one line says what, and all of them end."""


class RankError(RuntimeError):
    """Something is wrong on one rank alone: one line says what, and all of them end."""


@dataclass(frozen=True)
class Place:
    """This process among the ranks, as torchrun says."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> Place | None:
        """None where no launcher started this process.

        Raises:
            ValueError: part of what a launcher sets is missing.
        """
        if "RANK" not in os.environ:
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in os.environ]
        if missing:
            raise ValueError(f"RANK is set but {', '.join(missing)} is not: start ranks with torchrun")
        return cls(*(int(os.environ[name]) for name in names[:4]))


@dataclass
class Job:
    """This rank's membership of a job.

    Attributes:
        place: which rank this is.
        device: where its tensors live, once `connect` has chosen.
        backend: symm_mem, stand_in (both over NCCL), nccl or gloo, likewise.
        timeout: deadline of each collective, likewise.
    """

    place: Place
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "gloo"
    timeout: timedelta = timedelta(minutes=5)

    def __post_init__(self) -> None:
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=MEETING_S))))
        # An agent's store outlives one job: the names of this one begin with its id.
        self.store = dist.PrefixStore(f"helix/{os.environ.get('TORCHELASTIC_RUN_ID', '')}", store)
        self._watchdog = _Watchdog(self.store, self.place)

    @property
    def leads(self) -> bool:
        return self.place.rank == 0

    def agree(self, error: str | None, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Exchanges what each rank found before any collective; JSON-able facts of all ranks, in rank order.

        Raises:
            SystemExit: with code 1 on every rank where any of them found an error; rank 0 has printed it.
        """
        rank, world = self.place.rank, self.place.world_size
        keys = [f"preflight/{r}" for r in range(world)]
        self.store.set(keys[rank], json.dumps({"error": error, "facts": facts}))
        try:
            self.store.wait(keys, timedelta(seconds=MEETING_S))
        except dist.DistError as broken:
            absent = [r for r, key in enumerate(keys) if not self.store.check([key])]
            raise RuntimeError(f"ranks {absent} did not report within {MEETING_S:.0f} s of start") from broken
        found = [json.loads(self.store.get(key)) for key in keys]
        errors = {f["error"]: r for r, f in reversed(list(enumerate(found))) if f["error"] is not None}
        if not errors:
            return [f["facts"] for f in found]
        lines = []
        for message, first in errors.items():
            alone = sum(f["error"] == message for f in found) < world
            lines.append(f"error{f' on rank {first}' if alone and world > 1 else ''}: {message}")
        self._say("\n".join(lines))
        raise SystemExit(1)

    def _say(self, lines: str) -> None:
        """Rank 0 prints what all ranks have to say; the others return when it is out."""
        if self.leads:
            print(lines, file=sys.stderr, flush=True)
            self.store.set("said", "")
            return
        try:  # the first rank that exits takes the others down: not before
            self.store.wait(["said"], timedelta(seconds=10))
        except dist.DistError:
            print(lines, file=sys.stderr, flush=True)

    def connect(self, backend: str, facts: list[dict[str, Any]], timeout_s: float) -> None:
        """Starts the process group and the watchdog; `backend` may be auto, `facts` are those of `gpu_facts`.

        Raises:
            AlikeError: a backend of GPUs without one for each rank or, for symm_mem, without peers.
        """
        place = self.place
        self.backend = choose_backend(backend, place, facts)
        if self.backend != "gloo":
            self.device = torch.device("cuda", place.local_rank)
            torch.cuda.set_device(self.device)
            # NVLink multicast is not available everywhere; what is measured without it holds everywhere.
            os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        self.timeout = timedelta(seconds=timeout_s)
        self._watchdog.start()
        transport = "gloo" if self.backend == "gloo" else "nccl"
        dist.init_process_group(
            transport,
            store=dist.PrefixStore("group", self.store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=self.timeout,
            device_id=self.device if transport == "nccl" else None,
        )

    def end(self, error: AlikeError) -> NoReturn:
        """Ends this rank, and rank 0 says why; called on every rank."""
        self._say(f"error: {error}")
        sys.stdout.flush()
        os._exit(1)  # at once, as below

    def fail(self, error: BaseException) -> NoReturn:
        """Ends this rank with its traceback, or with the line of a RankError, and tells the others why."""
        if isinstance(error, RankError):
            print(f"error: {error}", file=sys.stderr, flush=True)
            self._watchdog.stop()  # not to end by it: the first rank that exits takes the others down, with tracebacks
            self._watchdog.tell("")
            time.sleep(SAID_S)
            os._exit(1)
        trace = "".join(traceback.format_exception(error))
        print(f"rank {self.place.rank} failed:\n{trace}", file=sys.stderr, flush=True)
        cause = f"rank {self.place.rank} failed: {type(error).__name__}: {error}"
        # A broken connection says that a peer is gone, not which.
        if gone := self._watchdog.silent():
            cause = f"rank {', '.join(map(str, gone))} gave no sign of life, and then {cause}"
            print(cause, file=sys.stderr, flush=True)
        self._watchdog.tell(cause)
        os._exit(1)  # at once: destructors of a broken process group may wait for peers

    def leave(self, *comms: Communicator) -> None:
        """Ends the job once all ranks have come here; rank 0, whose host may hold the store, goes last.

        Args:
            comms: in the order in which they were made.
        """
        # Nobody watches from here on, and taking a process group down may wait for peers.
        guard = threading.Timer(LEAVING_S, self._give_up_leaving)
        guard.daemon = True
        guard.start()
        self.store.set(f"left/{self.place.rank}", "")
        self._watchdog.stop()
        if self.leads:
            self.store.wait([f"left/{r}" for r in range(self.place.world_size)], timedelta(seconds=30))
        for comm in reversed(comms):
            comm.close()
        if dist.is_initialized():  # or there was nothing to connect for
            dist.destroy_process_group()
        guard.cancel()

    def _give_up_leaving(self) -> None:
        print(f"rank {self.place.rank} could not leave the job within {LEAVING_S:.0f} s", file=sys.stderr, flush=True)
        os._exit(1)


def choose_backend(backend: str, place: Place, facts: list[dict[str, Any]]) -> str:
    """The backend that `comm.backend` means where ranks found `facts` about their GPUs.

    Raises:
        AlikeError: it cannot be.
    """
    gpus = min(f["gpus"] for f in facts)
    covered = gpus >= place.local_world_size
    within_reach = covered and all(f["peers"] for f in facts)
    peers = within_reach and place.world_size > 1
    if backend == "auto":
        return "symm_mem" if peers else "nccl" if covered else "gloo"
    if backend != "gloo" and not covered:
        raise AlikeError(
            f"comm.backend={backend} needs a GPU for each rank: a host has {gpus} for {place.local_world_size} "
            "ranks; use fewer ranks or comm.backend=gloo"
        )
    if backend == "symm_mem" and not peers:
        raise AlikeError(
            "comm.backend=symm_mem needs several ranks on one host whose GPUs reach each other's memory: "
            "use comm.backend=nccl"
        )
    if backend == "stand_in" and not within_reach:
        raise AlikeError("comm.backend=stand_in needs two GPUs of one host that reach each other's memory, or one")
    return backend


def gpu_facts(place: Place) -> dict[str, Any]:
    """How many GPUs this rank sees, and whether its own reaches those of all other ranks."""
    gpus = torch.cuda.device_count()
    ranks = range(place.world_size)
    peers = place.local_world_size == place.world_size <= gpus and all(
        r == place.local_rank or torch.cuda.can_device_access_peer(place.local_rank, r) for r in ranks
    )
    return {"gpus": gpus, "peers": peers}


def gpu_name(place: Place) -> str | None:
    """What this rank's GPU is called; None where this host has not one for each of its ranks."""
    enough = place.local_world_size <= torch.cuda.device_count()
    return torch.cuda.get_device_name(place.local_rank) if enough else None


class _Watchdog:
    """Ends this process when another rank has failed or gone silent: no rank waits for one that cannot come.

    A thread, because the main one may be inside a collective or a kernel that never returns.
    """

    def __init__(self, store: dist.Store, place: Place) -> None:
        self._store = store
        self._place = place
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        # A connection of its own: the main thread may be waiting in the other.
        own = self._store.clone()  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._watch, args=(own,), name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread:
            self._thread.join(5 * BEAT_S)

    def silent(self) -> list[int]:
        """Ranks that give no sign of life for three beats from now on; empty where nobody can say."""
        if self._thread is None:
            return []

        def beats() -> list[int]:
            return [self._store.add(f"alive/{r}", 0) for r in range(self._place.world_size)]

        try:
            before = beats()
            time.sleep(3 * BEAT_S)
            return [r for r, (a, b) in enumerate(zip(before, beats(), strict=True)) if a == b != 0]
        except dist.DistError:
            return []

    def tell(self, message: str) -> None:
        try:
            self._store.compare_set("failed", "", message)
        except dist.DistError:
            return  # the store is gone, and with it the job

    def _watch(self, store: dist.Store) -> None:
        rank, world = self._place.rank, self._place.world_size
        others = [r for r in range(world) if r != rank]
        seen = dict.fromkeys(others, (0, time.monotonic()))
        while not self._stopped.wait(BEAT_S):
            try:
                store.add(f"alive/{rank}", 1)
                beats = {r: store.add(f"alive/{r}", 0) for r in others}
                left = {r for r in others if store.check([f"left/{r}"])}
                failure = store.get("failed").decode() if store.check(["failed"]) else None
            except dist.DistError as error:
                self._end(f"lost the rendezvous store, so the launcher or the first host is gone ({error})")
                return
            now = time.monotonic()
            seen = {r: seen[r] if seen[r][0] == beats[r] else (beats[r], now) for r in others}
            silent = [r for r in others if r not in left and now - seen[r][1] > SILENCE_S]
            if failure is not None:
                self._end(failure)
            elif silent:
                self._end(f"rank {silent[0]} gave no sign of life for {SILENCE_S:.0f} s: it was killed or hangs")

    def _end(self, why: str) -> None:
        if not self._stopped.is_set():
            if why:  # or one rank has said it for all
                print(f"rank {self._place.rank} ends: {why}", file=sys.stderr, flush=True)
            os._exit(1)
