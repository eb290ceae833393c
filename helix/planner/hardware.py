"""Hardware as data: every number has a provenance and a source, which results inherit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

# From measured on this hardware to promised by its vendor; a result has the provenance of its worst input.
PROVENANCE = ("measured", "interpolated", "extrapolated", "roofline")
MEASURED, INTERPOLATED, EXTRAPOLATED, ROOFLINE = range(4)
# Of a number: those of the paper without scales, then of the runtime's weights, e4m3 with a scale for 128 numbers and
# e2m1 with one for 32.
BYTES = {"fp4": 0.5, "fp8": 1.0, "bf16": 2.0, "e4m3": 1 + 4 / 128, "mxfp4": 17 / 32}
# Of keys and values, those in e4m3, with a scale for each token and head; e4m3_all: index keys, too.
FEW_BITS = {"e4m3": 2, "e4m3_all": 2, "k16v8": 1}
COLLECTIVES = ("all_to_all", "all_reduce", "all_gather", "send")

Array = NDArray[Any]


@dataclass(frozen=True)
class Constant:
    """A number with its provenance (an index into PROVENANCE) and source."""

    value: float
    level: int
    source: str


def between(known: Mapping[int, Constant], sizes: Array) -> tuple[Array, Array]:
    """Interpolates value and provenance at `sizes` between known ones (log2); beyond them the last one counts."""
    at = np.array(sorted(known))
    values = np.interp(np.log2(sizes), np.log2(at), [known[size].value for size in at])
    inside = (sizes >= at[0]) & (sizes <= at[-1])
    known_size = (np.asarray(sizes)[..., None] == at).any(-1)  # of few sizes; np.isin takes six times as long
    level = np.where(known_size, MEASURED, np.where(inside, INTERPOLATED, EXTRAPOLATED))
    return values, np.maximum(level, max(constant.level for constant in known.values()))


@dataclass(frozen=True)
class Collective:
    """Cost model of a collective: seconds = latency(width) + bytes that a rank sends / rate.

    Attributes:
        latency_s: latency by number of ranks; between these interpolated logarithmically, beyond them extrapolated.
        bytes_per_s: rate of the bytes that one rank sends.
        measured_bytes: size above which messages are extrapolated.
    """

    latency_s: Mapping[int, Constant]
    bytes_per_s: Constant
    measured_bytes: float

    def latency(self, width: Array) -> tuple[Array, Array]:
        """Returns the seconds and provenance for each width."""
        seconds, level = between(self.latency_s, width)
        last = sorted(self.latency_s)[-2:]
        if len(last) > 1:
            rise = self.latency_s[last[1]].value - self.latency_s[last[0]].value
            seconds = seconds + np.maximum(np.log2(width / last[1]), 0) * rise / np.log2(last[1] / last[0])
        return seconds, level


@dataclass(frozen=True)
class Hardware:
    """GPUs of one NVLink domain, with their measured or assumed constants.

    Attributes:
        gpus: number of GPUs.
        memory_bytes: memory of one GPU.
        read_bytes_per_s: rate of reads much larger than the caches.
        flops: dense matrix rate by dtype.
        kernel_s: time of a kernel in a captured step beyond its bytes and FLOPs: launch, ramp, tail, and the small
            kernels beside it (norms, RoPE, append, merging of splits).
        product_s: the same for a projection, by rows of its input; empty: as any kernel.
        latent_share: share of the read rate that MLA's attention reaches; None: all of it.
        latent_flops: FLOP/s of MLA's attention with many heads; None: as any product.
        e4m3_share: shares of the read rate at which numbers in e4m3 are read, which are converted: `weights`,
            `experts`, keys and values of heads (`kv`; values alone: `k16v8`) and `latents`; and the share of
            `latent_flops` over them; empty: all of it.
        chunk_s: time of each further HOP-B chunk of a layer.
        collectives: the runtime's own collectives, if it has them on this hardware.
        nccl: the library's collectives; empty: not measured.
        finding_s: time per layer of block-sparse attention beyond its bytes (chosen blocks and all key bounds) and
            beyond kernel_s, which dense attention takes as well; None: unknown.
        finding_sequence_s: the same per sequence; None: 0.
        bounds_share: share of the read rate at which the choice reads key bounds; None: all.
        link_bytes_per_s: rate from host memory to a GPU, in chosen blocks, while all GPUs fetch; None: unknown.
        fetch_s: fixed time per layer of finding the missing blocks and fetching them.
        gather_share: share of the read rate that attention over single chosen keys reaches; for self-speculation, like
            the next three; None: unknown.
        collect_share: additional time of attention that writes scores, as a share of the attention.
        select_s: time of choosing the keys of the next drafts in all layers, beyond the bytes of scores.
        select_bytes_per_s: rate at which the choice reads scores; its instructions take longer than its reads.
    """

    name: str
    gpus: int
    memory_bytes: Constant
    read_bytes_per_s: Constant
    flops: Mapping[str, Constant]
    kernel_s: Constant
    product_s: Mapping[int, Constant]
    latent_share: Constant | None
    latent_flops: Constant | None
    e4m3_share: Mapping[str, Constant]
    chunk_s: Constant
    finding_s: Constant | None
    finding_sequence_s: Constant | None
    bounds_share: Constant | None
    link_bytes_per_s: Constant | None
    fetch_s: Constant | None
    gather_share: Constant | None
    collect_share: Constant | None
    select_s: Constant | None
    select_bytes_per_s: Constant | None
    collectives: Mapping[str, Collective]
    nccl: Mapping[str, Collective]

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Hardware:
        """Creates the hardware of a `conf/hardware/*.yaml`.

        Raises:
            ValueError: a number is missing or invalid, or lacks its provenance or source.
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

        def optional(key: str) -> Constant | None:
            return constant(data, key) if key in data else None

        def by_size(key: str) -> dict[int, Constant]:
            return {int(size): constant(data[key], size) for size in data.get(key, {})}

        for key in ("gpus", "flops", "collectives"):
            if key not in data:
                raise ValueError(f"hardware {name} lacks {key}")

        def collectives(key: str) -> dict[str, Collective]:
            if missing := [op for op in COLLECTIVES if op not in data[key]]:
                raise ValueError(f"hardware {name} lacks the {key} {', '.join(missing)}")
            return {
                op: Collective(
                    {int(width): constant(given["latency_s"], width) for width in given["latency_s"]},
                    constant(given, "bytes_per_s"),
                    float(given["measured_bytes"]),
                )
                for op, given in data[key].items()
            }

        own = collectives("collectives")
        return cls(
            name,
            int(data["gpus"]),
            constant(data, "memory_bytes"),
            constant(data, "read_bytes_per_s"),
            {dtype: constant(data["flops"], dtype) for dtype in data["flops"]},
            constant(data, "kernel_s"),
            by_size("product_s"),
            optional("latent_share"),
            optional("latent_flops"),
            {kind: constant(data["e4m3_share"], kind) for kind in data.get("e4m3_share", {})},
            constant(data, "chunk_s"),
            optional("finding_s"),
            optional("finding_sequence_s"),
            optional("bounds_share"),
            optional("link_bytes_per_s"),
            optional("fetch_s"),
            optional("gather_share"),
            optional("collect_share"),
            optional("select_s"),
            optional("select_bytes_per_s"),
            own,
            collectives("nccl") if "nccl" in data else {},
        )

    def to_mapping(self) -> dict[str, Any]:
        """Converts the hardware to a mapping for `from_mapping`."""

        def plain(value: Any) -> Any:
            if isinstance(value, Constant):
                return {"value": value.value, "provenance": PROVENANCE[value.level], "source": value.source}
            if isinstance(value, Mapping):
                return {key: plain(inner) for key, inner in value.items()}
            if isinstance(value, Collective):
                return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
            return value

        values = {f.name: plain(getattr(self, f.name)) for f in fields(self)}
        return {key: value for key, value in values.items() if value not in (None, {})}

    def over_nccl(self) -> Hardware:
        """Returns the same hardware with the library's collectives.

        Raises:
            ValueError: they were not measured.
        """
        if not self.nccl:
            raise ValueError(f"nothing is known of NCCL's collectives on {self.name}: add nccl to its description")
        return replace(self, collectives=self.nccl)

    def rate(self, dtype: str) -> Constant:
        """Returns the FLOP/s in `dtype`.

        Raises:
            ValueError: the rate is unknown.
        """
        if dtype not in self.flops:
            raise ValueError(f"{self.name} has no rate for {dtype}; known: {', '.join(self.flops)}")
        return self.flops[dtype]

    def scaled(self, *, kernel: float = 1.0, collective: float = 1.0, read: float = 1.0, link: float = 1.0) -> Hardware:
        """Scales kernel times, collective latencies, read and link rates; 0 removes times."""

        def by(constant: Constant, factor: float) -> Constant:
            return replace(constant, value=constant.value * factor)

        return replace(
            self,
            read_bytes_per_s=by(self.read_bytes_per_s, read),
            kernel_s=by(self.kernel_s, kernel),
            product_s={rows: by(fixed, kernel) for rows, fixed in self.product_s.items()},
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
