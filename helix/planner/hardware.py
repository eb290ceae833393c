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
DTYPE_BYTES = {"fp4": 0.5, "fp8": 1.0, "bf16": 2.0, "e4m3": 1 + 4 / 128, "mxfp4": 17 / 32}
# Of keys and values, those in e4m3, with a scale for each token and head; e4m3_all: index keys, too.
QUANTIZED_KV = {"e4m3": 2, "e4m3_all": 2, "k16v8": 1}
COLLECTIVES = ("all_to_all", "all_reduce", "all_gather", "send")

Array = NDArray[Any]


@dataclass(frozen=True)
class Constant:
    """A number with its provenance (an index into PROVENANCE) and source."""

    value: float
    level: int
    source: str

    def times(self, factor: float) -> Constant:
        return replace(self, value=self.value * factor)


def interpolate(known: Mapping[int, Constant], sizes: Array) -> tuple[Array, Array]:
    """Interpolates value and provenance at `sizes` between known ones (log2); beyond them the last one counts."""
    at = np.array(sorted(known))
    values = np.interp(np.log2(sizes), np.log2(at), [known[size].value for size in at])
    inside = (sizes >= at[0]) & (sizes <= at[-1])
    known_size = (np.asarray(sizes)[..., None] == at).any(-1)  # of few sizes; np.isin takes six times as long
    level = np.where(known_size, MEASURED, np.where(inside, INTERPOLATED, EXTRAPOLATED))
    return values, np.maximum(level, max(constant.level for constant in known.values()))


def sent_bytes(op: str, width: Any, message: Any) -> Any:
    """Computes the bytes that one rank sends, of numbers or arrays.

    Args:
        message: bytes of all_to_all: a rank's parts for all ranks, its own included; all_reduce and send: the tensor;
            all_gather: the gathered tensor.
    """
    if op == "send":
        return message
    return (2 if op == "all_reduce" else 1) * message * (width - 1) / width


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
        seconds, level = interpolate(self.latency_s, width)
        last = sorted(self.latency_s)[-2:]
        if len(last) > 1:
            rise = self.latency_s[last[1]].value - self.latency_s[last[0]].value
            seconds = seconds + np.maximum(np.log2(width / last[1]), 0) * rise / np.log2(last[1] / last[0])
        return seconds, level


@dataclass(frozen=True, kw_only=True)
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
    latent_share: Constant | None = None
    latent_flops: Constant | None = None
    e4m3_share: Mapping[str, Constant]
    chunk_s: Constant
    finding_s: Constant | None = None
    finding_sequence_s: Constant | None = None
    bounds_share: Constant | None = None
    link_bytes_per_s: Constant | None = None
    fetch_s: Constant | None = None
    gather_share: Constant | None = None
    collect_share: Constant | None = None
    select_s: Constant | None = None
    select_bytes_per_s: Constant | None = None
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
        for key in ("gpus", "flops", "collectives"):
            if key not in data:
                raise ValueError(f"hardware {name} lacks {key}")

        def constant(mapping: Mapping[Any, Any], key: Any) -> Constant:
            entry = mapping.get(key)
            if not isinstance(entry, Mapping) or set(entry) != {"value", "provenance", "source"}:
                raise ValueError(f"hardware {name}: {key} needs value, provenance and source, not {entry!r}")
            if entry["provenance"] not in PROVENANCE:
                known = ", ".join(PROVENANCE)
                raise ValueError(f"hardware {name}: {key} has provenance {entry['provenance']!r}; known: {known}")
            return Constant(float(entry["value"]), PROVENANCE.index(entry["provenance"]), str(entry["source"]))

        def by_size(mapping: Mapping[Any, Any]) -> dict[int, Constant]:
            return {int(size): constant(mapping, size) for size in mapping}

        def by_name(mapping: Mapping[Any, Any]) -> dict[str, Constant]:
            return {key: constant(mapping, key) for key in mapping}

        def collectives(key: str) -> dict[str, Collective]:
            if missing := [op for op in COLLECTIVES if op not in data[key]]:
                raise ValueError(f"hardware {name} lacks the {key} {', '.join(missing)}")
            return {
                op: Collective(
                    by_size(entry["latency_s"]), constant(entry, "bytes_per_s"), float(entry["measured_bytes"])
                )
                for op, entry in data[key].items()
            }

        single = [f.name for f in fields(cls) if f.type == "Constant"]
        single += [f.name for f in fields(cls) if f.type == "Constant | None" and f.name in data]
        return cls(
            name=name,
            gpus=int(data["gpus"]),
            flops=by_name(data["flops"]),
            product_s=by_size(data.get("product_s", {})),
            e4m3_share=by_name(data.get("e4m3_share", {})),
            collectives=collectives("collectives"),
            nccl=collectives("nccl") if "nccl" in data else {},
            **{key: constant(data, key) for key in single},
        )

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

    def collective_s(self, op: str, width: Array, message: Array) -> tuple[Array, Array, Array]:
        """Computes latency and transfer of a collective, in seconds, and provenance; 0 for a single rank."""
        known = self.collectives[op]
        latency, level = known.latency(np.maximum(width, 2))
        # Up to the measured sizes latency dominates; beyond them the rate counts.
        beyond = max(EXTRAPOLATED, known.bytes_per_s.level)
        level = np.where(message > known.measured_bytes, np.maximum(level, beyond), level)
        many = width > 1
        wire = sent_bytes(op, width, message) / known.bytes_per_s.value
        return np.where(many, latency, 0.0), np.where(many, wire, 0.0), np.where(many, level, 0)
