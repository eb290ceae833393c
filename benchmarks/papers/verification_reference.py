"""Greedy verification and packing in plain torch: the eager baseline, and the kernels' reference."""

from __future__ import annotations

import torch


def verify(draft: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns accepted lengths [B] int64, mismatch flags [B] bool and next tokens [B] int64.

    Shapes as in `benchmarks.papers.verify_and_pack`.
    """
    gamma = draft.shape[1]
    wrong = (draft != target[:, :gamma]) | (draft < 0)
    closed = torch.nn.functional.pad(wrong, (0, 1), value=True)  # a last column ends every scan
    accepted = closed.to(torch.int64).argmax(dim=1)  # argmax returns the first maximum
    return accepted, wrong.any(dim=1), target.gather(1, accepted[:, None])[:, 0]


def offsets_of(accepted: torch.Tensor) -> torch.Tensor:
    """Returns where each sequence's packed rows begin, and where the last ones end: [B + 1] int64."""
    return torch.nn.functional.pad(accepted.cumsum(0), (1, 0))


def pack(kv: torch.Tensor, accepted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the accepted rows of kv [B, gamma, D], concatenated [total, D], and their offsets [B + 1] int64.

    The result's size depends on the data: on a GPU the host waits for it.
    """
    mask = torch.arange(kv.shape[1], device=kv.device) < accepted[:, None]
    return kv[mask], offsets_of(accepted)
