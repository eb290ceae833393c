"""Helix: exact LLM decoding with the KV cache sharded over many GPUs (helix parallelism)."""

from __future__ import annotations

import os
from typing import Any

from helix.packages import ROOT, import_package

__all__ = ["LLM", "ROOT"]


def __getattr__(name: str) -> Any:
    """Imports `LLM` lazily from `launch`."""
    if name != "LLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for package in ("launch", "kernels", "comm") if "RANK" in os.environ else ("launch",):  # a rank computes here
        import_package(package)
    from launch.llm import LLM

    return LLM
