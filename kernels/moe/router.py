"""MoE router: top-k experts of each token and their weights."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from kernels import dispatch
from kernels.moe.reference import route as reference
from kernels.overlap import pdl_options, start_successor, wait_for_predecessor

Scoring = Literal["softmax", "top_softmax", "sigmoid"]


@triton.jit
def _ordered(score):
    """Maps scores to int32 keys of the same order: -0 equals 0, NaN is highest, the lowest int32 is unused."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(score != score, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _score(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _route_kernel(
    logits, choice_bias, live, ids, weights, logits_n, scale,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUP_SCORE: tl.constexpr, SCORING: tl.constexpr, BIAS: tl.constexpr, NORMALIZE: tl.constexpr,
    SHARED_EXPERTS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Routes one token per program; compares scores as integers, whose maximum a warp finds in one instruction."""
    n = tl.program_id(0)
    size: tl.constexpr = EXPERTS // GROUPS
    never: tl.constexpr = -0x80000000  # below every key: padding, dropped groups, selected experts
    nowhere: tl.constexpr = 0x7FFFFFFF  # above every id
    group = tl.arange(0, BLOCK_G)
    member = tl.arange(0, BLOCK_E)
    real = (group < GROUPS)[:, None] & (member < size)[None, :]
    expert = tl.where(real, group[:, None] * size + member[None, :], nowhere)
    if BIAS:
        bias = tl.load(choice_bias + expert, mask=real, other=0.0)
    wait_for_predecessor(PDL)
    start_successor(PDL)
    scores = tl.load(logits + n.to(tl.int64) * logits_n + expert, mask=real, other=float("-inf")).to(tl.float32)
    if SCORING == "softmax":
        scores = tl.exp(scores - tl.max(tl.max(scores, 1), 0))
        scores /= tl.sum(tl.sum(scores, 1), 0)
    elif SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-scores))
    choice = scores
    if BIAS:
        choice += bias
    keys = tl.where(real, _ordered(choice), never)
    if GROUPS > 1:
        infinite: tl.constexpr = 0x7F800000
        numbers = tl.minimum(keys, infinite)  # a NaN is selected, and so is its group
        best_key = tl.max(numbers, 1)
        best = _score(best_key)
        if GROUP_SCORE == 2:
            index = tl.min(tl.where(numbers == best_key[:, None], member[None, :], nowhere), 1)
            best += _score(tl.max(tl.where(member[None, :] == index[:, None], never, numbers), 1))
        group_keys = tl.where(group < GROUPS, _ordered(best), never)
        is_kept = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            index = tl.min(tl.where(group_keys == tl.max(group_keys, 0), group, nowhere), 0)
            is_kept |= group == index
            group_keys = tl.where(group == index, never, group_keys)
        keys = tl.where(is_kept[:, None], keys, never)

    keys = tl.ravel(keys)
    lane = tl.arange(0, BLOCK_G * BLOCK_E)
    slot = tl.arange(0, BLOCK_K)
    lanes = tl.zeros([BLOCK_K], tl.int32)
    for s in tl.static_range(TOP_K):
        index = tl.min(tl.where(keys == tl.max(keys, 0), lane, nowhere), 0)
        lanes = tl.where(slot == s, index, lanes)
        keys = tl.where(lane == index, never, keys)
    selected = lanes // BLOCK_E * size + lanes % BLOCK_E
    weight = tl.where(slot < TOP_K, tl.gather(tl.ravel(scores), lanes, 0), float("-inf"))
    if SCORING == "top_softmax":
        weight = tl.exp(weight - tl.max(weight, 0))
        weight /= tl.sum(weight, 0)
    if NORMALIZE:
        weight /= tl.sum(tl.where(slot < TOP_K, weight, 0.0), 0) + 1e-20
    selected = tl.where(slot < TOP_K, selected + SHARED_EXPERTS, slot - TOP_K)
    if live is not None:
        selected = tl.where(tl.load(live + n), selected, -1)
    at = n.to(tl.int64) * (TOP_K + SHARED_EXPERTS) + slot
    tl.store(ids + at, selected, mask=slot < TOP_K + SHARED_EXPERTS)
    tl.store(weights + at, tl.where(slot < TOP_K, weight * scale, 1.0), mask=slot < TOP_K + SHARED_EXPERTS)


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: Scoring = "softmax",
    bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    group_score: int = 1,
    normalize: bool = False,
    scale: float = 1.0,
    shared_count: int = 0,
    live: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selects the `top_k` best experts of each token, best first, ties to the lowest id; all in fp32.

    Shared experts, which every token uses, follow with weight 1; they take the lowest ids, and the others' ids shift
    up.

    Args:
        logits: [N, E], any float dtype, last dim contiguous.
        top_k: experts per token, at most those of `top_groups` groups.
        scoring: `softmax` over all experts; `top_softmax`: over the selected ones only (gpt-oss); `sigmoid` of each
            logit (DeepSeek-V3).
        bias: [E] fp32, added to the scores for selection only.
        groups: contiguous groups of E / groups experts.
        top_groups: number of best groups from which to select.
        group_score: score of a group: its best expert (1: DeepSeek-V2) or the sum of its best two (2: DeepSeek-V3),
            bias included.
        normalize: a token's weights sum to one.
        scale: factor on the final weights.
        shared_count: experts in addition to the E that every token uses.
        live: [N] bool, contiguous: all ids of other rows are -1, so that they use no expert. None: all rows.

    Returns:
        Expert ids [N, top_k + shared_count] int32 and weights [N, top_k + shared_count] fp32.

    Source:
        DeepSeek-V2 (arXiv:2405.04434), section 2.2.2; DeepSeek-V3 (arXiv:2412.19437), section 2.1.2.
    """
    size = logits.shape[1] // groups
    assert logits.shape[1] == size * groups and group_score <= size and top_k <= size * top_groups <= size * groups
    if not dispatch.on_gpu(logits):
        how = scoring, bias, groups, top_groups, group_score, normalize, scale, shared_count
        return reference(logits, top_k, *how, live)
    N = len(logits)
    assert logits.stride(1) == 1 and (live is None or (live.shape == (N,) and live.is_contiguous()))
    ids = torch.empty(N, top_k + shared_count, dtype=torch.int32, device=logits.device)
    weights = torch.empty(N, top_k + shared_count, dtype=torch.float32, device=logits.device)
    if N:
        _route_kernel[(N,)](
            logits, bias, live, ids, weights, logits.stride(0), scale,
            EXPERTS=logits.shape[1], TOP_K=top_k, GROUPS=groups, TOP_GROUPS=top_groups, GROUP_SCORE=group_score,
            SCORING=scoring, BIAS=bias is not None, NORMALIZE=normalize, SHARED_EXPERTS=shared_count,
            BLOCK_G=triton.next_power_of_2(groups), BLOCK_E=triton.next_power_of_2(size),
            BLOCK_K=triton.next_power_of_2(top_k + shared_count), num_warps=1, **pdl_options(logits),
        )  # fmt: skip
    return ids, weights
