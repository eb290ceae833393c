"""MLA's attention over pages of one token, which an indexer chose for each query, in the pages of a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.mla import prefill_chosen_sm90
from kernels.mla.decode import mla_decode
from kernels.mla.prefill import mla_prefill
from kernels.mla.reference import mla_decode as decode_reference
from kernels.mla.reference import mla_prefill as prefill_reference
from kernels.paged_keys import PagedKeys
from kernels.scaled_keys import rounded_latents, unpacked_latents
from tests.kernels.oracle import check

# The interpreter multiplies the bit patterns of bf16.
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
COUNTS = [0, 1, 33, 64, 150]


class Chosen:
    """Queries of one token each, and as many of a cache's tokens as `counts` says for each."""

    def __init__(
        self,
        latent: int,
        rope: int,
        page: int,
        few: bool,
        dtype: torch.dtype,
        device: torch.device,
        heads: int = 6,
        counts: list[int] = COUNTS,
    ) -> None:
        gen = torch.Generator().manual_seed(latent)
        pages, rows, self.counts = 200 // page + 2, len(counts), counts
        self.q = torch.randn(rows, heads, latent + rope, generator=gen).to(dtype).to(device)
        slots = torch.stack([torch.randperm(pages * page, generator=gen)[: max(counts) + 9] for _ in range(rows)])
        tokens = torch.randn(pages, 2, page, latent + rope, generator=gen).to(dtype)[:, 1]
        latents, scales, ropes = tokens, None, None
        if few:
            latents, wide = rounded_latents(tokens[..., :latent])
            scales, ropes = wide.mT.contiguous(), tokens[..., latent:].contiguous()
            tokens = torch.cat((unpacked_latents(latents, scales), ropes.float()), -1)
            scales, ropes = scales.to(device), ropes.to(device).flatten(0, 1).unsqueeze(1)
        self.kept = tokens.double().flatten(0, 1)[slots]  # [rows, width, R + P]
        # Scores of a few units: of 30, an fp32 sum is off by 3e-6, and so is the logarithm of a weight.
        self.latent, self.scale = latent, 2 * (latent + rope) ** -0.5
        cache = latents.contiguous().to(device).flatten(0, 1).unsqueeze(1)
        for n, count in enumerate(counts):  # behind the chosen ones anything may stand
            slots[n, count:] = 2**30
        hi = torch.tensor(counts, device=device).int()
        table = slots.int().to(device)
        bounds = torch.zeros_like(hi), hi
        self.keys = PagedKeys(cache, cache[..., :latent], table, *bounds, self.scale, k_scale=scales, rope=ropes)

    def expected(self) -> tuple[Tensor, Tensor]:
        out = torch.zeros(*self.q.shape[:2], self.latent, dtype=torch.float64)
        lse = torch.full(self.q.shape[:2], -torch.inf, dtype=torch.float64)
        for n, count in enumerate(self.counts):
            if count:
                keys = self.kept[n, :count]
                scores = self.q[n].double().cpu() @ keys.T * self.scale
                out[n], lse[n] = scores.softmax(-1) @ keys[:, : self.latent], scores.logsumexp(-1)
        return out, lse

    def run(self, op: Any) -> tuple[Tensor, Tensor]:
        rows, lo, hi = len(self.q), self.keys.lo, self.keys.hi
        if op in (mla_prefill, prefill_reference):
            each = torch.arange(rows + 1, device=self.q.device).int()
            return op(self.q, self.keys, each, 1, self.keys.table.shape[1])
        keys = PagedKeys(**{**vars(self.keys), "lo": lo[:, None], "hi": hi[:, None]})
        out, lse = op(self.q[:, None], keys)
        return out[:, 0], lse[:, 0]


@pytest.mark.parametrize("op", [mla_decode, mla_prefill, decode_reference, prefill_reference])
@pytest.mark.parametrize("few", [False, True], ids=["whole", "fp8"])
@pytest.mark.parametrize("latent, rope, page", [(32, 8, 16), (136, 64, 7), (512, 64, 64)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chosen_tokens(
    op: Any, few: bool, latent: int, rope: int, page: int, dtype: torch.dtype, device: torch.device
) -> None:
    case = Chosen(latent, rope, page, few, dtype, device)
    check(*case.run(op), case, case.expected())  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [33, 64, 128, 150])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chosen_tokens_of_many_queries(heads: int, dtype: torch.dtype, device: torch.device) -> None:
    """Programs take several queries, one after the other, of no keys up to five tiles; what is not chosen is NaN."""
    counts = [0, 300, 1, 64, 65, 127, 128, 0, 0, 256, 200, 63, 129, 320, 5] * 12
    case = Chosen(512, 64, 64, False, dtype, device, heads, counts)
    assert prefill_chosen_sm90.fits(case.q, case.keys, len(counts)) == (torch.cuda.get_device_capability()[0] == 9)
    check(*case.run(mla_prefill), case, case.expected())  # type: ignore[arg-type]
    case.keys.lo[1::2] = (case.keys.hi[1::2] - 70).clamp(min=0)
    found, wanted = case.run(mla_prefill), case.run(prefill_reference)
    # Weights and outputs are rounded once each, in another order of sums: 2^-8 of a value's size, which is about 1.
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), atol=2**-6, rtol=2**-6)


@pytest.mark.parametrize("op", [mla_decode, mla_prefill])
def test_scales_of_other_pages_are_caught(op: Any, device: torch.device) -> None:
    case = Chosen(136, 8, 16, True, torch.float32, device)
    assert case.keys.k_scale is not None
    case.keys.k_scale.copy_(case.keys.k_scale.roll(1, 2) * 2)
    with pytest.raises(AssertionError):
        check(*case.run(op), case, case.expected())  # type: ignore[arg-type]
