"""Attention of a batch in chunks, each merged beside the next: what the whole batch gives, on a GPU from a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kernels.attention.flash_decode as kernel
from comm.hopb import RESERVED_SMS, Pipeline
from helix.layout import share
from kernels.attention.flash_decode import decode_parts, flash_decode
from kernels.attention.merge_states_pack import merge_states_pack
from kernels.attention.split_kv import PartialAttention
from kernels.dense.rms_norm import rms_norm
from tests.kernels.oracle import make_case

# Sequences, most keys of one, query and KV heads, head dim. On a GPU attention has to be longer than launches.
SMALL, LARGE = (5, 90, (4, 2), 64), (33, 6000, (16, 2), 128)
REPLAYS = 40


def steps(device: torch.device, dtype: torch.dtype, chunks: int) -> tuple[Tensor, Callable[[], Tensor], Tensor]:
    """The source of queries, a step from it (a norm, attention in chunks, messages), and what it gives as a whole."""
    on_gpu = device.type == "cuda"
    B, max_context, heads, dim = LARGE if on_gpu else SMALL
    lengths = [max_context * (7 * i % 11) // 11 for i in range(B)]
    case = make_case([1] * B, lengths, heads=heads, dim=dim, page_size=64, dtype=dtype, device=device)
    keys, pipeline = case.paged(B), Pipeline(device if on_gpu else None)
    x = torch.randn(B, heads[0] * dim, device=device).to(dtype)
    norm_weight = torch.ones(heads[0] * dim, dtype=dtype, device=device)
    starts = torch.tensor([0, heads[0]], dtype=torch.int32, device=device)
    sms = kernel.sm_count(device)

    def queries() -> Tensor:
        return rms_norm(x, norm_weight, 1e-6)[0].view(B, 1, heads[0], dim)

    def step() -> Tensor:
        q = queries()
        out, lse = q.new_empty(1, B, heads[0], dim), q.new_empty(1, B, heads[0], dtype=torch.float32)

        def rows(chunk: int) -> slice:
            part = share(B, chunks, chunk)
            return slice(part.start, part.stop)

        def attend(chunk: int) -> PartialAttention:
            cut = rows(chunk)
            some = replace(keys, table=keys.table[cut], lo=keys.lo[cut], hi=keys.hi[cut])
            free = sms - RESERVED_SMS if chunk else None
            return decode_parts(q[cut], some, sms=free, early=True, lane=chunk, ready=chunk > 0)

        def exchange(chunk: int, parts: PartialAttention) -> None:
            merge_states_pack(parts, out[:, rows(chunk)], lse[:, rows(chunk)], [heads[0]], starts)

        pipeline.run(chunks, attend, exchange)
        return out[0]

    return x, step, flash_decode(queries(), keys)[0][:, 0]


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
def test_chunks_are_the_whole(
    chunks: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(kernel, "sm_count", lambda device: 8)
    x, step, wanted = steps(device, dtype, chunks)
    # As in `oracle.check`, each side.
    close = {"atol": 8 * torch.finfo(dtype).eps, "rtol": 0.0}
    torch.testing.assert_close(step(), wanted, **close)
    if device.type == "cpu":
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    first = x.clone()
    for replay in range(REPLAYS):  # a chunk that does not wait for what it reads reads the step's before
        x.copy_(first if replay % 2 else -first)
        graph.replay()
        if replay % 2:
            torch.testing.assert_close(found, wanted, **close)
        else:
            assert not torch.allclose(found, wanted, **close)
