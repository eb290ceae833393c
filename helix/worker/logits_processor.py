"""Per-request changes of logits, and log-probabilities, by slot on the device.

Each rank changes its own columns before any communication, so sampling sees ordinary logits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from comm.base import Communicator
from helix.engine.scheduler_output import NewRequest
from helix.worker.sequence_observer import SequenceObserver
from helix.worker.transfers import to_device
from kernels.tokens.process_logits import ENDS, IN_PROMPT, ONCE, LogitsState, process_logits
from kernels.tokens.top_tokens import WIDTH, top_of_rank, top_of_ranks


class LogitsProcessor(SequenceObserver):
    """Logit changes of the sequences in all slots, over this rank's columns: 8 bytes per slot and column.

    State is written in place, so that captured steps see it.

    Args:
        vocab: size of the whole vocabulary.
        columns: this rank's token ids.

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

        self._state = LogitsState(
            is_active=zeros(slots, dtype=torch.bool),
            repetition=zeros(slots),
            frequency=zeros(slots),
            presence=zeros(slots),
            min_end_position=zeros(slots, dtype=torch.int64),
            bias=zeros(slots, len(columns)),
            seen=zeros(slots, len(columns), dtype=torch.int32),
            allowed=zeros(slots, -(-vocab // 32), dtype=torch.int32),
        )
        self.summaries = zeros(slots, WIDTH, dtype=torch.int64)

    def admit(self, *admissions: NewRequest) -> None:
        for admission in admissions:
            self._admit(admission)

    def _admit(self, admission: NewRequest) -> None:
        state, slot, params, tokens = self._state, admission.slot, admission.sampling, admission.token_ids
        state.is_active[slot].fill_(params.changes_logits)
        if not params.changes_logits:
            return  # kernels do not read the slot's other entries
        state.repetition[slot].fill_(params.repetition_penalty)
        state.frequency[slot].fill_(params.frequency_penalty)
        state.presence[slot].fill_(params.presence_penalty)
        state.min_end_position[slot].zero_()
        state.bias[slot].zero_()
        state.allowed[slot].fill_(-1)
        if params.counts_tokens:  # else `seen` has no effect
            prompt, answer = np.split(np.asarray(tokens), [len(tokens) - admission.num_output_tokens])
            state.min_end_position[slot].fill_(len(prompt) + params.min_tokens)
            seen = np.bincount(self._local_columns(answer), minlength=len(self.columns)).astype(np.int32) * ONCE
            seen[self._local_columns(prompt)] |= IN_PROMPT
            seen[self._local_columns(np.array([*self._eos, *params.stop_token_ids], np.int64))] |= ENDS
            state.seen[slot] = to_device(torch.from_numpy(seen), self._device)
        if params.logit_bias:
            bias = np.zeros(self.vocab, np.float32)
            bias[list(params.logit_bias)] = list(params.logit_bias.values())
            state.bias[slot] = to_device(torch.from_numpy(bias[self.columns.start : self.columns.stop]), self._device)
        if admission.token_bitmask is not None:
            self.set_bitmasks({slot: admission.token_bitmask})

    def move_slots(self, sources: Sequence[int], to: Sequence[int]) -> None:
        old, new = to_device(torch.tensor((sources, to)), self._device)
        for of_slots in (*vars(self._state).values(), self.summaries):
            of_slots[new] = of_slots[old]

    def set_bitmasks(self, masks: Mapping[int, np.ndarray]) -> None:
        """Sets the tokens that slots may sample from now on: slot -> one bit per token, lowest first, int32 [W]."""
        slots, rows = torch.tensor(list(masks)), torch.from_numpy(np.stack(list(masks.values())))
        self._state.allowed[to_device(slots, self._device)] = to_device(rows, self._device)

    def process(self, logits: Tensor, slots: Tensor, last: Tensor, positions: Tensor) -> Tensor:
        """Computes the changed logits; shapes as in `kernels.tokens.process_logits`."""
        return process_logits(logits, self._state, slots, last, positions, self.columns.start)

    def record_logprobs(self, logits: Tensor, tokens: Tensor, slots: Tensor, comm: Communicator) -> None:
        """Writes `summaries` of sampled tokens [B] int64 in slots [B] int64; a collective, one all-gather.

        `logits` [B, V_local] fp32 are the model's, unprocessed.
        """
        self.summaries[slots] = top_of_ranks(comm.all_gather(top_of_rank(logits, tokens, self.columns.start)))

    def _local_columns(self, tokens: np.ndarray) -> np.ndarray:
        local = tokens - self.columns.start
        return local[(local >= 0) & (local < len(self.columns))]
