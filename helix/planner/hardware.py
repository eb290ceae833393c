"""Hardware as data: every number has a provenance and a source, and results inherit the worst provenance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helix.layers.specs import PACKED_BLOCK, MatrixFormat

# From measured on this hardware to promised by its vendor.
PROVENANCE = ("measured", "interpolated", "extrapolated", "roofline")
MEASURED, INTERPOLATED, EXTRAPOLATED, ROOFLINE = range(4)
DTYPE_BYTES = {"fp4": 0.5, "fp8": 1.0, "bf16": 2.0}  # bytes per value; fp4 and fp8 are the paper's, without scales
ROW_SCALE_BYTES = 4
# How many of keys and values are in e4m3, with a scale per token and head; e4m3_all: index keys, too.
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


# Shares of the read rate at which matrices in four bits are read, on an H200: by rows of x, or by pairs of each expert
# (records linear-packed and moe-packed; those of up to 16 rows fit steps of Llama-3.1-70B and Qwen2.5-7B).
FOUR_BIT_SHARE: Mapping[str, tuple[Mapping[int, float], Mapping[int, float]]] = {
    "e2m1": ({16: 0.63, 32: 0.50, 64: 0.35, 128: 0.25, 192: 0.14, 256: 0.08}, {2: 0.64, 8: 0.55, 32: 0.285}),
    "int4": ({16: 0.72, 32: 0.56, 64: 0.40, 128: 0.25, 192: 0.14, 256: 0.08}, {2: 0.75, 5: 0.63, 20: 0.38}),
}
# What more rows of x leave of `e4m3_share`, except of experts'. Beyond 128 rows, two launches read a matrix; beyond
# 192, it is dequantized (one matrix, benchmarks/LOG.md, 2026-11-30).
E4M3_ROWS = {16: 1.0, 32: 0.82, 64: 0.63, 128: 0.45, 192: 0.2, 256: 0.15}


@dataclass(frozen=True)
class Stored:
    """How matrices are stored.

    Attributes:
        kind: a dtype of DTYPE_BYTES, or that of `helix.layers.specs.MatrixFormat`.
        bytes: of an element, with its share of its group's scale.
        row_bytes: of a row's scale.
        block: columns that stay on one rank.
    """

    kind: str
    bytes: float
    row_bytes: float = 0.0
    block: int = 1

    @classmethod
    def of(cls, dtype: str) -> Stored:
        return cls(dtype, DTYPE_BYTES[dtype])

    @classmethod
    def mean(cls, formats: Sequence[MatrixFormat | None]) -> Stored:
        """Averages matrices of the same size; None: in bf16. The most common kind counts."""
        n, packed = len(formats), any(f is not None and f.packed for f in formats)
        return cls(
            Counter("bf16" if f is None else f.kind for f in formats).most_common(1)[0][0],
            sum(DTYPE_BYTES["bf16"] if f is None else f.bits / 8 for f in formats) / n,
            sum(ROW_SCALE_BYTES for f in formats if f is not None and f.row_scales) / n,
            PACKED_BLOCK if packed else 1,
        )


E4M3 = Stored.mean([MatrixFormat(128)])  # as rounded while loading
QUANTIZED = ("weights", "output", "dense", "experts", "shared_experts")  # what FP8 checkpoints store in FP8


def interpolate(known: Mapping[int, Constant], sizes: Array) -> tuple[Array, Array]:
    """Interpolates value and provenance at `sizes` (linear in log2 of the size); constant beyond the known sizes."""
    at = np.array(sorted(known))
    values = np.interp(np.log2(sizes), np.log2(at), [known[size].value for size in at])
    inside = (sizes >= at[0]) & (sizes <= at[-1])
    known_size = (np.asarray(sizes)[..., None] == at).any(-1)  # np.isin takes six times as long for few sizes
    level = np.where(known_size, MEASURED, np.where(inside, INTERPOLATED, EXTRAPOLATED))
    return values, np.maximum(level, max(constant.level for constant in known.values()))


def _by_rows(known: Mapping[int, float], rows: Any) -> Any:
    return np.interp(np.log2(np.maximum(rows, 1)), np.log2([*known]), [*known.values()])


def sent_bytes(op: str, width: Any, message: Any) -> Any:
    """Returns the bytes that one rank sends.

    Args:
        message: bytes; all_to_all: a rank's messages to all ranks, itself included; all_reduce and send: the tensor;
            all_gather: the gathered tensor.
    """
    if op == "send":
        return message
    return (2 if op == "all_reduce" else 1) * message * (width - 1) / width


@dataclass(frozen=True)
class Collective:
    """Cost model of a collective: seconds = latency(width) + bytes that a rank sends / rate.

    Attributes:
        latency_s: by number of ranks; interpolated logarithmically between them, extrapolated beyond.
        bytes_per_s: of the bytes that one rank sends.
        measured_bytes: message size above which the model extrapolates.
    """

    latency_s: Mapping[int, Constant]
    bytes_per_s: Constant
    measured_bytes: float

    def latency(self, width: Array) -> tuple[Array, Array]:
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
        memory_bytes: per GPU.
        read_bytes_per_s: of reads much larger than the caches.
        flops: dense matrix FLOP/s by dtype.
        kernel_s: overhead of a kernel in a captured step: launch, ramp, tail, and the small kernels around it (norms,
            RoPE, append, merging of splits).
        product_s: the same for a projection, by rows of its input; empty: kernel_s.
        latent_share: share of the read rate that MLA attention reaches; None: 1.
        latent_flops: FLOP/s of MLA attention with many heads; None: as any GEMM.
        e4m3_share: shares of the read rate for e4m3 data, which needs conversion: `weights`, `experts`, keys and values
            (`kv`; only values: `k16v8`) and `latents`; and `latent_flops`, the share of that rate; missing: 1.
        chunk_s: overhead of each HOP-B chunk of a layer after the first.
        collectives: the runtime's own collectives.
        nccl: NCCL's collectives; empty: not measured.
        finding_s: overhead per layer of block-sparse attention, besides its bytes (selected blocks and all key bounds)
            and kernel_s; None: unknown.
        finding_sequence_s: the same per sequence; None: 0.
        bounds_share: share of the read rate at which selection reads key bounds; None: 1.
        link_bytes_per_s: from host memory to a GPU, in blocks, while all GPUs fetch; None: unknown.
        fetch_s: overhead per layer of finding and fetching missing blocks.
        gather_share: share of the read rate of attention over single selected keys; for self-speculation, like the next
            three; None: unknown.
        collect_share: additional time of attention that writes scores, as a share of the attention.
        select_s: overhead of selecting the next drafts' keys in all layers, besides the bytes of scores.
        select_bytes_per_s: rate at which selection reads scores, bound by its instructions.
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
        """Returns the same hardware with NCCL's collectives; ValueError if they were not measured."""
        if not self.nccl:
            raise ValueError(f"hardware {self.name} has no numbers for NCCL's collectives: add nccl to its description")
        return replace(self, collectives=self.nccl)

    def share(self, stored: Stored, experts: bool, rows: Any) -> Constant | None:
        """Returns the share of the read rate at which matrices are read; None: 1.

        Args:
            rows: of x, or the mean of pairs of an expert.
        """
        if stored.kind in FOUR_BIT_SHARE:
            return Constant(_by_rows(FOUR_BIT_SHARE[stored.kind][experts], rows), EXTRAPOLATED, "packed weights")
        shares: Mapping[str, Constant] = self.e4m3_share if stored.kind == "e4m3" else {}
        known = shares.get("experts" if experts else "weights")
        return known if known is None or experts else known.times(_by_rows(E4M3_ROWS, rows))

    def rate(self, dtype: str) -> Constant:
        """Returns the FLOP/s in `dtype`; ValueError if unknown."""
        if dtype not in self.flops:
            raise ValueError(f"{self.name} has no rate for {dtype}; known: {', '.join(self.flops)}")
        return self.flops[dtype]

    def collective_s(self, op: str, width: Array, message: Array) -> tuple[Array, Array, Array]:
        """Returns latency and transfer time of a collective, in seconds, and provenance; 0 for a single rank."""
        known = self.collectives[op]
        latency, level = known.latency(np.maximum(width, 2))
        # Up to the measured sizes latency dominates; beyond them the rate counts.
        beyond = max(EXTRAPOLATED, known.bytes_per_s.level)
        level = np.where(message > known.measured_bytes, np.maximum(level, beyond), level)
        many = width > 1
        wire = sent_bytes(op, width, message) / known.bytes_per_s.value
        return np.where(many, latency, 0.0), np.where(many, wire, 0.0), np.where(many, level, 0)
