"""Helix: exact LLM decoding with the KV cache sharded over many GPUs (helix parallelism)."""

from __future__ import annotations

from typing import Any

__all__ = ["LLM"]


def __getattr__(name: str) -> Any:
    """Finds `LLM`, which is a command of `launch` under the name that users look for."""
    if name != "LLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from launch.llm import LLM

    return LLM
