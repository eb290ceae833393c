"""Plain torch reference of `kernels.mla`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from kernels.attention.reference import flash_decode, flash_prefill
from kernels.dense.reference import rms_norm, rotate
from kernels.paged_keys import KeyScores, PagedKeys
from kernels.scaled_keys import dequantize_latents, quantize_latents

ROWS = 256  # per block: keeps scores small and matmuls large


def mla_append(
    q: torch.Tensor,
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    w_uk: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: torch.Tensor | None = None,
    ropes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain torch `kernels.mla.append.mla_append`."""
    latent = rms_norm(kv[:, : len(norm_weight)], norm_weight, eps)[0]
    key = rotate(kv[:, None, len(norm_weight) :], cos, sin)[:, 0]
    mine = slot_mapping >= 0
    page, slot = slot_mapping[mine] // cache.shape[1], slot_mapping[mine] % cache.shape[1]
    if scales is None or ropes is None:
        cache[page, slot] = torch.cat((latent, key), -1)[mine]
    else:
        cache[page, slot], scales[page, :, slot] = quantize_latents(latent[mine])
        ropes[page, slot] = key[mine]
    nope = w_uk.shape[1]
    absorbed = torch.bmm(q[..., :nope].transpose(0, 1), w_uk).transpose(0, 1)
    return torch.cat((absorbed, rotate(q[..., nope:], cos, sin)), -1)


def mla_decode(
    q: torch.Tensor,
    keys: PagedKeys,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    scores: KeyScores | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch `kernels.mla.decode.mla_decode`."""
    full, lse = flash_decode(q, concat_latents(keys), lse=lse, scores=scores)
    latent = keys.v.shape[-1]
    return full[..., :latent].contiguous() if out is None else out.copy_(full[..., :latent]), lse


def mla_prefill(
    q: torch.Tensor,
    keys: PagedKeys,
    cu_q: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch `kernels.mla.prefill.mla_prefill`."""
    full, lse = flash_prefill(q, concat_latents(keys), cu_q, max_q, max_k, lse=lse)
    latent = keys.v.shape[-1]
    return full[..., :latent].contiguous() if out is None else out.copy_(full[..., :latent]), lse


def concat_latents(latents: PagedKeys) -> PagedKeys:
    """Returns latents as one KV head whose values are whole entries; the caller slices the output."""
    entries = latents.k
    if latents.k_scale is not None and latents.rope is not None:
        scales, page = latents.k_scale, latents.page_size
        if scales.shape[2] != page:  # index slots across pages
            scales = scales.mT.flatten(0, 1).unflatten(0, (-1, page)).mT
        entries = torch.cat((dequantize_latents(entries, scales), latents.rope.float()), -1)
    slots = entries.unsqueeze(2)
    return replace(latents, k=slots, v=slots, k_scale=None)


def expanded_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    ropes: torch.Tensor,
    cu_q: torch.Tensor,
    max_q: int,
    hi: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch `kernels.mla.expanded_prefill.expanded_prefill`."""
    heads, nope = q.shape[1], q.shape[2] - ropes.shape[2]
    out = q.new_zeros(len(q), heads, keys.shape[3] - nope)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    for segment_keys, segment_ropes, (first, last) in zip(keys, ropes, pairwise(cu_q.tolist()), strict=False):
        for begin in range(first, last, ROWS):
            rows = slice(begin, min(begin + ROWS, last))
            if (num_keys := int(hi[rows].max())) == 0:
                continue
            k, v = segment_keys[:num_keys].float().transpose(0, 1).split([nope, out.shape[2]], 2)  # [H, T, ..]
            q_rows = q[rows].float().transpose(0, 1)
            scores = (q_rows[..., :nope] @ k.mT + q_rows[..., nope:] @ segment_ropes[:num_keys].float().mT) * scale
            beyond = torch.arange(num_keys, device=q.device) >= hi[rows, None]
            scores.masked_fill_(beyond, -torch.inf)
            weights = scores.softmax(-1).masked_fill(hi[rows, None] == 0, 0.0)
            out[rows] = (weights @ v).transpose(0, 1).to(q.dtype)
            lse[rows] = scores.logsumexp(-1).T
    return out, lse


def per_head_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Plain torch `kernels.mla.per_head_linear.per_head_linear`."""
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out
