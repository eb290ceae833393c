"""Greedy verification and packing in plain torch: the eager baseline, and the oracle of the kernels."""

from __future__ import annotations

import torch


def verify(draft: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accepted lengths [B] int64, mismatch flags [B] bool, next tokens [B] int64; shapes as in
    `benchmarks.papers.verify_and_pack`.
    """
    gamma = draft.shape[1]
    wrong = (draft != target[:, :gamma]) | (draft < 0)
    closed = torch.nn.functional.pad(wrong, (0, 1), value=True)  # a column that ends every scan
    accepted = closed.to(torch.int64).argmax(dim=1)  # the first of equals
    return accepted, wrong.any(dim=1), target.gather(1, accepted[:, None])[:, 0]


def offsets_of(accepted: torch.Tensor) -> torch.Tensor:
    """Where each sequence's packed rows begin, and where the last ones end: [B + 1] int64."""
    return torch.nn.functional.pad(accepted.cumsum(0), (1, 0))


def pack(kv: torch.Tensor, accepted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted rows of kv [B, gamma, D] one behind the other [total, D], and their offsets [B + 1] int64.

    The size of the result depends on the data: on a GPU the host waits for it.
    """
    mask = torch.arange(kv.shape[1], device=kv.device) < accepted[:, None]
    return kv[mask], offsets_of(accepted)
