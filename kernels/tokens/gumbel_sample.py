"""Gumbel-max sampling from filtered distributions over a sharded vocabulary.

A sample is the argmax of log-weights plus Gumbel noise, so ranks exchange candidates, never weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor
from kernels.tokens.accept import checked, log_weights, store_greedy
from kernels.tokens.best_token import slices_of, store_best
from kernels.tokens.reference import Distribution
from kernels.tokens.reference import gumbel_sample as reference
from kernels.tokens.uniform import gumbel, gumbel_bound

BLOCK = 512
WARPS = 4
REGISTERS = 80  # lets six programs fit an SM, as `slices_of` assumes
MANY = 12  # tiles per program, two or three of which raise the best so far; with fewer, the fp32 test does not pay


# The parameters of a few sequences have any alignment.
@triton.jit(do_not_specialize=["V", "first"], do_not_specialize_on_alignment=["temperature", "min_p", "seed"])
def _gumbel_sample_kernel(
    logits, best, last_key, temperature, min_p, greedy, seed, positions, candidates,
    logits_b, logits_t, first, V, T,
    STREAM: tl.constexpr, BLOCK: tl.constexpr, SKIP_TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    wait_for_predecessor(PDL)
    start_successor(PDL)
    b = row // T
    out = candidates + 2 * (part * tl.num_programs(0) + row)
    temperature_ = tl.load(temperature + b)
    if temperature_ == 0:
        store_greedy(out, tl.load(greedy + row), part)
    else:
        at = logits + b.to(tl.int64) * logits_b + (row % T).to(tl.int64) * logits_t
        best_, key, min_p_ = tl.load(best + row), tl.load(last_key + row), tl.load(min_p + b)
        seed_, position = tl.load(seed + b), tl.load(positions + row)
        stream = row * 0 + STREAM
        top = tl.full([BLOCK], float("-inf"), tl.float64)
        column = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        lower_bound = tl.max(top, 0)
        for begin in range(part * BLOCK, V, tl.num_programs(1) * BLOCK):
            v = begin + tl.arange(0, BLOCK)
            ids = (v + first).to(tl.int64)
            if SKIP_TILES:
                # Logarithms in fp64 take most of the time: only where fp32 does not rule out a better column.
                x = tl.load(at + v, mask=v < V, other=float("-inf"))
                weight = (x - best_.to(tl.float32)) / temperature_
                upper_bound = weight + gumbel_bound(seed_, position, stream, ids) + (0.001 + tl.abs(weight) * 1e-6)
                reads = tl.max(tl.where(x > float("-inf"), upper_bound, float("-inf")), 0) > lower_bound
            else:
                reads = True
            if reads:
                score = log_weights(at, v, v < V, best_, key, temperature_, min_p_)
                score += gumbel(seed_, position, stream, ids)
                column = tl.where(score > top, v, column)  # ties: keep the first
                top = tl.maximum(top, score)
                lower_bound = tl.max(top, 0)
        store_best(out, top, column, first, False)


def gumbel_sample(
    p: Distribution, greedy: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor, stream: int, first: int
) -> torch.Tensor:
    """Samples a token from each distribution, among this rank's columns.

    Args:
        p: distributions at T positions of B sequences.
        greedy: best tokens [B, T] int64, contiguous, the result at temperature 0; -1: a broken row.
        seed: [B] int64, contiguous.
        positions: token positions [B, T] int64, contiguous: the counter of the random numbers.
        stream: a stream of `kernels.tokens.reference`.
        first: token id of the first column.

    Returns:
        Pairs of score and id [N, B * T, 2] fp64, N the same on all ranks: `best_of_ranks` over the gathered pairs gives
        the tokens, -1 in broken rows.
    """
    if not dispatch.on_gpu(greedy):
        return reference(p, greedy, seed, positions, stream, first)
    B, T, V = checked(p)
    assert greedy.shape == positions.shape == (B, T) and seed.shape == (B,)
    assert all(t.is_contiguous() and t.dtype == torch.int64 for t in (greedy, seed, positions))
    slices = slices_of(B * T)
    candidates = torch.empty(slices, B * T, 2, dtype=torch.float64, device=greedy.device)
    _gumbel_sample_kernel[B * T, slices](
        *vars(p).values(), greedy, seed, positions, candidates, *p.logits.stride()[:2], first, V, T,
        STREAM=stream, BLOCK=BLOCK, SKIP_TILES=MANY * BLOCK * slices < V, num_warps=WARPS, maxnreg=REGISTERS,
        **pdl_options(greedy),
    )  # fmt: skip
    return candidates
