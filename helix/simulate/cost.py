"""Costs of single operations, and the closed formulas of the paper: pure functions, of numbers or arrays alike.

Units: bytes, FLOPs, seconds. Sources: Helix Parallelism, appendix A and section 2.1.3.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from helix.simulate.hardware import EXTRAPOLATED, Array, Hardware

Number = Any  # int, float or array: one formula serves all


def kv_read_s(
    batch: Number, kv_heads: Number, head_dim: int, length: Number, tpa: Number, kvp: Number, item: float, rate: float
) -> Number:
    """Seconds to read one layer's K and V of `batch` sequences (appendix A, first formula)."""
    return batch * 2 * np.ceil(kv_heads / tpa) * head_dim * (length / kvp) * item / rate


def weight_read_s(
    hidden: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    tpa: Number,
    tpf: Number,
    item: float,
    rate: float,
    output: str = "tpa",
) -> Number:
    """Seconds to read one layer's weights (appendix A, second formula).

    Args:
        output: how the output projection is divided: `tpa`, as in the appendix, or `tpf`, as in section 2.2.
    """
    query = hidden * (q_heads / tpa) * head_dim
    projected = hidden * q_heads * head_dim / {"tpa": tpa, "tpf": tpf}[output]
    kv = 2 * hidden * np.ceil(kv_heads / tpa) * head_dim
    return (query + projected + kv + 3 * hidden * ffn / tpf) * item / rate


def pipelined(compute: Number, exchange: Number, chunks: Number) -> Number:
    """Length of `chunks` pieces of compute, each exchanged while the next is computed (HOP-B, figure 3)."""
    return np.maximum(chunks * compute + exchange, compute + chunks * exchange)


def experts_touched(experts: int, top_k: int, tokens: Number) -> Number:
    """Expected number of experts that `tokens` choose, each `top_k` of them evenly."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def tokens_per_step(gamma: int, acceptance: float) -> float:
    """Expected tokens of a speculative step: `gamma` drafted ones, each accepted with `acceptance`, and one more."""
    return sum(acceptance**i for i in range(gamma + 1))


def sent_bytes(op: str, width: Number, message: Number) -> Number:
    """What leaves one rank.

    Args:
        message: all_to_all: what a rank has for all, its own part included; all_reduce: the tensor; all_gather: the
            gathered tensor; send: the tensor.
    """
    if op == "send":
        return message
    return (2 if op == "all_reduce" else 1) * message * (width - 1) / width


def collective_s(hardware: Hardware, op: str, width: Array, message: Array) -> tuple[Array, Array, Array]:
    """Latency and transfer, in seconds, and provenance; nothing among one rank."""
    known = hardware.collectives[op]
    latency, level = known.latency(np.maximum(width, 2))
    # Within what was measured, latency is nearly all; beyond, the rate counts.
    beyond = max(EXTRAPOLATED, known.bytes_per_s.level)
    level = np.where(message > known.measured_bytes, np.maximum(level, beyond), level)
    many = width > 1
    wire = sent_bytes(op, width, message) / known.bytes_per_s.value
    return np.where(many, latency, 0.0), np.where(many, wire, 0.0), np.where(many, level, 0)


def attention_and_exchange_s(
    data: Array,
    latency: Array,
    wire: Array,
    batch: Array,
    hopb: Array,
    serial: bool,
    chunk_s: float,
    chunks: int | None = None,
) -> Array:
    """Seconds of a layer's attention and its exchange together, kernel launch of the attention left out.

    Batched: one message for all sequences of a chunk; its latency counts once, behind the last chunk, and under HOP-B
    the number of chunks (powers of two up to the batch) is the best. Serial: each sequence has a collective of its own.

    Args:
        data: seconds of attention over the whole batch.
        latency, wire: seconds of the exchange of the whole batch.
        hopb: whether the exchange of one chunk runs beside the attention of the next.
        chunk_s: what a further chunk costs.
        chunks: how many there are, where the batch is that large; None: the best number.
    """
    if serial:
        one = latency + wire / batch
        return np.where(hopb, pipelined(data / batch, one, batch), data + batch * one)

    def cut(n: int) -> Array:
        return pipelined(data / n, wire / n, n) + (n - 1) * chunk_s

    best = data + wire
    if chunks is not None:
        return np.where(hopb & (wire > 0) & (chunks <= batch), cut(chunks), best) + latency
    n = 2
    while n <= np.max(batch):
        best = np.where(hopb & (wire > 0) & (n <= batch), np.minimum(best, cut(n)), best)
        n *= 2
    return best + latency
