"""copy_blocks in plain torch."""

from __future__ import annotations

import torch

from kernels.hot_blocks import BlockList


def copy_blocks(source: torch.Tensor, target: torch.Tensor, blocks: BlockList) -> None:
    """Copies listed blocks in all layers; shapes as in `kernels.tier.copy_blocks.copy_blocks`."""
    for of_source, of_target, count in zip(blocks.source, blocks.target, blocks.counts.tolist(), strict=True):
        copied = source[:, of_source[:count].long().to(source.device)]
        target[:, of_target[:count].long().to(target.device)] = copied.to(target.device)
