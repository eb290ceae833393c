"""Cases of routed experts for GPUs: SM90, few tokens of wide experts, and low-bit weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from kernels.moe import experts_e4m3_sm90, experts_many_sm90, experts_packed_sm90, experts_scaled_sm90, experts_sm90
from kernels.moe.experts import RoutedExperts
from tests.kernels.cases_experts import (
    EXPERTS,
    IN_A_GRAPH,
    Case,
    make_experts,
    poisoned,
    scales_rolled,
    slot_left_out,
    summand_left_out,
)  # fmt: skip
from tests.kernels.suite import KERNEL, Mode, Op, shapes_of


def make_wide(*, N: int, **shape: Any) -> Case:
    """Makes cases with aligned copies; no addend with one token."""
    return make_experts(N=N, addend=N > 1, dtype=torch.bfloat16, apart=8, **shape)


def fits_few(case: Case) -> bool:
    """Whether the SM90 kernel for few tokens supports a case."""
    return experts_sm90.fits(case.x, case.gate_up, case.down)


def fits_scaled(case: Case) -> bool:
    """Whether an SM90 kernel for scaled weights supports a case."""
    P, matrices = case.ids.numel(), (case.gate_up, case.down)
    return experts_scaled_sm90.fits(case.x, P, *matrices) or experts_packed_sm90.fits(
        case.x, P, len(case.gate_up), *matrices
    )


def fits_either(case: Case) -> bool:
    """Whether either SM90 kernel supports a case."""
    return fits_few(case) or fits_scaled(case)


def fits_many(case: Case) -> bool:
    """Whether the SM90 kernel for many tokens supports a case."""
    return experts_many_sm90.fits(case.x, case.ids.numel(), len(case.gate_up), case.gate_up, case.down)


def fits_e4m3(case: Case) -> bool:
    """Whether the SM90 kernel for rows in e4m3 supports a case."""
    return experts_e4m3_sm90.fits(case.x, case.ids.numel(), len(case.gate_up), case.gate_up, case.down)


def gigabytes(shape: Mapping[str, Any]) -> float:
    """Returns the GB of bf16 weights and their source values; those to be rounded to e4m3 are in fp32."""
    return 2 + 3e-9 * shape["E"] * shape["H"] * shape["F"] * (14 if "form" in shape else 6)


WIDE = "k experts E H F clamped"
# Qwen3-30B-A3B, gpt-oss-20b, DeepSeek-R1: experts per token, in all and on a rank, H, the rank's F, biases and clamp.
RANKS = shapes_of(
    (8, 128, 16, 2048, 768, False), (8, 128, 32, 2048, 384, False),
    (4, 32, 4, 2880, 2880, True), (4, 32, 8, 2880, 1440, True), (4, 32, 32, 2880, 360, True),
    (8, 256, 32, 7168, 2048, False), (8, 256, 64, 7168, 1024, False), (8, 256, 256, 7168, 512, False),
    (8, 288, 36, 4096, 1280, "step"),
    names=WIDE,
)  # fmt: skip
# Columns that begin inside a group, which has the minimum size, twice that, or all columns.
E4M3_RANKS = shapes_of(
    (8, 128, 16, 2048, 768, False, ("e4m3", 128, (0, 0))), (8, 256, 32, 7168, 2048, False, ("e4m3", 128, (0, 0))),
    (4, 32, 8, 2880, 1440, True, ("e4m3", 128, (0, 96))), (4, 32, 32, 2880, 336, True, ("e4m3", 128, (80, 16))),
    (8, 16, 16, 2048, 384, False, ("e4m3", 4096, (0, 384))), (8, 16, 16, 2048, 384, False, ("e4m3", 256, (128, 208))),
    names=WIDE + " form",
)  # fmt: skip
# Blocks of 8 to 32 pairs, several experts' pairs; columns that begin inside a group.
FEW_BITS_RANKS = shapes_of(
    (40, 8, 128, 128, 2048, 768, False, ("e4m3", 128, (0, 0))),
    (17, 8, 256, 32, 7168, 2048, False, ("e4m3", 128, (0, 0))),
    (128, 8, 128, 16, 2048, 768, False, ("e4m3", 128, (0, 0))),
    (9, 4, 32, 8, 2880, 1440, True, ("e4m3", 128, (0, 96))),
    (64, 8, 16, 16, 2064, 400, False, ("e4m3", 4096, (0, 384))),
    (33, 8, 16, 5, 2048, 208, True, ("e4m3", 256, (128, 208))),
    (40, 8, 288, 36, 4096, 1280, "step", ("e4m3", 128, (0, 0))),
    (1, 4, 32, 32, 2880, 2880, True, ("e2m1", 32, (0, 0))), (5, 4, 32, 32, 2880, 2880, True, ("e2m1", 32, (0, 0))),
    (40, 4, 32, 32, 2880, 2880, True, ("e2m1", 32, (0, 0))), (128, 4, 128, 16, 2880, 2880, True, ("e2m1", 32, (0, 0))),
    (19, 3, 7, 5, 352, 224, False, ("e2m1", 32, (32, 96))), (96, 4, 8, 8, 288, 192, True, ("e2m1", 32, (0, 32))),
    (5, 4, 32, 32, 2880, 2880, True, ("e2m1", 16, (0, 0))), (40, 8, 128, 16, 2048, 768, False, ("e2m1", 16, (0, 0))),
    (256, 4, 32, 32, 2880, 736, True, ("e2m1", 32, (0, 0))), (300, 8, 64, 64, 1024, 256, False, ("e2m1", 16, (0, 0))),
    (1024, 8, 256, 256, 1024, 256, False, ("int4", 32, (0, 0))),
    (500, 3, 64, 40, 576, 416, True, ("int4-zeros", 128, (64, 32))),
    (2, 8, 384, 48, 7168, 2048, False, ("int4", 32, (0, 0))), (64, 8, 384, 48, 7168, 2048, False, ("int4", 32, (0, 0))),
    (19, 3, 7, 5, 352, 224, False, ("int4-zeros", 128, (32, 96))),
    (29, 8, 16, 5, 2048, 224, True, ("int4", 128, (0, 32))),
    names=f"N {WIDE} form",
)  # fmt: skip
# Tiles and blocks with partial ends; experts that all or no tokens selected.
MANY_PAIRS = shapes_of(
    (300, 2, 6, 4, 256, 112, False, ("e4m3", 128, (0, 0))), (256, 1, 2, 2, 320, 256, True, ("e4m3", 128, (0, 0))),
    (401, 3, 7, 5, 576, 400, False, ("e4m3", 256, (64, 208))),
    (333, 2, 4, 4, 1088, 144, "step", ("e4m3", 2048, (0, 640))),
    (300, 2, 6, 4, 256, 128, True, ("e2m1", 32, (0, 0))), (401, 3, 7, 5, 576, 416, False, ("e2m1", 32, (64, 96))),
    (256, 1, 2, 2, 320, 256, True, ("e2m1", 16, (0, 0))), (401, 3, 7, 5, 1088, 160, False, ("e2m1", 16, (0, 0))),
    (300, 2, 6, 4, 256, 352, "step", ("int4", 32, (0, 0))),
    (401, 3, 7, 5, 576, 416, False, ("int4-zeros", 128, (64, 32))),
    (333, 2, 4, 4, 1088, 160, True, ("int4", 4096, (0, 0))),
    names="N k experts E H F clamped form",
)  # fmt: skip
# In e4m3 without an epilogue, whose rows may be rounded.
ROUNDED_PAIRS = {
    name: shape for name, shape in MANY_PAIRS.items() if shape["form"][0] == "e4m3" and not shape["clamped"]
} | shapes_of(
    (256, 1, 2, 2, 320, 256, ("e4m3", 128, (0, 0))), (333, 2, 4, 4, 1088, 144, ("e4m3", 2048, (0, 640))),
    names="N k experts E H F form",
)  # fmt: skip
# The same with fewer pairs of each expert, whose rows take two numbers an element.
FEW_PAIRS = shapes_of(
    (300, 2, 12, 8, 256, 112, ("e4m3", 128, (0, 0))), (256, 1, 4, 3, 320, 256, ("e4m3", 128, (0, 0))),
    (401, 3, 20, 14, 576, 400, ("e4m3", 256, (64, 208))), (333, 2, 9, 8, 1088, 144, ("e4m3", 2048, (0, 640))),
    (129, 10, 128, 64, 512, 128, ("e4m3", 128, (0, 0))),
    names="N k experts E H F form",
)  # fmt: skip
POISONED = {"": Mode(settings={"torch.empty": poisoned})}
COLUMNS = {
    f"{columns}-columns": Mode(
        settings={
            "torch.empty": poisoned,
            "kernels.moe.experts_scaled_sm90.columns_of": lambda pairs, experts, columns=columns: columns,
        }
    )
    for columns in (8, 16, 32)
}
PAIR_BLOCKS = {
    f"{block}-pairs": Mode(
        settings={
            "torch.empty": poisoned,
            "kernels.moe.experts_e4m3_sm90.block_of": lambda P, total, block=block: block,
        }
    )
    for block in (32, 64)
}
NARROW = dict(N=8, k=4, experts=8, E=8, H=512, F=328)
WIDE_EXPERTS = Op(
    "experts-wide", make_wide, RoutedExperts.compute, gpu=True,
    mistakes={
        **{
            f"{name}-{clamped}": (NARROW | dict(clamped=clamped), change)
            for clamped in (False, True)
            for name, change in (("slot-left-out", slot_left_out), ("summand-left-out", summand_left_out))
        },
        **{
            f"scale-of-another-{of}-{name}-{i}": (shape, partial(scales_rolled, name=name, dim=dim))
            for i, shape in enumerate(
                [
                    dict(N=8, k=8, experts=128, E=16, H=2048, F=768, form=("e4m3", 128, (0, 0))),
                    dict(N=33, k=8, experts=16, E=5, H=2048, F=208, clamped=True, form=("e4m3", 256, (128, 208))),
                    dict(N=40, k=4, experts=32, E=32, H=2880, F=2880, clamped=True, form=("e2m1", 32, (0, 0))),
                    dict(N=4, k=8, experts=128, E=16, H=2048, F=768, form=("e2m1", 16, (0, 0))),
                    dict(N=9, k=8, experts=128, E=16, H=2048, F=768, form=("int4", 32, (0, 0))),
                    dict(N=40, k=8, experts=128, E=16, H=2048, F=768, form=("int4-zeros", 128, (0, 0))),
                    dict(N=401, k=3, experts=7, E=5, H=576, F=400, form=("e4m3", 256, (64, 208))),
                    dict(N=401, k=3, experts=7, E=5, H=576, F=400, form=("e4m3", 256, (64, 208)), fp8_rows=True),
                    dict(N=401, k=3, experts=7, E=5, H=576, F=416, form=("e2m1", 32, (0, 0))),
                    dict(N=401, k=3, experts=7, E=5, H=576, F=416, form=("e2m1", 16, (0, 0))),
                    dict(N=401, k=3, experts=7, E=5, H=576, F=416, form=("int4", 32, (0, 0))),
                    dict(N=401, k=3, experts=20, E=14, H=576, F=400, form=("e4m3", 256, (64, 208))),
                ]
            )
            for name in ("gate_up", "down")
            for dim, of in ((1, "group"), (2, "row"))
        },
    },
)  # fmt: skip
OPS = [WIDE_EXPERTS]
ROWS = [
    *WIDE_EXPERTS.rows(
        RANKS, which=KERNEL, gpu=True, gb=gigabytes, hopper=fits_few, repeats=5, modes=POISONED, N=(8, 3, 2, 1)
    ),
    *WIDE_EXPERTS.rows(
        E4M3_RANKS, which=KERNEL, gpu=True, gb=gigabytes, hopper=fits_either, repeats=5, modes=POISONED, N=(8, 3, 1)
    ),
    *WIDE_EXPERTS.rows(
        FEW_BITS_RANKS, which=KERNEL, gpu=True, gb=gigabytes, hopper=fits_scaled, repeats=5, modes=POISONED | COLUMNS
    ),
    *WIDE_EXPERTS.rows(
        FEW_BITS_RANKS, which=KERNEL, gpu=True, gb=gigabytes, repeats=5, modes=POISONED, choices=("nobody", "one")
    ),
    *WIDE_EXPERTS.rows(
        MANY_PAIRS, which=KERNEL, gpu=True, hopper=fits_many, repeats=5, modes=POISONED,
        choices=("any", "one", "nobody")
    ),
    *WIDE_EXPERTS.rows(
        FEW_PAIRS, which=KERNEL, gpu=True, hopper=fits_e4m3, repeats=5, modes=POISONED | PAIR_BLOCKS,
        choices=("any", "one", "nobody"),
    ),
    *WIDE_EXPERTS.rows(
        ROUNDED_PAIRS, which=KERNEL, gpu=True, hopper=fits_e4m3, repeats=5, modes=POISONED | PAIR_BLOCKS,
        choices=("any", "one", "nobody"), fp8_rows=(True,),
    ),
    *WIDE_EXPERTS.rows(ROUNDED_PAIRS, which=("reference",), fp8_rows=(True,)),
    *WIDE_EXPERTS.rows(
        {"crowded": dict(k=4, experts=32, E=4, H=2880, F=360)}, which=KERNEL, gpu=True, hopper=fits_few, repeats=5,
        modes=POISONED, N=(1, 2, 3, 8), clamped=(False, True), choices=("nobody", "lone", "third", "four", "crowded"),
    ),
    *WIDE_EXPERTS.rows(
        {"nan-of-a-token": NARROW | dict(nan_token=3)}, which=KERNEL, gpu=True, hopper=fits_few, clamped=(False, True)
    ),
]  # fmt: skip
GRAPHS = EXPERTS.rows({f"{N}-384": IN_A_GRAPH | dict(N=N, F=384) for N in (1, 8)}, which=KERNEL, hopper=fits_few)
