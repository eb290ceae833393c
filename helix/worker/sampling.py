"""Sampling of the next token from logits that are sharded over the vocabulary.

All ranks get the same tokens, whatever the sharding: they exchange maxima, integer sums and (score, id) pairs, never
rounded sums. Logits are not gathered, shapes are fixed and nothing waits for the host, so steps can be captured.

Filters are thresholds on the logit, in the order of transformers: temperature, top-k, top-p over what top-k keeps,
min-p. Tokens with equal logits are kept or dropped together, so a tie at the threshold keeps more than k tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from comm.base import Communicator
from helix.sampling_params import SamplingParams
from helix.worker.graph_keys import FILTERED_ELEMENTS
from helix.worker.transfers import to_device
from kernels.tokens.accept import ALL_KEYS, Distribution, descending_keys
from kernels.tokens.best_token import best_of_rank, best_of_ranks
from kernels.tokens.gumbel_sample import gumbel_sample
from kernels.tokens.reference import DRAFT, TARGET

# Three digits (shift, bits) of a 32-bit key, most significant first: 16 KB of bins per row in each all-reduce.
_DIGITS = ((21, 11), (10, 11), (0, 10))


@dataclass
class SamplingState:
    """Sampling parameters of a batch on the device, one column per slot.

    Attributes:
        real: temperature, top_p and min_p (relative to the highest probability) [3, B] fp32.
        integer: top_k (0: all tokens) and seed [2, B] int64.
    """

    real: Tensor
    integer: Tensor

    @classmethod
    def create(cls, max_batch: int, device: torch.device | str) -> SamplingState:
        """Creates `max_batch` columns of the default parameters: greedy, unfiltered."""
        state = cls(
            torch.zeros(3, max_batch, dtype=torch.float32, device=device),
            torch.zeros(2, max_batch, dtype=torch.int64, device=device),
        )
        state.top_p.fill_(1)
        return state

    @property
    def temperature(self) -> Tensor:
        return self.real[0]

    @property
    def top_p(self) -> Tensor:
        return self.real[1]

    @property
    def min_p(self) -> Tensor:
        return self.real[2]

    @property
    def top_k(self) -> Tensor:
        return self.integer[0]

    @property
    def seed(self) -> Tensor:
        return self.integer[1]

    def set(self, slots: Tensor, params: Sequence[SamplingParams]) -> None:
        """Sets slots [n] int64 to the parameters of requests, in place, so that captured graphs see them."""
        real = torch.tensor([(p.temperature, p.top_p, p.min_p) for p in params], dtype=torch.float32)
        integer = torch.tensor([(p.top_k, p.seed) for p in params], dtype=torch.int64)
        self.real.index_copy_(1, slots, to_device(real, slots.device).T)
        self.integer.index_copy_(1, slots, to_device(integer, slots.device).T)

    def rows(self, index: Tensor | slice) -> SamplingState:
        """Returns a view of a slice of slots, or a copy of the slots `index` [n] int64."""
        return SamplingState(self.real[:, index], self.integer[:, index])


def sample(
    logits: Tensor,
    vocab_offset: int,
    positions: Tensor,
    state: SamplingState,
    comm: Communicator,
    *,
    stochastic: bool,
    filtered: bool,
) -> Tensor:
    """Samples one token per row [B * T] int64, -1 for an invalid row; arguments as in `sampled_candidates`."""
    flags = {"stochastic": stochastic, "filtered": filtered}
    return best_of_ranks(sampled_candidates(logits, vocab_offset, positions, state, comm, **flags))[1]


def sampled_candidates(
    logits: Tensor,
    vocab_offset: int,
    positions: Tensor,
    state: SamplingState,
    comm: Communicator,
    *,
    stochastic: bool,
    filtered: bool,
) -> Tensor:
    """Samples candidates for one token per row, of which `best_of_ranks` is the token; the same on all ranks.

    A collective with the same B and flags on all ranks: one all-gather, another one if `stochastic`, and five
    all-reduces between them if also `filtered`. The flags only skip work: setting one needlessly changes no token.
    Tokens with logit -inf are never sampled.

    Args:
        logits: [B * T, V_local] fp32, this rank's columns; V_local may differ between ranks and may be 0.
        vocab_offset: token id of the first column.
        positions: [B * T] int64, global position of the token to sample: the counter of the random numbers.
        state: B rows; temperature 0 is greedy.
        stochastic: any row has temperature > 0.
        filtered: any row with temperature > 0 has top-k or top-p on.

    Returns:
        (score, token id) pairs [N, B * T, 2] fp64. The best one is not finite for an invalid row: one with NaN or +inf
        on any rank, or with all logits -inf.
    """
    if not stochastic:
        return _gathered(best_of_rank(_with_a_column(logits), vocab_offset), comm)
    by_sequence = len(state.seed), len(logits) // len(state.seed)
    p, best = distribution(logits.unflatten(0, by_sequence), vocab_offset, state, comm, filtered=filtered)
    return _gathered(gumbel_sample(p, best, state.seed, positions.view(by_sequence), TARGET, vocab_offset), comm)


def distribution(
    logits: Tensor, vocab_offset: int, state: SamplingState, comm: Communicator, *, filtered: bool
) -> tuple[Distribution, Tensor]:
    """Computes the sampling distributions at T positions of each sequence, over this rank's columns.

    A collective: one all-gather, and five all-reduces if `filtered`.

    Args:
        logits: [B, T, V_local] fp32; V_local may differ between ranks and may be 0.
        state: B rows.

    Returns:
        The distributions over this rank's columns, and on all ranks the best tokens [B, T] int64, -1 for an invalid
        row.
    """
    B, T, _ = logits.shape
    logits = _with_a_column(logits)
    flat = logits.flatten(0, 1)
    best, tokens = _best(flat, vocab_offset, comm)
    last_key = torch.full((B, T), ALL_KEYS, dtype=torch.int64, device=logits.device)
    p = Distribution(logits, best.view(B, T), last_key, state.temperature, state.min_p)
    if filtered:
        rows = state.rows(torch.arange(B, device=logits.device).repeat_interleave(T))
        p = replace(p, last_key=_last_kept_key(_Weights(p), rows, comm).view(B, T))
    return p, tokens.view(B, T)


def sample_drafts(
    p: Distribution, best: Tensor, vocab_offset: int, positions: Tensor, seed: Tensor, comm: Communicator
) -> Tensor:
    """Samples a draft [B, T] int64 from each distribution, -1 for an invalid row; a collective, one all-gather.

    Args:
        p, best: results of `distribution`; `best` is the draft if the temperature is 0.
        positions, seed: [B, T] int64 and [B] int64, the counters of the random numbers.
    """
    return best_of_ranks(_gathered(gumbel_sample(p, best, seed, positions, DRAFT, vocab_offset), comm))[1].view_as(best)


def _gathered(candidates: Tensor, comm: Communicator) -> Tensor:
    """Gathers all ranks' candidates [n, R, 2] -> [W * n, R, 2]."""
    return comm.all_gather(candidates).flatten(0, 1)


def _with_a_column(logits: Tensor) -> Tensor:
    """Returns the logits; on a rank without columns, one column of -inf, which is never sampled."""
    assert logits.dtype == torch.float32, f"logits must be torch.float32, got {logits.dtype}"
    return logits if logits.shape[-1] else logits.new_full((*logits.shape[:-1], 1), -torch.inf)


def _best(scores: Tensor, vocab_offset: int, comm: Communicator) -> tuple[Tensor, Tensor]:
    """Returns the largest score [B] fp64 over all ranks (NaN wins) and its smallest token id [B]; -1 if not finite."""
    return best_of_ranks(_gathered(best_of_rank(scores, vocab_offset), comm))


class _Weights:
    """Keys and masses of all columns, of some sequences at a time: int64 numbers of all would take gigabytes.

    Rounding of a mass shifts a filter by at most V * 2^-41 of the sum: less than fp32 probabilities would.
    """

    def __init__(self, p: Distribution) -> None:
        B, T, V = p.logits.shape
        self._p = replace(p, min_p=torch.zeros_like(p.min_p))
        some = max(1, FILTERED_ELEMENTS // max(T * V, 1))
        self.pieces = [slice(first, min(first + some, B)) for first in range(0, B, some)]
        self._only = self._make(self.pieces[0]) if len(self.pieces) == 1 else None

    def of(self, sequences: slice) -> tuple[Tensor, Tensor]:
        """Returns the keys and masses [b * T, V_local] int64 of a piece."""
        return self._only or self._make(sequences)

    def _make(self, sequences: slice) -> tuple[Tensor, Tensor]:
        p = self._p
        some = Distribution(*(t[sequences] for t in (p.logits, p.best, p.last_key, p.temperature, p.min_p)))
        return descending_keys(some.logits.flatten(0, 1)), some.mass().flatten(0, 1)


def _last_kept_key(weights: _Weights, state: SamplingState, comm: Communicator) -> Tensor:
    """Finds the last key [B * T] that top-k and top-p keep, exactly, by radix search: one digit per all-reduce."""
    first = _histogram(weights, torch.zeros_like(state.seed), 0, comm, counts=True)
    k = torch.where(state.top_k > 0, state.top_k, torch.iinfo(torch.int64).max)
    by_count, (_, left) = _walk(first, weights, k, comm)
    # A token stays while the mass before it is below top_p of the mass that top-k keeps; at least 1 keeps the best.
    need = (state.top_p.double() * left.double()).ceil().long().clamp(min=1)
    by_mass, _ = _walk(first[1:], weights, need, comm)
    return torch.where(state.top_p < 1, by_mass, by_count)


def _walk(first: Tensor, weights: _Weights, need: Tensor, comm: Communicator) -> tuple[Tensor, Tensor]:
    """Finds, digit by digit, the smallest key up to which the first weight sums to `need`; else the largest key.

    Takes the histogram of the first digit [C, B, bins] and `need` [B] int64; returns the key [B] and the sum of each
    weight up to it [C, B]. The weights are counts and masses, or masses alone.
    """
    key = torch.zeros_like(need)
    before = upto = torch.zeros_like(first[..., 0])  # [C, B], weight of the keys below and up to the current digits
    for level, (_, bits) in enumerate(_DIGITS):
        bins = first if level == 0 else _histogram(weights, key, level, comm, counts=len(first) == 2)
        sums = bins.cumsum(-1)
        digit = (sums[0] < (need - before[0])[:, None]).sum(-1).clamp(max=(1 << bits) - 1)
        at = digit[None, :, None].expand(len(bins), -1, 1)
        upto = before + sums.gather(-1, at)[..., 0]
        before = upto - bins.gather(-1, at)[..., 0]
        key = (key << bits) | digit
    return key, upto


def _histogram(weights: _Weights, prefix: Tensor, level: int, comm: Communicator, *, counts: bool) -> Tensor:
    """Sums counts, if wanted, and masses by the next digit of keys that begin with prefix [B * T], over all ranks."""
    bins = prefix.new_zeros(1 + counts, len(prefix), 1 << _DIGITS[level][1])
    for sequences in weights.pieces:
        T = len(prefix) // weights.pieces[-1].stop
        rows = slice(sequences.start * T, sequences.stop * T)
        _add_to_bins(bins[:, rows], *weights.of(sequences), prefix[rows], level)
    return comm.all_reduce(bins)


def _add_to_bins(bins: Tensor, keys: Tensor, mass: Tensor, prefix: Tensor, level: int) -> None:
    shift, bits = _DIGITS[level]
    inside = (keys >> (shift + bits) == prefix[:, None]).long()
    digit = (keys >> shift).bitwise_and_((1 << bits) - 1)
    if len(bins) == 2:
        bins[0].scatter_add_(1, digit, inside)
    bins[-1].scatter_add_(1, digit, inside.mul_(mass))
