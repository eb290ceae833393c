"""Cases of what chooses blocks and tokens, and brings blocks of host memory, for `compile_sm90`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton

from benchmarks.ranks.kept_kernels import _repeat_blocks_kernel
from kernels.sparse.block_bounds import _fold_blocks_kernel
from kernels.sparse.keep_best import _keep_best_kernel
from kernels.sparse.select_blocks import LANES, TILE, _choose_kernel, _select_blocks_kernel
from kernels.sparse.select_tokens import TILE as TOKENS
from kernels.sparse.select_tokens import _select_tokens_kernel
from kernels.tier.copy_blocks import _copy_blocks_kernel, piece_shape
from kernels.tier.resolve import _resolve_kernel
from kernels.tier.write_back import _write_back_kernel

# Of a page of 128 tokens of one head of 128: numbers between heads' keys, words, how much farther apart values are.
BLOCKS = {"fp8": (33792, 8448, 1), "k16v8": (24832, 12416, 2)}


def sparse_cases() -> Iterator[tuple[str, torch.dtype, Any, dict[str, Any], dict[str, int]]]:
    """One query and five drafted ones of a group of seven; pages of 16; candidates, and parts of them."""
    bf16 = torch.bfloat16
    for dtype, queries, lanes, tiles, parts, stretches in (
        (bf16, 1, LANES, 256, 1, 1), (bf16, 5, LANES, 256, 1, 1),
        (bf16, 1, 2048, 2048, 1, 1), (bf16, 1, LANES, 256, 1, 17),
        (bf16, 5, LANES, 256, 1, 17), (bf16, 1, 2048, 128, 8, 1),
    ):  # fmt: skip
        item = {
            "T": queries,
            "HEADS": 4,
            "GROUP": 7,
            "D": 128,
            "LANES": lanes,
            "STRETCHES": stretches,
            "PARTS": parts,
            "TILE": TILE,
        }
        item |= {"BLOCK_B": 8, "BLOCK_M": max(16, triton.next_power_of_2(7 * queries)), "BLOCK_D": 128}
        item |= {"BLOCK_G": tiles, "REPORT": queries > 1, "PDL": True}
        yield "select", dtype, _select_blocks_kernel, item, {"num_warps": 4, "num_stages": 3}
        if queries > 1:
            names = "T", "HEADS", "LANES", "BLOCK_G", "TILE", "STRETCHES", "REPORT", "PDL"
            yield "choose", dtype, _choose_kernel, {name: item[name] for name in names}, {"num_warps": 4}
    grid = {"KVP": 2, "RANK": 1, "BLOCK_TOKENS": 128, "PAGE": 128, "D": 128, "BLOCK_D": 128}
    for unscaled in ({"k_scales": None}, {}):
        whole = grid | {"SLOTS": 32, "part_bounds": None} | unscaled
        yield "fold", bf16, _fold_blocks_kernel, whole, {"num_warps": 4}
    yield (
        "fold-parts",
        bf16,
        _fold_blocks_kernel,
        grid | {"SLOTS": 16, "k_scales": None},
        {"num_warps": 4},
    )
    offers = {"HEADS": 4, "TOPK": 32, "RANKS": 8, "BLOCK_K": 32, "BLOCK_ALL": 256, "PDL": True}
    yield "keep-best", bf16, _keep_best_kernel, offers, {"num_warps": 4}
    yield "repeat", bf16, _repeat_blocks_kernel, {"HEADS": 4, "BLOCK_K": 32, "PDL": True}, {"num_warps": 1}
    shard = {"HEADS": 4, "KVP": 2, "RANK": 1, "BLOCK_TOKENS": 128, "PAGE": 128, "PDL": True}
    for block, guess, parts, apart in ((1024, False, 1, 1), (64, False, 1, 1), (64, True, 1, 1), (256, False, 8, 16)):
        found = shard | {"BLOCK": block, "BLOCK_S": 4096, "GUESS": guess, "PARTS": parts, "APART": apart}
        yield "resolve", bf16, _resolve_kernel, found, {"num_warps": 8}
    block = {"WORDS": 16384, "PIECE": 8192, "PDL": True}
    for words in (16384, *(words for _, words, _ in BLOCKS.values())):
        copied = {"LISTS": 4, "BLOCK_L": 4, "PDL": True, **piece_shape(words)}
        yield "copy-blocks", bf16, _copy_blocks_kernel, copied, {"num_warps": 8}
    yield "write-back", bf16, _write_back_kernel, shard | block, {"num_warps": 8}


def token_cases() -> Iterator[tuple[str, torch.dtype, Any, dict[str, Any], dict[str, int]]]:
    """A guess and four launches, of one plane and of several, alone and with the best of the keys before."""
    tile = {"HEADS": 1, "PAGE": 128, "TILE": TOKENS, "BLOCK_PARTS": 64, "PDL": True}
    plain = [(stage, 1, 0) for stage in range(4)]
    for stage, planes, reach in [*plain, (0, 2, 0), (1, 2, 0), (3, 2, 0), (1, 1, 8), (2, 1, 8), (3, 1, 16)]:
        one = {"STAGE": stage, "PLANES": planes, "REACH": reach, "TOGETHER": planes > 1}
        for guess in (False, True)[: 1 + (stage == 2)]:
            yield (
                "select-tokens",
                torch.bfloat16,
                _select_tokens_kernel,
                tile | one | {"GUESS": guess},
                {"num_warps": 4},
            )
