"""Starts the ranks of one host through torch's elastic launcher, as torchrun does, and returns how they ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from comm.stand_in import PROCESSES

INTERRUPTED = 130  # exit code after control-C, as shells have it
ENTRY = Path(__file__).resolve().parent.parent / "torchrun_entry.py"


def played(ranks: int) -> bool:
    """Whether a benchmark of so many ranks has one or two GPUs to stand in for them: there are GPUs, and fewer."""
    return 0 < torch.cuda.device_count() < ranks


def processes() -> int:
    """Of those that stand in for ranks."""
    return min(PROCESSES, torch.cuda.device_count())


def launch(world_size: int, overrides: Sequence[str]) -> int:
    """Runs `torchrun_entry.py` with `overrides` on `world_size` ranks of this host.

    Returns:
        0, or the exit code of the rank that failed first (1 where a signal killed it), or INTERRUPTED.
    """
    # Ranks share the cores; one thread each where there are more ranks than cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a port of its own: several jobs of a host do not meet
        max_restarts=0,
        monitor_interval=0.1,
    )
    # Ranks say themselves what went wrong with them; the agent would add a screen of its own.
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        elastic_launch(config, sys.executable)("-u", str(ENTRY), *overrides)
    except (KeyboardInterrupt, SignalException):
        kept = "results of finished requests are in decode.output; decode.resume=true runs the rest"
        writes = any(override.startswith("decode.output=") for override in overrides)
        print(f"interrupted: {kept}" if writes else "interrupted", file=sys.stderr)
        return INTERRUPTED
    except ChildFailedError as error:
        # A rank that was killed is the cause, whoever noticed first; those that the agent ended are not.
        for rank, failure in error.failures.items():
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                why = ", as the system does where memory runs out" if failure.exitcode == -signal.SIGKILL else ""
                print(f"rank {rank} was killed by signal {-failure.exitcode}{why}", file=sys.stderr)
        return max(error.get_first_failure()[1].exitcode, 1)
    return 0
