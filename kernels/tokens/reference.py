"""Plain torch reference of `kernels.tokens`, and the argument types and formats that kernels share.

A top-logprobs summary of some columns of a row is WIDTH int64: the word of the sampled token, the words of the TOP best
tokens in order, and the bits of an fp64 sum of exp(logit - best logit). A token's word is the key of its logit
(`descending_keys`) and its id, so the smallest word is the best token, ties to the smallest id.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

# Random streams: draws for one (seed, position) that must be independent use different streams. A position drafted
# again after a rejection gets new numbers: see `helix.speculation.draft_sampler`.
TARGET = 0  # the target's token, also after accepted drafts
DRAFT = 1
ACCEPT = 2
RECOVER = 3  # the token in place of a rejected one

# splitmix64: the increment, and the multipliers of its finalizer (Stafford's mix 13), in int64.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
# Fixed-point weights: the best token weighs 2^40 units, and sums over 2^22 tokens fit int64, in any order.
MASS_UNITS = 2.0**40
ALL_KEYS = (1 << 32) - 1  # keeps every token
PLACEHOLDER_TOKEN_ID = -2  # pads the tokens that a sequence accepts in a step
TOKEN_BITS = 24  # of an entry; the salt has the other 39
# Flags of `LogitsState.seen`; the bits above are a counter.
IN_PROMPT, ENDS, ONCE = 1, 2, 4
FORBIDDEN = -1e30  # finite: a row with only forbidden tokens samples one of them instead of being broken

TOP = 20
WIDTH = TOP + 2
ID_BITS = 31
NONE = (1 << 63) - 1  # above every token's word


def uniform(seed: Tensor, position: Tensor, stream: Tensor | int, index: Tensor | int) -> Tensor:
    """Returns random numbers as a pure function of four counters: independent if one of them differs.

    The first three are hashed into the start of a splitmix64 sequence; `index` picks one of its outputs.

    Args:
        seed, position: int64; all four broadcast.
        stream: purpose of the number, one of the constants above.
        index: for instance a token id.

    Returns:
        fp64 in the open interval (0, 1): odd multiples of 2^-53, exact.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
    """
    start = mix((seed + 1) * GOLDEN)
    for counter in (position, stream, index):
        if not isinstance(counter, Tensor):  # an int would not wrap as a tensor does; `full` can be captured
            counter = torch.full((), counter, dtype=torch.int64, device=seed.device)
        start = mix(start + counter * GOLDEN)
    # 52 bits and a half: with one more bit, the largest would round to 1.
    return (_shift(start, 12).double() + 0.5) * 2.0**-52


def gumbel(seed: Tensor, position: Tensor, stream: Tensor | int, index: Tensor | int) -> Tensor:
    """Returns Gumbel noise from `uniform`: the argmax of log-weights plus noise is a sample."""
    return -(-uniform(seed, position, stream, index).log()).log()


def mix(x: Tensor) -> Tensor:
    """Applies the finalizer of splitmix64: a bijection of 64-bit words, in wrapping int64."""
    x = (x ^ _shift(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shift(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift; int64's own shift extends the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def best_of_rank(scores: torch.Tensor, first: int) -> torch.Tensor:
    """Plain torch `kernels.tokens.best_token.best_of_rank`; returns pairs [1, B, 2]."""
    value, column = scores.max(dim=1)  # ties: the first
    return torch.stack([value.double(), (column + first).double()], dim=1)[None]


def best_of_ranks(pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch `kernels.tokens.best_token.best_of_ranks`."""
    values, tokens = pairs.unbind(-1)  # [N, B] each
    best = values.amax(dim=0)
    token = torch.where(values == best, tokens, torch.inf).amin(dim=0)
    return best, torch.where(best.isfinite(), token, -1.0).long()


@dataclass(frozen=True)
class Distribution:
    """A rank's columns of T filtered next-token distributions of B sequences, with maxima and cutoffs over all ranks.

    A token's weight is exp((logit - best) / temperature) in fp64, rounded to units; 0 if a filter drops the token.

    Attributes:
        logits: [B, T, V_local] fp32, last dim contiguous; V_local may be 0.
        best: largest logit over all ranks [B, T] fp64, contiguous; NaN marks a broken row.
        last_key: top-k and top-p cutoff [B, T] int64, contiguous: keeps logits whose key (`descending_keys`) is at most
            this; ALL_KEYS keeps all.
        temperature: [B] fp32, contiguous; 0 is greedy.
        min_p: [B] fp32, contiguous.
    """

    logits: Tensor
    best: Tensor
    last_key: Tensor
    temperature: Tensor
    min_p: Tensor

    def log_weights(self) -> Tensor:
        """Computes log-weights [B, T, V_local] fp64: 0 for the best token, -inf for dropped ones and broken rows."""
        temperature = torch.where(self.temperature > 0, self.temperature, 1.0).double()[:, None, None]
        scaled = self.logits.double().sub_(self.best[..., None]).div_(temperature)
        keep = scaled >= self.min_p.double().log()[:, None, None]
        keep &= descending_keys(self.logits) <= self.last_key[..., None]
        return scaled.masked_fill_(~keep, -torch.inf)

    def mass(self) -> Tensor:
        """Computes fixed-point weights [B, T, V_local] int64."""
        return self.log_weights().exp_().mul_(MASS_UNITS).add_(0.5).long()


def descending_keys(logits: Tensor) -> Tensor:
    """Maps fp32 logits to int64 keys in [0, 2^32): larger logits get smaller keys, equal logits equal keys."""
    bits = (logits + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0 into 0.0
    return torch.where(bits < 0, bits + (1 << 32), (1 << 31) - 1 - bits)


def kept_mass(p: Distribution, tokens: Tensor, first: int) -> Tensor:
    """Plain torch `kernels.tokens.accept.kept_mass`."""
    mass = p.mass()
    tokens = pad(tokens, (0, p.logits.shape[1] - tokens.shape[1]), value=-1)
    ids = torch.arange(first, first + mass.shape[2], device=mass.device)
    return torch.stack([mass.sum(-1), (mass * (ids == tokens[..., None])).sum(-1)], dim=-1)


def accept(
    p: Distribution,
    q: Distribution | None,
    p_mass: Tensor,
    q_mass: Tensor | None,
    draft: Tensor,
    greedy: Tensor,
    seed: Tensor,
    position: Tensor,
    first: int,
) -> tuple[Tensor, Tensor]:
    """Plain torch `kernels.tokens.accept.accept`; candidates are [1, B, 2]."""
    B, G = draft.shape
    drawn = p.temperature > 0
    at = position[:, None] + torch.arange(G, device=draft.device)
    p_token = p_mass[:, :G, 1].double() / p_mass[:, :G, 0].double()  # [B, G]
    q_token = torch.ones_like(p_token) if q_mass is None else q_mass[..., 1].double() / q_mass[..., 0].double()
    is_likely = (p_token > 0) & (uniform(seed[:, None], at, ACCEPT, 0) * q_token <= p_token)
    is_accepted = torch.where(drawn[:, None], is_likely, draft == greedy[:, :G]) & (draft >= 0)
    accepted = pad(~is_accepted, (0, 1), value=True).long().argmax(1)  # [B]

    row = torch.arange(B, device=draft.device)
    rejected = pad(draft, (0, 1), value=-1)[row, accepted]  # -1: no draft at this position
    is_proposed = (rejected >= 0)[:, None]
    columns = p.logits.shape[2]
    ids = torch.arange(first, first + columns, device=draft.device)
    rest = p.mass()[row, accepted].double() / p_mass[row, accepted, 0].double()[:, None]  # [B, V_local]
    if q is None or q_mass is None:
        rest = torch.where(is_proposed & (ids == rejected[:, None]), 0.0, rest)
    elif G:
        behind = accepted.clamp(max=G - 1)
        rest -= torch.where(is_proposed, q.mass()[row, behind].double() / q_mass[row, behind, 0].double()[:, None], 0.0)
    stream = torch.where(is_proposed, RECOVER, TARGET)
    noise = gumbel(seed[:, None], (position + accepted)[:, None], stream, ids)
    scores = pad(torch.where(rest > 0, rest.log() + noise, -torch.inf), (0, 1), value=-torch.inf)
    score, column = scores.max(1)  # ties: the first
    own = greedy[row, accepted]
    score = torch.where(drawn, score, torch.where(own >= 0, 0.0, -torch.inf))
    token = torch.where(drawn, column + first, own)
    return accepted, torch.stack([score, token.double()], dim=-1)[None]


def gumbel_sample(p: Distribution, greedy: Tensor, seed: Tensor, positions: Tensor, stream: int, first: int) -> Tensor:
    """Plain torch `kernels.tokens.gumbel_sample.gumbel_sample`; returns [1, B * T, 2]."""
    ids = torch.arange(first, first + p.logits.shape[2], device=p.logits.device)
    noise = gumbel(seed[:, None, None], positions[..., None], stream, ids)
    drawn = best_of_rank((p.log_weights() + noise).flatten(0, 1), first)
    own = torch.stack((torch.where(greedy >= 0, 0.0, -torch.inf).double(), greedy.double()), -1)
    return torch.where(p.temperature[:, None, None] > 0, drawn.view_as(own), own).view(1, -1, 2)


@dataclass(frozen=True)
class Candidates:
    """All ranks' candidates for the tokens that a step samples; `best_of_ranks` selects.

    Attributes:
        pairs: score and token id [N, R, 2] fp64, contiguous, N per token: for B sequences with n drafts, the tokens
            after the last one and after each draft, R = B * (1 + n); with `accepted`, only those after the accepted, R
            = B.
        accepted: drafts that rejection sampling accepted [B] int64; None: accept drafts that equal the sampled tokens.
    """

    pairs: torch.Tensor
    accepted: torch.Tensor | None = None


def commit(
    candidates: Candidates,
    drafts: torch.Tensor | None,
    outcome: torch.Tensor | None,
    last: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    active: torch.Tensor,
    history: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch `kernels.tokens.commit.commit`."""
    drafts = last.new_empty(len(last), 0) if drafts is None else drafts
    tokens = best_of_ranks(candidates.pairs)[1].view(len(last), -1)
    if candidates.accepted is not None:
        draft_and_next = torch.cat((drafts, tokens), 1)
        tokens = draft_and_next.scatter(1, candidates.accepted[:, None], tokens)
    if outcome is not None:  # broken rows stay broken
        tokens[:, :-1] = torch.where(tokens[:, :-1] < 0, tokens[:, :-1], outcome)
    num_accepted = ((drafts == tokens[:, :-1]) & (drafts >= 0)).long().cumprod(1).sum(1)
    count = torch.minimum(num_accepted + 1, limits - lengths) * active
    index = torch.arange(tokens.shape[1], device=tokens.device)
    is_output = index < count[:, None]
    last.copy_(torch.where(count > 0, tokens.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0], last))
    if history.shape[1]:
        row = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(tokens)
        at = (lengths[:, None] + 1 + index)[is_output]
        history[row[is_output], at] = tokens[is_output].int()
    before = lengths.clone()
    lengths += count
    return torch.where(is_output, tokens, PLACEHOLDER_TOKEN_ID), before


@dataclass(frozen=True)
class SuffixPool:
    """Tokens of finished sequences, which suffix lookup searches for sequences of the same salt.

    Attributes:
        entries: ring [N] int64 of `salt << TOKEN_BITS | token`, contiguous; -1: no token.
        cursor: index of the oldest entry [1] int64.
        cache_salts: salt of each drafted sequence [B] int64, non-negative, contiguous.
    """

    entries: torch.Tensor
    cursor: torch.Tensor
    cache_salts: torch.Tensor


def suffix(
    history: torch.Tensor, lengths: torch.Tensor, pool: SuffixPool | None, drafts: int, prompt_lookup_max: int
) -> torch.Tensor:
    """Plain torch `kernels.tokens.suffix.suffix`."""
    L = history.shape[1]
    index = torch.arange(L, device=history.device)
    last = lengths[:, None] - 1  # [B, 1]

    def matches(token_ids: torch.Tensor, inside: torch.Tensor, cache_salt: torch.Tensor | int) -> torch.Tensor:
        at, same = torch.arange(token_ids.shape[1], device=token_ids.device), inside
        matched = torch.zeros_like(token_ids, dtype=torch.int64)
        for i in range(prompt_lookup_max):
            token = history.gather(1, (last - i).clamp(min=0)) + cache_salt
            same = same & (at >= i) & (last >= i) & (token_ids.roll(i, 1) == token)
            matched += same
        return matched

    # The longest match, ties to the latest; the suffix itself does not count.
    own = matches(history, index < last, 0)
    best = torch.where(index < last, own * L + index, -1).max(1, keepdim=True).values
    at = torch.where(best >= L, best % L, last - 1)  # no match: repeat the last token
    offset = torch.arange(drafts, device=history.device)
    source = at + 1 + offset % (last - at).clamp(min=1)
    history_drafts = history.gather(1, source.clamp(min=0).clamp(max=last)).long()
    if pool is None:
        return history_drafts
    N, cache_salts = len(pool.entries), pool.cache_salts[:, None]
    order = torch.arange(N, device=history.device)
    pool_tokens = pool.entries[(pool.cursor + order) % N].expand(len(history), N)  # oldest first
    pool_matched = matches(pool_tokens, pool_tokens >= 0, cache_salts << TOKEN_BITS)
    upper_bound = (pool_matched * N + order).max(1, keepdim=True).values
    source = upper_bound % N + 1 + offset
    entry = torch.where(source < N, pool_tokens.gather(1, source.clamp(max=N - 1)), -1)
    alive = (entry >> TOKEN_BITS == cache_salts).int().cummin(1).values > 0
    pool_drafts = torch.where(alive, entry & ((1 << TOKEN_BITS) - 1), -1)
    return torch.where(pool_matched.amax(1, keepdim=True) > own.amax(1, keepdim=True), pool_drafts, history_drafts)


@dataclass(frozen=True)
class LogitsState:
    """Logits processing state of every slot, over this rank's columns.

    Attributes:
        is_active: slots whose logits are changed [S] bool.
        repetition: divides positive and multiplies negative logits of tokens in prompt or output [S] fp32.
        frequency: subtracted per occurrence of the token in the output [S] fp32.
        presence: subtracted if the output contains the token [S] fp32.
        min_end_position: first position that may hold a token that ends the sequence [S] int64.
        bias: added [S, V_local] fp32.
        seen: [S, V_local] int32: IN_PROMPT, ENDS (it ends the sequence), plus ONCE per occurrence in the output.
        allowed: a bit per token of the whole vocabulary, lowest first [S, W] int32; tokens without it are masked.
    """

    is_active: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    min_end_position: Tensor
    bias: Tensor
    seen: Tensor
    allowed: Tensor


def process_logits(
    logits: Tensor, state: LogitsState, slots: Tensor, last: Tensor, positions: Tensor, first: int
) -> Tensor:
    """Plain torch `kernels.tokens.process_logits.process_logits`."""
    B, V = len(slots), logits.shape[1]
    out = logits.unflatten(0, (B, -1)).clone()  # [B, T, V]
    ids = torch.arange(first, first + V, device=logits.device)
    penalties = [t[slots, None].double() for t in (state.repetition, state.frequency, state.presence)]
    repetition, frequency, presence = penalties
    is_processed = state.is_active[slots, None]
    state.seen[slots] += (is_processed & (ids == last[:, None])).int() * ONCE
    seen = state.seen[slots]
    count = seen // ONCE

    raw = out[:, 0]
    x = raw.double() + state.bias[slots]
    ends = (seen & ENDS > 0) & (positions.view(B, -1)[:, :1] < state.min_end_position[slots, None])
    x = torch.where(ends, x.clamp(max=FORBIDDEN), x)
    x = torch.where((seen & IN_PROMPT > 0) | (count > 0), torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - frequency * count - presence * (count > 0)
    allowed = state.allowed[slots][:, ids // 32] >> (ids % 32) & 1 > 0
    x = torch.where(allowed, x, -torch.inf)
    out[:, 0] = torch.where(is_processed & (raw < torch.inf), x.float(), raw)  # a broken row stays broken
    return out.flatten(0, 1)


def top_of_rank(logits: Tensor, tokens: Tensor, first: int) -> Tensor:
    """Plain torch `kernels.tokens.top_tokens.top_of_rank`."""
    ids = torch.arange(first, first + logits.shape[1], device=logits.device)
    words = descending_keys(logits) << ID_BITS | ids
    sampled = torch.where(ids == tokens[:, None], words, NONE)
    best = pad(logits.double(), (0, 1), value=-torch.inf).amax(1, keepdim=True)
    weights = (logits.double() - best.clamp(min=torch.finfo(torch.float64).min)).exp().sum(1)
    return torch.cat([_smallest(sampled, 1), _smallest(words, TOP), weights.view(torch.int64)[:, None]], 1)


def top_of_ranks(summaries: Tensor) -> Tensor:
    """Plain torch `kernels.tokens.top_tokens.top_of_ranks`."""
    sampled, words, weights = summaries.split((1, TOP, 1), 2)  # [N, B, ..] each
    logit = _logits(words[..., 0])  # [N, B]
    share = (logit - logit.amax(0).clamp(min=torch.finfo(torch.float64).min)).exp()
    weight = (share * weights[..., 0].contiguous().view(torch.float64)).sum(0)
    best = _smallest(words.transpose(0, 1).flatten(1), TOP)
    return torch.cat([sampled.amin(0), best, weight.view(torch.int64)[:, None]], 1)


def logprobs(summaries: Tensor) -> tuple[Tensor, Tensor]:
    """Decodes summaries [B, WIDTH] of all columns into log-probabilities of the sampled token and the best ones.

    Returns:
        Ids [B, 1 + TOP] int64, -1 as padding, and their log-probabilities fp32, -inf as padding.
    """
    words, weight = summaries.split((1 + TOP, 1), 1)
    values = _logits(words) - _logits(words[:, 1:2]) - weight.contiguous().view(torch.float64).log()
    return torch.where(words < NONE, words & ((1 << ID_BITS) - 1), -1), values.float()


def _smallest(words: Tensor, count: int) -> Tensor:
    # Pad with NONE; `pad` would round it to fp64.
    return torch.cat([words, words.new_full((len(words), count), NONE)], 1).sort(1).values[:, :count]


def _logits(words: Tensor) -> Tensor:
    key = words >> ID_BITS
    bits = torch.where(key >> 31 > 0, key - (1 << 32), (1 << 31) - 1 - key)
    return torch.where(words < NONE, bits.int().view(torch.float32).double(), -torch.inf)
