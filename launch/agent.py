"""An agent of several, each with ranks of one job: what `launch/agent.sh` runs, through torch's elastic launcher."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from helix.place import most_ranks
from launch.inputs import compose, front
from launch.inputs.work import RUNTIME, Program
from launch.job.membership import deadline
from launch.job.spawn import INTERRUPTED

ANSWER_S = 30  # for the first agent's host to answer
MEETING_S = 300  # for all agents to be there
LOOK_S = 0.5  # between two looks at who is there
GRACE_S = 5  # between asking ranks to end and killing them


def read(environment: Mapping[str, str]) -> LaunchConfig:
    """Reads the agent that environment variables describe.

    Raises:
        ValueError: a variable is missing or wrong; the message names it, its value and what to set.
    """
    endpoint = environment.get("ENDPOINT", "")
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 1 <= int(port[:9]) <= 65535:
        raise ValueError(f"ENDPOINT={endpoint} must be HOST:PORT of the first host, such as host0:29500")
    try:
        socket.getaddrinfo(host.strip("[]"), None)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"ENDPOINT={endpoint}: no host of that name is known here") from error
    nodes = _count(environment, "NODES", 2, 1 << 16)
    ranks = _count(environment, "RANKS", torch.cuda.device_count(), most_ranks())
    grace: dict[str, Any] = (
        {"shutdown_timeout": GRACE_S} if "shutdown_timeout" in LaunchConfig.__dataclass_fields__ else {}
    )
    return LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=ranks,
        run_id=environment.get("RUN", "") or "helix",
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        rdzv_configs={"timeout": MEETING_S, "read_timeout": ANSWER_S, "is_host": False},  # `meeting_store` is there
        max_restarts=0,
        monitor_interval=0.1,
        **grace,
    )


def meeting_store(endpoint: str) -> dist.Store:
    """Connects to the store at which agents meet; the first agent on the endpoint's host starts it.

    Raises:
        RuntimeError: nothing answers there, or no store does.
    """
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    absent = f"ENDPOINT={endpoint}: no agent answered within {ANSWER_S} s: start the first host's, or set another port"
    with deadline(ANSWER_S, f"error: {absent}"):
        try:
            return _store(host, int(port), serves=_is_here(host))
        except (dist.DistError, RuntimeError, ValueError):
            try:  # another agent of this host was faster
                return _store(host, int(port), serves=False)
            except (dist.DistError, RuntimeError, ValueError) as error:
                raise RuntimeError(absent) from error


def meet(store: dist.Store, config: LaunchConfig) -> None:
    """Waits until all agents of a run are at the store.

    torch's rendezvous goes on as soon as one agent has as many as it wants: with unequal NODES some would run and the
    others wait.

    Raises:
        RuntimeError: one of them has another NODES, or too few came in time.
    """
    nodes, own = config.max_nodes, socket.gethostname()
    store = dist.PrefixStore(f"helix/{config.run_id}/agents", store)
    store.set(str(store.add("count", 1)), f"{nodes} {own}")
    end = time.monotonic() + MEETING_S
    while True:
        count = store.add("count", 0)
        for number in range(1, count + 1):
            theirs, _, host = store.get(str(number)).decode().partition(" ")
            if theirs != str(nodes):
                time.sleep(4 * LOOK_S)  # the store may end with this agent: the others look first
                raise RuntimeError(
                    f"NODES={nodes} on {own}, but NODES={theirs} on {host}: set NODES to the number of hosts on all"
                )
        if count >= nodes:
            return
        if time.monotonic() > end:
            raise RuntimeError(
                f"ENDPOINT={config.rdzv_endpoint}: {count} of NODES={nodes} agents came within {MEETING_S} s as "
                f"RUN={config.run_id}"
            )
        time.sleep(LOOK_S)


def _store(host: str, port: int, serves: bool) -> dist.Store:
    patience = timedelta(seconds=ANSWER_S)
    return dist.TCPStore(host, port, is_master=serves, timeout=patience, wait_for_workers=False, multi_tenant=True)


def _is_here(host: str) -> bool:
    """Returns whether a name is this host's: one of its addresses can be listened at."""
    for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
                return True
            except OSError:
                continue
    return False


def _count(environment: Mapping[str, str], name: str, unset: int, most: int) -> int:
    text = environment.get(name, "")
    if text in ("", "gpu") and unset:
        return unset
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:9]) <= most:
        why = "" if text else ", as this host has no GPU"
        raise ValueError(f"{name}={text} must be an integer from 1 to {most}{why}")
    return int(text)


def main(arguments: Sequence[str], environment: Mapping[str, str], program: Program = RUNTIME) -> int:
    """Runs the agent of a program; returns the exit code of its ranks, or 1 where the agents do not meet."""
    try:
        line = front.read(arguments, program.typed)
        if (text := compose.told(line, program.typed)) is not None:
            print(text, end="")
            return 0
        compose.composed(line.overrides, line.settings)
        config = read(environment)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    # Ranks say themselves what went wrong with them; torch would add a screen of its own.
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // config.nproc_per_node)))
    where = f"ENDPOINT={config.rdzv_endpoint}"
    try:
        store = meeting_store(config.rdzv_endpoint)  # held here for as long as the agent runs
        print(f"{where}: meeting {config.max_nodes} agents, for {MEETING_S} s at most", file=sys.stderr, flush=True)
        meet(store, config)
        elastic_launch(config, sys.executable)("-u", *program.command, *line.arguments)
    except (KeyboardInterrupt, SignalException):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except RendezvousError:
        print(
            f"error: {where}: NODES={config.max_nodes} agents did not meet there as RUN={config.run_id}",
            file=sys.stderr,
        )
        return 1
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ChildFailedError as error:
        return max(error.get_first_failure()[1].exitcode, 1)
    del store
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
