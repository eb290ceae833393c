"""Models whose indexers choose tokens (DSA): keys in few bits, and what runs beside."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from comm import dual_batch_overlap
from helix.layers import indexer, mla, specs
from helix.layers.mla import MLA
from helix.layout import HelixLayout
from helix.worker.kv_cache_spec import latents
from helix.worker.step import Step
from kernels.scaled_keys import quantize_fp8
from tests.e2e.checkpoints import checkpoint, continuations, oracle
from tests.e2e.fuzz_runs import SMALL_CHUNKS
from tests.e2e.parity import Result, check, distributed_rank, loopback
from tests.e2e.test_parity import MOE_LENGTHS, MOE_TOKENS
from tests.pool import PoolError, pool

CHOOSING = ["deepseek-v32", "glm-5", "glm-5-shared"]


@pytest.mark.parametrize("family", CHOOSING)
@pytest.mark.parametrize("kvp", [1, 3])
def test_index_keys_in_e4m3(monkeypatch: pytest.MonkeyPatch, family: str, kvp: int) -> None:
    """Choices are those of transformers with keys that are rounded as they are kept, and not those without."""
    update, layout = DynamicCache.update_indexer, HelixLayout.create("helix", kvp)

    def rounds(cache: DynamicCache, k: torch.Tensor, *args: Any) -> torch.Tensor:
        few, scales = quantize_fp8(k)
        return update(cache, few.float() * scales[..., None], *args)

    with monkeypatch.context() as patched:
        patched.setattr(DynamicCache, "update_indexer", rounds)
        wanted = continuations(checkpoint(family), MOE_LENGTHS, MOE_TOKENS)
    monkeypatch.setattr(specs, "latents", lambda *args: latents(*args[:-1], "auto"))

    results = loopback(checkpoint(family), layout, 4, wanted, kv="fp8_all")
    check(results, wanted)
    with pytest.raises(AssertionError, match="prompt"):
        check(results, oracle(family, MOE_LENGTHS, MOE_TOKENS))


LATE = {"first half": True, "second half": False}


def whether_there_or_not(dealt: Any, cache: Any, names: Any) -> dict[str, torch.Tensor]:
    return {name: dealt.gathered[name, cache.index][0] for name in names}


def with_late_kernels(rank: int, ranks: int, late: str, waits: bool, *task: Any) -> Result:
    """Serves prompts in halves, one of which comes late in each layer; or with sequences that are gathered late."""
    project, gather = MLA.project, MLA.prefetch_sequences

    def late_project(self: MLA, x: torch.Tensor, angles: Any, cache: Any, step: Step) -> torch.Tensor:
        if step.micro_batch is not None and step.micro_batch.first == LATE.get(late):
            torch.cuda._sleep(2_000_000)  # a millisecond
        return project(self, x, angles, cache, step)

    def late_gather(self: MLA, cache: Any, dealt: Any) -> None:
        torch.cuda._sleep(40_000_000)  # 20 ms: longer than a layer that is launched kernel by kernel
        gather(self, cache, dealt)

    with pytest.MonkeyPatch.context() as patched:
        for target in (target for target in SMALL_CHUNKS if "graph_keys" in target):
            patched.setattr(target, SMALL_CHUNKS[target])
        patched.setattr(dual_batch_overlap, "MIN_MICRO_BATCH_TOKENS", 7)
        patched.setattr(specs, "GATHER_SPEEDUP", 0 if late in LATE else 1 << 20)
        patched.setattr(MLA, "project", late_project)
        patched.setattr(MLA, "prefetch_sequences", late_gather)
        if not waits:
            patched.setattr(dual_batch_overlap.MicroBatch, "wait", lambda self, done: None)
            for reads in (mla, indexer):
                patched.setattr(reads, "gathered", whether_there_or_not)
        return distributed_rank(rank, ranks, *task)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "late, waits", [*((late, True) for late in (*LATE, "sequences")), ("first half", False), ("sequences", False)]
)
def test_what_runs_beside_is_waited_for(late: str, waits: bool) -> None:
    """Nobody waits for a second half."""
    family = "glm-5-shared"
    pool(2, "nccl").start()
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    task = (checkpoint(family), HelixLayout.create("helix", 2), 16, wanted, "cuda")
    run = partial(pool(2, "nccl").run, with_late_kernels, late, waits, *task, timeout_s=120.0)
    if waits:
        check(run(), wanted)
        return
    with pytest.raises((AssertionError, PoolError)):  # other tokens, no numbers, or a choice outside of the cache
        check(run(), wanted)
