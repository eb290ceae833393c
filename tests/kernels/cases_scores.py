"""Cases of the key scores that verification writes next to attention, with scores in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from helix.layout import HelixLayout
from helix.worker.kv_cache_spec import dtype_name, score_planes
from kernels.attention.flash_decode import decode_tile, flash_decode
from kernels.mla.decode import mla_decode
from kernels.mla.latent_tiles import latent_tile
from kernels.paged_keys import KeyScores
from tests.kernels.cases_attention import GROUPS_ON_HOPPER, Shapes, many_rows_on_hopper, other_bounds, some
from tests.kernels.oracle import Case, make_case, make_latents
from tests.kernels.suite import FEW_BITS, KERNEL, Mode, Op, sms


@dataclass
class Scored(Case):
    """Attention with key scores, and the same without; queries that read nothing are NaN.

    Attributes:
        rows: which queries count, see `KeyScores`.
        table: pages of scores, which differ from the keys' pages.
        planes: number of terms of a key's score.
    """

    rows: str = "any"
    table: Tensor | None = None
    planes: int = 1

    def run(self, function: Any, **options: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Returns output and LSE, those of attention alone, and one layer's planes among others, which were NaN."""
        assert self.table is not None
        plain, q = super().run(function, **options), self.q
        heads = self.keys[0].shape[1]
        planes = torch.full(
            (2, self.planes, self.table.numel(), heads, self.store.page_size),
            torch.nan,
            dtype=torch.float16,
            device=q.device,
        )
        self.q = torch.where((self.lo < self.hi)[:, None, None], q, torch.nan)
        out, lse = super().run(function, **options, scores=KeyScores(planes[1], self.table, self.rows))
        self.q = q
        return out, lse, *plain, planes[1]

    @cached_property
    def wanted_scores(self) -> list[Tensor]:
        return [self.of_sequence(b) for b in range(len(self.counts))]

    def row_tile(self, rows: int) -> int:
        """Returns how many of a sequence's rows per KV head the kernel scores together."""
        latent, width = self.values[0].shape[-1], self.q.shape[-1]
        if latent == width:
            return decode_tile(rows, width, self.q.dtype)["BLOCK_M"]
        few_bits = self.store.k_scale is not None
        return latent_tile(rows, latent, width - latent, self.q.dtype, few_bits)["BLOCK_M"]

    def of_sequence(self, b: int) -> Tensor:
        """Returns [Hkv, n] float64, base 2: the maximum over queries that read a key, or the mean over some of them."""
        T, keys, factor = self.counts[b], self.keys[b].double().cpu(), self.store.scale * math.log2(math.e)
        live = [n for n in range(b * T, (b + 1) * T) if self.lo[n] < self.hi[n]]
        heads = keys.shape[1]
        seen = keys[: max((int(self.hi[n]) for n in live), default=0)]
        if self.rows == "any":
            q = self.q[b * T : (b + 1) * T].double().cpu().unflatten(1, (heads, -1))  # [T, Hkv, group, D]
            tile = self.row_tile(T * q.shape[2])
            each = torch.einsum("thgd,nhd->hntg", q, seen)
            counts = torch.tensor([n in live for n in range(b * T, (b + 1) * T)])[:, None].expand(each.shape)
            bests = [
                part.masked_fill(~mask, -torch.inf).amax(2).nan_to_num(neginf=0)  # a tile may have no counted row
                for part, mask in zip(each.flatten(2).split(tile, 2), counts.flatten(2).split(tile, 2), strict=True)
            ]
            return torch.stack(bests).sum(0) * factor / (T * q.shape[2])
        total = torch.zeros(heads, len(seen), dtype=torch.float64)
        for n in {live[0], live[-1]} if live else ():
            q = self.q[n].double().cpu().view(heads, -1, keys.shape[-1]).mean(1)
            total += torch.einsum("hd,nhd->hn", q, seen) * factor / T
        return total

    def check(self, *found: Tensor) -> None:
        """Checks that attention is unchanged by scores, and that empty queries score nothing, also in whole tiles."""
        out, lse, plain, plain_lse, planes = found
        # With scores, compilation may reorder sums: the last digit of out, 1e-5 in fp32.
        digit = max(1e-5, torch.finfo(out.dtype).eps) if out.is_cuda else 0.0
        torch.testing.assert_close(out, plain, atol=digit, rtol=digit)
        torch.testing.assert_close(lse, plain_lse, atol=min(digit, 1e-5), rtol=min(digit, 1e-6))
        empty = out[self.lo >= self.hi]
        assert torch.equal(empty, torch.zeros_like(empty))
        super().check(out, lse)
        assert self.table is not None
        table, page_size = self.table.cpu().long(), planes.shape[3]
        for b, wanted in enumerate(self.wanted_scores):
            places = torch.arange(table.shape[1] * page_size)
            of_places = planes.cpu()[:, table[b, places // page_size], :, places % page_size].double()
            scores = of_places[: wanted.shape[1]].permute(1, 2, 0)  # [planes, Hkv, n]
            assert scores.isfinite().all()
            # fp16 keeps 2^-11 of each plane, and fp32 sums (of exact 16-bit products) are within 1e-5. A query sum over
            # many rows is two 16-bit values, within 5e-5.
            sizes, off = scores.abs().sum(0), (scores.sum(0) - wanted).abs()
            assert (off <= 2**-10 * sizes + 1e-4).all(), off.max()
            assert of_places[len(self.keys[b]) :].isnan().all(), "scores of keys that nobody has"


def make_scored(
    counts: list[int], lengths: list[int], *, rows: str = "any", dropped: int = 0, **options: Any
) -> Scored:
    """Makes cases whose first sequence's last queries are not tokens: they read nothing; with `latent`, of latents."""
    case = (make_latents if "latent" in options else make_case)(counts, lengths, **options)
    T, group = counts[0], case.q.shape[1] // case.keys[0].shape[1]
    if dropped:
        case.hi[T - dropped : T] = case.lo[T - dropped : T] = 0
    B, columns = case.store.table.shape
    table = torch.randperm(B * columns, generator=torch.Generator().manual_seed(1)).view(B, columns).int()
    planes = score_planes(T, group, None if "latent" in options else case.q.shape[2], dtype_name(case.q.dtype))
    return Scored(**vars(case), rows=rows, table=table.to(case.q.device), planes=planes)


SHAPES: Shapes = {
    "plain": dict(counts=[3, 3, 3], lengths=[40, 3, 17], dropped=2),
    "one-query": dict(counts=[1, 1], lengths=[90, 5]),
    "group-7": dict(counts=[5, 5], lengths=[70, 0], heads=(14, 2), dim=80, page_size=48, dropped=2),
    "pages-of-1": dict(counts=[4, 4], lengths=[37, 9], heads=(6, 2), dim=96, page_size=1, dropped=2),
    "64-rows": dict(counts=[8, 8], lengths=[101, 40], heads=(8, 1), dim=128, page_size=64, dropped=2),
    "84-rows": dict(counts=[12, 12], lengths=[141, 30], heads=(7, 1), dim=128, page_size=128, dropped=2),
    "pages-of-100-two-tiles": dict(counts=[20], lengths=[133], heads=(8, 1), dim=96, page_size=100, dropped=10),
    "sinks": dict(counts=[2, 2], lengths=[75, 9], heads=(8, 2), dim=128, sinks=True, dropped=1),
    # Drafts that cross over to a rank without earlier keys: their first queries read no key there.
    "first-queries-without-keys": dict(counts=[4, 4, 4], lengths=[2, 1, 40], heads=(6, 2), dim=64),
    "first-tile-without-keys": dict(counts=[12], lengths=[5], heads=(8, 2), dim=64),
    "few-bits": dict(counts=[3, 3], lengths=[66, 20], kv="fp8"),
}
LONG: Shapes = {
    f"{q}-over-{kv}-dim-{dim}-verify-{count}": dict(
        counts=[count] * 3, lengths=[9000, 12, 1333], heads=(q, kv), dim=dim, page_size=128, dtype=torch.bfloat16
    )
    for q, kv, dim, count in ((28, 4, 128, 8), (32, 8, 128, 5), (16, 2, 64, 8), (8, 1, 128, 12))
}


def swap_queries(case: Scored, dest: slice, source: slice) -> None:
    """Replaces queries: their attention is right, but scores are not those of all queries."""
    case.q = case.q.clone()
    case.q[dest] = case.q[source]
    case.__dict__.pop("wanted")


def other_lengths(case: Scored) -> Iterator[None]:
    """Yields with other lengths."""
    for _ in other_bounds(case, [[9000, 12, 1333], [12, 0, 64], [4096, 5, 700]]):
        case.__dict__.pop("wanted_scores", None)
        yield


HALVES = dict(counts=[12], lengths=[80], heads=(7, 1), page_size=64, dim=128, dtype=torch.float16)
SCORES = Op(
    "key_scores", make_scored, flash_decode,
    mistakes={
        f"{half}-of-the-rows-alone-{rows}": (HALVES | dict(rows=rows), partial(swap_queries, dest=dest, source=source))
        for half, dest, source in (  # 64 rows, and the rest of the tenth query
            ("first-half", slice(9, 12), slice(0, 1)),
            ("second-half", slice(0, 10), slice(11, 12)),
        )
        for rows in ("ends", "any")
    },
    replays=other_lengths,
)  # fmt: skip
LATENT_SCORES = Op("latent_scores", make_scored, mla_decode, replays=other_lengths)
SCORED_LATENTS: Shapes = {
    name: shape | dict(latent=shape.get("latent", 32))
    for name, shape in {
        "plain": dict(counts=[3, 3, 3], lengths=[40, 3, 17], dropped=2),
        "one-query": dict(counts=[1, 1], lengths=[90, 5], page_size=48),
        "pages-of-1": dict(counts=[4, 4], lengths=[37, 9], heads=3, page_size=1, dropped=2),
        "tiles-of-rows": dict(counts=[5, 5], lengths=[101, 40], heads=20, page_size=64, dropped=2),
        "first-queries-without-keys": dict(counts=[4, 4, 4], lengths=[2, 1, 40], heads=6, latent=40, rope=24),
        "first-tile-without-keys": dict(counts=[12], lengths=[5], heads=5),
        "few-bits": dict(counts=[3, 3], lengths=[66, 20], heads=11, latent=136, kv="fp8"),
    }.items()
}
ENDS_AND_ANY = ("ends", "any")
OPS = [SCORES, LATENT_SCORES]
ROWS = [
    *SCORES.rows(SHAPES, modes=sms(3), rows=ENDS_AND_ANY, pairs=True),
    *SCORES.rows(
        {"split": dict(counts=[3, 3], lengths=[290, 70], heads=(6, 2), dim=128, rows="ends")},
        which=KERNEL, modes=sms(1, 7),
    ),
    *SCORES.rows(
        some(SHAPES, "64-rows", "84-rows", "sinks"), which=KERNEL, modes=sms(2), rows=ENDS_AND_ANY, dtype=FEW_BITS
    ),
    *LATENT_SCORES.rows(SCORED_LATENTS, modes=sms(3), rows=ENDS_AND_ANY, pairs=True),
    *LATENT_SCORES.rows(
        some(SCORED_LATENTS, "tiles-of-rows"), which=KERNEL, modes=sms(2), rows=ENDS_AND_ANY, dtype=FEW_BITS
    ),
    *LATENT_SCORES.rows(
        {
            f"{heads}-heads-verify-{count}": dict(
                counts=[count] * 4, lengths=[5000, count, 333, 64], heads=heads, page_size=64, dropped=count // 2
            )
            for heads, count in ((16, 2), (16, 8), (64, 5), (128, 1), (128, 8))
        },
        which=KERNEL, gpu=True, rows=ENDS_AND_ANY, kv=("auto", "fp8"), dtype=(torch.bfloat16,), latent=(512,),
        rope=(64,), modes=sms(7),
    ),
    *SCORES.rows(LONG, which=KERNEL, gpu=True, rows=ENDS_AND_ANY),
    *SCORES.rows(
        {name: shape for name, shape in GROUPS_ON_HOPPER.items() if "first" not in name},
        which=KERNEL, gpu=True, hopper=many_rows_on_hopper, modes=sms(3), dim=(128,), dropped=(0, 5),
        rows=ENDS_AND_ANY, dtype=FEW_BITS,
    ),
    *SCORES.rows(
        some(GROUPS_ON_HOPPER, "hopper-first-queries-without-keys"), which=KERNEL, gpu=True, hopper=many_rows_on_hopper,
        modes=sms(3), dim=(128,), rows=ENDS_AND_ANY, dtype=FEW_BITS,
    ),
]  # fmt: skip
# Runs begin and end inside items, on all SMs; early, as in a step.
GRAPHS = SCORES.rows(
    {
        "early": dict(
            counts=[12] * 3, lengths=[9000, 12, 1333], heads=(14, 2), dim=128, page_size=64, dtype=torch.bfloat16
        )
    },
    which=KERNEL, modes={"": Mode({"early": True})}, rows=ENDS_AND_ANY,
)  # fmt: skip

HEAD_DIMS = (8, 16, 64, 80, 96, 128, 256)


def straddling(seed: int, n: int, rows: str, device: torch.device) -> Scored:
    """Makes drafts of three sequences on one rank of a layout: shape by `seed`, lengths and bounds also by `n`."""
    max_tokens, max_rows = (40, 40) if device.type == "cpu" else (3000, 130)  # tokens before the drafts, rows
    rng = random.Random(seed)
    kv_heads, group = rng.choice((1, 1, 2)), rng.choice((1, 2, 3, 5, 7, 8, 16))
    T = rng.randint(1, min(32, max_rows // group))
    dim, page_size = rng.choice(HEAD_DIMS), rng.choice((16, 32, 48, 64, 100, 128))
    dtype = torch.float32 if device.type == "cpu" else rng.choice((torch.float32, torch.bfloat16, torch.float16))
    rng = random.Random(f"{seed} {n}")
    layout = HelixLayout.create("helix", rng.choice((2, 3, 8)), 1)
    append_block, rank = rng.randint(1, 40), rng.randrange(layout.kvp)
    reads = []
    for _ in range(3):
        start = rng.randrange(layout.kvp)
        # Mostly the rank's first keys are the drafts' own.
        first = (rank - start) % layout.kvp * append_block
        before = max(0, first - rng.randint(0, T)) if rng.random() < 0.6 else rng.randint(0, max_tokens)
        tokens = rng.randint(1, T)  # the rest are not drafts
        hi = [layout.local_length(before + t + 1, rank, append_block, start) for t in range(tokens)]
        reads.append(hi + [0] * (T - tokens))
    return make_scored(
        [T] * 3, [max(hi) for hi in reads], heads=(kv_heads * group, kv_heads), dim=dim, page_size=page_size,
        dtype=dtype, reads=reads, device=device, seed=seed, rows=rows,
    )  # fmt: skip
