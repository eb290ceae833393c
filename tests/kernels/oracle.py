"""Attention over paged caches with traps in unused memory, and a textbook reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from helix.worker.blocks import BlockLayout
from helix.worker.kv_cache_spec import dtype_name, keys_and_values
from kernels.paged_keys import PagedKeys
from kernels.scaled_keys import quantize_latents, scales_of

E4M3 = torch.float8_e4m3fn
ELSEWHERE = 2**30  # invalid pages: following such an entry would fault
PART = {"keys": "k", "values": "v", "key_scales": "k_scale", "value_scales": "v_scale"}


@dataclass
class Case:
    """Queries of several sequences over a paged cache; memory that must not be read is NaN or out of range.

    Attributes:
        q: [N, Hq, D], sequence after sequence, counts[i] queries of sequence i.
        store: the cache as kernels take it, without the bounds `lo` and `hi`.
        lo, hi: [N] int32.
        keys, values: plain [S_i, Hkv, D] of each sequence, for the reference.
        present: per sequence, which KV head reads which key, [Hkv, S_i], instead of bounds; None: the bounds apply.
        prefill: whether the op takes concatenated queries, or the same number per sequence.
        size: magnitude of values, relative to about 4.
    """

    q: Tensor
    store: PagedKeys
    counts: list[int]
    lo: Tensor
    hi: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    present: list[Tensor] | None = None
    prefill: bool = False
    size: float = 1.0

    def paged(self, B: int | None = None) -> PagedKeys:
        """Returns the kernels' input, with bounds [B, T] for `B` sequences, or [N]."""
        lo, hi = (self.lo, self.hi) if B is None else (self.lo.view(B, -1), self.hi.view(B, -1))
        return replace(self.store, lo=lo, hi=hi)

    def run(self, function: Any, room: tuple[int, int] | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """Attends; with `room` into a slice of a tensor with that many more heads and dims, which must not change."""
        B = len(self.counts)
        rows = self.q if self.prefill else self.q.unflatten(0, (B, -1))
        if room is not None:
            lead, heads, dim = rows.shape[:-2], rows.shape[-2], self.values[0].shape[-1]
            wide = torch.full((*lead, heads + room[0], dim + room[1]), torch.nan, dtype=rows.dtype, device=rows.device)
            wide_lse = torch.full((*lead, heads + room[0]), torch.nan, device=rows.device)
            mine = slice(room[0] // 2, room[0] // 2 + heads)
            options |= {"out": wide[..., mine, :dim], "lse": wide_lse[..., mine]}
        if self.prefill:
            cu_q = torch.tensor([0, *self.counts], device=rows.device).cumsum(0).int()
            out, lse = function(rows, self.paged(), cu_q, max(self.counts), max(map(len, self.keys)), **options)
        else:
            out, lse = function(rows, self.paged(B), **options)
        if room is not None:
            out, lse = options["out"].clone(), options["lse"].clone()
            options["out"].fill_(torch.nan)
            options["lse"].fill_(torch.nan)
            assert wide.isnan().all() and wide_lse.isnan().all(), "written outside of what was given"
        return (out, lse) if self.prefill else (out.flatten(0, 1), lse.flatten(0, 1))

    @cached_property
    def wanted(self) -> tuple[Tensor, Tensor]:
        """Expected output [N, Hq, V] and natural-log LSE [N, Hq], float64; 0 and -inf if a query reads nothing.

        A sink is a further column of scores, without a value.
        """
        out = torch.zeros(*self.q.shape[:2], self.values[0].shape[-1], dtype=torch.float64)
        lse = torch.full(self.q.shape[:2], -torch.inf, dtype=torch.float64)
        sinks = None if self.store.sinks is None else self.store.sinks.double().cpu()[:, None]
        n = 0
        for i, (count, keys, values) in enumerate(zip(self.counts, self.keys, self.values, strict=True)):
            group = self.q.shape[1] // keys.shape[1]
            k = keys.double().cpu().repeat_interleave(group, 1)  # [S, Hq, D]
            v = values.double().cpu().repeat_interleave(group, 1)
            for _ in range(count):
                lo = int(self.lo[n])
                hi = max(lo, int(self.hi[n]))
                if self.present is not None:
                    lo, hi = 0, len(keys)
                scores = torch.einsum("hd,shd->hs", self.q[n].double().cpu(), k[lo:hi]) * self.store.scale
                if self.present is not None:
                    scores = scores.masked_fill(~self.present[i].repeat_interleave(group, 0), -torch.inf)
                if sinks is not None:
                    scores = torch.cat([scores, sinks], 1)
                if scores.shape[1]:
                    lse[n] = scores.logsumexp(-1)
                    weights = scores.softmax(-1).nan_to_num()[:, : hi - lo]
                    out[n] = torch.einsum("hs,shd->hd", weights, v[lo:hi])
                n += 1
        return out, lse

    def check(self, out: Tensor, lse: Tensor) -> None:
        """Compares with the reference.

        Tolerances: fp32 sums of a few hundred terms of size 1 are within 1e-5 (2^-24 x sqrt(terms), plus Triton's exp2
        with 2^-22). Below fp32 the weights are rounded to the dtype before the second product, large partials before
        they are merged, and the output once more, each by half an ulp, 2^-9 for bf16 and 2^-12 for
        fp16, of values up to about 4. Two of the three count: a row as large as that is nearly one key's, whose weight
        is exactly 1. LSE stays fp32.
        """
        wanted, wanted_lse = self.wanted
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 4 * 2**-8, torch.float16: 4 * 2**-11}[out.dtype]
        assert out.dtype == self.q.dtype
        torch.testing.assert_close(out.double().cpu(), wanted, atol=tolerance * self.size, rtol=0)
        torch.testing.assert_close(lse.double().cpu(), wanted_lse, atol=1e-5, rtol=1e-6)


def make_case(
    counts: list[int],
    lengths: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    sinks: bool = False,
    reads: list[list[int]] | None = None,
    shrunk: float = 1.0,
    latent: int | None = None,
    kv: str = "auto",
    decades: bool = False,
    layout: str = "pages",
    far: bool = False,
    prefill: bool = False,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Case:
    """Makes sequences of `lengths` keys with `counts` causal queries at the end: the last reads all, or its window.

    Args:
        reads: number of first keys that each query of a sequence reads.
        shrunk: scale of most heads' queries.
        latent: number of key dims that are also the value; there is no other cache.
        kv: what is in e4m3 with scales: nothing (auto), values (k16v8) or all (fp8).
        decades: sizes of tokens' values, or of groups of latents, span decades.
        layout: page layout, see `LAYOUTS`.
        far: use caches of more than 2^32 elements.
    """
    gen = torch.Generator().manual_seed(seed)
    q_heads, kv_heads = heads
    needed = [-(-length // page_size) for length in lengths]
    columns, pages = max([*needed, 1]) + 2, sum(needed) + 3
    order = torch.randperm(pages, generator=gen).tolist()
    # Pages are rows of a wider tensor, like the layers of a cache, and unused slots are NaN.
    wide = torch.full((2, pages, 2, page_size, kv_heads, dim), torch.nan, dtype=dtype)
    k_cache, v_cache = wide[0, :, 1], wide[1, :, 1]
    table = torch.full((len(lengths), columns), ELSEWHERE, dtype=torch.int32)
    keys, values, los, his = [], [], [], []
    for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        k = torch.randn(length, kv_heads, dim, generator=gen).to(dtype)
        v = torch.randn(length, kv_heads, dim, generator=gen).to(dtype)
        keys.append(k)
        values.append(v)
        for page in range(needed[i]):
            where = order.pop()
            table[i, page] = where
            part = slice(page * page_size, min((page + 1) * page_size, length))
            k_cache[where, : part.stop - part.start] = k[part]
            v_cache[where, : part.stop - part.start] = v[part]
        hi = torch.tensor(reads[i]) if reads else (torch.arange(count) + length - count + 1).clamp(min=0)
        his.append(hi)
        los.append((hi - window).clamp(min=0) if window else torch.zeros_like(hi))
    q = torch.randn(sum(counts), q_heads, 2 * dim, generator=gen).to(dtype)[..., :dim]  # strided
    q[1:, 2:] *= shrunk
    # Some far below all scores, some far above, most in between.
    sink = (torch.randn(q_heads, generator=gen) * 4).to(device) if sinks else None
    wide, lo, hi = wide.to(device), torch.cat(los).int().to(device), torch.cat(his).int().to(device)
    store = PagedKeys(wide[0, :, 1], wide[1, :, 1], table.to(device), lo, hi, dim**-0.5, sink)
    case = Case(q.to(device), store, counts, lo, hi, keys, values, prefill=prefill)
    if latent is not None:
        cache = store.k[:, :, 0]
        case.store, case.values = replace(store, k=cache, v=cache[..., :latent]), [k[..., :latent] for k in keys]
    if kv != "auto":
        case = few_bits(case, kv, decades)
    return _far_away(LAYOUTS[layout](case, gen)) if far else LAYOUTS[layout](case, gen)


def make_latents(
    counts: list[int], lengths: list[int], *, heads: int = 4, latent: int = 32, rope: int = 8, **options: Any
) -> Case:
    """Makes sequences like `make_case`, with one KV head whose values are the first `latent` dims of its keys."""
    return make_case(counts, lengths, heads=(heads, 1), dim=latent + rope, latent=latent, **options)


def few_bits(case: Case, kv: str, decades: bool) -> Case:
    """Rounds a case's values, or all, to e4m3 with scales; unused values and scales are NaN."""
    if case.store.k.dim() == 3:
        return _few_bits_of_latents(case, decades)
    store = case.store
    values, size = store.v.float(), 1.0
    if decades:  # scaled by 1e-6 to 1e2
        factor = 10 ** (torch.rand(values.shape[:3], generator=torch.Generator().manual_seed(1)) * 8 - 6)
        values, size = values * factor[..., None].to(values), 400.0
    v, v_scale, stood = _few(values)
    made = replace(store, k=store.k.contiguous(), v=v, v_scale=v_scale)
    found = replace(case, store=made, values=_sequences(case, stood), size=size)
    if kv == "fp8":
        k, k_scale, stood = _few(store.k)
        found = replace(found, store=replace(made, k=k, k_scale=k_scale), keys=_sequences(case, stood))
    return found


def _few(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pages [pages, page_size, Hkv, D] in e4m3, their scales [pages, Hkv, page_size], and the dequantized values."""
    scales = torch.where(x.isnan().any(-1), torch.nan, scales_of(x.nan_to_num()))
    few = (x.float() / scales[..., None]).to(E4M3)
    apart = scales.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return few, apart, few.float() * scales[..., None]


def _sequences(case: Case, pages: Tensor) -> list[Tensor]:
    found = []
    for i, k in enumerate(case.keys):
        at = torch.arange(len(k), device=pages.device)
        found.append(pages[case.store.table[i, at // pages.shape[1]].long(), at % pages.shape[1]])
    return found


def _few_bits_of_latents(case: Case, decades: bool) -> Case:
    """Rounds latents in groups of 128; with `decades`, groups of a token are scaled by 1e-3 to 1."""
    latent, cache = case.values[0].shape[-1], case.store.k.float()
    if decades:
        gen = torch.Generator().manual_seed(1)
        factor = 10 ** -(torch.rand(*cache.shape[:2], -(-latent // 128), generator=gen) * 3).to(cache)
        cache[..., :latent] *= factor.repeat_interleave(128, -1)[..., :latent]
    latents, scales = quantize_latents(cache[..., :latent].nan_to_num())
    stood = latents.float() * scales.repeat_interleave(128, -1)[..., :latent]
    absent = cache[..., :1].isnan()
    latents = latents.float().masked_fill(absent, torch.nan).to(E4M3)
    scales = scales.masked_fill(absent, torch.nan).mT.contiguous()
    # Pages are not adjacent, as in a cache of several layers.
    latents, ropes = (torch.stack((x, x), 1)[:, 1] for x in (latents, case.store.k[..., latent:]))
    keys = [k[:, None] for k in _sequences(case, torch.cat((stood, ropes.float()), -1))]
    store = replace(case.store, k=latents, v=latents, k_scale=scales, rope=ropes)
    return replace(case, store=store, keys=keys, values=[k[..., :latent] for k in keys])


def block_shape(store: PagedKeys, dtype: torch.dtype) -> BlockLayout:
    """Returns the block layout of a cache."""
    _, page_size, heads, dim = store.k.shape
    kv = "fp8" if store.k_scale is not None else "auto" if store.v_scale is None else "k16v8"
    return BlockLayout.of([keys_and_values(heads, dim, dtype_name(dtype), kv, None)], page_size)


def _in_blocks(case: Case) -> tuple[BlockLayout, Tensor, PagedKeys]:
    """Blocks of bytes with the same values, NaN elsewhere, and views of them."""
    store, block = case.store, block_shape(case.store, case.q.dtype)
    memory = torch.full((len(store.k) * block.heads, block.words), -1, dtype=torch.int32, device=store.k.device)
    views = block.pages(memory)
    for name, view in views.items():
        view.copy_(getattr(store, PART[name]))
    found: dict[str, Any] = {PART[name]: view for name, view in views.items()}
    return block, memory, replace(store, **found)


def _blocks(case: Case, gen: torch.Generator) -> Case:
    return replace(case, store=_in_blocks(case)[2])


def _places(case: Case, gen: torch.Generator) -> Case:
    """Blocks shared by heads; tables select a head's blocks, and have no page after the last key."""
    block, memory, store = _in_blocks(case)
    lanes = torch.arange(block.heads, device=memory.device)
    found: dict[str, Any] = {PART[name]: x for name, x in block.shared_by_heads(memory).items()}
    table = store.table[:, None] * block.heads + lanes[None, :, None]
    table = torch.where(store.table[:, None] < ELSEWHERE, table, -1).int().contiguous()
    return replace(case, store=replace(store, **found, table=table))


def _tokens(case: Case, gen: torch.Generator) -> Case:
    """Pages of one token in random order, over the same scales; for keys and values, one table per KV head."""
    store, size = case.store, case.store.page_size
    slots = torch.arange(store.table.shape[1] * size, device=store.table.device)
    table = store.table[:, slots // size].clamp(max=ELSEWHERE // size) * size + slots % size
    keys, values = list(case.keys), list(case.values)
    for i, k in enumerate(keys):
        order = torch.randperm(len(k), generator=gen)
        table[i, : len(k)] = table[i, : len(k)].clone()[order.to(table.device)]
        keys[i], values[i] = k[order], values[i][order]
    one = {name: x.flatten(0, 1)[:, None] for name in ("k", "rope") if (x := getattr(store, name)) is not None}
    if store.k.dim() == 3:
        v = one["k"][..., : store.v.shape[-1]]
    else:
        v = store.v.flatten(0, 1)[:, None]
        table = table[:, None].expand(-1, store.k.shape[2], -1).contiguous()
    return replace(case, store=replace(store, **one, v=v, table=table.int()), keys=keys, values=values)


def _heads(case: Case, gen: torch.Generator) -> Case:
    """Some of a sequence's pages for each KV head, in order and with the last one; the only query reads these.

    Entries below 0, at any place, are not pages. A page that no head of a sequence reads is NaN.
    """
    (page_size, kv_heads), store = case.store.k.shape[1:3], case.store
    counts = [-(-len(keys) // page_size) for keys in case.keys]
    table = torch.full((len(counts), kv_heads, max(counts) + 1), -1, dtype=torch.int32)
    hi, present = torch.zeros_like(case.hi), []
    for b, (keys, pages) in enumerate(zip(case.keys, counts, strict=True)):
        read = torch.rand(kv_heads, pages, generator=gen) < 0.5
        read[:, -1:] = True
        present.append(read.repeat_interleave(page_size, 1)[:, : len(keys)])
        columns = int(read.sum(1).max()) if pages else 0
        hi[b] = max(0, columns * page_size - (-len(keys) % page_size))
        for h in range(kv_heads):
            selected = read[h].nonzero()[:, 0]
            # Invalid pages are anywhere before the last one.
            places = torch.randperm(max(columns - 1, 0), generator=gen)[: max(len(selected) - 1, 0)].sort().values
            places = torch.cat([places, torch.tensor([columns - 1])])[: len(selected)]
            table[b, h, places] = store.table[b, selected].cpu()
        for cache in (store.k, store.v):
            cache[store.table[b, (~read.any(0)).nonzero()[:, 0]].long()] = torch.nan
    return replace(case, store=replace(store, table=table.to(hi.device)), hi=hi, present=present)


LAYOUTS: dict[str, Callable[[Case, torch.Generator], Case]] = {
    "pages": lambda case, gen: case,
    "blocks": _blocks,
    "places": _places,
    "tokens": _tokens,
    "heads": _heads,
}


def _far_away(case: Case) -> Case:
    """The same pages, at the end of caches of more than 2^32 elements."""
    store, begin = case.store, (1 << 32) // case.store.k[0].numel() + 1

    def last(x: Tensor) -> Tensor:
        found = torch.empty(begin + len(x), *x.shape[1:], dtype=x.dtype, device=x.device)
        found[begin:] = x
        return found

    found = {name: last(x) for name in ("k", "k_scale", "v_scale", "rope") if (x := getattr(store, name)) is not None}
    v = found["k"][..., : store.v.shape[-1]] if store.k.dim() == 3 else last(store.v)
    return replace(case, store=replace(store, **found, v=v, table=store.table + begin))
