"""Parts of `benchmarks.bench sparse`: kernels of sparse drafts, which score keys, select them and attend to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.runner import BenchContext, Part, Row
from benchmarks.timer import ROTATED, K, seconds
from helix.worker.kv_cache_spec import dtype_name, score_planes
from kernels.attention.flash_decode import decode_tile, flash_decode
from kernels.attention.reference import flash_decode as by_torch
from kernels.mla.decode import mla_decode
from kernels.mla.reference import mla_decode as latents_by_torch
from kernels.paged_keys import KeyScores, PagedKeys
from kernels.sparse.reference import select_tokens as select_by_torch
from kernels.sparse.select_tokens import select_tokens

PAGE = 128
KEY_SHARE = 0.07  # of all keys
TAIL = 64
# Query heads per KV head, head dim, queries, sequences, keys of each.
VERIFIED = [
    (4, 128, 8, 1, 128 * K), (7, 128, 8, 1, 64 * K), (7, 128, 8, 1, 128 * K), (7, 128, 5, 8, 128 * K),
    (7, 128, 8, 1, 512 * K), (8, 128, 8, 1, 128 * K), (8, 64, 8, 1, 128 * K), (8, 64, 8, 8, 64 * K),
    (8, 128, 12, 1, 128 * K), (7, 128, 9, 1, 512 * K), (7, 128, 10, 1, 512 * K), (7, 128, 12, 1, 512 * K),
    (7, 128, 12, 8, 128 * K), (8, 128, 16, 8, 64 * K), (7, 128, 18, 1, 128 * K),
]  # fmt: skip
# Heads, queries, sequences, latents of each.
LATENTS = [
    (16, 2, 1, 128 * K), (16, 5, 1, 128 * K), (64, 3, 1, 128 * K), (128, 1, 1, 128 * K), (128, 3, 1, 128 * K),
    (128, 5, 8, 16 * K),
]  # fmt: skip
# Layers, KV heads, sequences, keys of each.
SCORED = [(28, 1, 1, 128 * K), (28, 4, 1, 128 * K), (28, 1, 1, 512 * K), (36, 2, 8, 64 * K)]
# Query heads, KV heads, sequences, keys of each, selected keys, length of contiguous runs.
ATTENDED = [
    *((28, 4, batch, 128 * K, 9216, run) for batch in (1, 8) for run in (1, 2, 4, 8, 16)),
    *((7, 1, batch, 512 * K, 36864, 1) for batch in (1, 8)), (8, 2, 1, 128 * K, 9216, 1), (32, 8, 8, 64 * K, 4608, 1),
]  # fmt: skip


def dtype(ctx: BenchContext) -> torch.dtype:
    """Returns bfloat16 on a GPU, float32 on the CPU."""
    return torch.bfloat16 if ctx.gpu else torch.float32


def collect(ctx: BenchContext, group: int, dim: int, queries: int, batch: int, length: int) -> list[Row]:
    """Times verification of one KV head without scores, with scores of two queries, and with the maximum over all."""
    device, kind = ctx.device, dtype(ctx)
    pages = length // PAGE
    copies = max(4, -(-ROTATED // (batch * length * dim * 2 * kind.itemsize))) if ctx.gpu else 1
    k, v = (torch.randn(copies * batch * pages, PAGE, 1, dim, device=device, dtype=kind) for _ in range(2))
    tables = torch.randperm(copies * batch * pages, device=device).int().view(copies, batch, pages)
    q = torch.randn(batch, queries, group, dim, device=device, dtype=kind)
    hi = torch.arange(length - queries, length, device=device, dtype=torch.int32)[None].expand(batch, -1) + 1
    lo = torch.zeros_like(hi)
    num_planes = score_planes(queries, group, dim, dtype_name(kind))
    planes = torch.empty(num_planes, batch * pages, 1, PAGE, dtype=torch.float16, device=device)
    score_table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)

    def attend(copy: int, rows: str | None = None, op: Callable[..., object] = flash_decode) -> None:
        scores = None if rows is None else KeyScores(planes, score_table, rows)
        op(q, PagedKeys(k, v, tables[copy], lo, hi, dim**-0.5), scores=scores)

    def found(rows: str, op: Callable[..., object]) -> torch.Tensor:
        planes.zero_()
        attend(0, rows, op)
        num_keys = length - queries + 1  # without keys of drafts, which some queries do not see
        return planes.double().sum(0).view(batch, -1)[:, :num_keys]

    kinds = ["ends"]
    if queries * group <= decode_tile(queries * group, dim, kind)["BLOCK_M"]:
        kinds += ["any"]
    row: Row = {"kind": "collect", "group": group, "dim": dim, "queries": queries, "batch": batch, "length": length}
    for rows in kinds:
        # Different order of summation, and fp16: 2^-11 of scores below 8.
        torch.testing.assert_close(found(rows, flash_decode), found(rows, by_torch), rtol=2**-9, atol=2**-8)
    row |= {"planes": num_planes, "plain_us": 1e6 * seconds(attend, copies, device)}
    for rows in kinds:
        row[f"{rows}_us"] = 1e6 * seconds(partial(attend, rows=rows), copies, device)
    row["again_us"] = 1e6 * seconds(attend, copies, device)  # run-to-run difference of plain attention
    for rows in kinds:
        row[f"{rows}_over_plain"] = 2 * row[f"{rows}_us"] / (row["plain_us"] + row["again_us"])
    return [row]


def collect_latents(ctx: BenchContext, heads: int, queries: int, batch: int, length: int) -> list[Row]:
    """Times verification over latents (512 + 64) without scores and with them, in microseconds."""
    device, kind, page = ctx.device, dtype(ctx), 64
    pages = length // page
    copies = max(2, -(-ROTATED // (batch * length * 576 * kind.itemsize))) if ctx.gpu else 1
    latents = torch.randn(copies * batch * pages, page, 576, device=device, dtype=kind)
    tables = torch.randperm(len(latents), device=device).int().view(copies, batch, pages)
    q = torch.randn(batch, queries, heads, 576, device=device, dtype=kind)
    hi = torch.arange(length - queries, length, device=device, dtype=torch.int32)[None].expand(batch, -1) + 1
    lo, num_planes = torch.zeros_like(hi), score_planes(queries, heads, None, dtype_name(kind))
    planes = torch.empty(num_planes, batch * pages, 1, page, dtype=torch.float16, device=device)
    score_table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)

    def attend(copy: int, rows: str | None = None, op: Callable[..., object] = mla_decode) -> None:
        scores = None if rows is None else KeyScores(planes, score_table, rows)
        op(q, PagedKeys(latents, latents[..., :512], tables[copy], lo, hi, 192**-0.5), scores=scores)

    def found(rows: str, op: Callable[..., object]) -> torch.Tensor:
        attend(0, rows, op)
        return planes.double().sum(0).view(batch, -1)[:, : length - queries + 1]

    row: Row = {"kind": "collect-latents", "heads": heads, "queries": queries, "batch": batch, "length": length}
    for rows in ("any", "ends"):
        torch.testing.assert_close(found(rows, mla_decode), found(rows, latents_by_torch), rtol=2**-9, atol=2**-8)
    row |= {"planes": num_planes, "plain_us": 1e6 * seconds(attend, copies, device)}
    for rows in ("any", "ends"):
        row[f"{rows}_us"] = 1e6 * seconds(partial(attend, rows=rows), copies, device)
        row[f"{rows}_over_plain"] = row[f"{rows}_us"] / row["plain_us"]
    return [row]


def select(ctx: BenchContext, layers: int, heads: int, batch: int, length: int) -> list[Row]:
    """Measures one row over all layers, in us: with the last k-th score as a right guess, and as a wrong one."""
    device = ctx.device
    read = layers * heads * batch * length * 2
    copies = max(4, -(-ROTATED // read)) // 2 * 2 if ctx.gpu else 2
    pages = length // PAGE
    scores = [torch.randn(layers, 1, batch * pages, heads, PAGE, device=device).half() for _ in range(copies)]
    score_tables, tables = (torch.randperm(batch * pages, device=device).int().view(batch, pages) for _ in range(2))
    num_keys = torch.full((batch,), length - TAIL, dtype=torch.int32, device=device)
    counts = torch.full_like(num_keys, int(KEY_SHARE * length))
    sinks, windows = torch.full_like(num_keys, 4), torch.full_like(num_keys, 16)
    fresh = torch.zeros_like(num_keys, dtype=torch.bool)
    table = torch.zeros(layers, batch, heads, int(KEY_SHARE * length) + TAIL, dtype=torch.int32, device=device)

    def choose(copy: int, to: torch.Tensor = table, op: Callable[..., None] = select_tokens) -> None:
        op(scores[copy], score_tables, tables, num_keys, counts, sinks, windows, fresh, to, TAIL)

    wanted = torch.zeros_like(table)

    def checked() -> None:
        for copy in (0, 0, 1, 0):
            choose(copy)
            choose(copy, wanted, select_by_torch)
            assert torch.equal(table, wanted), "the selected keys differ from torch's"

    row: Row = {"kind": "select", "layers": layers, "kv_heads": heads, "batch": batch, "length": length}
    row["read_bytes"] = read
    checked()
    row["us"] = 1e6 * seconds(choose, copies, device)
    for tensor in scores[1::2]:
        tensor *= 4
    checked()
    row["missed_us"] = 1e6 * seconds(choose, copies, device)
    row["target_us"] = 3 * read / 4.4e6 + 20
    return [row]


def attend(
    ctx: BenchContext, q_heads: int, kv_heads: int, batch: int, length: int, keys_read: int, run: int
) -> list[Row]:
    """Times attention of one query over `keys_read` keys of each KV head, in runs of `run`, in microseconds."""
    device, kind, dim = ctx.device, dtype(ctx), 128
    read = batch * keys_read * kv_heads * dim * 2 * kind.itemsize
    copies = max(4, -(-ROTATED // read)) if ctx.gpu else 1
    slots = batch * length
    k, v = (torch.randn(slots, 1, kv_heads, dim, device=device, dtype=kind) for _ in range(2))
    q = torch.randn(batch, 1, q_heads, dim, device=device, dtype=kind)
    hi = torch.full((batch, 1), keys_read, dtype=torch.int32, device=device)
    lo = torch.zeros_like(hi)
    selected = (
        torch.rand(copies, batch, kv_heads, length // run, device=device).topk(keys_read // run).indices.sort().values
    )
    tables = (selected[..., None] * run + torch.arange(run, device=device)).flatten(3)
    tables = (tables + torch.arange(batch, device=device)[:, None, None] * length).int()

    def over(copy: int, op: Callable[..., tuple[torch.Tensor, torch.Tensor]] = flash_decode) -> torch.Tensor:
        return op(q, PagedKeys(k, v, tables[copy], lo, hi, dim**-0.5))[0]

    # As in tests/kernels/oracle.py: bf16 keeps 2^-8 of weights and results, and these are means of thousands of values.
    torch.testing.assert_close(over(0).float(), over(0, by_torch).float(), rtol=2**-6, atol=2**-10)
    row: Row = {
        "kind": "attend",
        "heads": f"{q_heads}/{kv_heads}",
        "batch": batch,
        "length": length,
        "keys_read": keys_read,
    }
    row |= {"run": run, "read_bytes": read, "us": 1e6 * seconds(over, copies, device)}
    row["target_us"] = read / 4.0e6 + 6
    return [row]


PARTS = (
    Part(
        lambda ctx: VERIFIED if ctx.gpu else [(2, 32, 3, 2, 2 * K)],
        collect,
        "group dim queries batch length plain_us again_us ends_us any_us ends_over_plain any_over_plain",
        "scores written by verification",
    ),
    Part(
        lambda ctx: LATENTS if ctx.gpu else [(4, 3, 2, 256)],
        collect_latents,
        "heads queries batch length planes plain_us any_us ends_us any_over_plain ends_over_plain",
        "scores of latents written by verification",
    ),
    Part(
        lambda ctx: SCORED if ctx.gpu else [(2, 2, 1, 2 * K)],
        select,
        "layers kv_heads batch length us missed_us target_us",
        "selection of keys",
    ),
    Part(
        lambda ctx: ATTENDED if ctx.gpu else [(4, 2, 2, 2 * K, 128, 2)],
        attend,
        "heads batch length keys_read run us target_us",
        "attention over selected keys",
    ),
)
