"""One of several agents, each with ranks of the same job: run by `launch/agent.sh`, on torch's elastic launcher."""

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
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from helix import log
from helix.log import print_error
from helix.rank_info import max_ranks
from launch.inputs import command_parser, compose
from launch.inputs.job_kinds import RUNTIME, Program
from launch.job.membership import deadline
from launch.job.spawn import INTERRUPTED

LOG = logging.getLogger("helix.launch.agent")  # also as __main__
ANSWER_S = 30  # for the first agent's host to respond
JOIN_S = 300  # for all agents to join
POLL_S = 0.5  # interval of polling the number of agents
GRACE_S = 5  # between SIGTERM and SIGKILL


def read(environment: Mapping[str, str]) -> LaunchConfig:
    """Reads the agent's configuration from environment variables.

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
        raise ValueError(
            f"ENDPOINT={endpoint}: the host name cannot be resolved: set a name or address that all hosts reach"
        ) from error
    nodes = _count(environment, "NODES", 2, 1 << 16)
    ranks = _count(environment, "RANKS", torch.cuda.device_count(), max_ranks())
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
        rdzv_configs={"timeout": JOIN_S, "read_timeout": ANSWER_S, "is_host": False},  # `rendezvous_store` hosts it
        max_restarts=0,
        monitor_interval=0.1,
        **grace,
    )


def rendezvous_store(endpoint: str) -> dist.Store:
    """Connects to the store where agents meet; the first agent on the endpoint's host starts it.

    Raises:
        RuntimeError: nothing responds there, or it is not a store.
    """
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    absent = f"ENDPOINT={endpoint}: no agent responded within {ANSWER_S} s: start the first host's, or set another port"
    with deadline(ANSWER_S, absent):
        try:
            return _store(host, int(port), serves=_is_here(host))
        except (dist.DistError, RuntimeError, ValueError):
            try:  # another agent of this host has started it
                return _store(host, int(port), serves=False)
            except (dist.DistError, RuntimeError, ValueError) as error:
                raise RuntimeError(absent) from error


def wait_for_agents(store: dist.Store, config: LaunchConfig) -> None:
    """Waits until all agents of a run have joined.

    torch's rendezvous proceeds once one agent has as many as it expects: with unequal NODES some would run while the
    others wait.

    Raises:
        RuntimeError: agents have different NODES, or too few joined in time.
    """
    nodes, local = config.max_nodes, socket.gethostname()
    store = dist.PrefixStore(f"helix/{config.run_id}/agents", store)
    store.set(str(mine := store.add("count", 1)), f"{nodes} {local}")
    if mine > nodes:
        LOG.warning(
            "%d agents have joined as RUN=%s, more than NODES=%d: only so many will have a part in the job",
            *(mine, config.run_id, nodes),
        )
    end = time.monotonic() + JOIN_S
    while True:
        count = store.add("count", 0)
        for number in range(1, count + 1):
            theirs, _, host = store.get(str(number)).decode().partition(" ")
            if theirs != str(nodes):
                time.sleep(4 * POLL_S)  # the store may end with this agent: let the others see the error first
                raise RuntimeError(
                    f"NODES={nodes} on {local}, but NODES={theirs} on {host}: set NODES to the number of hosts, "
                    "the same on all"
                )
        if count >= nodes:
            return
        if time.monotonic() > end:
            raise RuntimeError(
                f"ENDPOINT={config.rdzv_endpoint}: {count} of NODES={nodes} agents joined within {JOIN_S} s as "
                f"RUN={config.run_id}: start one on each host, with the same RUN"
            )
        time.sleep(POLL_S)


def _store(host: str, port: int, serves: bool) -> dist.Store:
    patience = timedelta(seconds=ANSWER_S)
    return dist.TCPStore(host, port, is_master=serves, timeout=patience, wait_for_workers=False, multi_tenant=True)


def _is_here(host: str) -> bool:
    """Returns whether a name is this host's, by listening on one of its addresses."""
    for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
                return True
            except OSError:
                continue
    return False


def _count(environment: Mapping[str, str], name: str, unset: int, maximum: int) -> int:
    text = environment.get(name, "")
    if text in ("", "gpu") and unset:
        return unset
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:9]) <= maximum:
        why = "" if text else ", because this host has no GPU"
        raise ValueError(f"{name}={text} must be an integer from 1 to {maximum}{why}")
    return int(text)


def main(arguments: Sequence[str], environment: Mapping[str, str], program: Program = RUNTIME) -> int:
    """Runs an agent; returns the exit code of its ranks, or 1 if the agents do not meet."""
    try:
        line = command_parser.read(arguments, program.cli_command)
        if (text := compose.info_text(line, program.cli_command)) is not None:
            print(text, end="")
            return 0
        compose.compose_config(line.overrides, line.settings)
        config = read(environment)
    except ValueError as error:
        print_error(error)
        return 1
    # Ranks print their own errors; torch would add a screenful.
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // config.nproc_per_node)))
    where = f"ENDPOINT={config.rdzv_endpoint}"
    try:
        store = rendezvous_store(config.rdzv_endpoint)  # kept alive while the agent runs
        LOG.info("%s: waiting for %d agents, up to %s s", where, config.max_nodes, JOIN_S)
        wait_for_agents(store, config)
        elastic_launch(config, sys.executable)("-u", *program.command, *line.arguments)
    except (KeyboardInterrupt, SignalException):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except RendezvousTimeoutError:
        print_error(
            f"{where}: not all NODES={config.max_nodes} agents joined as RUN={config.run_id}: start one on each host, "
            "with the same RUN"
        )
        return 1
    except RendezvousError:
        print_error(f"{where}: another agent of RUN={config.run_id} has ended, or its host is gone: see its output")
        return 1
    except RuntimeError as error:
        print_error(error)
        return 1
    except AttributeError as error:
        if error.name != "is_failed":
            raise
        print_error(  # torch has no result for an agent without a part in the job
            f"{where}: the job ended without this agent: NODES={config.max_nodes} others had joined as "
            f"RUN={config.run_id}; set NODES to the number of hosts, the same on all"
        )
        return 1
    except ChildFailedError as error:
        return max(error.get_first_failure()[1].exitcode, 1)
    del store
    return 0


if __name__ == "__main__":
    log.configure()
    sys.exit(main(sys.argv[1:], os.environ))
