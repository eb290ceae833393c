"""Cases of attention over latents, for decode steps and prompts, also of indexer-selected tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kernels.mla import decode_common_sm90, prefill_selected_sm90
from kernels.mla.decode import mla_decode
from kernels.mla.expanded_prefill import expanded_prefill
from kernels.mla.prefill import mla_prefill
from tests.kernels.cases_attention import (
    DECADES,
    FUTURE,
    IN_PIECES,
    PIECES,
    PROMPTS,
    ROUND_ROBIN,
    SEVERAL,
    SHAPES,
    SHARED_KEYS,
    SPLIT,
    TWO,
    Shapes,
    nan_in,
    other_bounds,
    other_lse,
    rolled,
    rows_of,
    scaled_more,
    some,
    with_another_key,
    without_last_key,
)  # fmt: skip
from tests.kernels.oracle import Case, make_latents
from tests.kernels.suite import FEW_BITS, FLOATS, KERNEL, PLAIN, Call, Mode, Op, sms


def without_rotated_part(case: Case) -> None:
    """Drops the rope part of queries."""
    case.q = case.q.clone()
    case.q[..., case.values[0].shape[-1] :] = 0


# ---- decode

DECODE = Op(
    "mla_decode", make_latents, mla_decode,
    mistakes={
        "one-key-left-out": (TWO, without_last_key),
        "one-key-too-many": (TWO, with_another_key),
        "scale": (TWO, scaled_more),
        "lse": (TWO, other_lse),
        "no-rotated-part": (TWO, without_rotated_part),
        **{
            f"scale-of-another-{of}": (DECADES | dict(latent=300), partial(rolled, name="k_scale", dim=dim))
            for dim, of in enumerate(("page", "group", "slot"))
        },
        "scale-of-another-token": (
            dict(counts=[1, 1], lengths=[90, 33], latent=136, kv="fp8", layout="tokens", decades=True),
            partial(rolled, name="k_scale", dim=2),
        ),
    },
    nan={
        "latent": (dict(counts=[1], lengths=[20]), partial(nan_in, name="k", column=3)),
        "rope": (dict(counts=[1], lengths=[20]), partial(nan_in, name="k", column=35)),
        "scale": (dict(counts=[1], lengths=[20], kv="fp8"), partial(nan_in, name="k_scale")),
        "rope-beside-few-bits": (dict(counts=[1], lengths=[20], kv="fp8"), partial(nan_in, name="rope")),
    },
    replays=partial(other_bounds, lengths=[[1, 0, 64], [65, 1, 0], [512, 2, 128], [700, 3, 250]]),
)  # fmt: skip
LATENTS: Shapes = some(
    SHAPES, "plain", "empty-shards", "all-empty", "window", "window-verify", "fewer-keys-than-queries"
) | {
    "one-head": dict(counts=[1, 1], lengths=[70, 5], heads=1, page_size=48),
    "three-heads-verify-2": dict(counts=[2, 2], lengths=[37, 2], heads=3, page_size=1),
    "sixteen-heads-page-64": dict(counts=[1, 1], lengths=[130, 64], heads=16, page_size=64),
    "twenty-heads-verify-4": dict(counts=[4, 4], lengths=[66, 5], heads=20, page_size=64),
    "80-heads": dict(counts=[1, 1], lengths=[50, 9], heads=80, latent=16),
    "odd-dims": dict(counts=[3], lengths=[45], heads=5, latent=40, rope=24),
    "rope-as-wide": dict(counts=[1], lengths=[33], heads=2, latent=8, rope=8),
    "verify-16": dict(counts=[16], lengths=[50], heads=6),
    "verify-32": dict(counts=[32, 32], lengths=[70, 33], heads=3),
}
WIDE: Shapes = {
    "two-groups": dict(counts=[1, 1], lengths=[90, 33], latent=256, heads=3),
    "a-ragged-group": dict(counts=[2, 2], lengths=[90, 33], latent=136, heads=20, page_size=48),
    "three-groups-page-64": dict(counts=[1], lengths=[130], latent=384, heads=2, page_size=64),
}
# What the SM90 kernels support: latents of 512 + 64, pages of whole tiles of 64 keys. Few rows are up to 32.
MIXED = [5000, 0, 333, 1]
LATENTS_ON_HOPPER: Shapes = {
    **{f"{heads}-heads": dict(counts=[1] * 4, lengths=MIXED, heads=heads) for heads in (1, 16, 32, 33)},
    "20-heads": dict(counts=[1] * 3, lengths=[700, 64, 65], heads=20),
    "verify-2": dict(counts=[2] * 4, lengths=[5000, 0, 333, 2], heads=16),
    "verify-2-of-10-heads": dict(counts=[2] * 5, lengths=[700, 1, 63, 64, 65], heads=10),
    "verify-3-of-20-heads": dict(counts=[3] * 3, lengths=[700, 64, 65], heads=20),
    "verify-7": dict(counts=[7] * 3, lengths=[700, 3, 129], heads=33),
    "verify-16-of-2-heads": dict(counts=[16] * 3, lengths=[700, 16, 70], heads=2),
    "verify-32": dict(counts=[32] * 2, lengths=[700, 40], heads=5),
    "verify-32-of-one-head": dict(counts=[32] * 3, lengths=[700, 32, 70], heads=1),
    "page-128": dict(counts=[2] * 3, lengths=[700, 64, 65], heads=48, page_size=128),
    "page-192-of-few": dict(counts=[2] * 3, lengths=[700, 64, 65], heads=12, page_size=192),
    "window-verify-4": dict(counts=[4, 4], lengths=[900, 210], heads=32, window=100),
    "window-verify-2-of-few": dict(counts=[2, 2, 2], lengths=[900, 210, 65], heads=16, window=64),
    **{
        f"{name}-of-{heads}": shape | dict(heads=heads)
        for name, of_heads, shape in (
            ("one-sequence", (16, 64), dict(counts=[1], lengths=[3000])),
            ("fp16", (16, 128), dict(counts=[1] * 3, lengths=[700, 64, 65], dtype=torch.float16)),
            ("window", (16, 64), dict(counts=[1] * 3, lengths=[900, 200, 70], window=190)),
            ("all-empty", (16, 128), dict(counts=[1, 1], lengths=[0, 0])),
            ("sequences-of-more-than-a-warp", (16, 40), dict(counts=[1] * 70, lengths=list(range(70)))),
            *((f"from-{n}", (16, 128), dict(counts=[1] * 8, lengths=[*range(n, n + 8)])) for n in (1, 57, 121, 185)),
        )
        for heads in of_heads
    },
}
DEEPSEEK: dict[str, Any] = dict(latent=512, rope=64)
LATENTS_ON_HOPPER = {
    f"hopper-{name}": dict(page_size=64, dtype=torch.bfloat16, decades="dtype" not in shape) | DEEPSEEK | shape
    for name, shape in LATENTS_ON_HOPPER.items()
}
REAL_LATENTS: Shapes = {
    f"{heads}-heads-verify-{count}": dict(counts=[count] * 4, lengths=[5000, 0, 333, count], heads=heads)
    for heads, count in ((16, 1), (16, 2), (16, 8), (20, 3), (64, 1), (128, 1), (128, 4), (128, 8), (1, 16))
}
FAR = {
    f"page-{page_size}-heads-{heads}": DEEPSEEK
    | dict(counts=[1], lengths=[100], heads=heads, page_size=page_size, dtype=torch.bfloat16)
    for page_size, heads in ((64, 16), (64, 128), (16, 128))
}


def latents_on_hopper(case: Case) -> bool:
    """Whether the SM90 decode kernels support a case."""
    return decode_common_sm90.fits(*rows_of(case))


DECODE_ROWS = [
    *DECODE.rows(LATENTS),
    *DECODE.rows(
        some(LATENTS, "plain", "twenty-heads-verify-4", "window-verify", "empty-shards"),
        which=KERNEL, modes=sms(1, 2, 7, 50), pairs=True,
    ),
    *DECODE.rows(
        {"in-parts": dict(counts=[2, 2], lengths=[1100, 100], heads=9, latent=16)}, which=KERNEL, modes=sms(37)
    ),
    *DECODE.rows(
        {"low-precision": dict(counts=[2, 2], lengths=[75, 9], heads=20, latent=64, rope=16)}, dtype=FEW_BITS
    ),
    *DECODE.rows(
        {"into-a-slice": dict(counts=[1, 1], lengths=[40, 0])},
        which=KERNEL, modes={"": Mode({"room": (4, 8), "sms": 3})},
    ),
    *DECODE.rows(LATENTS | WIDE, pairs=True, kv=("fp8",), dtype=FLOATS),
    *DECODE.rows({"a-ragged-group": WIDE["a-ragged-group"] | dict(kv="fp8")}, which=KERNEL, modes=sms(1, 7, 50)),
    *DECODE.rows({"scales-over-decades": DECADES | dict(latent=300, page_size=48)}),
    *DECODE.rows(
        REAL_LATENTS, which=KERNEL, gpu=True, kv=("auto", "fp8"), dtype=(torch.bfloat16, torch.float32),
        page_size=(16, 64), latent=(512,), rope=(64,), decades=(True,),
    ),
    *DECODE.rows(
        LATENTS_ON_HOPPER, which=KERNEL, gpu=True, hopper=latents_on_hopper, repeats=5, kv=("auto", "fp8"),
        modes={"": Mode({"room": (0, 8)}), "sms=7": Mode({"room": (0, 8), "sms": 7})},
    ),
    *DECODE.rows(
        {
            f"{heads}-heads": dict(counts=[2, 2], lengths=[700, 250], heads=heads, page_size=64, dtype=torch.bfloat16)
            for heads in (12, 64)
        },
        which=KERNEL, gpu=True, modes={"early": Mode({"early": True})}, latent=(512,), rope=(64,),
    ),
    *DECODE.rows(FAR, which=KERNEL, gpu=True, gb=12, kv=("auto", "fp8"), far=(True,)),
]  # fmt: skip

# ---- prompts

PREFILL = Op(
    "mla_prefill", partial(make_latents, prefill=True), mla_prefill, mistakes=FUTURE
)  # fmt: skip
LATENT_PROMPTS: Shapes = some(PROMPTS, *IN_PIECES, "empty-shard") | {
    "one-head": dict(counts=[19, 40], lengths=[64, 40], heads=1, page_size=1),
    "twenty-heads": dict(counts=[9], lengths=[130], heads=20, page_size=64),
    "128-heads": dict(counts=[5, 2], lengths=[31, 2], heads=128, latent=16),
    "odd-dims": dict(counts=[17], lengths=[70], heads=3, latent=40, rope=24),
    "many-segments": dict(counts=SEVERAL[:70], lengths=SEVERAL[:70], heads=4, latent=16, rope=8),
}
# Attention over indexer-selected tokens of each query: pages of one token.
COUNTS = [0, 1, 33, 64, 150]
CHOSEN: Shapes = {
    f"{latent}-{rope}-page-{page}": dict(
        counts=[1] * 5, lengths=COUNTS, heads=6, latent=latent, rope=rope, page_size=page
    )
    for latent, rope, page in ((32, 8, 16), (136, 64, 7), (512, 64, 64))
}
# Programs with several queries in turn, from no keys to five tiles.
CHOSEN_ON_HOPPER = dict(
    counts=[1] * 180, lengths=[0, 300, 1, 64, 65, 127, 128, 0, 0, 256, 200, 63, 129, 320, 5] * 12,
    page_size=64, layout="tokens", **DEEPSEEK,
)  # fmt: skip


def chosen_on_hopper(case: Case) -> bool:
    """Whether the SM90 kernel for selected tokens supports a case."""
    return prefill_selected_sm90.fits(case.q, case.paged(), len(case.counts))


PREFILL_ROWS = [
    *PREFILL.rows(LATENT_PROMPTS),
    *PREFILL.rows(some(LATENT_PROMPTS, *SHARED_KEYS), which=KERNEL, modes=SPLIT),
    *PREFILL.rows(
        {"low-precision": dict(counts=[40, 9], lengths=[75, 9], latent=128, rope=32)}, dtype=FEW_BITS
    ),
    *PREFILL.rows({"round-robin-bounds": ROUND_ROBIN}, which=KERNEL),
    *PREFILL.rows(
        {"into-a-slice": dict(counts=[7, 4], lengths=[20, 0])}, which=KERNEL, modes={"": Mode({"room": (2, 8)})}
    ),
    *PREFILL.rows(LATENT_PROMPTS | WIDE, pairs=True, kv=("fp8",), dtype=FLOATS),
    *PREFILL.rows(
        some(LATENT_PROMPTS, *IN_PIECES),
        which=KERNEL, modes=PIECES, pairs=True, kv=("fp8",),
    ),
    *PREFILL.rows({"late-chunks": LATENT_PROMPTS["late-chunks"]}, which=KERNEL, modes=SPLIT, kv=("fp8",)),
    *(
        row
        for op in (DECODE, PREFILL)
        for row in op.rows(CHOSEN, pairs=True, kv=("auto", "fp8"), dtype=FLOATS, layout=("tokens",))
    ),
    *PREFILL.rows(
        {"chosen": CHOSEN_ON_HOPPER}, which=KERNEL, gpu=True, hopper=chosen_on_hopper, heads=(33, 64, 128, 150),
        window=(None, 70), dtype=FEW_BITS,
    ),
    *PREFILL.rows(
        {f"{heads}-heads": dict(counts=[300, 29], lengths=[1500, 29], heads=heads) for heads in (16, 20, 64, 128)},
        which=KERNEL, gpu=True, kv=("auto", "fp8"), dtype=(torch.bfloat16, torch.float32), page_size=(16, 64),
        latent=(512,), rope=(64,), decades=(True,),
    ),
    *PREFILL.rows(FAR, which=KERNEL, gpu=True, gb=12, kv=("fp8",), far=(True,)),
]  # fmt: skip

# ---- prompts over latents that are expanded to keys and values


def make_expanded(
    *, counts: list[int], lengths: list[int], heads: int, dims: tuple[int, int, int], device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Call:  # fmt: skip
    """Makes queries at the ends of sequences, and a segment of padding; keys that must not be read are NaN."""
    gen, (nope, rope, value) = torch.Generator().manual_seed(sum(counts)), dims
    room = max(lengths) + 5
    keys = torch.full((len(counts), room, heads, nope + value), torch.nan, dtype=dtype)
    ropes = torch.full((len(counts), room, rope + 8), torch.nan, dtype=dtype)[..., 8:]
    for i, length in enumerate(lengths):
        keys[i, :length] = torch.randn(length, heads, nope + value, generator=gen).to(dtype)
        ropes[i, :length] = torch.randn(length, rope, generator=gen).to(dtype)
    q = torch.randn(sum(counts), heads, nope + rope, generator=gen).to(dtype)
    cu_q = torch.tensor([0, *counts, 0]).cumsum(0).int()
    reads = [
        (torch.arange(count) + length - count + 1).clamp(min=0) for count, length in zip(counts, lengths, strict=True)
    ]
    out = torch.zeros(len(q), heads, value, dtype=torch.float64)
    lse = torch.full((len(q), heads), -torch.inf, dtype=torch.float64)
    for i, (first, his) in enumerate(zip(cu_q.tolist(), reads, strict=False)):
        k, v = keys[i].double().split([nope, value], 2)
        for n, length in enumerate(his.tolist(), first):
            if length:
                scores = torch.einsum("hd,thd->ht", q[n, :, :nope].double(), k[:length])
                scores = (scores + q[n, :, nope:].double() @ ropes[i, :length].double().T) * 0.1
                out[n], lse[n] = torch.einsum("ht,thd->hd", scores.softmax(-1), v[:length]), scores.logsumexp(-1)
    # Outputs are means of values of size 1, in fp32 of sums of up to 192 products. In 16 bits, weights and the output
    # are rounded by half an ulp of 2^-8 (bf16): errors of some hundred weights add up like a random walk.
    max_error = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    given = [x.to(device) for x in (q, keys, ropes, cu_q)]
    arguments = dict(enumerate([*given, max(counts), torch.cat(reads).int().to(device), 0.1]))
    wanted = {"0": (out, max_error), "1": (lse, 1e-5 + 1e-6 * lse.nan_to_num(neginf=0).abs())}
    return Call({f"_{i}": x for i, x in arguments.items()}, wanted, call=lambda op, **given: op(*given.values()))


EXPANDED = Op("expanded_prefill", make_expanded, expanded_prefill)
SEGMENTS: Shapes = {
    "whole-prompts": dict(counts=[33, 1, 16], lengths=[33, 1, 16], heads=4, dims=(32, 16, 32)),
    "late-chunks": dict(counts=[20, 140], lengths=[150, 141], heads=2, dims=(128, 64, 128)),
    "an-empty-segment-between": dict(counts=[5, 0, 7], lengths=[9, 0, 70], heads=1, dims=(16, 8, 24)),
    "before-this-piece-of-keys": dict(counts=[40, 30], lengths=[12, 0], heads=3, dims=(24, 8, 16)),
    "odd-dims": dict(counts=[17], lengths=[70], heads=3, dims=(40, 24, 20)),
    "many-segments": dict(counts=SEVERAL[:70], lengths=SEVERAL[:70], heads=1, dims=(16, 8, 16)),
}
IN_16_BITS: Shapes = {
    "split": dict(counts=[150, 9], lengths=[300, 9], heads=2),
    "segments": dict(counts=[300, 0, 129], lengths=[1500, 0, 129], heads=3),
    "a-row-more": dict(counts=[257], lengths=[257], heads=1),
    "fewer-rows-than-a-program's": dict(counts=[64, 40], lengths=[500, 40], heads=2),
    "many-segments": dict(counts=[2 * n for n in SEVERAL], lengths=[2 * n for n in SEVERAL], heads=2),
    "of-a-rank-that-keeps-no-head": dict(counts=[300], lengths=[300], heads=0),
}
EXPANDED_ROWS = [
    *EXPANDED.rows(SEGMENTS),
    *EXPANDED.rows(
        some(IN_16_BITS, "split", "a-row-more", "of-a-rank-that-keeps-no-head"), dims=((128, 64, 128),), dtype=FEW_BITS
    ),
    *EXPANDED.rows(
        some(IN_16_BITS, "segments", "fewer-rows-than-a-program's", "many-segments"), gpu=True, dims=((128, 64, 128),),
        dtype=FEW_BITS,
    ),
]  # fmt: skip

OPS = [DECODE, PREFILL]
ROWS = [*DECODE_ROWS, *PREFILL_ROWS, *EXPANDED_ROWS]
GRAPHS = DECODE.rows(
    {
        f"{heads}-heads": DEEPSEEK
        | dict(counts=[1, 1, 1], lengths=[700, 3, 250], heads=heads, page_size=64, dtype=torch.bfloat16)
        for heads in (16, 32, 128)
    },
    which=KERNEL, modes=PLAIN | {"early": Mode({"early": True})}, kv=("auto", "fp8"),
)  # fmt: skip
