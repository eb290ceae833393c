"""Attention of decode steps and prompts, over keys and values: tables of cases of `tests.kernels.oracle`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.attention import flash_decode_fp8_sm90, flash_decode_many_rows_sm90, flash_prefill_sm90
from kernels.attention.flash_decode import flash_decode
from kernels.attention.flash_prefill import flash_prefill
from kernels.attention.merge_states import merge_states
from tests.kernels.oracle import Case, few_bits, make_case
from tests.kernels.suite import FEW_BITS, FLOATS, KERNEL, PLAIN, Call, Mode, Op, shapes_of, sms

Shapes = dict[str, dict[str, Any]]


def some(shapes: Shapes, *names: str) -> Shapes:
    """Selects shapes by name."""
    return {name: shapes[name] for name in names}


# ---- faults that have to show, and NaN that has to propagate


def without_last_key(case: Case) -> None:
    """Drops the first query's last key."""
    case.hi[0] -= 1


def with_another_key(case: Case) -> None:
    """Reads one slot beyond the last sequence's keys, with a finite value in it."""
    page, slot = divmod(len(case.keys[-1]), case.store.page_size)
    for cache in (case.store.k, case.store.v):
        cache[case.store.table[-1, page].long(), slot] = cache[case.store.table[0, 0].long(), 0]
    case.hi[-1] += 1


def scaled_more(case: Case) -> None:
    """Changes the scale by 0.1%."""
    case.store = replace(case.store, scale=1.001 * case.store.scale)


def other_lse(case: Case) -> None:
    """Shifts the expected LSE."""
    case.wanted[1].add_(1e-3)


def sink_in_base_2(case: Case) -> None:
    """Takes sinks for base-2 logarithms."""
    assert case.store.sinks is not None
    case.store.sinks.add_(math.log(2))


def rolled(case: Case, name: str, dim: int) -> None:
    """Takes the scales of another page, head or group, or slot."""
    scales = getattr(case.store, name).roll(1, dim).contiguous().nan_to_num(1.0)
    case.store = replace(case.store, **{name: scales})


def nan_in(case: Case, name: str, column: int = 5) -> None:
    """Puts NaN into the fourth slot of a sequence's first page."""
    plane, page = getattr(case.store, name), case.store.table[0, 0].long()
    if name == "k_scale":
        plane[page, 0, 3] = torch.nan
    else:
        plane[page, 3, ..., column] = torch.tensor(torch.nan).to(plane.dtype)


def other_bounds(case: Case, lengths: list[list[int]]) -> Iterator[None]:
    """Yields with the bounds of other lengths, one key less for each query before the last."""
    counts = torch.tensor(case.counts)
    before = counts.repeat_interleave(counts) - 1 - torch.cat([torch.arange(n) for n in case.counts])
    for sequences in lengths:
        last = torch.tensor(sequences).repeat_interleave(counts)
        case.hi.copy_((last - before).clamp(min=0))
        case.__dict__.pop("wanted", None)
        yield


TWO = dict(counts=[1, 1], lengths=[40, 23])
DECADES: dict[str, Any] = dict(counts=[1, 1], lengths=[90, 33], kv="fp8", decades=True)

# ---- decode over keys and values

DECODE = Op(
    "flash_decode", make_case, flash_decode,
    mistakes={
        "one-key-left-out": (TWO, without_last_key),
        "one-key-too-many": (TWO, with_another_key),
        "scale": (TWO, scaled_more),
        "lse": (TWO, other_lse),
        "sink": (TWO | dict(sinks=True), sink_in_base_2),
        **{
            f"{name}-of-another-{of}": (DECADES | dict(heads=(6, 2)), partial(rolled, name=name, dim=dim))
            for name in ("k_scale", "v_scale")
            for dim, of in enumerate(("page", "head", "slot"))
        },
    },
    nan={"key": (dict(counts=[1], lengths=[20]), partial(nan_in, name="k"))},
    replays=partial(other_bounds, lengths=[[700, 3, 250], [1, 0, 64], [512, 2, 0]]),
)  # fmt: skip
SHAPES: Shapes = {
    "plain": dict(counts=[1, 1, 1], lengths=[40, 1, 17]),
    "empty-shards": dict(counts=[1, 1, 1], lengths=[0, 33, 0]),
    "all-empty": dict(counts=[1, 1], lengths=[0, 0]),
    "group-7": dict(counts=[1, 1], lengths=[70, 5], heads=(7, 1), dim=80, page_size=48),
    "group-16-verify-3": dict(counts=[3, 3], lengths=[66, 3], heads=(16, 1), dim=64, page_size=100),
    "group-3-page-1": dict(counts=[2, 2], lengths=[37, 2], heads=(6, 2), dim=96, page_size=1),
    "mha-verify-8": dict(counts=[8, 8], lengths=[129, 8], heads=(2, 2)),
    "verify-32": dict(counts=[32], lengths=[50], heads=(4, 1), dim=16, page_size=16),
    "dim-256": dict(counts=[1], lengths=[65], heads=(2, 1), dim=256, page_size=64),
    "dim-8": dict(counts=[1], lengths=[20], heads=(5, 1), dim=8),
    "window": dict(counts=[1, 1, 1], lengths=[90, 20, 7], window=19),
    "window-verify": dict(counts=[4, 4], lengths=[90, 21], window=10, page_size=48),
    "sinks": dict(counts=[1, 1, 1], lengths=[130, 0, 17], heads=(14, 2), sinks=True),
    "sinks-window-verify": dict(counts=[4, 4], lengths=[90, 2], heads=(6, 2), window=10, page_size=48, sinks=True),
    "fewer-keys-than-queries": dict(counts=[4, 4], lengths=[2, 40]),
}
# A long sequence with a short one, items that begin inside a run, and several query tiles: more partials than one
# program merges.
IN_PARTS = {
    52: dict(counts=[1, 1], lengths=[1500, 100]),
    40: dict(counts=[1, 1], lengths=[1490, 100]),
    37: dict(counts=[2, 2], lengths=[1100, 100]),
    36: dict(counts=[17, 17], lengths=[900, 100]),
}
# More than 64 rows per KV head: tiles of 128, and masks for partial tiles of keys (except in fp32).
MANY_ROWS: Shapes = {
    "65": dict(counts=[13, 13], lengths=[301, 5], heads=(5, 1), dim=128),
    "96-pages-of-100": dict(counts=[12], lengths=[333], heads=(8, 1), dim=96, page_size=100),
    "100-window": dict(counts=[10, 10], lengths=[390, 0], heads=(10, 1), dim=64, page_size=64, window=150),
    "128-sinks": dict(counts=[16], lengths=[257], heads=(16, 2), dim=128, page_size=64, sinks=True),
    "group-of-72": dict(counts=[1, 1], lengths=[200, 64], heads=(72, 1), dim=128, page_size=64),
    "256": dict(counts=[32], lengths=[290], heads=(8, 1), dim=128),
    "72-dim-256": dict(counts=[9], lengths=[150], heads=(8, 1), dim=256, page_size=64),
}
# Pages whose scales end between multiples of 16 bytes, tokens of one page in several tiles, and the default page.
BLOCK_SHAPES: Shapes = {
    "odd": dict(counts=[2, 2], lengths=[90, 33], heads=(6, 2), dim=48, page_size=7),
    "small": dict(counts=[1, 1], lengths=[50, 21], heads=(4, 4), dim=64, page_size=16),
    "usual": dict(counts=[3, 3], lengths=[300, 129], heads=(7, 1), dim=128, page_size=128),
}
LONG: Shapes = {
    f"{q}-over-{kv}-dim-{dim}-verify-{count}": dict(counts=[count] * 3, lengths=[5000, 0, 333], heads=(q, kv), dim=dim)
    for q, kv, dim, count in ((32, 8, 128, 1), (28, 4, 128, 8), (8, 1, 64, 32), (16, 2, 256, 4))
}
FEW_BITS_ON_HOPPER: Shapes = {
    "hopper-group-7": dict(counts=[1, 1, 1], lengths=[700, 1, 129], heads=(28, 4), dim=128, page_size=64),
    "hopper-page-128": dict(counts=[2, 2], lengths=[1500, 300], heads=(14, 2), dim=128, page_size=128),
    "hopper-40-sequences": dict(counts=[1] * 40, lengths=[*range(0, 400, 10)], heads=(8, 1), dim=64, page_size=16),
    "hopper-sinks-window": dict(
        counts=[4, 4], lengths=[600, 3], heads=(4, 1), dim=128, page_size=48, window=200, sinks=True
    ),
    "hopper-window": dict(counts=[1], lengths=[2000], heads=(16, 1), dim=128, page_size=100, window=900),
    "hopper-sinks": dict(counts=[3, 3], lengths=[260, 1], heads=(2, 2), dim=64, page_size=64, sinks=True),
    "hopper-verify-5": dict(counts=[5, 5], lengths=[900, 6], heads=(8, 2), dim=128, page_size=64),
    "hopper-empty-shard": dict(
        counts=[4, 4, 4], lengths=[333, 0, 2100], heads=(8, 1), dim=128, page_size=128, window=500, sinks=True
    ),
    "hopper-dim-64-page-16": dict(counts=[4, 4], lengths=[140, 70], heads=(14, 2), dim=64, page_size=16),
}
# 65 to 128 rows per KV head. The 64th is inside a query's group except for groups of 8 and 16: other warps attend half
# of its heads.
GROUPS_ON_HOPPER: Shapes = {
    "hopper-10-of-7": dict(counts=[10, 10, 10], lengths=[700, 10, 129], heads=(14, 2), page_size=64),
    "hopper-12-of-7": dict(counts=[12] * 4, lengths=[500, 12, 1000, 64], heads=(7, 1), page_size=128),
    "hopper-18-of-7": dict(counts=[18, 18], lengths=[333, 3000], heads=(7, 1), page_size=64),
    "hopper-13-of-5": dict(counts=[13, 13], lengths=[301, 50], heads=(10, 2), page_size=192),
    "hopper-16-of-8": dict(counts=[16, 16], lengths=[777, 16], heads=(8, 1), page_size=128),
    "hopper-25-of-3": dict(counts=[25, 25], lengths=[640, 91], heads=(3, 1), page_size=64),
    # Drafts that cross over to a rank without earlier keys: their first queries read no key there.
    "hopper-first-queries-without-keys": dict(counts=[12, 12, 12], lengths=[5, 1, 90], heads=(7, 1), page_size=64),
    "hopper-40-sequences": dict(counts=[12] * 40, lengths=[*range(12, 412, 10)], heads=(7, 1), page_size=64),
}
ROWS_ON_HOPPER: Shapes = GROUPS_ON_HOPPER | {
    "hopper-window": dict(counts=[10, 10], lengths=[690, 12], heads=(20, 2), page_size=64, window=150),
    "hopper-sinks": dict(counts=[16, 16], lengths=[257, 20], heads=(16, 2), page_size=64, sinks=True),
    "hopper-sinks-window": dict(counts=[12, 12], lengths=[900, 77], heads=(7, 1), page_size=128, sinks=True, window=70),
    "hopper-one-query-of-72": dict(counts=[1, 1, 1], lengths=[200, 0, 64], heads=(72, 1), page_size=64),
    "hopper-nothing": dict(counts=[12, 12], lengths=[0, 0], heads=(7, 1), page_size=64),
}


def rows_of(case: Case) -> tuple[Tensor, Any]:
    """Returns queries and keys by sequence."""
    B = len(case.counts)
    return case.q.unflatten(0, (B, -1)), case.paged(B)


def few_bits_on_hopper(case: Case) -> bool:
    """Whether the SM90 FP8 decode kernel supports a case."""
    return flash_decode_fp8_sm90.fits(*rows_of(case))


def many_rows_on_hopper(case: Case) -> bool:
    """Whether the SM90 kernel for many rows supports a case."""
    return flash_decode_many_rows_sm90.fits(*rows_of(case))


def small_values(dtype: torch.dtype, device: torch.device) -> Case:
    """Makes weights far below the maximum, of values of 0.01, in fp16's range: many of them make up the output."""
    made = make_case([1], [2000], heads=(4, 1), dim=128, page_size=64, dtype=dtype)
    one, pages, slots = torch.arange(2000), made.store.table[0, :32].long(), torch.arange(64)
    keys = torch.zeros_like(made.keys[0])
    keys[:, :, 0] = torch.where(one == 700, 70.0, 0.0)[:, None]
    whole = torch.full((2048, 1, 128), torch.nan, dtype=dtype)
    k, v = made.store.k.clone(), made.store.v * 0.01
    whole[:2000] = keys
    k[pages[:, None], slots] = whole.view(32, 64, 1, 128)
    made.q.zero_()
    made.q[..., 0] = 1.0
    case = replace(made, store=replace(made.store, k=k.contiguous(), v=v.contiguous()))
    case = few_bits(replace(case, keys=[keys], values=[made.values[0] * 0.01]), "fp8", False)
    on = {name: x.to(device) for name, x in vars(case.store).items() if isinstance(x, Tensor)}
    moved = replace(case, q=case.q.to(device), lo=case.lo.to(device), hi=case.hi.to(device), size=0.01)
    return replace(moved, store=replace(case.store, **on))


SMALL_VALUES = Op("flash_decode-small-values", small_values, flash_decode)
DECODE_ROWS = [
    *DECODE.rows(SHAPES),
    *DECODE.rows(
        some(SHAPES, "plain", "group-16-verify-3", "window-verify", "empty-shards", "sinks"),
        which=KERNEL, modes=sms(1, 2, 7, 50), pairs=True,
    ),
    *(row for n, shape in IN_PARTS.items() for row in DECODE.rows({"in-parts": shape}, which=KERNEL, modes=sms(n))),
    *DECODE.rows(MANY_ROWS, which=KERNEL, modes=sms(2), dtype=FEW_BITS),
    *DECODE.rows(
        {"low-precision": dict(counts=[2, 2], lengths=[75, 9], heads=(8, 2), dim=128)},
        dtype=FEW_BITS, sinks=(False, True),
    ),
    *DECODE.rows(
        {"into-a-slice": dict(counts=[1, 1], lengths=[40, 0])},
        which=KERNEL, modes={"": Mode({"room": (4, 0), "sms": 3})},
    ),
    *DECODE.rows(SHAPES, pairs=True, kv=("fp8", "k16v8"), dtype=FLOATS),
    *DECODE.rows(BLOCK_SHAPES, pairs=True, kv=("auto", "k16v8", "fp8"), layout=("blocks", "places"), dtype=FLOATS),
    *DECODE.rows(
        {"heads": dict(counts=[1, 1, 1], lengths=[331, 0, 47], layout="heads")},
        modes=sms(3), pairs=True, heads=((4, 2), (7, 1), (6, 6)), page_size=(16, 48, 128, 1),
    ),
    *DECODE.rows(
        {"tokens": dict(counts=[1, 1], lengths=[50, 21], layout="tokens", kv="fp8")},
        dtype=(torch.float32, torch.float16), dim=(64, 80), pairs=True,
    ),
    *DECODE.rows(
        {"queries-of-nearly-nothing": dict(counts=[2, 2], lengths=[90, 33], heads=(6, 2), kv="fp8")},
        pairs=True, shrunk=(0.0, 1e-7), dtype=FLOATS,
    ),
    *DECODE.rows({"scales-over-decades": DECADES | dict(counts=[2, 2], heads=(6, 2), page_size=48)}),
    *SMALL_VALUES.rows({"": {}}, which=KERNEL, dtype=FLOATS),
    *DECODE.rows(
        LONG, which=KERNEL, gpu=True, page_size=(64,), dtype=(torch.bfloat16, torch.float32), sinks=(False, True)
    ),
    *DECODE.rows(
        FEW_BITS_ON_HOPPER, which=KERNEL, gpu=True, hopper=few_bits_on_hopper, modes=PLAIN | sms(1, 3),
        kv=("fp8", "k16v8"), dtype=FEW_BITS,
    ),
    *DECODE.rows(
        ROWS_ON_HOPPER, which=KERNEL, gpu=True, hopper=many_rows_on_hopper, modes=PLAIN | sms(1, 3),
        dim=(128,), dtype=FEW_BITS,
    ),
    *DECODE.rows(
        {
            "one-query": dict(counts=[1], lengths=[100], heads=(4, 1)),
            "many-rows": dict(counts=[12], lengths=[100], heads=(7, 1)),
        },
        which=KERNEL, gpu=True, gb=20, dim=(128,), page_size=(64,), dtype=(torch.bfloat16,), far=(True,),
    ),
]  # fmt: skip

# ---- prompts over keys and values


def hopper_settings(splits: int = 1, rows: int = 1) -> dict[str, Any]:
    """Returns the thresholds that send all chunks to the SM90 kernel, and the number of key splits."""
    module = "kernels.attention.flash_prefill_sm90."
    return {
        module + "MIN_ROWS": rows,
        module + "MIN_KEYS_MANY_ROWS": 0,
        SPLIT_COUNT: lambda items, tiles, slots: splits,
    }


SPLIT_COUNT = "kernels.attention.split_prefill.split_count"
# Split keys, sometimes more splits than tiles of keys: a sink counts once, no key twice.
SPLIT = {"split": Mode(settings={SPLIT_COUNT: lambda items, tiles, slots: 3})}


def poisoned(x: Tensor, *size: Any, **more: Any) -> Tensor:
    """Makes a NaN tensor like x."""
    made = x.new_full(size[0] if len(size) == 1 and not isinstance(size[0], int) else size, 0, **more)
    return made.fill_(torch.nan) if made.is_floating_point() else made


# Pages per segment to unpack at once: one, and some; their memory was NaN.
PIECES = {
    f"pieces-of-{size}-bytes": Mode(
        settings={"kernels.attention.dequantized_prefill.PIECE_BYTES": size, "torch.Tensor.new_empty": poisoned}
    )
    for size in (1, 100_000)
}
SHARED_KEYS = "late-chunks", "shard-shorter-than-chunk", "empty-shard", "window", "many-segments"
IN_PIECES = "whole-prompts", "late-chunks", "empty-segment-between", "shard-shorter-than-chunk", "window"
SEVERAL = [0 if i % 11 == 3 else 40 if i % 50 == 7 else 5 * i % 14 for i in range(150)]
PROMPTS: Shapes = {
    "whole-prompts": dict(counts=[33, 1, 16], lengths=[33, 1, 16]),
    "late-chunks": dict(counts=[20, 40], lengths=[150, 41], page_size=48),
    "empty-segment-between": dict(counts=[5, 0, 7], lengths=[9, 0, 70]),
    "shard-shorter-than-chunk": dict(counts=[40, 30], lengths=[12, 30]),
    "empty-shard": dict(counts=[30], lengths=[0]),
    "group-7": dict(counts=[19, 40], lengths=[64, 40], heads=(14, 2), dim=80, page_size=1),
    "group-16": dict(counts=[20], lengths=[31], heads=(16, 1), dim=128),
    "window": dict(counts=[70, 9], lengths=[150, 9], window=23, page_size=100),
    "sinks": dict(counts=[20, 3, 5], lengths=[150, 0, 5], heads=(6, 2), sinks=True),
    "sinks-window": dict(counts=[70, 9], lengths=[150, 4], window=23, page_size=100, sinks=True),
    "dim-256": dict(counts=[17], lengths=[70], heads=(2, 2), dim=256),
    "dim-8": dict(counts=[20], lengths=[20], heads=(5, 1), dim=8),
    # Tiles are counted over all segments, 64 at a time.
    "many-segments": dict(counts=SEVERAL[:70], lengths=SEVERAL[:70], heads=(4, 1), dim=16),
}
# Bounds that stay for a block of queries and then jump, as on a rank of a larger kvp.
ROUND_ROBIN: dict[str, Any] = dict(
    counts=[60], lengths=[40], window=16, reads=[[min(40, n // 16 * 8 + 4) for n in range(60)]]
)
# The SM90 kernel around its tile sizes: 64 rows per group, 128 per program, 128 keys in two pieces.
ODD = dict(counts=[1, 17, 63, 65, 129, 300], lengths=[301, 18, 63, 60, 513, 600])
PROMPTS_ON_HOPPER: Shapes = {
    **{f"{q}-over-{kv}": dict(heads=(q, kv), **ODD) for q, kv in ((4, 4), (14, 2), (8, 1), (16, 1))},
    **{f"window-{w}": dict(counts=[200, 90], lengths=[900, 91], heads=(14, 2), window=w) for w in (1, 64, 130, 257)},
    "many-segments": dict(counts=[10 * n for n in SEVERAL], lengths=[10 * n for n in SEVERAL], heads=(4, 2)),
    "one-tile-each": dict(counts=[1] * 9, lengths=[1, 63, 64, 65, 127, 128, 129, 191, 192]),
    "empty-segment-between": dict(counts=[40, 0, 9], lengths=[70, 0, 75], heads=(14, 2)),
    "empty-shard": dict(counts=[140, 150], lengths=[0, 9], heads=(8, 1)),
    "shard-shorter-than-chunk": dict(counts=[400, 130], lengths=[70, 129], heads=(8, 1)),
    "sinks": dict(counts=[300, 129, 5], lengths=[3000, 129, 0], heads=(28, 4), sinks=True),
    "sinks-window": dict(counts=[200, 90], lengths=[900, 91], heads=(14, 2), window=23, sinks=True),
    "page-128": dict(counts=[200, 3], lengths=[700, 3], heads=(14, 2), page_size=128),
    "page-192": dict(counts=[200, 3], lengths=[700, 3], heads=(14, 2), page_size=192, window=150),
    "fp16": dict(counts=[300, 65], lengths=[900, 65], heads=(14, 2), dtype=torch.float16),
}
PROMPTS_ON_HOPPER = {
    f"hopper-{name}": dict(page_size=64, dtype=torch.bfloat16) | shape for name, shape in PROMPTS_ON_HOPPER.items()
}


def prompts_on_hopper(case: Case) -> bool:
    """Whether the SM90 prefill kernel supports a case."""
    return flash_prefill_sm90.fits(case.q, case.paged(), max(case.counts), max(map(len, case.keys)))


def a_future_key(case: Case) -> None:
    """Lets one query read a later key."""
    case.hi[4] += 1


FUTURE = {"a-future-key": (dict(counts=[20], lengths=[20]), a_future_key)}
PREFILL = Op("flash_prefill", partial(make_case, prefill=True), flash_prefill, mistakes=FUTURE)
PREFILL_ROWS = [
    *PREFILL.rows(PROMPTS),
    *PREFILL.rows(some(PROMPTS, *SHARED_KEYS, "sinks", "sinks-window"), which=KERNEL, modes=SPLIT),
    *PREFILL.rows(some(PROMPTS, "late-chunks", "sinks-window", "dim-8"), which=KERNEL, layout=("blocks",)),
    *PREFILL.rows(
        {"low-precision": dict(counts=[40, 9], lengths=[75, 9], heads=(8, 2), dim=128)}, dtype=FEW_BITS
    ),
    *PREFILL.rows({"round-robin-bounds": ROUND_ROBIN}, which=KERNEL),
    *PREFILL.rows(
        {"into-a-slice": dict(counts=[7, 4], lengths=[20, 0])}, which=KERNEL, modes={"": Mode({"room": (2, 0)})}
    ),
    *PREFILL.rows(PROMPTS, pairs=True, kv=("fp8", "k16v8"), dtype=FLOATS),
    *PREFILL.rows(BLOCK_SHAPES, pairs=True, kv=("auto", "k16v8", "fp8"), layout=("blocks",), dtype=FLOATS),
    *PREFILL.rows(
        some(PROMPTS, *IN_PIECES, "sinks-window"), which=KERNEL, modes=PIECES, pairs=True, kv=("fp8", "k16v8"),
    ),
    *PREFILL.rows(
        {
            f"{q}-over-{kv}-dim-{dim}": dict(counts=[300, 129], lengths=[3000, 129], heads=(q, kv), dim=dim)
            for q, kv, dim in ((32, 8, 128), (28, 4, 128), (8, 1, 64), (4, 2, 256))
        },
        which=KERNEL, gpu=True, page_size=(64,), dtype=(torch.bfloat16, torch.float32), sinks=(False, True),
    ),
    *PREFILL.rows(
        PROMPTS_ON_HOPPER, which=KERNEL, gpu=True, hopper=prompts_on_hopper, repeats=5, dim=(128, 256),
        modes={f"splits-{n}": Mode({"room": (0, 0)}, hopper_settings(n)) for n in (1, 3)},
    ),
    *PREFILL.rows(
        PROMPTS_ON_HOPPER, which=KERNEL, gpu=True, hopper=prompts_on_hopper, repeats=5, dim=(128, 256),
        layout=("blocks",), modes={"": Mode({"room": (0, 0)}, hopper_settings())},
    ),
    *PREFILL.rows(
        {"": dict(counts=[100], lengths=[1200], heads=(1, 1), dim=128, page_size=64, dtype=torch.bfloat16)},
        which=KERNEL, gpu=True, gb=20, far=(True,),
        modes={name: Mode(settings=hopper_settings(rows=rows)) for name, rows in (("triton", 1 << 30), ("hopper", 1))},
    ),
]  # fmt: skip

# ---- partials merged by their LSE


def make_parts(
    *, W: int, N: int, H: int, D: int, device: torch.device, empty: float = 0.0, dtype: torch.dtype = torch.float32,
    to: str = "", nan: bool = False,
) -> Call:  # fmt: skip
    """Makes partials of W sources, some of which are empty and NaN.

    fp32: sums of up to 39 terms of size 4. Otherwise the result is rounded once, on a GPU to half an ulp of 4;
    Triton's interpreter truncates bf16, a whole ulp.

    Args:
        to: output: new, the first "source", or a "slice" of something wider, from one.
        nan: in one source's LSE and in a value of another.
    """
    gen, first = torch.Generator().manual_seed(W * 1000 + N), 1 if to == "slice" else 0
    lse = torch.randn(W, N, H + 2 * first, generator=gen) * 10
    partials = torch.randn(W, N, H + 2 * first, D, generator=gen).to(dtype)
    gone = torch.rand(W, N, H + 2 * first, generator=gen) < empty
    lse[gone], partials[gone] = -torch.inf, torch.nan
    if nan:
        lse[1, 0, 1], partials[2, 1, 0, 5] = torch.nan, torch.nan
    partials, lse = partials.to(device)[:, :, first : first + H], lse.to(device)[:, :, first : first + H]
    parts, logs = partials.double(), lse.double()
    total = logs.logsumexp(0)
    weights = (logs - total.masked_fill(total == -torch.inf, 0)).exp()
    merged = (weights[..., None] * parts.masked_fill((logs == -torch.inf)[..., None], 0)).sum(0)
    given: dict[str, Any] = dict(partials=partials, lse=lse)
    max_error = {torch.float32: 1e-5, torch.bfloat16: 4 * 2**-8 + 1e-5, torch.float16: 4 * 2**-12 + 1e-5}[dtype]
    wanted = {"0": (merged, max_error), "1": (total, 1e-5 + 1e-6 * total.abs())}
    if to == "source":
        given |= dict(out=partials[0], out_lse=lse[0])
    elif to == "slice":
        wide = torch.full((N, H + 2, D), torch.nan, dtype=dtype, device=device)
        given |= dict(out=wide[:, 2:], out_lse=torch.full((N, H + 2), torch.nan, device=device)[:, 2:])
    if to:
        wanted = {"out": wanted["0"], "out_lse": wanted["1"]}
    return Call(given, wanted, call=partial(merge, dtype=dtype))


def merge(function: Any, dtype: torch.dtype, **given: Any) -> Any:
    """Merges partials and checks dtypes."""
    out, lse = function(**given, return_lse=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    return out, lse


def lse_shifted(case: Call) -> None:
    """Shifts one source's LSE."""
    case.given["lse"][1] += 0.01


MERGE = Op("merge_states", make_parts, merge_states, mistakes={"lse": (dict(W=3, N=2, H=2, D=16), lse_shifted)})
PARTS = shapes_of((1, 3, 2, 64), (2, 1, 1, 8), (3, 5, 3, 80), (8, 2, 4, 128), (39, 2, 1, 256), names="W N H D")
SEVERAL_A_PROGRAM = {"": Mode(), "several": Mode(settings={"kernels.attention.merge_states.MANY": 0})}
MERGE_ROWS = [
    *MERGE.rows(PARTS, modes=SEVERAL_A_PROGRAM, empty=(0.0, 0.6)),
    *MERGE.rows({"low-precision": dict(W=4, N=3, H=2, D=128, empty=0.3)}, dtype=FEW_BITS),
    *MERGE.rows({"nothing": dict(W=3, N=2, H=2, D=16, empty=1.1)}),
    *MERGE.rows({"nan": dict(W=3, N=2, H=2, D=16, nan=True)}),
    *MERGE.rows({"source": dict(W=2, N=37, H=4, empty=0.3, to="source")}, D=(128, 256)),
    *MERGE.rows({"large": dict(W=2, N=40_000, H=4, D=128, empty=0.3, to="source")}, gpu=True, gb=4),
    *MERGE.rows({"slice": dict(W=4, N=3, H=3, D=64, empty=0.3, to="slice")}),
]

OPS = [DECODE, PREFILL, MERGE]
ROWS = [*DECODE_ROWS, *PREFILL_ROWS, *MERGE_ROWS]
GRAPHS = DECODE.rows({"": dict(counts=[1, 1, 1], lengths=[700, 3, 250], heads=(8, 2), dim=128)}, which=KERNEL)
