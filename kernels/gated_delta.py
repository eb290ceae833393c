"""Parameters and state of the gated delta rule on a rank, as its kernels take them.

    S = exp(g) S;   d = beta (v - S^T k);   S = S + k d^T;   o = S^T q          S [dk, dv] for each value head

Queries, keys and values come from a causal convolution over a sequence's last W rows, with silu; q and k are
L2-normalized and q is scaled by dk^-0.5; beta = sigmoid(b) and g = -exp(a_log) softplus(a + dt_bias). The output is a
gated norm per head: norm * o / rms(o) * silu(z). (arXiv:2412.06464)

Drafts can be rejected, and a state cannot be rolled back. So a decode step leaves the state as it was before the step
and stores k, d and g of its rows; the next step first adds those of accepted tokens: S times exp of the sum of all g,
and k d^T of each row times exp of the sum of the g after it. The convolution's input rows are in a ring indexed by
position: a step reads the W - 1 before its own while it writes these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GatedDelta:
    """Parameters of a rank's V value heads, and of the K key heads that they use.

    Attributes:
        conv: [W, C], weights of the convolution; C = 2 K dk + V dv channels: query heads, key heads, value heads.
        a_log, dt_bias: [V] fp32.
        norm: [dv].
        key_heads: K.
        group: value heads of the model that share a key head.
        first: index of the first value head in its group; value head j uses key head (first + j) // group.
    """

    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float
    key_heads: int
    group: int
    first: int


@dataclass(frozen=True)
class DeltaState:
    """A layer's state of the sequences in all slots.

    Attributes:
        state: S before the rows of the last decode step [slots, V, dk, dv] fp32.
        qkv: input rows of the convolution [slots, L, C], position p at p % L; L is at least W - 1 + R.
        rows: k and d of the last decode step's rows [slots, R, V, dk + dv] fp32; a step has at most R.
        decays: sums of g from the first of these rows up to each [slots, R, V] fp32.
        accepted: rows of the last decode step whose tokens were accepted [slots] int64.
    """

    state: torch.Tensor
    qkv: torch.Tensor
    rows: torch.Tensor
    decays: torch.Tensor
    accepted: torch.Tensor


@dataclass(frozen=True)
class DeltaInput:
    """Projected rows of a step's N tokens; last dims contiguous.

    Attributes:
        qkv: [N, C].
        gates: b and a [N, 2 V].
        z: [N, V dv].
    """

    qkv: torch.Tensor
    gates: torch.Tensor
    z: torch.Tensor
