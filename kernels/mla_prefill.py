"""Prefill attention of MLA: chunks of several prompts over this rank's shard of the paged latents."""

from __future__ import annotations

import torch

from kernels import routing
from kernels.reference.mla_prefill import mla_prefill as reference


def mla_prefill(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_q: torch.Tensor,
    max_q: int,
    lo: torch.Tensor,
    hi: torch.Tensor,
    scale: float,
    latent: int,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of several sequences' prompt chunks over their paged latents: a partial output and its LSE.

    Slots of the cache as in `kernels.mla_decode.mla_decode`, bounds as in `kernels.flash_prefill.flash_prefill`.

    Args:
        q: [N, Hq, R + P] bf16, fp16 or fp32, absorbed, the chunks one after another; last dim contiguous.
        cache: [pages, page_size, R + P] in q's dtype; last dim contiguous.
        block_table: [n, max_pages] int32, rows contiguous; row i belongs to segment i.
        cu_q: [n + 1] int32, where each segment of q begins, and the end of the last.
        max_q: length of the longest segment.
        lo: [N] int32, first local key of each query, at least 0; non-decreasing within a segment.
        hi: [N] int32, one past the last, likewise; `lo >= hi` reads nothing.
        scale: factor on the scores.
        latent: R.
        out: [N, Hq, R] in q's dtype, written if given; last dim contiguous.
        lse: [N, Hq] fp32, written if given.

    Returns:
        Output [N, Hq, R] normalised over these keys, and natural-log LSE [N, Hq] fp32; 0 and -inf where a query
        reads no key.

    Source:
        DeepSeek-V2 (arXiv:2405.04434), section 2.1, absorbed; FlashAttention-2.
    """
    if not routing.on_gpu(q):
        return reference(q, cache, block_table, cu_q, max_q, lo, hi, scale, latent, out=out, lse=lse)
    raise NotImplementedError("mla_prefill has no kernel yet")
