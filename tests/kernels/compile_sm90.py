"""Compiles kernels for sm_90 without a GPU; prints registers, programs that fit an SM, and stack, one line a case.

`python -m tests.kernels.compile_sm90 PART PARTS` takes one of so many parts of the cases; with `last` behind that, of
the last case of each name.

A program of its own: the tests' process runs kernels under the interpreter, and cannot compile them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from kernels.attention.flash_decode import _flash_decode_kernel, decode_tile
from kernels.attention.flash_decode_fp8_sm90 import _flash_decode_fp8_sm90_kernel
from kernels.attention.flash_decode_many_rows_sm90 import _flash_decode_many_sm90_kernel
from kernels.attention.flash_prefill import _flash_prefill_kernel
from kernels.attention.flash_prefill_sm90 import SHAPES as PREFILL_SHAPES
from kernels.attention.flash_prefill_sm90 import _flash_prefill_sm90_kernel
from kernels.attention.head_squares import _head_squares_kernel
from kernels.attention.kv_append import _kv_append_kernel
from kernels.attention.lse_combine import _lse_combine_kernel
from kernels.attention.merge_messages import _merge_messages_kernel, _pack_kernel
from kernels.attention.paged_tiles import tile_shape
from kernels.attention.split_kv import LARGE, SLICE, _merge_parts_kernel
from kernels.attention.unpacked_prefill import _unpack_pages_kernel
from kernels.dense.linear import _linear_kernel
from kernels.dense.linear_fp8_sm90 import E4M3, E4M3_PAIRS, _linear_fp8_sm90_kernel, rows_of
from kernels.dense.linear_scaled import _scaled_linear_kernel, _unpack_kernel
from kernels.dense.linear_sm90 import ROWS, SLICES, _linear_sm90_kernel
from kernels.dense.linear_sm90 import SHARED as SLICED
from kernels.dense.qkv_append import _qkv_append_kernel
from kernels.dense.rms_norm import _rms_norm_kernel
from kernels.dense.rotary import _angles_kernel
from kernels.indexer.append import _index_append_kernel
from kernels.indexer.choose import TILE as SCORES
from kernels.indexer.choose import _count_digits_kernel, _list_between_kernel, _write_chosen_kernel
from kernels.indexer.choose_many_rows import (
    GROUPS,
    LISTED,
    WARPS,
    _count_listed_kernel,
    _list_own_best_kernel,
    _write_listed_kernel,
)
from kernels.indexer.choose_many_rows import TILE as LONG_TILE
from kernels.indexer.scores import _index_scores_kernel, score_tile
from kernels.mla.append import _mla_append_kernel
from kernels.mla.decode import _mla_decode_kernel
from kernels.mla.decode_few_rows_sm90 import _mla_decode_few_sm90_kernel
from kernels.mla.decode_many_rows_sm90 import _mla_decode_sm90_kernel
from kernels.mla.expanded_prefill import _expanded_prefill_kernel, expanded_tile
from kernels.mla.expanded_prefill_sm90 import _expanded_prefill_sm90_kernel
from kernels.mla.latent_tiles import latent_tile
from kernels.mla.per_head_linear import _each_head_kernel, head_blocks
from kernels.mla.prefill import _mla_prefill_kernel
from kernels.mla.prefill_chosen_sm90 import _mla_prefill_chosen_kernel
from kernels.moe.experts import (
    _down_few_kernel,
    _sum_kernel,
)
from kernels.moe.experts_many_sm90 import ROWS as MANY_ROWS
from kernels.moe.experts_many_sm90 import WEIGHT_TILES, _experts_many_kernel
from kernels.moe.experts_scaled_sm90 import _moe_scaled_sm90_kernel, words_shared
from kernels.moe.experts_sm90 import BLOCK_K, DOWN, E4M3_DOWN, E4M3_GATE_UP, GATE_UP, HALF, _moe_sm90_kernel
from kernels.moe.experts_sm90 import ROWS as DOWN_ROWS
from kernels.peers.all_gather import _all_gather_kernel
from kernels.peers.all_reduce_norm import _all_reduce_norm_kernel
from kernels.peers.all_reduce_norm_long import _all_reduce_norm_long_kernel
from kernels.peers.all_reduce_norm_rows import _all_reduce_norm_rows_kernel
from kernels.peers.exchange import IN_GROUP, PIECE_WORDS, _exchange_kernel
from kernels.peers.merge_exchange import _merge_exchange_kernel
from kernels.peers.reduce_scatter import _reduce_scatter_kernel
from kernels.sm90 import SHARED
from tests.kernels.compile_moe import expert_cases
from tests.kernels.compile_recurrent import recurrent_cases
from tests.kernels.compile_sparse import BLOCKS, sparse_cases, token_cases
from tests.kernels.compile_tokens import verify_cases

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
PLAIN = {"scales": None, "GROUP": 1, "GROUPS": 0, "BEGIN": 0}  # weights that are not of a few bits
AMONG, BESIDE = {"READY": False}, {"READY": True}  # attention of a whole batch, of a chunk behind another's
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
TL = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
# Arguments that are no tensors of the case's dtype and no strides: type, and whether it is a multiple of 16.
SPECIAL = {
    **dict.fromkeys(
        ("block_table", "lo", "hi", "cu_q", "starts", "sent", "received", "counts", "status"), ("*i32", True)
    ),
    **dict.fromkeys(("ids", "order", "bounds", "block_ends"), ("*i32", True)),
    **dict.fromkeys(("weights", "choice_bias"), ("*fp32", True)),
    **dict.fromkeys(("out_lse", "lse", "part_lse", "to_lse", "sinks", "k_scales", "v_scales"), ("*fp32", True)),
    **dict.fromkeys(("means", "inv_freq"), ("*fp32", True)),
    **dict.fromkeys(("peers", "squares", "slots", "sent", "received", "count", "turns"), ("*i64", True)),
    **dict.fromkeys(("scale_log2", "eps", "scale", "clamp_at", "q_scale"), ("fp32", False)),
    **dict.fromkeys(("q_share", "k_share", "factor"), ("fp32", False)),
    **dict.fromkeys(("T", "B", "W", "N", "R", "rank", "lanes", "spins", "n", "steps", "programs"), ("i32", False)),
    **dict.fromkeys(("blocks", "runs", "E", "P", "first", "G", "target_b", "shares", "splits"), ("i32", False)),
    **dict.fromkeys(("draft", "target", "accepted", "next_tokens", "offsets", "shared"), ("*i64", True)),
    **dict.fromkeys(("last_key", "tokens", "sums", "greedy", "seed", "position"), ("*i64", True)),
    **dict.fromkeys(("last", "lengths", "limits", "taken", "outcome", "drawn_at"), ("*i64", True)),
    **dict.fromkeys(("p_key", "p_mass", "q_key", "q_mass"), ("*i64", True)),
    **dict.fromkeys(("best", "p_best", "q_best", "candidates", "pairs"), ("*fp64", True)),
    **dict.fromkeys(("temperature", "min_p", "p_temperature", "p_min", "q_temperature", "q_min"), ("*fp32", True)),
    **dict.fromkeys(("chance", "vocab"), ("i32", False)),
    **dict.fromkeys(("has_mismatch", "active", "shaped", "live"), ("*i1", True)),
    **dict.fromkeys(("a_log", "dt_bias", "state", "totals", "betas"), ("*fp32", True)),
    **dict.fromkeys(("kept_rows", "kept_decays", "work"), ("*fp32", True)),
    **dict.fromkeys(("history", "seen", "allowed"), ("*i32", True)),
    **dict.fromkeys(("others", "cursor", "salts", "found", "own_found", "others_found", "proposed"), ("*i64", True)),
    **dict.fromkeys(("repetition", "frequency", "presence"), ("*fp32", True)),
    **dict.fromkeys(("positions", "ends_from", "summaries", "merged"), ("*i64", True)),
    "kept": ("*fp16", True),
    "kept_table": ("*i32", True),
    **dict.fromkeys(("firsts", "lasts", "held", "scores", "tile_best", "lists", "arrived"), ("*i32", True)),
    **dict.fromkeys(("table", "tables", "report", "offered"), ("*i32", True)),
    **dict.fromkeys(("before", "after", "counted"), ("*i64", True)),
    **dict.fromkeys(("topk", "width", "columns", "tail"), ("i32", False)),
    **dict.fromkeys(("score_tables", "block_tables", "known", "sink_keys", "window_keys"), ("*i32", True)),
    **dict.fromkeys(("row_counts", "part_counts", "all_counts", "equals_before", "of_all"), ("*i32", True)),
    "overflow": ("*i64", True),
    "key_scores": ("*fp16", True),
    "fresh": ("*i1", True),
    "layer_stride": ("i64", True),
    **dict.fromkeys(("place_of", "page_of", "turns", "chosen", "miss_blocks", "miss_places"), ("*i32", True)),
    "positions": ("*i64", True),
    **dict.fromkeys(("scored", "raw"), ("*fp32", True)),
    **dict.fromkeys(("first_ranks", "least_keys", "owners", "listed", "all_listed"), ("*i64", True)),
    **dict.fromkeys(("gathered", "lefts", "chosen_slots", "chosen_counts", "tickets", "digit_counts"), ("*i32", True)),
    **dict.fromkeys(("parts", "EACH", "listed_n", "cap"), ("i32", False)),
    **dict.fromkeys(("miss_counts", "his", "listed_from", "listed_to", "block_counts"), ("*i32", True)),
    **dict.fromkeys(("copied_from", "copied_to", "placed", "kept_on_host"), ("*i32", True)),
    **dict.fromkeys(("from_layer", "to_layer", "placed_layer", "host_layer"), ("i64", True)),
    **dict.fromkeys(("entries", "first_row", "ring_pages", "most", "begin", "pages", "places", "MOST"), ("i32", False)),
}
TENSORS = {
    "q", "k_cache", "v_cache", "partials", "out", "qkv", "cos", "sin", "q_norm", "k_norm", "x", "weight", "bias",
    "residual", "total", "y", "result", "cache", "kv", "gain",
    "block_bounds", "part_bounds", "logits", "gate_up", "down", "h", "outputs", "packed", "addend", "p_logits",
    "q_logits", "part", "keys", "ropes", "to_out", "gates", "z", "conv", "norm", "ring", "gate",
    "k", "v", "w", "u", "o",
}  # fmt: skip
# Scales that a cache lacks: of keys and values in the dtype of the case, or of keys alone.
PLAIN_KEYS = {"V_APART": 1, "SCALE_PAGE": 1, "SCALE_NEXT": 0, "SCALE_HEAD": 0}
UNSCALED = {"auto": {"k_scales": None, "v_scales": None}, "k16v8": {"k_scales": None}, "fp8": {}}
DESCRIPTORS = {"latents": 256, "ropes": 64, "keys": 128, "values": 128}  # columns of what one load brings


def cases() -> Iterator[tuple[str, torch.dtype, Any, dict[str, Any], dict[str, int]]]:
    """Name, dtype, kernel, constants and options of each case."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for dtype, dim, group, tokens, page in (
        (bf16, 128, 4, 1, 64), (bf16, 128, 8, 16, 64), (bf16, 96, 8, 9, 100), (bf16, 64, 8, 1, 64),
        (bf16, 64, 8, 16, 64), (bf16, 256, 16, 32, 16), (bf16, 128, 8, 8, 128), (fp32, 128, 8, 8, 100),
    ):  # fmt: skip
        tile = decode_tile(tokens * group, dim, dtype)
        options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
        rows = min(tile["BLOCK_M"], triton.next_power_of_2(tokens * group))
        shared = {"T": tokens, "HEADS": 8, "GROUP": group, "D": dim, "BLOCK_B": 8, "ROWS": rows}
        shared |= {"SINKS": dim == 256, "EARLY": True, "PDL": True, **AMONG, **PLAIN_KEYS, **UNSCALED["auto"], **tile}
        none = {"kept": None, "kept_table": None, "COLLECT": ""}
        paged = shared | none | {"PAGE": page, "HOLES": False}
        yield "decode-beside", dtype, _flash_decode_kernel, paged | BESIDE, options
        for holes in (False, True)[: 1 + (tokens == 1)]:  # each query has tables of its own
            name = "decode" + "-holes" * holes
            yield name, dtype, _flash_decode_kernel, shared | none | {"PAGE": page, "HOLES": holes}, options
        for rows in ("ends", "any")[: 1 + (tokens == 8)]:
            collects = {"PAGE": page, "HOLES": False, "COLLECT": rows}
            yield f"decode-collects-{rows}", dtype, _flash_decode_kernel, shared | collects, options
        for name in ("BLOCK_D", *AMONG, *PLAIN_KEYS, "k_scales", "v_scales"):
            del shared[name]
        merge = shared | {"PARTS": 64, "SLICE": SLICE}
        yield "merge", dtype, _merge_parts_kernel, merge, {"num_warps": 2}
        yield "merge-messages", dtype, _merge_messages_kernel, merge, {"num_warps": 2}
        copied = {"D": 256, "BLOCK_L": 8, "BLOCK_D": 256, "PDL": True}
        yield "pack", dtype, _pack_kernel, copied, {"num_warps": 4}
        world = {"RANKS": 8, "BLOCK_RANKS": 8, "PIECES": 1024, "SIZE": PIECE_WORDS, "IN_GROUP": IN_GROUP}
        world |= {"DTYPE": TL[dtype], "PUSH": True, "WAIT": True, "AHEAD": dim == 128}
        yield "merge-exchange", dtype, _merge_exchange_kernel, merge | world, {"num_warps": 2}
    for group, tokens, page, collect in ((7, 12, 64, ""), (7, 12, 128, "any"), (8, 16, 64, "ends")):
        name = "many-rows-sm90" + f"-{collect}" * bool(collect)
        many = {"T": tokens, "HEADS": 1 + (group == 8), "GROUP": group, "PAGE": page, "BLOCK_B": 32, "ROWS": 128}
        many |= {"SINKS": group == 8, "EARLY": True, "COLLECT": collect}
        many |= {} if collect else {"kept": None, "kept_table": None}
        yield name, bf16, _flash_decode_many_sm90_kernel, many, {"num_warps": 4}
    yield from scaled_cases()
    for dtype, dim, group, page in ((bf16, 128, 8, 64), (bf16, 64, 8, 64), (fp32, 64, 4, 16)):
        tile = tile_shape(512 * group, 64, dim, dtype)
        options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
        constants = {"GROUP": group, "D": dim, "PAGE": page, "SINKS": dim == 64, **tile}
        yield "prefill", dtype, _flash_prefill_kernel, constants, options
    for dim, group, page, sinks in ((128, 7, 64, False), (128, 16, 128, True), (256, 6, 64, False)):
        constants = {"D": dim, "GROUP": group, "PAGE": page, "SINKS": sinks, **PREFILL_SHAPES[dim]}
        yield "prefill-sm90", bf16, _flash_prefill_sm90_kernel, constants, {"num_warps": 4}
    latents = {"R": 512, "P": 64, "PAGE": 64, "SCALE_PAGE": 64}
    for dtype, heads, tokens in ((bf16, 16, 1), (bf16, 16, 2), (bf16, 128, 2), (fp32, 16, 1)):
        for name, plain in (("", {"scales": None, "ropes": None}), ("-fp8", {})):
            tile = latent_tile(tokens * heads, 512, 64, dtype, not plain)
            options = {option: tile.pop(option) for option in ("num_warps", "num_stages")}
            rows = tile["BLOCK_M"]
            grid = {"T": tokens, "GROUP": heads, "BLOCK_B": 8, "ROWS": rows, "EARLY": True, "PDL": True}
            yield f"mla-decode-{rows}{name}", dtype, _mla_decode_kernel, latents | tile | plain | grid, options
            if plain:
                prefill = latents | tile | plain | {"GROUP": heads}
                yield f"mla-prefill-{rows}", dtype, _mla_prefill_kernel, prefill, options
    for heads, tokens in ((128, 1), (32, 4)):
        grid = {"T": tokens, "GROUP": heads, "BLOCK_B": 32, "ROWS": 128, "EARLY": True}
        yield "mla-decode-sm90", bf16, _mla_decode_sm90_kernel, latents | grid | {"scales": None}, {"num_warps": 4}
        yield "mla-decode-sm90-fp8", bf16, _mla_decode_sm90_kernel, latents | grid, {"num_warps": 4}
    for heads, tokens, rows in ((16, 1, 16), (16, 2, 32)):
        grid = {"T": tokens, "GROUP": heads, "BLOCK_B": 32, "ROWS": rows, "EARLY": True}
        plain = grid | {"scales": None}
        yield "mla-decode-few-sm90", bf16, _mla_decode_few_sm90_kernel, latents | plain, {"num_warps": 4}
        yield "mla-decode-few-sm90-fp8", bf16, _mla_decode_few_sm90_kernel, latents | grid, {"num_warps": 4}
    for dtype in (bf16, fp32):
        tile = expanded_tile(8192, dtype)
        options = {option: tile.pop(option) for option in ("num_warps", "num_stages")}
        blocks = {"NOPE": 128, "P": 64, "V": 128, "BLOCK_D": 128, "BLOCK_P": 64, "BLOCK_V": 128}
        yield "mla-prefill-expanded", dtype, _expanded_prefill_kernel, blocks | tile, options
    asynchronous = {"NOPE": 128, "P": 64, "V": 128, "KEYS": 128, "STAGES": 2}
    yield "mla-prefill-expanded-sm90", bf16, _expanded_prefill_sm90_kernel, asynchronous, {"num_warps": 4}
    for heads in (64, 128):
        chosen = {"GROUP": heads, "R": 512, "P": 64}
        yield "mla-prefill-chosen-sm90", bf16, _mla_prefill_chosen_kernel, chosen, {"num_warps": 4}
    width = {"HEADS": 32, "NOPE": 128, "R": 512, "P": 64, "PAGE": 64, "BLOCK_R": 512, "BLOCK_H": 8, "BLOCK": 32}
    width |= {"PDL": True, **head_blocks(128, 64, bf16)}
    yield from index_cases()
    yield "mla-append", bf16, _mla_append_kernel, width | {"scales": None, "ropes": None}, {"num_warps": 4}
    for warps in (1, 4):
        yield "mla-append-fp8", bf16, _mla_append_kernel, width, {"num_warps": warps}
    for dtype in (bf16, fp32):
        head = {"A": 512, "B": 128, "w_a": 1, "PDL": True, **head_blocks(512, 16, dtype)}
        yield "each-head", dtype, _each_head_kernel, head, {"num_warps": 4}
    for rows, warps in ((1, 1), (8, 2)):
        yield (
            f"combine-{rows}",
            bf16,
            _lse_combine_kernel,
            {"D": 128, "ROWS": rows, "BLOCK_D": 128},
            {"num_warps": warps},
        )
    yield "norm", bf16, _rms_norm_kernel, {"H": 4096, "BLOCK": 4096, "ADDS": True, "PDL": True}, {"num_warps": 16}
    heads = {"Q_HEADS": 8, "KV_HEADS": 2, "D": 128, "PAGE": 64, "SLOT": 256, "HEAD": 128}
    yield "angles", bf16, _angles_kernel, {"HALF": 64, "BLOCK": 64}, {"num_warps": 1}
    squared = {"Q": 6144, "K": 1024, "BLOCK": 1024, "PDL": True}
    yield "head-squares", bf16, _head_squares_kernel, squared, {"num_warps": 4}
    for kv, unscaled in UNSCALED.items():
        append = heads | {"BLOCK": 64, "NORMS": True, "PDL": True, "V_HEAD": 128, "means": None} | unscaled
        append |= {"SCALE_NEXT": 128, "SCALE_HEAD": 64}
        yield f"append-{kv}", bf16, _kv_append_kernel, append | {"TOKENS": 1}, {"num_warps": 1}
        yield f"append-many-{kv}", bf16, _kv_append_kernel, append | {"TOKENS": 16}, {"num_warps": 4}
        del append["means"]
        yield f"append-over-all-{kv}", bf16, _kv_append_kernel, append | {"TOKENS": 1}, {"num_warps": 1}
        yield f"append-over-all-many-{kv}", bf16, _kv_append_kernel, append | {"TOKENS": 16}, {"num_warps": 4}
    for kv, (head, words, apart) in BLOCKS.items():
        append = heads | {"BLOCK": 64, "NORMS": True, "PDL": True, "PAGE": 128, "SLOT": 128, "HEAD": head, "TOKENS": 1}
        append |= {"V_HEAD": apart * head, "SCALE_NEXT": 2 * words, "SCALE_HEAD": words, "means": None} | UNSCALED[kv]
        yield f"append-block-{kv}", bf16, _kv_append_kernel, append, {"num_warps": 1}
    for rows in (1, 4):
        tile = {"BLOCK_N": rows, "BLOCK_R": 2, "BLOCK_K": 1024, "RUN": 8, "STAGES": 1, "BIAS": True, "PDL": True}
        yield "qkv-append", bf16, _qkv_append_kernel, heads | tile | PLAIN, {"num_warps": 4}
    for gated, rows, warps in ((True, 1, 2), (False, 4, 4)):
        tile = {"BLOCK_N": rows, "BLOCK_R": 4, "BLOCK_K": 256 * warps, "RUN": 8, "STAGES": 3 if rows > 2 else 1}
        tile |= {"BIAS": True, "GATED": gated, "PDL": True}
        alone = {"RANKS": 0, "PIECES": 0, "SIZE": 0, "peers": None, "count": None}
        yield "linear", bf16, _linear_kernel, tile | alone | PLAIN, {"num_warps": warps}
    for dtype, ranks in ((bf16, 8), (fp32, 3)):
        tile = {"BLOCK_N": 1, "BLOCK_R": 4, "BLOCK_K": 1024, "RUN": 8, "STAGES": 1, "BIAS": True, "GATED": False}
        tile |= {"RANKS": ranks, "PIECES": 256, "SIZE": 256, "PDL": True, "out": None}
        yield "linear-send", dtype, _linear_kernel, tile | PLAIN, {"num_warps": 4}
    for gated, split, most, block in (
        (False, 2, 16, 128), (False, 1, 32, 64), (True, 4, 32, 64), (False, 6, 16, 64), (True, 3, 32, 64)
    ):  # fmt: skip
        tile = {"SPLIT": split, "SLICED": split in (1, 2, 4), "N_MAX": most, "BLOCK_K": block, "STAGES": 5}
        tile |= {"BIAS": True, "GATED": gated}
        world = {"RANKS": 8, "PIECES": 512, "SIZE": 256, "TWO_SHOT": split == 2, "out": None}
        none = dict.fromkeys(("cos", "sin", "slots", "k_cache", "v_cache", "q"))
        none |= dict.fromkeys(("Q_HEADS", "KV_HEADS", "D", "PAGE", "SLOT", "HEAD"), 0)
        alone |= {"TWO_SHOT": False}
        yield "linear-sm90", bf16, _linear_sm90_kernel, tile | alone | none, {"num_warps": 4}
        if gated:
            yield (
                "qkv-append-sm90",
                bf16,
                _linear_sm90_kernel,
                tile | alone | heads | {"GATED": False, "out": None},
                {"num_warps": 4},
            )
        else:
            yield "linear-sm90-send", bf16, _linear_sm90_kernel, tile | world | none, {"num_warps": 4}
    for gated, split, most, parts, stages in (
        (False, 4, 8, 2, 5), (False, 16, 16, 2, 4), (False, 1, 32, 1, 6), (True, 3, 8, 2, 5), (True, 1, 32, 1, 6),
        (False, 2, 64, 1, 4), (True, 1, 64, 1, 4), (False, 4, 128, 1, 4), (True, 3, 128, 1, 4),
    ):  # fmt: skip
        tile = {"SPLIT": split, "N_MAX": most, "PARTS": parts, "STAGES": stages, "GROUP": 128, "BEGIN": 64}
        tile |= {"BIAS": True, "GATED": gated, "ROWS": rows_of(most)}
        warps = {"num_warps": rows_of(most) // 16}
        yield "linear-fp8-sm90", bf16, _linear_fp8_sm90_kernel, tile | alone | none, warps
        if gated:
            to_heads = tile | alone | heads | {"GATED": False, "out": None}
            yield "qkv-append-fp8-sm90", bf16, _linear_fp8_sm90_kernel, to_heads, warps
        else:
            yield "linear-fp8-sm90-send", bf16, _linear_fp8_sm90_kernel, tile | world | none, warps
    for rows, block_r, block_k, stages, warps in ((64, 64, 128, 5, 4), (8, 64, 128, 5, 4), (256, 128, 64, 4, 8)):
        tile = {"R": 2112, "K": 7168, "GROUP": 128, "GROUPS": 57, "BEGIN": 64, "BLOCK_R": block_r, "BLOCK_K": block_k}
        tile |= {"BLOCK_N": min(128, max(16, rows)), "STAGES": stages, "TOGETHER": 8, "BIAS": True, "PDL": True}
        tile |= {"ROUNDS": rows > 64}
        for gated in (False, True):
            yield "linear-fp8", bf16, _scaled_linear_kernel, tile | {"GATED": gated}, {"num_warps": warps}
    unpacked = {"GROUP": 128, "GROUPS": 57, "BEGIN": 64, "BLOCK_R": 16, "BLOCK_K": 256}
    yield "unpack", bf16, _unpack_kernel, unpacked, {"num_warps": 4}
    yield from expert_cases()
    for dtype, ranks in ((bf16, 8), (fp32, 2)):
        world = {"RANKS": ranks, "BLOCK_RANKS": ranks, "PDL": True}
        piece = {"PIECES": 1024, "SIZE": PIECE_WORDS, "WORDS": 64, "BLOCK": 64, "PUSH": True, "WAIT": True}
        piece |= {"IN_GROUP": IN_GROUP}
        yield "exchange", dtype, _exchange_kernel, world | piece | {"DTYPE": TL[dtype]}, {"num_warps": 1}
        for two_shot, phases in ((False, 7), (True, 7), (False, 6), (True, 6)):
            row = {"ROW_WORDS": 1792, "SLICES": 7, "BLOCK_SLICES": 8, "PIECES": 256, "SIZE": 256, "DTYPE": TL[dtype]}
            row |= {"RESIDUAL": True, "TWO_SHOT": two_shot, "PHASES": phases}
            yield "reduce", dtype, _all_reduce_norm_kernel, world | row, {"num_warps": 4}
        for words in (1792, 4096):
            row = {"WORDS": words, "BLOCK": triton.next_power_of_2(words), "ROWS": 256, "SIZE": 4096, "PHASES": 7}
            row |= {"RESIDUAL": True, "DTYPE": TL[dtype]}
            yield "reduce-rows", dtype, _all_reduce_norm_rows_kernel, world | row, {"num_warps": 8}
        group = {"H": 3584, "BLOCK": 4096, "GROUP": 4, "ROOM": 1024, "BLOCK_RANKS": ranks}
        group |= {"SIZE": (32 << 10) // dtype.itemsize}
        group |= {"RESIDUAL": True, "DTYPE": TL[dtype], "RANKS": ranks, "PDL": True}
        yield "reduce-long", dtype, _all_reduce_norm_long_kernel, group, {"num_warps": 16}
        gather = {"PIECES": 64, "SIZE": 256, "PHASES": 7}
        yield "gather", dtype, _all_gather_kernel, world | gather, {"num_warps": 4}
        yield "scatter", dtype, _reduce_scatter_kernel, world | gather | {"DTYPE": TL[dtype]}, {"num_warps": 4}
    yield from verify_cases()
    yield from sparse_cases()
    yield from token_cases()
    yield from recurrent_cases()


def last_cases() -> list[tuple[str, torch.dtype, Any, dict[str, Any], dict[str, int]]]:
    """The last case of each name, of those in bf16 if there are any: mostly the one of the most registers."""
    return [*{case[0]: case for case in sorted(cases(), key=lambda case: case[1] == torch.bfloat16)}.values()]


def scaled_cases() -> Iterator[tuple[str, torch.dtype, Any, dict[str, Any], dict[str, int]]]:
    """Attention over keys and values in e4m3, or values alone: decoded, collected, of chosen tokens, of prompts."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for dtype, dim, group, tokens, page, kv in (
        (bf16, 128, 4, 1, 64, "fp8"), (bf16, 128, 7, 1, 64, "k16v8"), (bf16, 128, 8, 16, 64, "fp8"),
        (bf16, 128, 8, 8, 128, "fp8"), (bf16, 128, 8, 8, 64, "k16v8"), (bf16, 128, 8, 16, 64, "k16v8"),
        (bf16, 64, 8, 1, 64, "fp8"), (bf16, 256, 16, 1, 16, "fp8"), (bf16, 128, 8, 1, 1, "fp8"),
        (fp32, 128, 8, 1, 64, "fp8"),
    ):  # fmt: skip
        few = 1 + (kv == "fp8")
        tile = decode_tile(tokens * group, dim, dtype, few)
        options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
        rows = min(tile["BLOCK_M"], triton.next_power_of_2(tokens * group))
        shared = {"T": tokens, "HEADS": 8, "GROUP": group, "D": dim, "BLOCK_B": 8, "ROWS": rows, "PAGE": page}
        shared |= {"SINKS": False, "EARLY": True, "PDL": True, "HOLES": page == 1, **AMONG}
        slots = max(page, 64)
        scales = {"V_APART": 1, "SCALE_PAGE": slots, "SCALE_NEXT": 8 * slots, "SCALE_HEAD": slots} | UNSCALED[kv]
        shared |= scales | tile
        none = {"kept": None, "kept_table": None, "COLLECT": ""}
        yield f"decode-{kv}", dtype, _flash_decode_kernel, shared | none, options
        yield f"decode-beside-{kv}", dtype, _flash_decode_kernel, shared | none | BESIDE, options
        if page == 128:
            for counted in ("ends", "any"):
                collects = shared | {"COLLECT": counted}
                yield f"decode-collects-{counted}-{kv}", dtype, _flash_decode_kernel, collects, options
    of_pages = {"WIDTH": 512, "D": 128, "PAGE": 64, "BLOCK_N": 64, "BLOCK_D": 128, "SCALE_NEXT": 256, "SCALE_HEAD": 64}
    for name, more in (("", {}), ("-whole", {"scales": None})):
        yield f"unpack-pages{name}", bf16, _unpack_pages_kernel, of_pages | more, {"num_warps": 4}
    for tokens, group, dim, page, kv in (
        (1, 7, 128, 64, "fp8"), (2, 8, 64, 128, "fp8"), (1, 4, 128, 1, "k16v8"), (5, 4, 128, 64, "fp8"),
        (4, 8, 128, 64, "k16v8"),
    ):  # fmt: skip
        slots = max(page, 64)
        given = {"T": tokens, "HEADS": 8, "GROUP": group, "D": dim, "BLOCK_B": 32, "ROWS": 16, "PAGE": page}
        given |= {"SINKS": tokens == 2, "EARLY": True, "HOLES": page == 1, **AMONG}
        given |= {"V_APART": 1, "SCALE_PAGE": slots, "SCALE_NEXT": 8 * slots, "SCALE_HEAD": slots} | UNSCALED[kv]
        given |= {"QUERIES": 16, "OF_WARP": 32} if tokens * group <= 16 else {"QUERIES": 32, "OF_WARP": 16}
        given["STAGES"] = (3 if kv == "fp8" else 2) * 32 // given["OF_WARP"]
        yield f"decode-{kv}-sm90", bf16, _flash_decode_fp8_sm90_kernel, given, {"num_warps": 4}
        yield f"decode-beside-{kv}-sm90", bf16, _flash_decode_fp8_sm90_kernel, given | BESIDE, {"num_warps": 4}
    for kv, (_, words, apart) in BLOCKS.items():  # over blocks, of which each head reads its own, and of prompts
        tile = decode_tile(7, 128, bf16, 1 + (kv == "fp8"))
        options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
        shared = {"T": 1, "HEADS": 4, "GROUP": 7, "D": 128, "BLOCK_B": 8, "ROWS": 8, "PAGE": 128, "SINKS": False}
        shared |= {"EARLY": True, "PDL": True, "HOLES": True, **AMONG, "kept": None, "kept_table": None, "COLLECT": ""}
        blocks = {"V_APART": apart, "SCALE_PAGE": 128, "SCALE_NEXT": words, "SCALE_HEAD": 0} | UNSCALED[kv]
        yield f"decode-blocks-{kv}", bf16, _flash_decode_kernel, shared | blocks | tile, options


def index_cases() -> Iterator[tuple[str, torch.dtype, Any, dict[str, Any], dict[str, int]]]:
    """Indexers of GLM-5.2 (32 heads) and DeepSeek-V3.2 (64)."""
    bf16 = torch.bfloat16
    shape = {"D": 128, "PAGE": 64, "PDL": True}
    for heads, rows in ((32, 1), (32, 5), (64, 1), (64, 5), (64, 512)):
        for few, plain in (("", {"scales": None}), ("-fp8", {})):
            tile = score_tile(rows, heads, bf16, not plain, rows <= 5)
            options = {option: tile.pop(option) for option in ("num_warps", "num_stages")}
            scan = shape | {"HEADS": heads, "OFFSETS": rows > 5, "BLOCK_D": 128, **tile, **plain}
            counts = {"digit_counts": None} if rows > 1 else {}
            yield f"index-scores-{heads}-{rows}{few}", bf16, _index_scores_kernel, scan | counts, options
    append = shape | {"HEADS": 32, "ROPE": 64, "BLOCK_H": 16, "BLOCK_D": 128, "BLOCK": 32, "PLANES": 3}
    for few, plain in (("", {"scales": None}), ("-fp8", {})):
        yield f"index-append{few}", bf16, _index_append_kernel, append | plain, {"num_warps": 1}
    plain = plain | {"HEADS": 0, "BLOCK_H": 1, "PLANES": 0, "digit_counts": None}
    yield "index-append-keys", bf16, _index_append_kernel, append | plain, {"num_warps": 1}
    choice = {"PASSES": 7, "BITS": 24, "RANKS": 8, "BLOCK_TOKENS": 16, "TILE": SCORES, "PDL": True}
    of_row = {"GROUPS": GROUPS, "TILE": LONG_TILE, "RUN": 4, "PDL": True}
    yield "list-own-best", bf16, _list_own_best_kernel, of_row, {"num_warps": WARPS}
    for stage in (0, 6):
        listed = choice | {"STAGE": stage, "TILE": LISTED}
        yield f"count-listed-{stage}", bf16, _count_listed_kernel, listed, {"num_warps": 4}
    for owners in ({"owners": None}, {}):
        listed = choice | {"PAGE": 64, "TILE": LISTED} | owners
        yield "write-listed", bf16, _write_listed_kernel, listed, {"num_warps": 4}
    for several in (False, True):
        choice["SEVERAL"] = several
        for stage in (0, 1):
            yield f"count-digits-{stage}", bf16, _count_digits_kernel, choice | {"STAGE": stage}, {"num_warps": 4}
        yield "list-between", bf16, _list_between_kernel, dict(choice), {"num_warps": 4}
        write = choice | {"PAGE": 64, "BLOCK_PARTS": 64, "BLOCK_RANKS": 8, "LISTED": 128}
        for owners in ({"owners": None}, {}):
            yield "write-chosen", bf16, _write_chosen_kernel, write | owners, {"num_warps": 4}
    for few, plain in ((False, {"scales": None, "ropes": None}), (True, {})):
        tile = latent_tile(64, 512, 64, bf16, few)
        options = {option: tile.pop(option) for option in ("num_warps", "num_stages")}
        latents = {"R": 512, "P": 64, "PAGE": 1, "SCALE_PAGE": 64, "GROUP": 64, **plain, **tile}
        grid = {"T": 1, "BLOCK_B": 8, "ROWS": 64, "EARLY": True, "PDL": True}
        name = "-fp8" * few
        yield f"mla-decode-64{name}", bf16, _mla_decode_kernel, latents | grid, options
        yield f"mla-prefill-64{name}", bf16, _mla_prefill_kernel, latents, options


def compiled(dtype: torch.dtype, function: Any, constants: dict[str, Any], options: dict[str, int]) -> Any:
    runtime = {parameter.name for parameter in function.params if parameter.do_not_specialize}
    constants = {name: value for name, value in constants.items() if name not in runtime}
    words = "peers" in function.arg_names  # kernels between GPUs see 32-bit words, where attention is not in them
    mixed = function in (
        _merge_exchange_kernel, _linear_kernel, _linear_sm90_kernel, _linear_fp8_sm90_kernel, _down_few_kernel,
        _sum_kernel, _moe_sm90_kernel, _all_reduce_norm_long_kernel,
    )  # fmt: skip
    few = constants.get("GROUPS") or function is _linear_fp8_sm90_kernel  # weights of a few bits
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(function.arg_names):
        kind, aligned = SPECIAL.get(name, ("i32", True))
        if name in TENSORS:
            kind = "*i32" if words and (not mixed or name == "result") else f"*{NAMES[dtype]}"
        if few and name in ("gate_up", "down", "weight"):
            kind = "*u8" if constants["GROUP"] == 32 else "*fp8e4nv"
        if few and name == "scales":
            kind = "*u8" if constants["GROUP"] == 32 else "*fp32"
        scales = name.replace("_cache", "_scales")
        if scales != name and scales in function.arg_names and scales not in constants:
            kind = "*fp8e4nv"
        if name == "part" and constants["ROWS"] * constants.get("D", 512) < LARGE:
            kind = "*fp32"
        latents = "ropes" in function.arg_names and "ropes" not in constants
        latents |= function in (_index_append_kernel, _index_scores_kernel) and "scales" not in constants
        if latents or (function is _unpack_pages_kernel and "scales" not in constants):
            kind = {"cache": "*fp8e4nv", "scales": "*fp32"}.get(name, kind)
        if name == "latents" and "scales" in function.arg_names and "scales" not in constants:
            kind = "*i32"  # words of four numbers
        elif name in DESCRIPTORS and isinstance(function, GluonJITFunction):
            columns = constants["D"] if function is _flash_prefill_sm90_kernel else DESCRIPTORS[name]
            kind, aligned = f"tensordesc<{NAMES[dtype]}[64, {columns}],{SHARED.value!r}>", False
        if function is _expanded_prefill_sm90_kernel and name in ("keys", "ropes", "values"):
            columns = constants[{"keys": "NOPE", "ropes": "P", "values": "V"}[name]]
            kind, aligned = f"tensordesc<{NAMES[dtype]}[{constants['KEYS']}, {columns}],{SHARED.value!r}>", False
        if name == "words" and function in (
            _linear_sm90_kernel, _linear_fp8_sm90_kernel, _moe_sm90_kernel, _moe_scaled_sm90_kernel,
        ):  # fmt: skip
            kind = "*i64" if any(constants.get(two) for two in ("GATED", "GATE", "RANKS", "D")) else "*i32"
        if function is _linear_sm90_kernel and name in ("weights", "xs"):
            rows = ROWS.value if name == "weights" else constants["N_MAX"]
            block = [rows, SLICES.value, constants["BLOCK_K"]]
            kind, aligned = f"tensordesc<{NAMES[dtype]}{block},{SLICED.value!r}>", False
        if function is _linear_fp8_sm90_kernel and name == "weights":
            paired = constants["GATED"] or constants["D"]
            columns = constants["PARTS"] * BLOCK_K.value
            rows = constants["ROWS"]
            block = [1, rows // 16, 2, 8, columns] if paired else [rows, columns]
            kind, aligned = f"tensordesc<fp8e4nv{block},{(E4M3_PAIRS if paired else E4M3).value!r}>", False
        if function is _linear_fp8_sm90_kernel and name == "xs":
            block = [constants["N_MAX"], constants["PARTS"] * BLOCK_K.value]
            kind, aligned = f"tensordesc<{NAMES[dtype]}{block},{SHARED.value!r}>", False
        if function is _experts_many_kernel and name == "w":
            kind, aligned = f"tensordesc<fp8e4nv[1, {MANY_ROWS.value // 16}, 2, 8, 64],{WEIGHT_TILES.value!r}>", False
        if function is _experts_many_kernel and name == "x" and not constants["GATED"]:
            kind, aligned = f"tensordesc<{NAMES[dtype]}[128, 64],{SHARED.value!r}>", False
        if function is _moe_sm90_kernel and name == "w":
            gate = [1, HALF.value // 8, 2, 8, BLOCK_K.value], GATE_UP
            block, layout = gate if constants["GATE"] else ([1, DOWN_ROWS.value, BLOCK_K.value], DOWN)
            element = NAMES[dtype]
            if constants["GROUPS"]:
                layout, element = E4M3_GATE_UP if constants["GATE"] else E4M3_DOWN, "fp8e4nv"
            kind, aligned = f"tensordesc<{element}{block},{layout.value!r}>", False
        if function is _moe_scaled_sm90_kernel and name == "w":
            columns = BLOCK_K.value // (8 if constants["GROUP"] == 32 else 4)
            block = [1, HALF.value // 8, 2, 8, columns] if constants["GATE"] else [1, DOWN_ROWS.value, columns]
            kind, aligned = f"tensordesc<i32{block},{words_shared(columns, len(block))!r}>", False
        if function in (_moe_sm90_kernel, _moe_scaled_sm90_kernel, _experts_many_kernel) and name == "x_n":
            aligned = False
        signature[name] = "constexpr" if name in constants else kind
        if name in constants:
            values[(i,)] = constants[name]
        elif aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    language = GluonASTSource if isinstance(function, GluonJITFunction) else ASTSource
    source = language(function, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def registers_and_stack(kernel: Any) -> tuple[int, int]:
    """Registers of a thread, and its stack in bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0]
    return int(registers), int(stack)


def programs_on_an_sm(kernel: Any, registers: int) -> int:
    """Computes how many programs fit an SM: 64K registers, allocated by eights per thread, 228 KiB of shared memory."""
    by_registers = 65536 // (triton.cdiv(registers, 8) * 8 * 32 * kernel.metadata.num_warps)
    return min(by_registers, (228 << 10) // (kernel.metadata.shared + 1024))  # a KiB of each is the system's


if __name__ == "__main__":
    part, parts = map(int, sys.argv[1:3])
    for name, dtype, *case in (last_cases() if sys.argv[3:] == ["last"] else list(cases()))[part::parts]:
        kernel = compiled(dtype, *case)
        # ptxas 12.8 loses what such an addition adds, where it is a constant: 0 stands in the machine code.
        assert "add.s16x2" not in kernel.asm["ptx"], f"{name} adds 16-bit halves"
        registers, stack = registers_and_stack(kernel)
        print(name, NAMES[dtype], registers, programs_on_an_sm(kernel, registers), stack, flush=True)
