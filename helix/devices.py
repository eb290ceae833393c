"""How many ranks a config needs on this host, its GPUs, and which backend and device to use."""

from __future__ import annotations

import os
from typing import Any

import torch

from comm.emulated import EmulatedCommunicator, EmulatedTransport, emulating_processes
from comm.symm_mem import SymmMemCommunicator
from comm.torch_dist import p2p_disabled
from helix.config import Config
from helix.errors import ConfigError
from helix.layout import HelixLayout
from helix.rank_info import RankInfo, max_ranks

EMULATED_LINK = "emulated over nccl"
COMMUNICATORS = {  # others: TorchDistCommunicator
    "symm_mem": SymmMemCommunicator,
    "emulated": EmulatedCommunicator,
    EMULATED_LINK: EmulatedTransport,
}


def ranks(config: Config) -> int:
    """Returns the number of processes to start here: the layout's ranks; with `auto` every GPU, or one on a CPU.

    Raises:
        ValueError: the widths form no layout, this host cannot run that many ranks, or it has no GPU to emulate ranks.
    """
    layout = config.layout
    if config.comm.backend == "emulated":
        if not (processes := emulating_processes()):
            raise ValueError(
                "comm.backend=emulated needs a GPU that emulates ranks, but this machine has none: set "
                "comm.backend=gloo for CPU ranks"
            )
        return processes
    if layout.mode == "auto":
        return 1 if config.comm.backend == "gloo" else max(torch.cuda.device_count(), 1)
    made = HelixLayout.create(layout.mode, layout.kvp, layout.tpa, layout.tpf, layout.ep, layout.dp)
    if made.world_size > (limit := max_ranks()):
        widths = "layout.dp" if made.mode == "dp" else "layout.kvp and layout.tpa"
        raise ValueError(
            f"{made.ranks}, but this host runs at most {limit}: lower {widths}, or spread the ranks over hosts "
            "(launch/agent.sh)"
        )
    return made.world_size


def choose_backend(backend: str, rank_info: RankInfo, facts: list[dict[str, Any]]) -> str:
    """Resolves `comm.backend`, given `gpu_facts` of all ranks.

    Raises:
        ConfigError: the hosts cannot run the backend.
    """
    gpus = min(f["gpus"] for f in facts)
    covered = gpus >= rank_info.local_world_size
    within_reach = covered and all(f["peers"] for f in facts)
    peers = within_reach and rank_info.world_size > 1
    if backend == "auto":
        return "symm_mem" if peers else "nccl" if covered else "gloo"
    if backend != "gloo" and not covered:
        raise ConfigError(
            f"comm.backend={backend} needs a GPU for each rank, but a host has {gpus} GPUs for "
            f"{rank_info.local_world_size} ranks: start fewer ranks, or set comm.backend=gloo"
        )
    if backend == "symm_mem" and not peers:
        raise ConfigError(
            "comm.backend=symm_mem needs several ranks on one host, with peer access between their GPUs: set "
            "comm.backend=nccl"
        )
    return EMULATED_LINK if backend == "emulated" and not within_reach else backend


def set_device(backend: str, rank_info: RankInfo) -> torch.device:
    """Returns this rank's device, and makes it the current one."""
    if backend == "gloo":
        return torch.device("cpu")
    device = torch.device("cuda", rank_info.local_rank)
    torch.cuda.set_device(device)
    # NVLink multicast is not available everywhere; measurements without it are comparable.
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    # A collective that overlaps attention gets the first SMs that become free (`comm.dual_batch_overlap`).
    os.environ["TORCH_NCCL_HIGH_PRIORITY"] = "1"
    return device


def gpu_facts(rank_info: RankInfo) -> dict[str, Any]:
    """Returns the number of visible GPUs, and whether this rank's GPU has peer access to all other ranks' GPUs."""
    gpus = torch.cuda.device_count()
    ranks = range(rank_info.world_size)
    peers = (
        not (p2p_disabled() and rank_info.world_size > 1)
        and rank_info.local_world_size == rank_info.world_size <= gpus
        and all(r == rank_info.local_rank or torch.cuda.can_device_access_peer(rank_info.local_rank, r) for r in ranks)
    )
    return {"gpus": gpus, "peers": peers}


def gpu_name(rank_info: RankInfo) -> str | None:
    """Returns the name of this rank's GPU; None if this host has fewer GPUs than ranks."""
    enough = rank_info.local_world_size <= torch.cuda.device_count()
    return torch.cuda.get_device_name(rank_info.local_rank) if enough else None
