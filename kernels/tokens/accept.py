"""Rejection sampling of drafts (lossless) over a vocabulary sharded across ranks.

A drafted token x is accepted with probability min(1, p(x) / q(x)). The first rejected draft is replaced by a sample
from max(p - q, 0); if all are accepted, a sample from p follows. Emitted tokens follow p, whatever q is. A step:

1. for p, and for q if the drafter samples: the largest logit and the last kept key, as in the sampler;
2. `kept_mass` of each, then one all-reduce of [B, T, 2] integers: the weight of all tokens and of the drafted one;
3. `accept`, then one all-gather of the candidates, whose best is the token that follows: `commit` finds it.

Probabilities are quotients of integer sums, and sampling is an argmax: results do not depend on the sharding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor
from kernels.tokens import reference
from kernels.tokens.best_token import store_best
from kernels.tokens.commit import before_first
from kernels.tokens.reference import ACCEPT, ALL_KEYS, MASS_UNITS, RECOVER, TARGET, Distribution, descending_keys
from kernels.tokens.uniform import gumbel, uniform

__all__ = ["ALL_KEYS", "MASS_UNITS", "Distribution", "accept", "descending_keys", "kept_mass"]

SLICES = 32  # programs per row: constant, so that ranks with different numbers of columns gather equal shapes
BLOCK = 512
WARPS = 4

_UNITS = tl.constexpr(MASS_UNITS)
_ACCEPT, _RECOVER, _TARGET = tl.constexpr(ACCEPT), tl.constexpr(RECOVER), tl.constexpr(TARGET)


@triton.jit
def log_weights(logits, v, inside, best, last_key, temperature, min_p):
    """Computes the log-weights of columns v, fp64; -inf for dropped ones."""
    x = tl.load(logits + v, mask=inside, other=float("-inf"))
    scaled = (x.to(tl.float64) - best) / tl.where(temperature > 0, temperature, 1.0).to(tl.float64)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True).to(tl.int64)
    key = tl.where(bits < 0, bits + 0x100000000, 0x7FFFFFFF - bits)
    keep = (scaled >= tl.log(min_p.to(tl.float64))) & (key <= last_key)
    return tl.where(keep, scaled, float("-inf"))


@triton.jit
def _mass(logits, v, inside, best, last_key, temperature, min_p):
    return (tl.exp(log_weights(logits, v, inside, best, last_key, temperature, min_p)) * _UNITS + 0.5).to(tl.int64)


# With a single column known at compile time, sums of ids take 16 bits each, and ptxas (12.8) loses summands.
@triton.jit(do_not_specialize=["V", "first"])
def _kept_mass_kernel(
    logits, best, last_key, temperature, min_p, tokens, sums, logits_b, logits_t, tokens_b, first, V, G,
    T: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)  # a large batch has more rows than axis 1 allows
    b = (row // T).to(tl.int64)
    t = row % T
    wait_for_predecessor(PDL)
    start_successor(PDL)
    token = tl.load(tokens + b * tokens_b + t, mask=t < G, other=-1)
    at = logits + b * logits_b + t.to(tl.int64) * logits_t
    total = tl.zeros([BLOCK], tl.int64)
    mine = tl.zeros([BLOCK], tl.int64)
    best_ = tl.load(best + row)
    key = tl.load(last_key + row)
    temperature_ = tl.load(temperature + b)
    min_p_ = tl.load(min_p + b)
    for begin in range(tl.program_id(1) * BLOCK, V, tl.num_programs(1) * BLOCK):
        v = begin + tl.arange(0, BLOCK)
        mass = _mass(at, v, v < V, best_, key, temperature_, min_p_)
        total += mass
        mine += tl.where((v + first).to(tl.int64) == token, mass, 0)
    tl.atomic_add(sums + 2 * row, tl.sum(total, 0), sem="relaxed")  # integers: the order does not matter
    tl.atomic_add(sums + 2 * row + 1, tl.sum(mine, 0), sem="relaxed")


@triton.jit
def store_greedy(to, token, part):
    """Stores a row's best token as the only candidate; none for -1, a broken row."""
    tl.store(to, tl.where((part == 0) & (token >= 0), 0.0, float("-inf")).to(tl.float64))
    tl.store(to + 1, token.to(tl.float64))


@triton.jit(do_not_specialize=["V", "first"])
def _accept_kernel(
    p_logits, p_best, p_key, p_temperature, p_min, p_mass, q_logits, q_best, q_key, q_temperature, q_min, q_mass,
    draft, greedy, seed, position, accepted, candidates,
    p_b, p_t, q_b, q_t, draft_b, greedy_b, position_b, first, V, B, G,
    SAMPLED: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    part = tl.program_id(1)
    wait_for_predecessor(PDL)
    start_successor(PDL)
    row = b.to(tl.int64)
    seed_ = tl.load(seed + b)
    position_ = tl.load(position + row * position_b)
    temperature = tl.load(p_temperature + b)
    # Each program repeats the scan, which is as cheap as loading its result.
    j = tl.arange(0, BLOCK_G)
    inside = j < G
    d = tl.load(draft + row * draft_b + j, mask=inside, other=-1)
    at = p_mass + 2 * (b * (G + 1) + j)
    p = tl.load(at + 1, mask=inside, other=0).to(tl.float64) / tl.load(at, mask=inside, other=1).to(tl.float64)
    bound = uniform(seed_, position_ + j, j * 0 + _ACCEPT, j * 0)
    if SAMPLED:
        at = q_mass + 2 * (b * G + j)
        q = tl.load(at + 1, mask=inside, other=0).to(tl.float64) / tl.load(at, mask=inside, other=1).to(tl.float64)
        bound *= q
    greedy_token = tl.load(greedy + row * greedy_b + j, mask=inside, other=-1)
    is_accepted = tl.where(temperature > 0, ((p > 0) & (bound <= p)).to(tl.int32), (d == greedy_token).to(tl.int32))
    k = before_first((is_accepted == 0) | (d < 0), j, G)
    if part == 0:
        tl.store(accepted + b, k.to(tl.int64))

    out = candidates + 2 * (part * B + b)
    if temperature == 0:
        store_greedy(out, tl.load(greedy + row * greedy_b + k), part)
    else:
        rejected = tl.load(draft + row * draft_b + k, mask=k < G, other=-1)
        is_proposed = rejected >= 0
        stream = tl.where(is_proposed, _RECOVER, _TARGET)
        p_index = b * (G + 1) + k
        best_p = tl.load(p_best + p_index)
        key_p = tl.load(p_key + p_index)
        min_p = tl.load(p_min + b)
        all_p = tl.load(p_mass + 2 * p_index).to(tl.float64)
        row_p = p_logits + row * p_b + k.to(tl.int64) * p_t
        if SAMPLED:
            of_q = b * G + k
            best_q = tl.load(q_best + of_q, mask=is_proposed, other=0.0)
            key_q = tl.load(q_key + of_q, mask=is_proposed, other=0)
            min_q = tl.load(q_min + b)
            temperature_q = tl.load(q_temperature + b)
            all_q = tl.load(q_mass + 2 * of_q, mask=is_proposed, other=1).to(tl.float64)
            row_q = q_logits + row * q_b + k.to(tl.int64) * q_t
        top = tl.full([BLOCK], float("-inf"), tl.float64)
        column = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        for begin in range(part * BLOCK, V, tl.num_programs(1) * BLOCK):
            v = begin + tl.arange(0, BLOCK)
            ids = (v + first).to(tl.int64)
            rest = _mass(row_p, v, v < V, best_p, key_p, temperature, min_p).to(tl.float64) / all_p
            if SAMPLED:
                mass_q = _mass(row_q, v, (v < V) & is_proposed, best_q, key_q, temperature_q, min_q)
                rest -= tl.where(is_proposed, mass_q.to(tl.float64) / all_q, 0.0)
            else:
                rest = tl.where(ids == rejected, 0.0, rest)
            noise = gumbel(seed_, position_ + k, stream, ids)
            is_left = rest > 0
            score = tl.where(is_left, tl.log(tl.where(is_left, rest, 1.0)) + noise, float("-inf"))
            column = tl.where(score > top, v, column)  # ties: keep the first
            top = tl.maximum(top, score)
        store_best(out, top, column, first, False)


def kept_mass(p: Distribution, tokens: torch.Tensor, first: int, sums: torch.Tensor | None = None) -> torch.Tensor:
    """Sums the weights of all kept tokens, and of one token, over this rank's columns; all-reduce the result.

    Args:
        p: distributions at T positions.
        tokens: the one token per position [B, T or T - 1] int64, last dim contiguous; -1 or missing: none.
        first: token id of the first column.
        sums: output, zeros [B, T, 2] int64, contiguous; None: a new tensor.

    Returns:
        [B, T, 2] int64 in units of `MASS_UNITS`; a token that is dropped, or another rank's, weighs 0.
    """
    if not dispatch.on_gpu(tokens):
        mass = reference.kept_mass(p, tokens, first)
        return mass if sums is None else sums.copy_(mass)
    B, T, V = checked(p)
    G = tokens.shape[1]
    assert T - 1 <= G <= T and (G < 2 or tokens.stride(1) == 1) and tokens.dtype == torch.int64
    sums = torch.zeros(B, T, 2, dtype=torch.int64, device=p.logits.device) if sums is None else sums
    assert sums.shape == (B, T, 2) and sums.is_contiguous() and sums.dtype == torch.int64
    _kept_mass_kernel[B * T, SLICES](
        p.logits, p.best, p.last_key, p.temperature, p.min_p, tokens, sums,
        p.logits.stride(0), p.logits.stride(1), tokens.stride(0), first, V, G,
        T=T, BLOCK=BLOCK, num_warps=WARPS, **pdl_options(sums),
    )  # fmt: skip
    return sums


def accept(
    p: Distribution,
    q: Distribution | None,
    p_mass: torch.Tensor,
    q_mass: torch.Tensor | None,
    draft: torch.Tensor,
    greedy: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    first: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepts drafted tokens up to the first rejection, and samples the next token among this rank's columns.

    A sequence depends only on its own row: neither its index in the batch nor its neighbors change a token. Without
    drafts, this equals the sampler.

    Args:
        p: the target's distributions, at T = gamma + 1 positions.
        q: the drafter's distributions, at gamma positions, sharded like p; None: drafts were deterministic.
        p_mass: all-reduced `kept_mass(p, draft, first)` [B, gamma + 1, 2] int64, contiguous.
        q_mass: all-reduced `kept_mass` of q [B, gamma, 2], or None.
        draft: [B, gamma] int64, last dim contiguous; -1 (no token) is never accepted, and q is ignored there.
        greedy: the target's best tokens [B, gamma + 1] int64, last dim contiguous: compared with drafts at temperature
            0.
        seed: [B] int64, contiguous.
        position: position of the first drafted token [B] int64: the counter of the random numbers.
        first: token id of the first column.

    Returns:
        Accepted lengths [B] int64, the same on all ranks; candidates for the next token, pairs of score and id
        [n, B, 2] fp64, n the same on all ranks: `best_of_ranks` over the gathered candidates gives the token, -1 if the
        target's row is broken.

    Source:
        Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023, appendix A.1.
    """
    assert (q is None) == (q_mass is None)
    if not dispatch.on_gpu(draft):
        return reference.accept(p, q, p_mass, q_mass, draft, greedy, seed, position, first)
    B, T, V = checked(p)
    G = T - 1
    assert draft.shape == (B, G) and greedy.shape == (B, T) and p_mass.shape == (B, T, 2)
    assert greedy.stride(1) == 1 and (G < 2 or draft.stride(1) == 1)
    assert all(t.is_contiguous() for t in (p_mass, seed))
    if q is not None and q_mass is not None:
        assert checked(q) == (B, G, V) and q_mass.shape == (B, G, 2) and q_mass.is_contiguous()
    of_q = (None,) * 5 if q is None else tuple(vars(q).values())
    accepted = torch.empty(B, dtype=torch.int64, device=draft.device)
    candidates = torch.empty(SLICES, B, 2, dtype=torch.float64, device=draft.device)
    strides = (0, 0) if q is None else q.logits.stride()[:2]
    _accept_kernel[B, SLICES](
        *vars(p).values(), p_mass, *of_q, q_mass, draft, greedy, seed, position, accepted, candidates,
        *p.logits.stride()[:2], *strides, draft.stride(0), greedy.stride(0), position.stride(0),
        first, V, B, G,
        SAMPLED=q is not None, BLOCK_G=triton.next_power_of_2(max(G, 1)), BLOCK=BLOCK, num_warps=WARPS,
        **pdl_options(draft),
    )  # fmt: skip
    return accepted, candidates


def checked(p: Distribution) -> tuple[int, int, int]:
    """Checks that the kernels accept these tensors; returns B, T and V."""
    B, T, V = p.logits.shape
    assert p.logits.dtype == torch.float32 and (V < 2 or p.logits.stride(2) == 1)
    assert p.best.shape == p.last_key.shape == (B, T) and p.best.dtype == torch.float64
    assert all(t.is_contiguous() for t in (p.best, p.last_key, p.temperature, p.min_p))
    return B, T, V
