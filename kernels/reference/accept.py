"""Lossless acceptance in plain torch, over whole tensors of weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.reference.uniform import ACCEPT, RECOVER, TARGET, gumbel, uniform

# Weights in fixed point: the best token weighs 2^40 units, and sums over 2^22 tokens fit int64 and any order.
MASS_UNITS = 2.0**40

ALL_KEYS = (1 << 32) - 1  # a last key that keeps every token


@dataclass(frozen=True)
class Distribution:
    """A rank's columns of T filtered next-token distributions of B sequences, with maxima and cutoffs over all ranks.

    A token's weight is exp((logit - best) / temperature) in fp64, rounded to units; 0 if a filter drops the token.

    Attributes:
        logits: [B, T, V_local] fp32, last dim contiguous; V_local may be 0.
        best: largest logit over all ranks [B, T] fp64, contiguous; NaN marks a broken row.
        last_key: cutoff of top-k and top-p [B, T] int64, contiguous: logits are kept whose key (`descending_keys`) is
            at most this one; ALL_KEYS keeps all.
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
        scaled = (self.logits.double() - self.best[..., None]) / temperature
        keep = scaled >= self.min_p.double().log()[:, None, None]
        keep &= descending_keys(self.logits) <= self.last_key[..., None]
        return torch.where(keep, scaled, -torch.inf)

    def mass(self) -> Tensor:
        """Computes the weights in fixed point [B, T, V_local] int64."""
        return (self.log_weights().exp() * MASS_UNITS + 0.5).long()


def descending_keys(logits: Tensor) -> Tensor:
    """Maps fp32 logits to int64 keys in [0, 2^32): larger logits get smaller keys, equal logits equal keys."""
    bits = (logits + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0 into 0.0
    return torch.where(bits < 0, bits + (1 << 32), (1 << 31) - 1 - bits)


def kept_mass(p: Distribution, tokens: Tensor, first: int) -> Tensor:
    """Computes this rank's summand of [B, T, 2] int64; shapes as in `kernels.tokens.accept.kept_mass`."""
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
    """Computes accepted lengths and candidates [1, B, 2]; shapes as in `kernels.tokens.accept.accept`."""
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
