"""Times decode over two agents on one machine that are connected only by sockets: `helix bench multi-node`.

Each agent has one rank of `kvp=2` on its own GPU; NCCL may use neither peer access nor shared memory, so that
messages travel as between hosts. Without GPUs both run on the CPU over gloo. A row has the bytes and the time of
a step's exchange, measured and predicted from pings.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.jobs import JobError
from benchmarks.models.workloads import K, named
from benchmarks.runner import BenchContext, Row
from launch.client.supervisor import cause
from launch.job import spawn

AGENTS = 2
POINTS = [f"{batch}x{8 * K}" for batch in (1, 8, 64)]
STEPS = 32
SOCKETS = {"TORCH_CPP_LOG_LEVEL": "ERROR", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"}
POLL_S = 0.1


def cases(ctx: BenchContext) -> list[tuple[str]]:
    """Returns the models.

    Raises:
        ValueError: there is one GPU.
    """
    if ctx.gpu and torch.cuda.device_count() < AGENTS:
        raise ValueError("two hosts need two GPUs, and there is one")
    return [(model,) for model in ((ctx.models or ["llama-3.1-8b"]) if ctx.gpu else ["demo"])]


def measure(ctx: BenchContext, model: str) -> Iterator[Row]:
    """Yields the rows of a job over two agents."""
    points = POINTS if ctx.gpu else ["4x256"]
    overrides = [*named(model), "bench=multi-node", "layout.kvp=2", f"bench.points=[{','.join(points)}]"]
    overrides += [f"bench.steps={STEPS if ctx.gpu else 3}", f"comm.backend={'nccl' if ctx.gpu else 'gloo'}"]
    for row in over_agents(overrides, ctx.gpu):
        yield {"model": model, **row}


def over_agents(overrides: Sequence[str], gpus: bool) -> list[Row]:
    """Runs a job over two agents of this host and returns its rows.

    Raises:
        JobError: an agent failed.
        KeyboardInterrupt: they were interrupted.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as directory:
        record = Path(directory) / "record.json"
        command = (sys.executable, "-m", "benchmarks.agent", *overrides, f"record={record}")
        shared = {"ENDPOINT": endpoint, "NODES": str(AGENTS), "RANKS": "1", **SOCKETS}
        shared["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // AGENTS))  # they share the cores
        with spawn.captured_stderr() as lines, ExitStack() as stack:
            agents = []
            for i in range(AGENTS):
                environment = os.environ | shared | {"CUDA_VISIBLE_DEVICES": str(i) if gpus else ""}
                stdout = subprocess.DEVNULL if i else None  # both print the same
                agents.append(stack.enter_context(subprocess.Popen(command, stdout=stdout, env=environment)))
                stack.callback(agents[-1].terminate)
            while None in (codes := [agent.poll() for agent in agents]) and not any(codes):
                time.sleep(POLL_S)
        if spawn.INTERRUPTED in codes:
            raise KeyboardInterrupt
        if any(codes):
            raise JobError(cause(lines) or f"exit codes {codes}")
        rows: list[Row] = json.loads(record.read_text(encoding="utf-8"))["multi_node"]
        return rows
