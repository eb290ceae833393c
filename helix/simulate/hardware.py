"""Hardware as data: every number has a provenance and a source, and goes with what is computed from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

# From what was seen on this hardware to what its vendor promises; a result is worth its worst input.
PROVENANCE = ("measured", "interpolated", "extrapolated", "roofline")
MEASURED, INTERPOLATED, EXTRAPOLATED, ROOFLINE = range(4)
BYTES = {"fp4": 0.5, "fp8": 1.0, "bf16": 2.0}  # scales of block formats not counted
COLLECTIVES = ("all_to_all", "all_reduce", "all_gather", "send")

Array = NDArray[Any]


@dataclass(frozen=True)
class Constant:
    """A number, how it is known (an index into PROVENANCE) and where from."""

    value: float
    level: int
    source: str


@dataclass(frozen=True)
class Collective:
    """seconds = latency(width) + bytes that a rank sends / rate.

    Attributes:
        latency_s: by number of ranks; between them logarithmically interpolated, beyond them extrapolated.
        bytes_per_s: of what leaves one rank.
        measured_bytes: messages above it are extrapolated.
    """

    latency_s: Mapping[int, Constant]
    bytes_per_s: Constant
    measured_bytes: float

    def latency(self, width: Array) -> tuple[Array, Array]:
        """Seconds and provenance for each width."""
        known = np.array(sorted(self.latency_s))
        values = np.array([self.latency_s[w].value for w in known])
        x, at = np.log2(width), np.log2(known)
        seconds = np.interp(x, at, values)
        if len(known) > 1:
            slope = (values[-1] - values[-2]) / (at[-1] - at[-2])
            seconds = seconds + np.maximum(x - at[-1], 0) * slope
        inside = (width >= known[0]) & (width <= known[-1])
        level = np.where(np.isin(width, known), MEASURED, np.where(inside, INTERPOLATED, EXTRAPOLATED))
        return seconds, np.maximum(level, max(c.level for c in self.latency_s.values()))


@dataclass(frozen=True)
class Hardware:
    """GPUs of one NVLink domain.

    Attributes:
        gpus: how many there are.
        memory_bytes: of one GPU.
        read_bytes_per_s: that a read of much more than the caches reaches.
        flops: dense matrix rate by dtype.
        kernel_s: what a kernel of a captured step takes beyond its bytes and FLOPs: launch, ramp, tail, and the small
            kernels beside it (norms, RoPE, append, merging of splits).
        chunk_s: what each further HOP-B chunk of a layer costs.
        finding_s: choosing a layer's blocks in sparse attention (the price of finding), None: not known.
    """

    name: str
    gpus: int
    memory_bytes: Constant
    read_bytes_per_s: Constant
    flops: Mapping[str, Constant]
    kernel_s: Constant
    chunk_s: Constant
    finding_s: Constant | None
    collectives: Mapping[str, Collective]

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Hardware:
        """The hardware of a `conf/hardware/*.yaml`.

        Raises:
            ValueError: a number is missing, is none, or lacks its provenance or source.
        """
        name = data.get("name")
        if not isinstance(name, str):
            raise ValueError("a hardware description needs a name")

        def constant(place: Mapping[Any, Any], key: Any) -> Constant:
            given = place.get(key)
            if not isinstance(given, Mapping) or set(given) != {"value", "provenance", "source"}:
                raise ValueError(f"hardware {name}: {key} needs value, provenance and source, not {given!r}")
            if given["provenance"] not in PROVENANCE:
                known = ", ".join(PROVENANCE)
                raise ValueError(f"hardware {name}: {key} has provenance {given['provenance']!r}; known: {known}")
            return Constant(float(given["value"]), PROVENANCE.index(given["provenance"]), str(given["source"]))

        for key in ("gpus", "flops", "collectives"):
            if key not in data:
                raise ValueError(f"hardware {name} lacks {key}")
        if missing := [op for op in COLLECTIVES if op not in data["collectives"]]:
            raise ValueError(f"hardware {name} lacks the collectives {', '.join(missing)}")
        collectives = {
            op: Collective(
                {int(width): constant(given["latency_s"], width) for width in given["latency_s"]},
                constant(given, "bytes_per_s"),
                float(given["measured_bytes"]),
            )
            for op, given in data["collectives"].items()
        }
        return cls(
            name,
            int(data["gpus"]),
            constant(data, "memory_bytes"),
            constant(data, "read_bytes_per_s"),
            {dtype: constant(data["flops"], dtype) for dtype in data["flops"]},
            constant(data, "kernel_s"),
            constant(data, "chunk_s"),
            constant(data, "finding_s") if "finding_s" in data else None,
            collectives,
        )

    def rate(self, dtype: str) -> Constant:
        """FLOP/s in `dtype`.

        Raises:
            ValueError: this hardware has no such arithmetic, or nothing is known about it.
        """
        if dtype not in self.flops:
            raise ValueError(f"{self.name} has no rate for {dtype}; known: {', '.join(self.flops)}")
        return self.flops[dtype]

    def scaled(self, *, kernel: float = 1.0, collective: float = 1.0, read: float = 1.0, link: float = 1.0) -> Hardware:
        """The same hardware with other kernel times, collective latencies, read and link rates; 0 leaves times out."""

        def by(constant: Constant, factor: float) -> Constant:
            return replace(constant, value=constant.value * factor)

        return replace(
            self,
            read_bytes_per_s=by(self.read_bytes_per_s, read),
            kernel_s=by(self.kernel_s, kernel),
            chunk_s=by(self.chunk_s, kernel),
            collectives={
                op: replace(
                    c,
                    latency_s={w: by(s, collective) for w, s in c.latency_s.items()},
                    bytes_per_s=by(c.bytes_per_s, link),
                )
                for op, c in self.collectives.items()
            },
        )
