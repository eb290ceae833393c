"""Times MLA prefill attention, absorbed and expanded to keys and values: `helix bench mla-prefill`.

The last tokens of a context attend to all before them, with the heads of one GPU: 16, as DeepSeek-R1 has on one of
eight GPUs, and DeepSeek-V2-Lite on one. The time includes the expansion.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.runner import BenchContext, Row
from benchmarks.timer import PAGE, seconds
from kernels.mla.expanded_prefill import expanded_prefill
from kernels.mla.prefill import mla_prefill
from kernels.paged_keys import PagedKeys

NOPE, VALUE, LATENT, ROPE = 128, 128, 512, 64
SCALE = (NOPE + ROPE) ** -0.5


def measure(ctx: BenchContext, heads: int, queries: int, length: int) -> list[Row]:
    """Measures one row: the same attention in both ways, in microseconds."""
    device, dtype = ctx.device, torch.bfloat16

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    cache = random(length // PAGE, PAGE, LATENT + ROPE)
    latents = cache.view(1, length, LATENT + ROPE)
    expand, q = random(heads * (NOPE + VALUE), LATENT) * LATENT**-0.5, random(queries, heads, NOPE + ROPE)
    w_uk, w_uv = expand.view(heads, NOPE + VALUE, LATENT).split([NOPE, VALUE], 1)
    table = torch.arange(length // PAGE, dtype=torch.int32, device=device)[None]
    cu_q = torch.tensor([0, queries], dtype=torch.int32, device=device)
    hi = torch.arange(length - queries + 1, length + 1, dtype=torch.int32, device=device)
    paged = PagedKeys(cache, cache[..., :LATENT], table, torch.zeros_like(hi), hi, SCALE)

    def absorbed(copy: int) -> torch.Tensor:
        absorbed_q = torch.einsum("nhd,hdr->nhr", q[..., :NOPE], w_uk)
        out, _ = mla_prefill(torch.cat((absorbed_q, q[..., NOPE:]), -1), paged, cu_q, queries, length)
        return torch.einsum("nhr,hvr->nhv", out, w_uv)

    def expanded(copy: int) -> torch.Tensor:
        keys = (latents[..., :LATENT] @ expand.T).unflatten(2, (heads, NOPE + VALUE))
        return expanded_prefill(q, keys, latents[..., LATENT:], cu_q, queries, hi, SCALE)[0]

    # Weights, keys and outputs are rounded to bf16 at different places: some 2^-8 of the norm each.
    error = (expanded(0).float() - (wanted := absorbed(0).float())).norm() / wanted.norm()
    assert error < 3e-2, (
        f"absorbed and expanded attention differ by {float(error):.1e} of the norm at {(heads, queries, length)}"
    )
    row: dict[str, Any] = {"kind": "mla-prefill", "heads": heads, "queries": queries, "length": length}
    row["absorbed_us"], row["us"] = (seconds(run, 1, device) * 1e6 for run in (absorbed, expanded))
    pairs = queries * (length - queries / 2) * heads
    products = pairs * (NOPE + ROPE + VALUE) + length * len(expand) * LATENT
    return [row | {"tflops": 2 * products / row["us"] / 1e6}]
