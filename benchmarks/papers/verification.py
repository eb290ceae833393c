"""Times verification and packing against their baselines: `helix bench verify`.

The grid is from Kolawole, "Batched Speculative Decoding Verification Kernels" (CMU, 2026). Each row is checked
against the lengths it was generated with, then timed twice: as single launches from Python, and as replays of a CUDA
graph. KV rows rotate past the L2; tokens, which a step has just written, may stay in it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch

from benchmarks.papers import verification_kernels as baselines
from benchmarks.papers import verification_reference as reference
from benchmarks.papers.verify_and_pack import Packed, Verified, verify_and_pack
from benchmarks.runner import BenchContext, Benchmark, Part, Row
from benchmarks.timer import ROTATED, replays
from helix.worker.clock import time_each

VOCABULARY = 4096
MAX_COPIES = 256
WARM_UPS, TIMED, ROUNDS = 10, 50, 4  # launches from Python per round and variant; rounds
REPLAYS = 50
WARM_UP_S = 0.01  # of a graph: the eager runs have already raised the clocks
DISPATCH_BYTES = 5e6  # below, the paper uses its one-block kernel, above a scan and torch's packing
BATCHES, GAMMAS, ALPHAS, WIDTHS = (1, 4, 16, 32), (8, 64, 128), (0.3, 0.6, 0.9), (128, 512, 1024, 2048)
SCANS = [
    *[(b, g, a) for b in BATCHES for g in GAMMAS for a in ALPHAS],
    *[(32, g, a) for g in (4, 16, 32) for a in ALPHAS],
]
PACKS = [(b, g, a, d) for b in BATCHES for g in GAMMAS for a in ALPHAS for d in WIDTHS]
PACKS_ALONE = [(32, 128, a, d) for a in ALPHAS for d in WIDTHS]
SORTED = [(b, g, a) for b in (32, 128, 512) for g in (64, 128) for a in ALPHAS]
SPREAD = 0.1  # of sequences' acceptance rates around alpha, in sorted batches
BEYOND = [(b, g, 0.9, d) for b, g in ((128, 8), (512, 8), (128, 128)) for d in (128, 2048)]  # the paper has 32
Replay = Callable[[int], Any]


@dataclass
class VerifiedBatch:
    """Tokens and KV of a batch, and its output buffers.

    Attributes:
        draft: [B, gamma] int64.
        target: [B, gamma + 1] int64.
        kv: [B, gamma, D].
        accepted: the true lengths [B] int64.
    """

    draft: torch.Tensor
    target: torch.Tensor
    kv: torch.Tensor
    accepted: torch.Tensor
    out: Verified
    packed: Packed


def workload(
    batch: int, gamma: int, alpha: float | torch.Tensor, width: int, dtype: torch.dtype, device: torch.device, seed: int
) -> VerifiedBatch:
    """Makes random tokens whose accepted lengths follow Binomial(gamma, alpha); alpha may be of each sequence [B]."""
    generator = torch.Generator().manual_seed(seed)
    accepted = (torch.rand(batch, gamma, generator=generator) < torch.as_tensor(alpha)[..., None]).sum(1)
    draft = torch.randint(VOCABULARY, (batch, gamma), generator=generator)
    target = torch.randint(VOCABULARY, (batch, gamma + 1), generator=generator)
    j = torch.arange(gamma)
    target[:, :gamma] = torch.where(j < accepted[:, None], draft, target[:, :gamma])
    target[:, :gamma] = torch.where(j == accepted[:, None], (draft + 1) % VOCABULARY, target[:, :gamma])
    kv = torch.randn(batch, gamma, width, device=device, dtype=dtype)
    out, packed = Verified.create(batch, device), Packed.create(kv)
    return VerifiedBatch(draft.to(device), target.to(device), kv, accepted.to(device), out, packed)


def check(work: VerifiedBatch, name: str, scan: Callable[..., None] | None, fused: Callable[..., None] | None) -> None:
    """Checks the lengths and outputs bit for bit against the reference.

    Raises:
        RuntimeError: `name` computes something else.
    """
    wanted = [work.accepted, *reference.verify(work.draft, work.target)]
    work.out.copy(*(torch.full_like(t, -1) for t in wanted[1:]))
    got = [work.out.accepted, *work.out.tensors]
    if scan is not None:
        scan(work.draft, work.target, work.out)
    if fused is not None:
        rows, offsets = reference.pack(work.kv, work.accepted)
        work.packed.kv.fill_(torch.nan)
        work.packed.offsets.fill_(-1)
        fused(work.draft, work.target, work.kv, work.out, work.packed)
        wanted += [rows, offsets]
        got += [work.packed.kv[: len(rows)], work.packed.offsets]
    if not all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)):
        raise RuntimeError(f"{name} differs from the reference at {tuple(work.kv.shape)}")


def eager_seconds(run: Replay, copies: int, device: torch.device) -> list[float]:
    """Times single runs, launched from Python, between two events; seconds."""
    if device.type != "cuda":
        return time_each(lambda: run(0), 1, device)
    indices = cycle(range(copies))
    for _ in range(WARM_UPS):
        run(next(indices))
    return time_each(lambda: run(next(indices)), TIMED, device)


def percentiles(name: str, seconds: Iterable[float]) -> dict[str, float]:
    """Returns columns of the median and 95th percentile, in microseconds."""
    ordered = [1e6 * s for s in sorted(seconds)]
    return {f"{name}_us": ordered[len(ordered) // 2], f"{name}_p95_us": ordered[len(ordered) * 95 // 100]}


def timed(runs: dict[str, Replay], copies: int, device: torch.device, captured: Container[str]) -> dict[str, float]:
    """Returns the columns of all variants; those that wait for the host are not captured.

    Launches from Python alternate between variants, so that changes in host speed affect all.
    """
    eager: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            eager[name] += eager_seconds(run, copies, device)
    found: dict[str, float] = {}
    for name, run in runs.items():
        found |= percentiles(name, eager[name])
        if name in captured:
            found |= percentiles(f"{name}_graph", replays(run, copies, device, 16, REPLAYS, WARM_UP_S))
    return found


def batches(ctx: BenchContext, batch: int, gamma: int, alpha: float, width: int) -> list[VerifiedBatch]:
    """Makes as many workloads as exceed the L2, for rotation."""
    kind = torch.bfloat16
    copies = min(MAX_COPIES, -(-ROTATED // (batch * gamma * width * kind.itemsize))) if ctx.gpu else 1
    return [workload(batch, gamma, alpha, width, kind, ctx.device, seed=7 + i) for i in range(copies)]


def scanning(scan: Callable[..., None], work: VerifiedBatch) -> Replay:
    """Returns a run of a kernel without packing."""
    return lambda i: scan(work.draft, work.target, work.out)


def packing(fused: Callable[..., None], works: list[VerifiedBatch]) -> Replay:
    """Returns a run of a kernel that verifies and packs."""
    return lambda i: fused(works[i].draft, works[i].target, works[i].kv, works[i].out, works[i].packed)


def measure_scan(ctx: BenchContext, batch: int, gamma: int, alpha: float) -> list[Row]:
    """Measures lengths, flags and next tokens: eager torch, one lane per sequence, a warp ballot, and the scan."""
    work = workload(batch, gamma, alpha, 1, torch.bfloat16, ctx.device, seed=7)
    runs: dict[str, Replay] = {"torch": lambda i: reference.verify(work.draft, work.target)}
    for name, scan in (("naive", baselines.naive), ("ballot", baselines.ballot), ("scan", baselines.verify)):
        check(work, name, scan, None)
        runs[name] = scanning(scan, work)
    row: Row = {"kind": "scan", "batch": batch, "gamma": gamma, "alpha": alpha}
    return [row | timed(runs, 1, ctx.device, captured=runs)]


def two_step(draft: Any, target: Any, kv: torch.Tensor, out: Verified, packed: Packed) -> None:
    """Runs ours in two launches."""
    baselines.verify(draft, target, out)
    baselines.pack(kv, out.accepted, packed)


def measure_pack(ctx: BenchContext, batch: int, gamma: int, alpha: float, width: int) -> list[Row]:
    """Measures verification with packed KV: ours in one launch, the one-block kernel, two steps (kernels, torch)."""
    works = batches(ctx, batch, gamma, alpha, width)

    def torch_step(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        baselines.verify(works[i].draft, works[i].target, works[i].out)
        return reference.pack(works[i].kv, works[i].out.accepted)

    def torch_alone(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.pack(works[i].kv, reference.verify(works[i].draft, works[i].target)[0])

    variants = {"fused": verify_and_pack, "two_step": two_step}
    if batch <= baselines.ONE_BLOCK_BATCH:
        variants["one_block"] = baselines.verify_and_pack_one_block
    for name, fused in variants.items():
        for work in works[:2]:
            check(work, name, None, fused)
    itemsize = works[0].kv.itemsize
    row: Row = {"kind": "pack", "batch": batch, "gamma": gamma, "alpha": alpha, "kv_dim": width}
    row["packed_bytes"] = sum(int(w.accepted.sum()) for w in works) / len(works) * width * itemsize
    runs: dict[str, Replay] = {name: packing(fused, works) for name, fused in variants.items()}
    runs |= {"two_step_torch": torch_step, "torch": torch_alone}
    row |= timed(runs, len(works), ctx.device, captured=variants)
    # The paper's dispatcher compares sizes on the host, then launches one of its two kernels.
    if "one_block" in variants:
        small = batch * alpha * gamma * width * itemsize < DISPATCH_BYTES
        row["dispatcher_us"] = row["one_block_us" if small else "two_step_torch_us"]
        row["dispatcher_graph_us"] = row["one_block_graph_us" if small else "two_step_graph_us"]
    for suffix in ("_us", "_graph_us"):
        others = [row[n + suffix] for n in ("one_block", "two_step", "two_step_torch", "torch") if n + suffix in row]
        row[f"best_other_over_fused{suffix.removesuffix('_us')}"] = min(others) / row[f"fused{suffix}"]
    return [row]


def measure_pack_alone(ctx: BenchContext, batch: int, gamma: int, alpha: float, width: int) -> list[Row]:
    """Measures packing with known lengths: our kernel, torch's mask, and the paper's packer, which waits."""
    works = batches(ctx, batch, gamma, alpha, width)
    rows, offsets = reference.pack(works[0].kv, works[0].accepted)
    baselines.pack(works[0].kv, works[0].accepted, works[0].packed)
    if not torch.equal(works[0].packed.kv[: len(rows)], rows) or not torch.equal(works[0].packed.offsets, offsets):
        raise RuntimeError(f"pack differs from the reference at {tuple(works[0].kv.shape)}")
    if not torch.equal(baselines.pack_waiting(works[0].kv, works[0].accepted)[0], rows):
        raise RuntimeError(f"pack_waiting differs from the reference at {tuple(works[0].kv.shape)}")
    runs: dict[str, Replay] = {
        "pack": lambda i: baselines.pack(works[i].kv, works[i].accepted, works[i].packed),
        "pack_torch": lambda i: reference.pack(works[i].kv, works[i].accepted),
        "pack_waiting": lambda i: baselines.pack_waiting(works[i].kv, works[i].accepted),
    }
    row: Row = {"kind": "pack_alone", "batch": batch, "gamma": gamma, "alpha": alpha, "kv_dim": width}
    return [row | timed(runs, len(works), ctx.device, captured={"pack"})]


def measure_sorted(ctx: BenchContext, batch: int, gamma: int, alpha: float) -> list[Row]:
    """Measures one lane per sequence, in request order and sorted, and the scan.

    A warp takes as long as its longest sequence. Sequences have rates within SPREAD of alpha. They are sorted by their
    true lengths, the best case, and by what a step before accepted, a prediction; sorting itself is not included.
    """
    rates = alpha + SPREAD * (2 * torch.rand(batch, generator=torch.Generator().manual_seed(5)) - 1)
    work, before = (workload(batch, gamma, rates, 1, torch.bfloat16, ctx.device, seed=seed) for seed in (7, 8))

    def in_order(lengths: torch.Tensor) -> VerifiedBatch:
        order = lengths.argsort()
        rows = {name: getattr(work, name)[order] for name in ("draft", "target", "kv", "accepted")}
        return replace(work, **rows)

    kernels = {"naive": (baselines.naive, work), "scan": (baselines.verify, work)}
    kernels["naive_sorted"] = baselines.naive, in_order(work.accepted)
    kernels["naive_predicted"] = baselines.naive, in_order(before.accepted)
    for name, (scan, kernel_work) in kernels.items():
        check(kernel_work, name, scan, None)
    runs = {name: scanning(scan, kernel_work) for name, (scan, kernel_work) in kernels.items()}
    row: Row = {"kind": "sorted", "batch": batch, "gamma": gamma, "alpha": alpha}
    return [row | timed(runs, 1, ctx.device, captured=runs)]


def _part(cases: list[Any], measure: Callable[..., list[Row]], settings: str, names: str) -> Part:
    """Cases of a kind, only the first without a GPU, with each kernel's time from Python and in a graph."""
    columns = [settings, *(f"{name}_us {name}_graph_us" for name in names.split())]
    return Part(lambda ctx: cases if ctx.gpu else cases[:1], measure, " ".join(columns))


PARTS = (
    _part(SCANS, measure_scan, "batch gamma alpha", "torch naive ballot scan"),
    _part(
        [*PACKS, *BEYOND],
        measure_pack,
        "batch gamma alpha kv_dim",
        "fused one_block two_step two_step_torch dispatcher",
    ),
    _part(PACKS_ALONE, measure_pack_alone, "batch gamma alpha kv_dim", "pack pack_torch pack_waiting"),
    _part(SORTED, measure_sorted, "batch gamma alpha", "naive naive_sorted naive_predicted scan"),
)
ABOUT = "verification of drafts against the paper's kernels and plain torch, on one GPU"
BENCHMARK = Benchmark(ABOUT, __doc__, PARTS)
