"""Decode attention of MLA: a few absorbed queries per sequence over this rank's shard of the paged latents."""

from __future__ import annotations

import torch

from kernels import routing
from kernels.reference.mla_decode import mla_decode as reference


def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    scale: float,
    latent: int,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    programs: int | None = None,
    early: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of absorbed queries over paged latents: a partial output in latent space and its LSE.

    A slot of the cache holds R latent values and P rotated ones: all R + P are the key of every head, the first R its
    value. Pages, bounds and what they promise as in `kernels.flash_decode.flash_decode`.

    Args:
        q: [B, T, Hq, R + P] bf16, fp16 or fp32; last dim contiguous.
        cache: [pages, page_size, R + P] in q's dtype; last dim contiguous.
        block_table: [B, max_pages] int32, rows contiguous.
        lo: [B, T] int32, first local key of each query, at least 0.
        hi: [B, T] int32, one past the last; `lo >= hi` reads nothing.
        scale: factor on the scores.
        latent: R.
        out: [B, T, Hq, R] in q's dtype, written if given; last dim contiguous.
        lse: [B, T, Hq] fp32, written if given.
        programs: the grid; one on every SM if None.
        early: the bounds are older than the kernel that runs before this one, and may be read while that runs.

    Returns:
        Output [B, T, Hq, R] normalised over these keys, and natural-log LSE [B, T, Hq] fp32; 0 and -inf where a
        query reads no key.

    Source:
        DeepSeek-V2 (arXiv:2405.04434), section 2.1, absorbed; FlashDecoding; stream-K (arXiv:2301.03598).
    """
    if not routing.on_gpu(q):
        return reference(q, cache, block_table, lo, hi, scale, latent, out=out, lse=lse)
    raise NotImplementedError("mla_decode has no kernel yet")
