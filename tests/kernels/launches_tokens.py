"""Launches of `compile_sm90` from logits to tokens: sampling, acceptance, commit, lookup, papers' verification."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers import verification_kernels as papers
from benchmarks.papers.verify_and_pack import Packed, Verified, verify_and_pack
from benchmarks.ranks.synthetic_kernels import synthetic_drafts
from kernels.tokens.accept import Distribution, accept, kept_mass
from kernels.tokens.best_token import best_of_rank, best_of_ranks
from kernels.tokens.commit import Candidates, commit
from kernels.tokens.gumbel_sample import MANY, gumbel_sample
from kernels.tokens.process_logits import process_logits
from kernels.tokens.reference import TARGET, WIDTH, LogitsState
from kernels.tokens.suffix import SuffixPool, suffix
from kernels.tokens.top_tokens import top_of_rank, top_of_ranks
from tests.kernels.launches import FP64, Launch, flags, fp32, i32, i64, launch, numbers

B, G = 4, 8  # sequences, drafts per sequence


def all_of_them() -> Iterator[Launch]:
    """Yields all launches."""
    yield from draws()
    yield from commits()
    yield from lookups()
    yield from verifications()


def distribution(T: int, V: int) -> Distribution:
    """Returns a distribution over a vocabulary shard."""
    return Distribution(fp32(B, T, V), numbers(B, T, dtype=FP64), i64(B, T), fp32(B), fp32(B))


def draws() -> Iterator[Launch]:
    """Yields sampling with a large vocabulary shard, and with a single column, for which kernels are specialized."""
    slots = LogitsState(flags(B), fp32(B), fp32(B), fp32(B), i64(B), fp32(B, 20_000), i32(B, 20_000), i32(B, 5_000))
    for V, first in ((20_000, 40_000), (1, 1)):
        column = "-column" * (V == 1)
        p, q, greedy, rows = distribution(G + 1, V), distribution(G, V), i64(B, G + 1), B * (G + 1)
        yield launch("kept-mass" + column, kept_mass, p, i64(B, G), first)
        masses = i64(B, G + 1, 2), i64(B, G, 2)
        given = i64(B, G), greedy, i64(B), i64(B), first
        yield launch("accept" + column, accept, p, q, *masses, *given)
        yield launch("accept-exact" + column, accept, p, None, masses[0], None, *given)
        yield launch("draw" + column, gumbel_sample, p, greedy, i64(B), i64(B, G + 1), TARGET, first)
        column_state = LogitsState(**vars(slots) | {"bias": fp32(B, V), "seen": i32(B, V)})
        yield launch("shape" + column, process_logits, fp32(rows, V), column_state, i64(B), i64(B), i64(rows), first)
        yield launch("top" + column, top_of_rank, fp32(B, V), i64(B), first)
        yield launch("best" + column, best_of_rank, fp32(B, V), first)
    many = distribution(1, MANY * 600 * 600)
    yield launch("draw-ruled-out", gumbel_sample, many, i64(B, 1), i64(B), i64(B, 1), TARGET, 0)
    yield launch("merge-tops", top_of_ranks, i64(100, B, WIDTH))
    yield launch("best-of-ranks", best_of_ranks, numbers(8, B, 2, dtype=FP64))


def commits() -> Iterator[Launch]:
    """Yields commits of one rank's candidates and of eight ranks'; with and without drafts, and rejection sampling."""
    state = i64(B), i64(B), i64(B), flags(B)
    for slices in (8, 64):
        plain = Candidates(numbers(slices, B, 2, dtype=FP64))
        yield launch(f"commit-{slices}", commit, plain, None, None, *state, i32(B, 0))
        candidates = Candidates(numbers(slices, B * (G + 1), 2, dtype=FP64))
        for name, outcome in (("drafts", None), ("replaced", i64(B, G))):
            yield launch(f"commit-{name}-{slices}", commit, candidates, i64(B, G), outcome, *state, i32(B, 64))
        accepted = Candidates(plain.pairs, i64(B))
        yield launch(f"commit-accepted-{slices}", commit, accepted, i64(B, G), None, *state, i32(B, 64))
    yield launch("synthetic", synthetic_drafts, i64(B), G, 0.8, 7, 1000)


def lookups() -> Iterator[Launch]:
    """Yields lookups in a sequence of a million tokens, and in 2^18 tokens of others."""
    others = SuffixPool(i64(1 << 18), i64(1), i64(B))
    for texts, longest in ((None, 3), (others, 8)):
        yield launch(f"suffix-{longest}", suffix, i32(B, 1 << 20), i64(B), texts, 4, longest)


def verifications() -> Iterator[Launch]:
    """Yields verification of 128 drafts with narrow and wide rows, and the paper's own kernels."""
    draft, target = i64(B, 128), i64(B, 129)
    for columns in (64, 8192):
        kv, out = numbers(B, 128, columns), Verified(i64(B), flags(B), i64(B))
        packed = Packed(numbers(B * 128, columns), i64(B + 1), i64(B + 1))
        yield launch(f"verify-pack-{columns}", papers.pack, kv, i64(B), packed)
        for fused in (verify_and_pack, papers.verify_and_pack_one_block):
            yield launch(f"{fused.__name__}-{columns}", fused, draft, target, kv, out, packed)
    for scan in (papers.naive, papers.ballot, papers.verify):
        yield launch(f"verify-{scan.__name__}", scan, draft, target, out)
