"""Drawing the next token from logits that are sharded over the vocabulary.

Every rank holds some columns of the logits and ends with the same tokens, which do not depend on how the columns are
cut: what crosses ranks is a maximum, an integer sum or a (score, id) pair, never a rounded sum. Logits are not
gathered, shapes are fixed and nothing waits for the host, so that a step can be captured in a CUDA graph.

Filters are thresholds on the logit, in the order of transformers: temperature, top-k, top-p over what top-k leaves,
min-p. Tokens with equal logits are kept or dropped together, so a tie at the threshold keeps more than k tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from comm.base import Communicator
from helix.events.sampling_params import SamplingParams
from kernels.reference.uniform import TARGET, gumbel
from kernels.tokens.accept import ALL_KEYS, Distribution, descending_keys
from kernels.tokens.best_token import best_of_rank, best_of_ranks

# A key of 32 bits as three digits (shift, bits), most significant first: 16 KB of bins a row in each all-reduce.
_DIGITS = ((21, 11), (10, 11), (0, 10))


@dataclass
class SamplingState:
    """The sampling parameters of a batch on the device, one row a slot.

    Attributes:
        temperature, top_p, min_p: [B] fp32.
        top_k, seed: [B] int64.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor

    @classmethod
    def create(cls, max_batch: int, device: torch.device | str) -> SamplingState:
        """`max_batch` rows of the default parameters: greedy, unfiltered."""
        real = torch.zeros(3, max_batch, dtype=torch.float32, device=device)
        integer = torch.zeros(2, max_batch, dtype=torch.int64, device=device)
        return cls(real[0], integer[0], real[1].fill_(1), real[2], integer[1])

    def set(self, row: int, params: SamplingParams) -> None:
        """Gives a row the parameters of a request; in place, so that a captured graph sees them."""
        for name in (f.name for f in fields(self)):
            getattr(self, name)[row].fill_(getattr(params, name))

    def rows(self, index: Tensor | slice) -> SamplingState:
        """The rows of a slice, as views, or a copy of the rows `index` [n] int64, in that order."""
        return SamplingState(*(getattr(self, f.name)[index] for f in fields(self)))


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
    """Draws one token a row; all ranks return bitwise the same.

    All ranks call with the same B and flags, and communicate in the same order: one all-gather, one more where
    `stochastic`, between them five all-reduces where also `filtered`. The flags skip work: set without need, they
    change no token. Tokens with logit -inf are never drawn.

    Args:
        logits: [B, V_local] fp32, this rank's columns; V_local may differ between ranks and may be 0.
        vocab_offset: token id of the first column.
        positions: [B] int64, global position of the token that is drawn: the counter of the random numbers.
        state: B rows; those with temperature 0 are greedy.
        stochastic: some row has temperature > 0.
        filtered: some row with temperature > 0 has top-k or top-p on.

    Returns:
        Token ids [B] int64; -1 for a row that is broken: its logits hold NaN or +inf on some rank, or nothing but -inf.
    """
    logits = _with_a_column(logits)
    if not stochastic:
        return _best(logits, vocab_offset, comm)[1]
    p, best = distribution(logits[:, None], vocab_offset, state, comm, filtered=filtered)
    return draw(p, best, vocab_offset, positions[:, None], state.seed, TARGET, comm)[:, 0]


def distribution(
    logits: Tensor, vocab_offset: int, state: SamplingState, comm: Communicator, *, filtered: bool
) -> tuple[Distribution, Tensor]:
    """What tokens are drawn from at T positions of each sequence, over this rank's columns.

    A collective: one all-gather, and five all-reduces where `filtered`.

    Args:
        logits: [B, T, V_local] fp32; V_local may differ between ranks and may be 0.
        vocab_offset, filtered: as in `sample`.
        state: B rows.

    Returns:
        The distributions, and the best tokens [B, T] int64, -1 where a row is broken; the same on all ranks but for
        the columns.
    """
    B, T, _ = logits.shape
    logits = _with_a_column(logits)
    flat = logits.flatten(0, 1)
    best, tokens = _best(flat, vocab_offset, comm)
    last_key = torch.full((B, T), ALL_KEYS, dtype=torch.int64, device=logits.device)
    p = Distribution(logits, best.view(B, T), last_key, state.temperature, state.min_p)
    if filtered:
        mass = replace(p, min_p=torch.zeros_like(p.min_p)).mass().flatten(0, 1)
        rows = state.rows(torch.arange(B, device=logits.device).repeat_interleave(T))
        p = replace(p, last_key=_last_kept_key(descending_keys(flat), mass, rows, comm).view(B, T))
    return p, tokens.view(B, T)


def draw(
    p: Distribution,
    best: Tensor,
    vocab_offset: int,
    positions: Tensor,
    seed: Tensor,
    stream: int,
    comm: Communicator,
) -> Tensor:
    """Draws a token [B, T] int64 from each distribution; a collective, one all-gather.

    Args:
        p, best: what `distribution` gives; `best` is the answer where the temperature is 0.
        vocab_offset: as there.
        positions: [B, T] int64, and
        seed: [B] int64, and
        stream: of `kernels.reference.uniform`: the counters of the random numbers.

    Returns:
        Token ids; -1 for a row that is broken.
    """
    # Gumbel-max: the argmax of log-weights plus independent Gumbel noise is a draw from the normalised weights.
    ids = torch.arange(vocab_offset, vocab_offset + p.logits.shape[2], device=p.logits.device)
    noise = gumbel(seed[:, None, None], positions[..., None], stream, ids)
    drawn = _best((p.log_weights() + noise).flatten(0, 1), vocab_offset, comm)[1]
    return torch.where(p.temperature[:, None] > 0, drawn.view_as(best), best)


def _with_a_column(logits: Tensor) -> Tensor:
    """A rank without rows of the vocabulary takes part with one column that never wins."""
    assert logits.dtype == torch.float32, f"logits must be torch.float32, got {logits.dtype}"
    return logits if logits.shape[-1] else logits.new_full((*logits.shape[:-1], 1), -torch.inf)


def _best(scores: Tensor, vocab_offset: int, comm: Communicator) -> tuple[Tensor, Tensor]:
    """Largest score [B] fp64 over all ranks (NaN wins) and its smallest token id [B], -1 where it is not finite."""
    return best_of_ranks(comm.all_gather(best_of_rank(scores, vocab_offset)))


def _last_kept_key(keys: Tensor, mass: Tensor, state: SamplingState, comm: Communicator) -> Tensor:
    """The key [B] up to which top-k and top-p keep, found exactly by radix: one digit an all-reduce.

    Args:
        keys: [B, V_local] from `descending_keys`.
        mass: [B, V_local] int64, weights in fixed point. Rounding to units moves a filter by at most V * 2^-41 of the
            mass, less than fp32 probabilities would.
    """
    weights = torch.stack([torch.ones_like(mass), mass])  # [2, B, V_local]
    first = _histogram(keys, weights, torch.zeros_like(state.seed), 0, comm)
    k = torch.where(state.top_k > 0, state.top_k, torch.iinfo(torch.int64).max)
    by_count, (_, left) = _walk(first, keys, weights, k, comm)
    # A token stays while the mass before it is less than top_p of what top-k leaves; at least 1 keeps the best.
    need = (state.top_p.double() * left.double()).ceil().long().clamp(min=1)
    by_mass, _ = _walk(first[1:], keys, weights[1:], need, comm)
    return torch.where(state.top_p < 1, by_mass, by_count)


def _walk(first: Tensor, keys: Tensor, weights: Tensor, need: Tensor, comm: Communicator) -> tuple[Tensor, Tensor]:
    """Smallest key up to which the first weight adds up to `need`, digit by digit; the largest key if it never does.

    Args:
        first: [C, B, bins] histogram of the most significant digit.
        weights: [C, B, V_local] int64.
        need: [B] int64.

    Returns:
        The key [B], and the sum of each weight up to it [C, B].
    """
    key = torch.zeros_like(need)
    before = upto = torch.zeros_like(first[..., 0])  # [C, B], weight of the keys below and up to the digits so far
    for level, (_, bits) in enumerate(_DIGITS):
        bins = first if level == 0 else _histogram(keys, weights, key, level, comm)
        sums = bins.cumsum(-1)
        digit = (sums[0] < (need - before[0])[:, None]).sum(-1).clamp(max=(1 << bits) - 1)
        at = digit[None, :, None].expand(len(bins), -1, 1)
        upto = before + sums.gather(-1, at)[..., 0]
        before = upto - bins.gather(-1, at)[..., 0]
        key = (key << bits) | digit
    return key, upto


def _histogram(keys: Tensor, weights: Tensor, prefix: Tensor, level: int, comm: Communicator) -> Tensor:
    """Weights [C, B, V_local] by the next digit of the keys that begin with prefix [B], summed over ranks."""
    shift, bits = _DIGITS[level]
    inside = keys >> (shift + bits) == prefix[:, None]
    digit = (keys >> shift) & ((1 << bits) - 1)
    bins = weights.new_zeros(*weights.shape[:2], 1 << bits)
    return comm.all_reduce(bins.scatter_add_(2, digit.expand_as(weights), weights * inside))
