"""Facts about this machine, and what Helix uses on it."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from helix.devices import choose_backend
from helix.errors import ConfigError
from helix.rank_info import RankInfo
from launch.inputs.hardware import hardware_of, load_hardware

PACKAGES = ("helix-runtime", "torch", "triton", "transformers", "safetensors", "hydra-core", "huggingface_hub")
HOPPER = (9, 0)
COLLECTIVES = {
    "symm_mem": "Helix's kernels over NVLink, NCCL for large messages",
    "nccl": "NCCL",
    "gloo": "gloo, on CPUs",
}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def backend(count: int) -> str:
    """Returns what comm.backend=auto resolves to with a rank on each GPU, or with CPU ranks."""
    ranks = max(count, 1)
    peers = all(torch.cuda.can_device_access_peer(a, b) for a in range(count) for b in range(count) if a != b)
    return choose_backend("auto", RankInfo(0, ranks, 0, ranks), [{"gpus": count, "peers": peers}])


def kernels(capability: tuple[int, int] | None) -> str:
    """Describes which kernels run on a GPU with a compute capability; None: a CPU."""
    if capability is None:
        interpreted = ", TRITON_INTERPRET=1" if os.environ.get("TRITON_INTERPRET") else ""
        return f"plain torch (kernels/*/reference.py){interpreted}"
    if capability == HOPPER:
        return "Hopper kernels and general Triton kernels"
    return "general Triton kernels (Hopper kernels need compute capability 9.0)"


def described(name: str) -> str:
    """Names the hardware description that the planner uses for a GPU."""
    try:
        hardware = hardware_of(name)
    except ValueError:
        return "none: layout=auto has no predictions; `helix calibrate output=conf/hardware/mine.yaml` measures one"
    return f"{hardware.name}, {hardware.memory_bytes.value / 1e9:.0f} GB"


def facts() -> dict[str, Any]:
    """Collects all facts that `helix info` shows."""
    gpus: list[dict[str, Any]] = []
    for i in range(count := torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        reached = [j for j in range(count) if j != i and torch.cuda.can_device_access_peer(i, j)]
        about: dict[str, Any] = {"name": seen.name, "capability": f"{seen.major}.{seen.minor}"}
        about |= {"multiprocessors": seen.multi_processor_count}
        gpus.append(about | {"free_bytes": free, "bytes": total, "reaches": reached})
    capability = torch.cuda.get_device_capability(0) if gpus else None
    try:
        chosen = backend(count)
    except ConfigError as error:
        chosen = f"none: {error}"
    return {
        "gpus": gpus,
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
        "backend": chosen,
        "collectives": COLLECTIVES.get(chosen, chosen),
        "kernels": kernels(capability),
        "planner": described(gpus[0]["name"]) if gpus else f"predicts for {load_hardware('h200').name} by default",
        "ranks": count or "CPU ranks: layout.kvp x layout.tpa",
    }


def show(found: dict[str, Any]) -> None:
    """Prints the facts as tables."""
    terminal = Console(highlight=False)
    if found["gpus"]:
        table = Table("GPU", "name", "free memory", "capability", "peer access to")
        for i, gpu in enumerate(found["gpus"]):
            reaches = ", ".join(map(str, gpu["reaches"])) or "none"
            memory = f"{gpu['free_bytes'] / 1e9:.1f} of {gpu['bytes'] / 1e9:.1f} GB"
            table.add_row(str(i), gpu["name"], memory, gpu["capability"], reaches)
        terminal.print(table)
    else:
        print("no GPU: everything runs on CPUs, for testing only")
    table = Table(show_header=False)
    for name in ("collectives", "kernels", "planner", "ranks", "cpus"):
        table.add_row(name, str(found[name]))
    table.add_row("memory", f"{found['memory_bytes'] / 1e9:.1f} GB")
    packages = {"python": found["python"], **found["versions"], "cuda": found["cuda"], "nccl": found["nccl"]}
    for package, text in packages.items():
        if text is not None:
            table.add_row(package, text)
    terminal.print(table)
