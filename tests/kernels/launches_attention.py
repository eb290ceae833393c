"""Launches of `compile_sm90` that attend, append keys, select blocks and tokens, and fetch blocks from host memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.ranks.synthetic_kernels import repeat_blocks
from kernels.attention.flash_decode import decode_parts
from kernels.attention.flash_prefill import flash_prefill
from kernels.attention.head_squares import head_squares
from kernels.attention.kv_append import kv_append
from kernels.attention.merge_prefixes import merge_prefixes
from kernels.attention.merge_states import merge_states
from kernels.attention.merge_states_pack import merge_states_pack
from kernels.attention.placement import compute_slot_mapping, local_bounds
from kernels.attention.split_kv import PartialAttention, UnmergedAttention
from kernels.indexer.append import index_append
from kernels.indexer.reference import Shard
from kernels.indexer.scores import index_scores
from kernels.indexer.select_topk import FEW_ROWS, PLANES, index_topk
from kernels.mla.append import mla_append
from kernels.mla.decode import decode_parts as latent_parts
from kernels.mla.expanded_prefill import expanded_prefill
from kernels.mla.per_head_linear import per_head_linear
from kernels.mla.prefill import mla_prefill
from kernels.offload.copy_blocks import copy_blocks
from kernels.offload.fetch_tokens import fetch_tokens
from kernels.offload.resolve import resolve
from kernels.offload.write_back import write_back
from kernels.paged_keys import KeyScores, PagedKeys
from kernels.peers.merge_states_exchange import merge_states_exchange
from kernels.resident_blocks import BlockList, FetchList, QueryRanges, ResidentBlocks
from kernels.sparse.block_bounds import fold_blocks
from kernels.sparse.block_ranges import block_ranges
from kernels.sparse.draft_ranges import draft_ranges
from kernels.sparse.keep_best import keep_best
from kernels.sparse.reference import SelectionGroup
from kernels.sparse.select_blocks import select_blocks
from kernels.sparse.select_tokens import select_tokens
from tests.kernels.launches import BF16, E4M3, FP32, Launch, flags, fp32, general, i32, i64, launch, numbers

PAGES = 64


def all_of_them() -> Iterator[Launch]:
    """Yields all launches."""
    yield from decodes()
    yield from merges()
    yield from prefills()
    yield from latents()
    yield from appends()
    yield from indexers()
    yield from blocks()
    yield from offload()


def paged(
    heads: tuple[int, int], dim: int, page: int, bounds: tuple[int, ...], *, kv: str = "auto", sinks: bool = False,
    holes: bool = False,
) -> PagedKeys:  # fmt: skip
    """Returns keys in bf16 or e4m3 (kv=fp8), values in e4m3 with kv=k16v8; with `holes` one table per KV head."""
    Hq, Hkv = heads
    tables = (bounds[0], Hkv, 40) if holes else (bounds[0], 40)
    cache, words = (PAGES, page, Hkv, dim), (PAGES, Hkv, max(page, 64))
    return PagedKeys(
        numbers(*cache, dtype=E4M3 if kv == "fp8" else BF16), numbers(*cache, dtype=BF16 if kv == "auto" else E4M3),
        i32(*tables), i32(*bounds), i32(*bounds), dim**-0.5, fp32(Hq) if sinks else None,
        k_scale=fp32(*words) if kv == "fp8" else None, v_scale=None if kv == "auto" else fp32(*words),
    )  # fmt: skip


def decodes() -> Iterator[Launch]:
    """Yields decode attention by head dim, group, queries, page, kv and collected scores, with 8 KV heads and 2."""
    for dim, group, tokens, page, kv, collect in (
        (128, 4, 1, 64, "auto", ""), (128, 8, 16, 64, "auto", ""), (96, 8, 9, 100, "auto", ""),
        (64, 8, 16, 64, "auto", ""), (256, 16, 32, 16, "auto", ""), (128, 8, 8, 128, "auto", "ends"),
        (128, 8, 8, 128, "auto", "any"), (128, 8, 16, 64, "fp8", ""), (128, 8, 8, 128, "fp8", "any"),
        (128, 8, 16, 64, "k16v8", ""), (64, 8, 1, 64, "fp8", ""), (256, 16, 1, 16, "fp8", ""),
        (128, 8, 1, 1, "fp8", ""), (64, 8, 16, 64, "fp8", ""),
    ):  # fmt: skip
        q = numbers(4, tokens, 8 * group, dim)
        name = f"decode-{dim}-{tokens}-{kv}-{page}" + f"-{collect}" * bool(collect)
        for holes in (False, True)[page == 1 : 1 + (tokens == 1)]:
            keys = paged((8 * group, 8), dim, page, (4, tokens), kv=kv, sinks=dim == 256, holes=holes)
            scores = scores_of(8, page, collect) if collect else None
            yield general(name + "-holes" * holes, decode_parts, q, keys, early=True, scores=scores)
    for group, tokens, page, collect in ((7, 12, 64, ""), (7, 12, 128, "any"), (8, 16, 64, "ends")):
        q, keys = numbers(4, tokens, 2 * group, 128), paged((2 * group, 2), 128, page, (4, tokens), sinks=group == 8)
        scores = scores_of(2, page, collect) if collect else None
        yield launch(f"many-rows-{collect}", decode_parts, q, keys, early=True, scores=scores)
    for tokens, group, dim, page, kv in (
        (1, 7, 128, 64, "fp8"), (2, 8, 64, 128, "fp8"), (1, 4, 128, 1, "k16v8"), (5, 4, 128, 64, "fp8"),
        (4, 8, 128, 64, "k16v8"),
    ):  # fmt: skip
        q = numbers(4, tokens, 8 * group, dim)
        keys = paged((8 * group, 8), dim, page, (4, tokens), kv=kv, sinks=tokens == 2, holes=page == 1)
        name = f"decode-{dim}-{tokens}-{kv}-sm90"
        yield launch(name, decode_parts, q, keys, early=True)
        if tokens == 1:
            yield launch(f"{name}-beside", decode_parts, q, keys, early=True, ready=True)


def scores_of(heads: int, page: int, rows: str, planes: int = 2) -> KeyScores:
    """Returns planes of key scores."""
    return KeyScores(numbers(planes, PAGES, heads, page, dtype=torch.float16), i32(4, 40), rows)


def merges() -> Iterator[Launch]:
    """Yields merges of four sequences' attention over 64 heads."""
    for dim in (128, 256):
        out, part = numbers(4, 1, 64, dim), numbers(264, 2, 64, dim, dtype=BF16 if dim == 256 else FP32)
        bounds = i32(4, 1), i32(4, 1), None
        parts = UnmergedAttention(out, fp32(4, 1, 64), *bounds, part, fp32(264, 2, 64), 132, 8, 64, 64)
        yield launch(f"merge-{dim}", parts.merge_states)
        shared = replace(parts, out=numbers(8, 16, 64, dim), lse=fp32(8, 16, 64), lo=i32(8, 16), hi=i32(8, 16))
        shared = replace(shared, part=numbers(264, 128, 64, dim), part_lse=fp32(264, 128), block_m=128)
        yield launch(f"merge-prefixes-{dim}", merge_prefixes, parts, shared, 4)
        messages = numbers(8, 4, 8, dim), fp32(8, 4, 8), [8] * 8, i32(9)
        yield launch(f"merge-messages-{dim}", merge_states_pack, parts, *messages)
        merged = PartialAttention(out, fp32(4, 1, 64))
        yield launch(f"pack-{dim}", merge_states_pack, merged, *messages)
        boxes = i64(8), (i64(1), i64(1)), i32(1)
        sizes = dict(rank=3, lanes=8, pieces=1024, spins=1000)
        yield launch(f"merge-exchange-{dim}", merge_states_exchange, parts, numbers(4, 8, dim), i32(9), *boxes, **sizes)
    for sources, rows in ((2, 4), (8, 4096)):
        yield launch(f"combine-{sources}", merge_states, numbers(sources, rows, 8, 128), fp32(sources, rows, 8))


def prefills() -> Iterator[Launch]:
    """Yields prefill attention."""
    for dim, group, page, kv, op in (
        (128, 8, 64, "auto", general), (64, 8, 64, "auto", general), (128, 7, 64, "auto", launch),
        (128, 16, 128, "auto", launch), (256, 6, 64, "auto", launch), (128, 4, 64, "fp8", launch),
        (128, 4, 64, "k16v8", launch),
    ):  # fmt: skip
        keys = paged((2 * group, 2), dim, page, (1024,), kv=kv, sinks=group in (8, 16))
        name = f"prefill-{dim}-{group}-{kv}"
        yield op(name, flash_prefill, numbers(1024, 2 * group, dim), keys, i32(3), 1024, 1 << 16)


def paged_latents(bounds: tuple[int, ...], few: bool = False, page: int = 64) -> PagedKeys:
    """Returns DeepSeek's latents: 512 values, and 64 rope dims; with `few` in e4m3."""
    table, bound = i32(bounds[0], 40), i32(*bounds)
    if few:
        latent, rope = numbers(PAGES, page, 512, dtype=E4M3), numbers(PAGES, page, 64)
        scale_args = fp32(PAGES, 4, max(page, 64))
        return PagedKeys(latent, latent, table, bound, bound, 0.1, k_scale=scale_args, rope=rope)
    entries = numbers(PAGES, page, 576)
    return PagedKeys(entries, entries[..., :512], table, bound, bound, 0.1)


def latents() -> Iterator[Launch]:
    """Yields decode and prefill over latents."""
    for few, kv in ((False, ""), (True, "-fp8")):
        for heads, tokens in ((16, 1), (32, 4), (128, 2)):
            q, keys = numbers(4, tokens, heads, 576), paged_latents((4, tokens), few)
            for op, arch in ((general, ""), (launch, "-sm90")):
                name = f"mla-decode-{heads}-{tokens}{arch}{kv}"
                yield op(name, latent_parts, q, keys, early=True)
                for rows in ("any", "ends") if tokens > 1 else ():
                    yield op(f"{name}-{rows}", latent_parts, q, keys, early=True, scores=scores_of(1, 64, rows, 4))
        for heads in (16, 128):
            q, keys = numbers(512, heads, 576), paged_latents((512,), few)
            yield general(f"mla-prefill-{heads}{kv}", mla_prefill, q, keys, i32(3), 256, 1024)
        q, selected = numbers(512, 64, 576), paged_latents((512,), few, page=1)
        yield general(f"mla-prefill-chosen{kv}", mla_prefill, q, selected, i32(513), 1, 2048)
    for heads in (64, 128):
        q, selected = numbers(512, heads, 576), paged_latents((512,), page=1)
        yield launch(f"mla-prefill-chosen-{heads}-sm90", mla_prefill, q, selected, i32(513), 1, 2048)
    given = numbers(1024, 16, 192), numbers(2, 1024, 16, 256), numbers(2, 1024, 64), i32(3), 512, i32(1024), 0.1
    yield general("mla-prefill-expanded", expanded_prefill, *given)
    yield launch("mla-prefill-expanded-sm90", expanded_prefill, *given)
    yield launch("each-head", per_head_linear, numbers(4, 32, 512), numbers(32, 512, 128))
    for tokens in (1, 64):
        given = numbers(tokens, 32, 192), numbers(tokens, 576), numbers(tokens, 32), numbers(tokens, 32)
        model_args = numbers(512), 1e-6, numbers(32, 128, 512)
        few = numbers(PAGES, 64, 512, dtype=E4M3), i64(tokens), fp32(PAGES, 4, 64), numbers(PAGES, 64, 64)
        for kv, cache in (("", (numbers(PAGES, 64, 576), i64(tokens))), ("-fp8", few)):
            yield launch(f"mla-append-{tokens}{kv}", mla_append, *given, *model_args, *cache)


def appends() -> Iterator[Launch]:
    """Yields appends of heads and latents."""
    yield launch("head-squares", head_squares, numbers(4, 64, 128), 8, (1.0, 1.0))
    norms = numbers(128), numbers(128), 1e-6
    over_all = numbers(8, 128), numbers(2, 128), 1e-6
    for kv in ("auto", "fp8", "k16v8"):
        keys = paged((8, 2), 128, 64, (1, 1), kv=kv)
        for tokens in (1, 512):
            given = numbers(tokens, 12, 128), numbers(tokens, 64), numbers(tokens, 64), keys.k, keys.v, i64(tokens)
            scales = keys.k_scale, keys.v_scale
            yield launch(f"append-{tokens}-{kv}", kv_append, *given, norms, scales)
            yield launch(f"append-over-all-{tokens}-{kv}", kv_append, *given, over_all, scales, fp32(tokens, 2))


def indexers() -> Iterator[Launch]:
    """Yields indexers of GLM-5.2 (32 heads) and DeepSeek-V3.2 (64)."""
    for few in (False, True):
        dtype, scales = (E4M3, fp32(PAGES, 64)) if few else (BF16, None)
        cache = numbers(PAGES, 64, 128, dtype=dtype)
        for heads, rows in ((32, 1), (64, 5), (64, 512)):
            N, name = 4 * rows, f"index-scores-{heads}-{rows}" + "-fp8" * few
            given = numbers(N, heads, 128), fp32(N, heads), cache, i32(4, 40), i32(N)
            counts = i32(PLANES, N, 256) if rows == 1 else None
            segments = i32(5) if rows > 5 else None
            yield launch(name, index_scores, *given, segments, rows, fp32(N, 4096), scales, counts)
        for heads in (32, 0):
            given = numbers(4, heads, 128), fp32(4, 128), numbers(4, 32), numbers(4, 32), numbers(128), numbers(128)
            kept = cache, i64(4), scales, i32(PLANES, 4, 256) if heads else None
            yield launch(f"index-append-{heads}" + "-fp8" * few, index_append, *given, 1e-6, *kept)
    for N in (4, FEW_ROWS + 1):
        for kvp in (1, 8):
            shard = Shard(kvp, kvp - 1, 16, 64, None if kvp == 1 else lambda x: numbers(8, *x.shape, dtype=x.dtype))
            given = fp32(N, 70_000), i64(N), i64(N), i32(N), i32(N, 2000), i64(N), 2048, 1 << 20, shard
            counts = i32(PLANES, N, 256) if N <= FEW_ROWS else None
            yield launch(f"choose-tokens-{N}-{kvp}", index_topk, *given, counts)


def blocks() -> Iterator[Launch]:
    """Yields block selection with one query and with five drafts; candidates, stretches, subblocks."""
    for queries, how in ((1, {}), (5, {}), (1, {"stretches": True}), (5, {"stretches": True}), (1, {"parts": 8})):
        N, parts = 4 * queries, how.pop("parts", 0)
        table = i32(N, 4, 4096) if parts else i32(4, 4096)
        bounds = numbers(PAGES, 4, parts, 2, 128) if parts else numbers(PAGES, 4, 2, 128)
        given = numbers(N, 28, 128), bounds, table, i32(N), i32(N), i32(N), 32, 40
        offered = i32(N, 4, 32, 2) if queries > 1 and not how else None
        name = f"select-blocks-{queries}-{parts}-{len(how)}"
        yield launch(name, select_blocks, *given, i64(2), candidates=offered, **how)
    grid: dict[str, Any] = {"kvp": 2, "kvp_rank": 1, "append_block": 128}
    for few in (False, True):
        keys = numbers(2, PAGES, 128, 4, 128, dtype=E4M3 if few else BF16)
        scales = fp32(2, PAGES, 4, 128) if few else None
        given = keys, scales, numbers(2, PAGES, 4, 2, 128), i32(4, 40), i64(4), i64(4), i64(4), 2
        yield launch(f"fold-{few}", fold_blocks, *given, **grid)
        part_bounds = numbers(2, PAGES, 4, 8, 2, 128)
        yield launch(f"fold-parts-{few}", fold_blocks, *given, **grid, part_bounds=part_bounds)
    sizes = dict(page_size=128, sink_blocks=1, local_blocks=2, topk=32, from_tokens=4096)
    token_args = i64(4), i64(4), flags(4)
    yield launch("local-bounds", local_bounds, *token_args, **grid, window=1000)
    yield launch("cache-slots", compute_slot_mapping, *token_args, i32(4, 40), None, **grid, page_size=128)
    yield launch("block-ranges", block_ranges, i64(4), i64(4), flags(4), 1, **grid, **sizes)
    drafted = dict(sink_tokens=4, min_keys=64, share=9, latest=8)
    yield launch("draft-ranges", draft_ranges, *token_args, **grid, **drafted)
    yield launch("keep-best", keep_best, i32(8, 4, 4, 32, 2), i32(4), i64(4), i32(4, 4, 40), 3, i64(2))
    yield launch("repeat", repeat_blocks, i32(4, 4, 40), i32(4, 400), i32(4), i32(4), i64(4), 32, 0.5)
    for planes, reach, ranks in ((1, 0, 0), (2, 0, 0), (1, 8, 0), (1, 16, 0), (2, 0, 3)):
        selection_group = (
            SelectionGroup(lambda x: numbers(3, *x.shape, dtype=x.dtype), 1, i32(4), i64(1)) if ranks else None
        )
        scores = numbers(2, planes, PAGES, 1, 128, dtype=torch.float16)
        given = scores, i32(4, 40), i32(4, 40), i32(4), i32(4), i32(4), i32(4), flags(4), i32(2, 4, 1, 300)
        how = dict(reach=reach, selection_group=selection_group)
        yield launch(f"select-tokens-{planes}-{reach}-{ranks}", select_tokens, *given, 8, **how)


def offload() -> Iterator[Launch]:
    """Yields lookups in the resident cache, and fetches of blocks."""
    grid = {"kvp": 2, "kvp_rank": 1, "append_block": 128, "page_size": 128}
    cpu = torch.device("cpu")
    for places, guess, parts in ((600, False, 1), (600, True, 1), (4000, False, 8)):
        hot = ResidentBlocks.create(1, 4, PAGES, places, 24, 2, cpu).layer(0)
        misses = FetchList(i32(4, places), i32(4, places), i32(4), i64(2), guess)
        readers = QueryRanges(i32(4), i32(4), i64(4), i64(4), 1)
        given = i32(4, 4, 64), readers, hot, misses
        yield launch(f"resolve-{places}-{guess}", resolve, *given, **grid, parts=parts, part_stride=2 * parts)
    for words in (16384, 8448, 12416):  # pages of 128 tokens of a head of 128: bf16, e4m3, and only values in e4m3
        listed = BlockList(i32(4, 64), i32(4, 64), i32(4))
        yield launch(f"copy-blocks-{words}", copy_blocks, i32(2, PAGES, words), i32(2, PAGES, words), listed)
    for words, last in ((288, None), (128, None), (4, None), (288, 1)):  # latents: bf16, e4m3, scales; a step's own
        to = i32(8, 2048, words), i32(8, 2048), i32(8)
        yield launch(f"fetch-tokens-{words}-{last}", fetch_tokens, i32(PAGES, 64, words), *to, last)
    memory = numbers(2, PAGES, 2, 128, 128)
    lengths = i32(4, 40), i64(4), i64(4), i64(4)
    yield launch("write-back", write_back, memory, memory, i32(2, 4, PAGES), *lengths, 2, 0, 2, **grid)
