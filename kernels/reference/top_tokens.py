"""The most likely tokens of each row in plain torch, and their exchange format: integers that compare.

A token's word is the key of its logit (`descending_keys`) and its id, so that the least word is the best token, ties
to the smallest id. A summary [WIDTH] int64 of some columns of a row holds the word of the drawn token, the words of the
TOP best tokens in order, and the bits of an fp64 number: the sum of exp(logit - best logit).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.reference.accept import descending_keys

TOP = 20
WIDTH = TOP + 2
ID_BITS = 31
NONE = (1 << 63) - 1  # above every token's word


def top_of_rank(logits: Tensor, tokens: Tensor, first: int) -> Tensor:
    """Summarises this rank's columns, [B, WIDTH]; shapes as in `kernels.tokens.top_tokens`."""
    ids = torch.arange(first, first + logits.shape[1], device=logits.device)
    words = descending_keys(logits) << ID_BITS | ids
    drawn = torch.where(ids == tokens[:, None], words, NONE)
    best = pad(logits.double(), (0, 1), value=-torch.inf).amax(1, keepdim=True)
    weights = (logits.double() - best.clamp(min=torch.finfo(torch.float64).min)).exp().sum(1)
    return torch.cat([_least(drawn, 1), _least(words, TOP), weights.view(torch.int64)[:, None]], 1)


def top_of_ranks(summaries: Tensor) -> Tensor:
    """Merges summaries into one of all columns, [B, WIDTH]; shapes as in `kernels.tokens.top_tokens`."""
    drawn, words, weights = summaries.split((1, TOP, 1), 2)  # [N, B, ..] each
    logit = _logits(words[..., 0])  # [N, B]
    share = (logit - logit.amax(0).clamp(min=torch.finfo(torch.float64).min)).exp()
    weight = (share * weights[..., 0].contiguous().view(torch.float64)).sum(0)
    best = _least(words.transpose(0, 1).flatten(1), TOP)
    return torch.cat([drawn.amin(0), best, weight.view(torch.int64)[:, None]], 1)


def logprobs(summaries: Tensor) -> tuple[Tensor, Tensor]:
    """Decodes summaries [B, WIDTH] of all columns into the log-probabilities of the drawn token and the best ones.

    Returns:
        Ids [B, 1 + TOP] int64, -1 as padding, and their log-probabilities fp32, -inf as padding.
    """
    words, weight = summaries.split((1 + TOP, 1), 1)
    values = _logits(words) - _logits(words[:, 1:2]) - weight.contiguous().view(torch.float64).log()
    return torch.where(words < NONE, words & ((1 << ID_BITS) - 1), -1), values.float()


def _least(words: Tensor, count: int) -> Tensor:
    """Returns the `count` least words of each row, ascending."""
    # Padded with NONE; `pad` would round it to fp64.
    return torch.cat([words, words.new_full((len(words), count), NONE)], 1).sort(1).values[:, :count]


def _logits(words: Tensor) -> Tensor:
    """Decodes the logits of words, fp64; -inf for NONE."""
    key = words >> ID_BITS
    bits = torch.where(key >> 31 > 0, key - (1 << 32), (1 << 31) - 1 - key)
    return torch.where(words < NONE, bits.int().view(torch.float32).double(), -torch.inf)
