"""Changes of logits as single requests specify, by slot on the device, and log-probabilities.

Each rank changes its own columns before any communication: sampling sees ordinary logits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from comm.base import Communicator
from helix.engine.decision import Admission
from helix.worker.follower import Follower
from helix.worker.transfers import to_device
from kernels.tokens.shape_logits import ENDS, IN_PROMPT, ONCE, Shaping, shape_logits
from kernels.tokens.top_tokens import WIDTH, top_of_rank, top_of_ranks


class Shaper(Follower):
    """Logit changes of the sequences in all slots, over this rank's columns.

    Written in place, so that captured steps see them. It takes 8 bytes per slot and column.

    Args:
        slots: number of slots.
        vocab: size of the whole vocabulary.
        columns: this rank's token ids.
        eos: the model's end tokens.

    Attributes:
        summaries: packed log-probabilities of each slot's last token and of the most likely ones [slots, WIDTH] int64,
            the same on all ranks; `logprobs` unpacks them on the host.
    """

    def __init__(self, slots: int, vocab: int, columns: range, eos: Collection[int], device: torch.device) -> None:
        self.columns = columns
        self.vocab = vocab
        self._eos = tuple(eos)
        self._device = device

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._shaping = Shaping(
            shaped=zeros(slots, dtype=torch.bool),
            repetition=zeros(slots),
            frequency=zeros(slots),
            presence=zeros(slots),
            ends_from=zeros(slots, dtype=torch.int64),
            bias=zeros(slots, len(columns)),
            seen=zeros(slots, len(columns), dtype=torch.int32),
            allowed=zeros(slots, -(-vocab // 32), dtype=torch.int32),
        )
        self.summaries = zeros(slots, WIDTH, dtype=torch.int64)

    def admit(self, *admissions: Admission) -> None:
        for admission in admissions:
            self._admit(admission)

    def _admit(self, admission: Admission) -> None:
        state, slot, params, tokens = self._shaping, admission.slot, admission.sampling, admission.text
        state.shaped[slot].fill_(params.changes_logits)
        if not params.changes_logits:
            return  # the slot's other entries are not read
        state.repetition[slot].fill_(params.repetition_penalty)
        state.frequency[slot].fill_(params.frequency_penalty)
        state.presence[slot].fill_(params.presence_penalty)
        prompt, answer = np.split(np.asarray(tokens), [len(tokens) - admission.drawn])
        state.ends_from[slot].fill_(len(prompt) + params.min_tokens)
        columns = len(self.columns)
        seen = np.bincount(self._mine(answer), minlength=columns).astype(np.int32) * ONCE
        seen[self._mine(prompt)] |= IN_PROMPT
        seen[self._mine(np.array([*self._eos, *params.stop_token_ids], np.int64))] |= ENDS
        state.seen[slot] = to_device(torch.from_numpy(seen), self._device)
        bias = np.zeros(self.vocab, np.float32)
        bias[list(params.logit_bias)] = list(params.logit_bias.values())
        state.bias[slot] = to_device(torch.from_numpy(bias[self.columns.start : self.columns.stop]), self._device)
        state.allowed[slot].fill_(-1)
        if admission.allowed is not None:
            self.allow({slot: admission.allowed})

    def allow(self, masks: Mapping[int, np.ndarray]) -> None:
        """Sets the tokens that slots may draw from now on: slot -> a bit per token, lowest first, int32 [W]."""
        slots, rows = torch.tensor(list(masks)), torch.from_numpy(np.stack(list(masks.values())))
        self._shaping.allowed[to_device(slots, self._device)] = to_device(rows, self._device)

    def shape(self, logits: Tensor, slots: Tensor, last: Tensor, positions: Tensor) -> Tensor:
        """Computes the changed logits; shapes as in `kernels.tokens.shape_logits`."""
        return shape_logits(logits, self._shaping, slots, last, positions, self.columns.start)

    def report(self, logits: Tensor, tokens: Tensor, slots: Tensor, comm: Communicator) -> None:
        """Writes `summaries` of the drawn tokens; a collective, one all-gather.

        Args:
            logits: [B, V_local] fp32, unchanged logits of the model.
            tokens: the drawn tokens [B] int64.
            slots: [B] int64.
        """
        self.summaries[slots] = top_of_ranks(comm.all_gather(top_of_rank(logits, tokens, self.columns.start)))

    def _mine(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the columns of those tokens that this rank holds."""
        own = tokens - self.columns.start
        return own[(own >= 0) & (own < len(self.columns))]
