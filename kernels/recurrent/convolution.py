"""Triton building blocks of the gated delta rule: causal convolution, L2 norm, and gates."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.recurrent.reference import L2_EPS as _L2_EPS

L2_EPS = tl.constexpr(_L2_EPS)


@triton.jit
def convolve(
    ring, rows, conv, p, begin, there, channel, rows_n, d,
    D: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Computes silu of the convolution at positions p [n] and channels `channel` + d [m], [n, m] fp32; 0 elsewhere.

    Rows before position `begin` are in the sequence's ring [RING, WIDTH], later ones in `rows`; none before position 0.
    """
    inside = d < D
    total = tl.zeros((p.shape[0], d.shape[0]), tl.float32)
    for w in tl.static_range(W):
        at = p - (W - 1) + w
        kept = ring + (at + RING * W) % RING * WIDTH  # keep the remainder non-negative
        row = tl.where(at < begin, kept, rows + (at - begin) * rows_n)
        mask = (there & (at >= 0))[:, None] & inside[None, :]
        x = tl.load(row[:, None] + channel + d[None, :], mask=mask, other=0.0).to(tl.float32)
        total += x * tl.load(conv + w * WIDTH + channel + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    return total / (1.0 + tl.exp(-total))


@triton.jit
def norm_scale(x):
    """Returns the factors [n] that L2-normalize rows [n, m]."""
    return tl.rsqrt(tl.sum(x * x, 1) + L2_EPS)


@triton.jit
def gate(a, b, decay, bias):
    """Returns g and beta of the raw gates a and b, with `decay` = exp(a_log)."""
    shifted = a.to(tl.float32) + bias
    # torch's softplus: the identity from 20 on
    soft = tl.where(shifted > 20.0, shifted, tl.log(1.0 + tl.exp(tl.minimum(shifted, 20.0))))
    return -decay * soft, 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))
