"""Costs of single operations, and the closed formulas of the paper: pure functions of numbers or arrays.

Units: bytes, FLOPs, seconds. Sources: Helix Parallelism, appendix A and section 2.1.3.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from helix.planner.hardware import EXTRAPOLATED, Array, Hardware

Number = Any  # int, float or array: one formula serves all


def kv_read_s(
    batch: Number, kv_heads: Number, head_dim: int, length: Number, tpa: Number, kvp: Number, item: float, rate: float
) -> Number:
    """Computes the seconds to read one layer's K and V of `batch` sequences (appendix A, first formula)."""
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
    """Computes the seconds to read one layer's weights (appendix A, second formula).

    Args:
        output: division of the output projection: `tpa`, as in the appendix, or `tpf`, as in section 2.2.
    """
    query = hidden * (q_heads / tpa) * head_dim
    projected = hidden * q_heads * head_dim / {"tpa": tpa, "tpf": tpf}[output]
    kv = 2 * hidden * np.ceil(kv_heads / tpa) * head_dim
    return (query + projected + kv + 3 * hidden * ffn / tpf) * item / rate


def pipelined(compute: Number, exchange: Number, chunks: Number) -> Number:
    """Computes the time of `chunks` pieces, each exchanged while the next is computed (HOP-B, figure 3)."""
    return np.maximum(chunks * compute + exchange, compute + chunks * exchange)


def experts_touched(experts: int, top_k: int, tokens: Number) -> Number:
    """Computes the expected number of distinct experts that `tokens` choose, each `top_k` uniformly."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def tokens_per_step(gamma: int, acceptance: float) -> float:
    """Computes the expected tokens of a step with `gamma` drafts of probability `acceptance`, and one more token."""
    return sum(acceptance**i for i in range(gamma + 1))


def sent_bytes(op: str, width: Number, message: Number) -> Number:
    """Computes the bytes that one rank sends.

    Args:
        message: bytes of all_to_all: a rank's parts for all ranks, its own included; all_reduce and send: the tensor;
            all_gather: the gathered tensor.
    """
    if op == "send":
        return message
    return (2 if op == "all_reduce" else 1) * message * (width - 1) / width


def collective_s(hardware: Hardware, op: str, width: Array, message: Array) -> tuple[Array, Array, Array]:
    """Computes latency and transfer, in seconds, and provenance; 0 for a single rank."""
    known = hardware.collectives[op]
    latency, level = known.latency(np.maximum(width, 2))
    # Up to the measured sizes latency dominates; beyond them the rate counts.
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
    """Computes the seconds of a layer's attention and exchange together, without the attention's kernel launch.

    Batched: one message for all sequences of a chunk; its latency counts once, after the last chunk, and HOP-B uses the
    best number of chunks, a power of two up to the batch. Serial: each sequence has its own collective.

    Args:
        data: seconds of attention over the whole batch.
        latency, wire: seconds of the exchange of the whole batch.
        hopb: whether the exchange of one chunk overlaps the attention of the next.
        chunk_s: seconds of each further chunk.
        chunks: number of chunks, if the batch is large enough; None: the best number.
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
