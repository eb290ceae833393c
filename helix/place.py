"""Where this process runs: its rank, the GPUs of its host, and the backend and device that these allow."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

import torch

from comm.emulated import EmulatedCommunicator
from comm.symm_mem import SymmMemCommunicator
from helix.errors import ConfigError

KINDS = {"symm_mem": SymmMemCommunicator, "emulated": EmulatedCommunicator}  # others: TorchDistCommunicator


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
            ValueError: part of what a launcher sets is missing, or cannot be.
        """
        if "RANK" not in os.environ:
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        remedy = "start ranks with torchrun, or unset RANK and they are started for you"
        if missing := [name for name in names if not os.environ.get(name)]:
            raise ValueError(f"RANK is set but {', '.join(missing)} is not: {remedy}")
        values: dict[str, int] = {}
        for name, least, bound in (
            ("WORLD_SIZE", 1, None),
            ("LOCAL_WORLD_SIZE", 1, "WORLD_SIZE"),
            ("RANK", 0, "WORLD_SIZE"),
            ("LOCAL_RANK", 0, "LOCAL_WORLD_SIZE"),
            ("MASTER_PORT", 1, None),
        ):
            text = os.environ[name]
            most = 65535 if bound is None else values[bound] - 1 + least
            if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
                of = f" ({bound}={values[bound]})" if bound is not None else ""
                raise ValueError(f"{name}={text} must be an integer from {least} to {most}{of}: {remedy}")
            values[name] = int(text)
        host = os.environ["MASTER_ADDR"]
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError) as error:
            raise ValueError(f"MASTER_ADDR={host} is no host that is known here: {remedy}") from error
        return cls(*(values[name] for name in names[:4]))


def choose_backend(backend: str, place: Place, facts: list[dict[str, Any]]) -> str:
    """The backend that `comm.backend` means where ranks found `facts` about their GPUs.

    Raises:
        ConfigError: it cannot be.
    """
    gpus = min(f["gpus"] for f in facts)
    covered = gpus >= place.local_world_size
    within_reach = covered and all(f["peers"] for f in facts)
    peers = within_reach and place.world_size > 1
    if backend == "auto":
        return "symm_mem" if peers else "nccl" if covered else "gloo"
    if backend != "gloo" and not covered:
        raise ConfigError(
            f"comm.backend={backend} needs a GPU for each rank: a host has {gpus} for {place.local_world_size} "
            "ranks; use fewer ranks or comm.backend=gloo"
        )
    if backend == "symm_mem" and not peers:
        raise ConfigError(
            "comm.backend=symm_mem needs several ranks on one host whose GPUs reach each other's memory: "
            "use comm.backend=nccl"
        )
    if backend == "emulated" and not within_reach:
        raise ConfigError("comm.backend=emulated needs two GPUs of one host that reach each other's memory, or one")
    return backend


def take_device(backend: str, place: Place) -> torch.device:
    """This rank's device under a backend, made the current one."""
    if backend == "gloo":
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    # NVLink multicast is not available everywhere; what is measured without it holds everywhere.
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    # Beside attention that fills the GPU, a collective takes the first room that there is (`comm.turns`).
    os.environ["TORCH_NCCL_HIGH_PRIORITY"] = "1"
    return device


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
