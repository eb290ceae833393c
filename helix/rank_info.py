"""This process's rank, from the launcher's environment variables."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class RankInfo:
    """This process's rank and world size, globally and on this host, as torchrun sets them."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def host(self) -> int:
        return self.rank - self.local_rank

    @classmethod
    def from_environment(cls) -> RankInfo | None:
        """Reads torchrun's environment variables; returns None if no launcher started this process.

        Raises:
            ValueError: a variable is missing or invalid.
        """
        if "RANK" not in os.environ:
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        remedy = "start ranks with torchrun, or unset RANK and they are started for you"
        if missing := [name for name in names if not os.environ.get(name)]:
            raise ValueError(f"RANK is set but {', '.join(missing)} is not: {remedy}")
        values: dict[str, int] = {}
        for name, min_value, bound in (
            ("WORLD_SIZE", 1, None),
            ("LOCAL_WORLD_SIZE", 1, "WORLD_SIZE"),
            ("RANK", 0, "WORLD_SIZE"),
            ("LOCAL_RANK", 0, "LOCAL_WORLD_SIZE"),
            ("MASTER_PORT", 1, None),
        ):
            text = os.environ[name]
            max_value = 65535 if bound is None else values[bound] - 1 + min_value
            if not (text.isascii() and text.isdecimal() and len(text) < 20 and min_value <= int(text) <= max_value):
                of = f" ({bound}={values[bound]})" if bound is not None else ""
                raise ValueError(f"{name}={text} must be an integer from {min_value} to {max_value}{of}: {remedy}")
            values[name] = int(text)
        host = os.environ["MASTER_ADDR"]
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError) as error:
            raise ValueError(f"MASTER_ADDR={host} cannot be resolved: {remedy}") from error
        return cls(*(values[name] for name in names[:4]))


def max_ranks() -> int:
    """Returns the most ranks that this host runs; on CPUs several share a core, to try a layout."""
    return max(32, 8 * (os.cpu_count() or 1))
