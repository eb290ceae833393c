"""Hardware constants from timed kernels and collectives, by linear fits of seconds over bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from helix.planner.hardware import EXTRAPOLATED, MEASURED, Collective, Constant, Hardware, sent_bytes

Record = Mapping[str, Any]
OPS = {"exchange": "all_to_all", "all_reduce_norm": "all_reduce", "all_gather": "all_gather"}
SLOPE_BYTES = 65536  # a slope shows the rate only if the largest message has at least this size
MIN_S = 1e-7  # minimum fixed time: noise could make it negative


def line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fits `seconds = fixed + bytes / rate` with the least squared relative error; returns fixed seconds and bytes/s.

    A single point, or points without a positive slope, give only a rate.
    """
    x, y = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    if len(set(sizes)) > 1:
        (fixed, slope), *_ = np.linalg.lstsq(np.stack([1 / y, x / y], 1), np.ones(len(x)), rcond=None)
        if slope > 0 and fixed >= MIN_S:
            return float(fixed), float(1 / slope)
    largest = int(np.argmax(x))
    return MIN_S, float(x[largest] / y[largest])


def attention(base: Hardware, rows: Sequence[Record]) -> Hardware:
    """Sets the read rate and the kernel time from rows with bytes and seconds, for any number of KV heads."""
    fixed, rate = line([row["bytes"] for row in rows], [row["seconds"] for row in rows])
    of = f"flash_decode, {_range(row['bytes'] for row in rows)}"
    return replace(
        base,
        read_bytes_per_s=Constant(rate, MEASURED, f"{of}: slope over bytes"),
        kernel_s=Constant(fixed, MEASURED, f"{of}: what is left at no bytes"),
    )


def fit_costs(columns: Sequence[Sequence[float]], excess: Sequence[float], took: Sequence[float]) -> list[float]:
    """Fits a non-negative cost per column by least squares of `excess` relative to `took`."""
    left = list(range(len(columns)))
    weight = 1 / np.asarray(took, dtype=float)
    weighted, found = [np.asarray(column, dtype=float) * weight for column in columns], np.zeros(len(columns))
    while left:
        fitted, *_ = np.linalg.lstsq(np.stack([weighted[i] for i in left], 1), np.asarray(excess) * weight, rcond=None)
        if fitted.min() >= 0:
            found[left] = fitted
            break
        left.pop(int(np.argmin(fitted)))
    return [float(cost) for cost in found]


def finding(base: Hardware, rows: Sequence[Record]) -> Hardware:
    """Sets the cost of block selection: time beyond the bytes read and the kernel's fixed time.

    Rows have bytes, bytes of bounds, sequences, seconds and topk.
    """
    rate, fixed = base.read_bytes_per_s.value, base.kernel_s.value
    excess = [row["seconds"] - row["bytes"] / rate - fixed for row in rows]
    columns = [1.0 for _ in rows], [row["batch"] for row in rows], [row["bounds"] / rate for row in rows]
    once, each, again = fit_costs(columns, excess, [row["seconds"] for row in rows])
    topks = "/".join(str(topk) for topk in sorted({row["topk"] for row in rows}))
    source = f"select_blocks and flash_decode, {topks} blocks, fit of {len(rows)}, {_range(r['bytes'] for r in rows)}"
    return replace(
        base,
        finding_s=Constant(max(once, MIN_S), MEASURED, source),
        finding_sequence_s=Constant(each, MEASURED, source),
        bounds_share=Constant(1 / (1 + again), MEASURED, source),
    )


def link(base: Hardware, rows: Sequence[Record]) -> Hardware:
    """Sets the link's rate and the fixed time of a fetch from rows with bytes, seconds and resolve_seconds."""
    fixed, rate = line([row["bytes"] for row in rows], [row["seconds"] for row in rows])
    at_once = f"copy_blocks from host memory, {_range(row['bytes'] for row in rows)}, on {rows[0]['gpus']} GPUs at once"
    price = fixed + float(np.median([row["resolve_seconds"] for row in rows]))
    return replace(
        base,
        link_bytes_per_s=Constant(rate, MEASURED, f"{at_once}: slope over bytes"),
        fetch_s=Constant(price, MEASURED, f"{at_once}: what is left at no bytes, and resolve"),
    )


def latents(base: Hardware, rows: Sequence[Record]) -> Hardware:
    """Sets MLA's share of the read rate (fewest heads, most bytes) and its FLOP/s (most heads); rows have flops."""
    min_heads, max_heads = min(row["heads"] for row in rows), max(row["heads"] for row in rows)
    first = max((row for row in rows if row["heads"] == min_heads), key=lambda row: row["bytes"])
    busy = max(first["seconds"] - base.kernel_s.value, MIN_S)
    share = min(first["bytes"] / busy / base.read_bytes_per_s.value, 1.0)
    base = replace(
        base, latent_share=Constant(share, MEASURED, f"mla_decode, {min_heads} heads, {first['bytes']:.3g} B")
    )
    if many := [row["flops"] / row["seconds"] for row in rows if row["heads"] == max_heads > min_heads]:
        rate = Constant(float(np.median(many)), MEASURED, f"mla_decode, {max_heads} heads: median")
        base = replace(base, latent_flops=rate)
    return base


def products(base: Hardware, rows: Sequence[Record]) -> Hardware:
    """Sets a projection's time beyond its bytes at the read rate, by number of input rows (`rows` of a record)."""
    product_s = {}
    for count in sorted({row["rows"] for row in rows}):
        same = [r for r in rows if r["rows"] == count]
        excess = [row["seconds"] - row["bytes"] / base.read_bytes_per_s.value for row in same]
        source = f"linear, median of {len(same)} matrices, {_range(row['bytes'] for row in same)}"
        product_s[count] = Constant(max(float(np.median(excess)), MIN_S), MEASURED, source)
    return replace(base, product_s=product_s)


def collectives(rows: Sequence[Record], key: str) -> dict[str, Collective]:
    """Fits latency by width, and rate, to rows of `helix bench comm`; `key` is the column, symm_us or nccl_us."""
    by_op: dict[str, Collective] = {}
    for name, op in OPS.items():
        same = [row for row in rows if row["op"] == name]
        points = []  # width, bytes sent, seconds
        for row in same:
            width = row["ranks"]
            message = row["message_bytes"] * (width if op == "all_gather" else 1)
            points.append((width, float(sent_bytes(op, width, message)), row[key] / 1e6))
        widths = sorted({width for width, _, _ in points})
        lines = {w: line(*zip(*((x, y) for of, x, y in points if of == w), strict=True)) for w in widths}
        largest = max(x for _, x, _ in points)
        rate = Constant(float(np.median([of[1] for of in lines.values()])), MEASURED, f"{name}: median of the widths")
        if largest < SLOPE_BYTES and by_op:
            rate = replace(by_op["all_to_all"].bytes_per_s, level=EXTRAPOLATED, source="as all_to_all")
        latency = {}
        for width in widths:
            smallest = min((x, y) for of, x, y in points if of == width)
            sent, seconds = smallest
            source = f"{name}, {sent:.0f} B sent, less their time at the rate"
            latency[width] = Constant(max(seconds - sent / rate.value, MIN_S), MEASURED, source)
        by_op[op] = Collective(latency, rate, float(max(row["message_bytes"] for row in same)))
    exchange = by_op["all_to_all"]
    narrow = min(exchange.latency_s)
    two = replace(exchange.latency_s[narrow], level=EXTRAPOLATED, source="as the narrowest exchange")
    rate = replace(exchange.bytes_per_s, level=EXTRAPOLATED, source="as all_to_all")
    by_op["send"] = Collective({2: two}, rate, 0.0)
    return by_op


def assumed(hardware: Hardware) -> Hardware:
    """Marks all constants as extrapolated, for use on another GPU."""

    def of(value: Any) -> Any:
        if isinstance(value, Constant):
            return replace(value, level=max(value.level, EXTRAPOLATED), source=f"{hardware.name}: {value.source}")
        if isinstance(value, Mapping):
            return {key: of(inner) for key, inner in value.items()}
        if isinstance(value, Collective):
            return Collective(of(value.latency_s), of(value.bytes_per_s), 0.0)
        return value

    return Hardware(**{name: of(value) for name, value in vars(hardware).items()})


def _range(sizes: Iterable[float]) -> str:
    ordered = sorted(sizes)
    return f"{ordered[0]:.3g} to {ordered[-1]:.3g} B"
