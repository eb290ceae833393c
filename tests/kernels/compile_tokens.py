"""Cases of `compile_sm90` from logits to tokens: draws, acceptance, verification and commit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.papers.verification_kernels import (
    _ballot_kernel,
    _naive_kernel,
    _one_block_kernel,
    _pack_kernel,
    _verify_kernel,
)
from benchmarks.papers.verify_and_pack import _verify_and_pack_kernel
from benchmarks.ranks.kept_kernels import _replay_kernel
from kernels.tokens.accept import _accept_kernel, _kept_mass_kernel
from kernels.tokens.best_token import _best_of_rank_kernel, _best_of_ranks_kernel
from kernels.tokens.commit import _commit_kernel
from kernels.tokens.draw import _draw_kernel
from kernels.tokens.shape_logits import _shape_logits_kernel
from kernels.tokens.suffix import _find_kernel, _find_others_kernel, _propose_kernel
from kernels.tokens.top_tokens import _merge_tops_kernel, _top_of_blocks_kernel


def verify_cases() -> Iterator[tuple[str, torch.dtype, Any, dict[str, Any], dict[str, int]]]:
    """128 drafted tokens, and the largest tile of a copy."""
    bf16, options = torch.bfloat16, {"num_warps": 8}
    scan, tile = {"BLOCK_G": 128, "PDL": True}, {"BLOCK": 32768, "PDL": True}
    once, more = tile | {"MORE": False}, tile | {"BLOCK": 16384, "MORE": True}
    yield "verify-naive", bf16, _naive_kernel, {"LANES": 32, "PDL": True}, {"num_warps": 1}
    ballot = {"LANES": 32, "CHUNKS": 4, "PDL": True}
    yield "verify-ballot", bf16, _ballot_kernel, ballot, {"num_warps": 1}
    yield "verify-scan", bf16, _verify_kernel, scan, {"num_warps": 1}
    yield "verify-pack", bf16, _pack_kernel, once | {"BLOCK_B": 32}, options
    yield "verify-pack-more", bf16, _pack_kernel, more | {"BLOCK_B": 32}, options
    yield "verify-one", bf16, _one_block_kernel, scan | tile | {"BLOCK_B": 32}, {"num_warps": 32}
    slices = {"BLOCK": 512, "PDL": True}
    for sampled in (True, False):
        one = {name: None for name in _accept_kernel.arg_names if name.startswith("q_") and not sampled}
        yield (
            "accept",
            torch.float32,
            _accept_kernel,
            slices | one | {"SAMPLED": sampled, "BLOCK_G": 16},
            {"num_warps": 4},
        )
    yield "kept-mass", torch.float32, _kept_mass_kernel, slices | {"T": 9}, {"num_warps": 4}
    column = slices | {"V": 1, "first": 1}  # a rank's only one, if the kernel is compiled for such numbers
    yield "kept-mass-column", torch.float32, _kept_mass_kernel, column | {"T": 2}, {"num_warps": 4}
    yield "accept-column", torch.float32, _accept_kernel, column | {"SAMPLED": True, "BLOCK_G": 16}, {"num_warps": 4}
    yield "shape-column", torch.float32, _shape_logits_kernel, column | {"BLOCK": 1024}, {"num_warps": 4}
    yield "top-column", torch.float32, _top_of_blocks_kernel, column | {"BLOCK": 2048}, {"num_warps": 4}
    yield from commit_cases()
    yield from lookup_cases()
    yield "synthetic", bf16, _replay_kernel, {"seed": 7, "BLOCK": 32, "PDL": True}, {"num_warps": 1}
    yield "shape-logits", torch.float32, _shape_logits_kernel, {"BLOCK": 1024, "PDL": True}, {"num_warps": 4}
    yield "top-of-blocks", torch.float32, _top_of_blocks_kernel, {"BLOCK": 2048, "PDL": True}, {"num_warps": 4}
    yield (
        "merge-tops",
        torch.float32,
        _merge_tops_kernel,
        {"BLOCK": 2048, "BLOCK_N": 128, "PDL": True},
        {"num_warps": 4},
    )
    find = scan | {"ROWS": 8, "BLOCK_B": 256, "LOOKS": 1000}
    few = once | {"BLOCK": 2048, "AHEAD": True, "shared": None}
    yield "verify-fused", bf16, _verify_and_pack_kernel, find | once | {"AHEAD": False}, options
    yield "verify-fused-more", bf16, _verify_and_pack_kernel, find | more | {"AHEAD": False}, options
    yield "verify-fused-few", bf16, _verify_and_pack_kernel, find | few, {"num_warps": 4}


def commit_cases() -> Iterator[tuple[str, torch.dtype, Any, dict[str, Any], dict[str, int]]]:
    """Candidates of one rank and of eight; without drafts, with some, and with some that rejection sampling accepts."""
    kernel, options = _commit_kernel, {"num_warps": 1}
    absent = {"outcome": None, "PDL": True}
    plain = absent | {"draft": None, "drawn_at": None, "history": None, "BLOCK_G": 1}
    yield "commit-plain", torch.bfloat16, kernel, plain | {"WIDTH": 64}, options
    yield "commit-plain-ranks", torch.bfloat16, kernel, plain | {"WIDTH": 512}, options
    yield "commit", torch.bfloat16, kernel, absent | {"drawn_at": None, "BLOCK_G": 16, "WIDTH": 32}, options
    yield "commit-accepted", torch.bfloat16, kernel, absent | {"BLOCK_G": 16, "WIDTH": 256}, options
    replaced = {name: value for name, value in absent.items() if name != "outcome"}
    yield "commit-replaced", torch.bfloat16, kernel, replaced | {"drawn_at": None, "BLOCK_G": 32, "WIDTH": 16}, options
    yield "best-of-ranks", torch.bfloat16, _best_of_ranks_kernel, {"WIDTH": 512, "PDL": True}, options
    best = {"BLOCK": 1024, "PDL": True}
    yield "best-of-rank", torch.float32, _best_of_rank_kernel, best, {"num_warps": 4}
    yield "best-column", torch.float32, _best_of_rank_kernel, best | {"V": 1, "first": 1}, {"num_warps": 4}
    drawn, options = {"STREAM": 0, "BLOCK": 512, "PDL": True}, {"num_warps": 4, "maxnreg": 80}
    for rules_out in (True, False):
        name = "draw-ruled-out" if rules_out else "draw"
        yield name, torch.float32, _draw_kernel, drawn | {"RULES_OUT": rules_out}, options
    column = drawn | {"RULES_OUT": False, "V": 1, "first": 1}
    yield "draw-column", torch.float32, _draw_kernel, column, options


def lookup_cases() -> Iterator[tuple[str, torch.dtype, Any, dict[str, Any], dict[str, int]]]:
    """Prompt lookup in a sequence of a million tokens, and in 2^18 of others."""
    search = {"LONGEST": 8, "BLOCK": 1024, "PDL": True}
    propose = {"BLOCKS": 1024, "MORE_BLOCKS": 256, "DRAFTS": 4, "PDL": True}
    own = dict.fromkeys(("others", "cursor", "salts", "others_found")) | {"MORE_BLOCKS": 0}
    yield "lookup", torch.bfloat16, _find_kernel, search | {"LONGEST": 3, "BLOCK": 4096}, {"num_warps": 8}
    yield "lookup-propose-own", torch.bfloat16, _propose_kernel, propose | own, {"num_warps": 1}
    yield "lookup-others", torch.bfloat16, _find_others_kernel, search, {"num_warps": 8}
    yield "lookup-propose", torch.bfloat16, _propose_kernel, propose, {"num_warps": 1}
