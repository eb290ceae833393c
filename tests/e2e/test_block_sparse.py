"""Block-sparse decode gives, on every layout, what one rank gives that masks dense attention block by block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.papers.policies import MeanBlocks
from comm.loopback import LoopbackWorld, run_ranks
from comm.symm_mem import SymmMemCommunicator
from comm.torch_dist import TorchDistCommunicator
from helix.attention.base import LayerAttention
from helix.attention.dense import DenseAttention
from helix.engine.core import Engine
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.placement import BlockBudget
from helix.sampling_params import SamplingParams
from helix.speculation import SuffixDrafter
from helix.worker.follower import Span
from helix.worker.kv_cache import LayerCache
from helix.worker.step import Step
from kernels.attention.split_kv import PartialAttention
from tests.e2e.checkpoints import checkpoint
from tests.e2e.parity import Sparse, build_engine
from tests.pool import pool
from tests.sequences import generated_ids

PAGE = 16
BUDGET = BlockBudget(sink_blocks=1, local_blocks=4, topk=5, from_tokens=0)
LENGTHS = (7, 60, 260, 128, 33)
NEW_TOKENS = 18
GREEDY = SamplingParams()
SLOW = pytest.mark.slow

Tokens = dict[int, tuple[int, ...]]


class MaskedDense(DenseAttention):
    """One rank's dense attention with the keys of blocks masked that are not chosen, judged by the keys themselves."""

    def __init__(self, budget: BlockBudget, score: str) -> None:
        self.budget = budget
        self.score = score
        self.from_tokens = budget.from_tokens

    def attend(self, q: Tensor, cache: LayerCache, step: Step, layer: LayerAttention) -> PartialAttention:
        if step.cu_q is not None or layer.window is not None:
            return super().attend(q, cache, step, layer)
        N, q_heads = q.shape[:2]
        group = q_heads // cache.keys.shape[2]
        out, lse = torch.zeros_like(q), torch.full((N, q_heads), -torch.inf)
        for n in range(N):
            if not step.live[n]:
                continue
            length = int(step.positions[n]) + 1
            committed = int(step.positions[n // step.max_q * step.max_q])
            pages = step.block_tables[n // step.max_q].long()
            keys, values = (x[pages].flatten(0, 1)[:length] for x in (cache.keys, cache.values))  # [S, Hkv, D]
            for h in range(keys.shape[1]):
                of_group = slice(h * group, (h + 1) * group)
                read = self.read(q[n, of_group], keys[:, h], length, committed)
                scores = q[n, of_group] @ keys[read, h].T * layer.scale
                if layer.sinks is not None:
                    scores = torch.cat([scores, layer.sinks[of_group, None]], 1)
                lse[n, of_group] = scores.logsumexp(-1)
                out[n, of_group] = scores.softmax(-1)[:, : len(read)] @ values[read, h]
        return PartialAttention(out, lse)

    def read(self, q: Tensor, keys: Tensor, length: int, committed: int) -> Tensor:
        """Places of the keys that one KV head's queries read."""
        b, last = self.budget, (length - 1) // PAGE
        if length < b.from_tokens:
            return torch.arange(length)
        blocks = {*range(min(b.sink_blocks, last + 1)), *range(max(0, last - b.local_blocks + 1), last + 1)}
        scores = {}
        for block in sorted(set(range(last + 1)) - blocks):
            k = keys[block * PAGE : (block + 1) * PAGE]
            assert (block + 1) * PAGE <= committed
            if self.score == "bounds":
                bound = torch.maximum(q[:, None] * k.amax(0), q[:, None] * k.amin(0)).sum(-1)
            else:
                bound = (q @ k.mean(0))[:, None]
            scores[block] = float(bound.max())
        blocks |= set(sorted(scores, key=lambda block: (-scores[block], block))[: b.topk])
        return torch.cat([torch.arange(x * PAGE, min((x + 1) * PAGE, length)) for x in sorted(blocks)])


def prompts(lengths: Sequence[int] = LENGTHS) -> list[tuple[int, ...]]:
    gen = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(0, 257, (n,), generator=gen).tolist()) for n in lengths]


def generate(engine: Engine, sampling: SamplingParams = GREEDY) -> Tokens:
    requests = [Request(i, prompt, NEW_TOKENS, sampling) for i, prompt in enumerate(prompts())]
    return generated_ids(engine, requests)


def tokens(
    family: str,
    layout: HelixLayout,
    sparse: Sparse | None,
    tamper: Callable[[Engine], None] = lambda engine: None,
    *,
    block: int = PAGE,
    drafts: int = 0,
    sampling: SamplingParams = GREEDY,
    device: str = "cpu",
    **options: Any,
) -> Tokens:
    def body(world: LoopbackWorld, rank: int) -> Tokens:
        comm = world.communicator(rank, layout.kvp_group(rank))
        drafter = SuffixDrafter(drafts, 1) if drafts else None
        engine = build_engine(
            checkpoint(family), layout, comm, block, page_size=PAGE, sparse=sparse, drafter=drafter, adaptive=False,
            **options,
        )  # fmt: skip
        tamper(engine)
        with closing(engine):
            return generate(engine, sampling)

    return run_ranks(layout.world_size, body, timeout_s=120.0, device=device)[0]


@cache
def wanted(family: str, budget: BlockBudget, score: str = "bounds", sampling: SamplingParams = GREEDY) -> Tokens:
    def masks(engine: Engine) -> None:
        engine.runner.policy = MaskedDense(budget, score)

    return tokens(family, HelixLayout.create(), None, masks, sampling=sampling)


@cache
def dense(family: str) -> Tokens:
    return tokens(family, HelixLayout.create(), None)


GRIDS = [
    pytest.param(world // tpa, tpa, marks=[] if (world // tpa, tpa) in ((3, 1), (4, 2)) else [SLOW])
    for world in range(1, 9)
    for tpa in (1, 2, 4)
    if world % tpa == 0
]


@pytest.mark.parametrize("kvp, tpa", GRIDS)
def test_one_choice_over_all_ranks_gives_the_same_tokens_on_every_grid(kvp: int, tpa: int) -> None:
    found = tokens("qwen2", HelixLayout.create("helix", kvp, tpa), Sparse(BUDGET))
    assert found == wanted("qwen2", BUDGET) != dense("qwen2")


def test_mean_keys() -> None:
    found = tokens("qwen2", HelixLayout.create("helix", 2), Sparse(BUDGET, policy=MeanBlocks))
    assert found == wanted("qwen2", BUDGET, "mean") != wanted("qwen2", BUDGET)


@pytest.mark.parametrize("mode, kvp, tpa", [("medha", 3, 1), pytest.param("tp", 1, 2, marks=SLOW)])
def test_modes(mode: str, kvp: int, tpa: int) -> None:
    assert tokens("qwen2", HelixLayout.create(mode, kvp, tpa), Sparse(BUDGET)) == wanted("qwen2", BUDGET)


@pytest.mark.parametrize(
    "family", ["gpt-oss", *(pytest.param(f, marks=SLOW) for f in ("llama-llama3", "qwen3", "qwen3-moe"))]
)
def test_families(family: str) -> None:
    """With a learned sink and windowed layers among them."""
    found = tokens(family, HelixLayout.create("helix", 2), Sparse(BUDGET))
    assert found == wanted(family, BUDGET) != dense(family)


@pytest.mark.parametrize("drafts", [3, pytest.param(8, marks=SLOW)])
def test_drafts_change_no_token(drafts: int) -> None:
    """Each query of a verified group chooses for itself."""
    budget = replace(BUDGET, local_blocks=2)
    found = tokens("qwen2", HelixLayout.create("helix", 2), Sparse(budget), drafts=drafts)
    assert found == wanted("qwen2", budget)


def test_short_sequences_read_everything_whoever_shares_the_batch() -> None:
    budget = replace(BUDGET, from_tokens=140)
    found = tokens("qwen2", HelixLayout.create("helix", 2), Sparse(budget))
    assert found == wanted("qwen2", budget)
    for i, length in enumerate(LENGTHS):
        count = max(0, 140 - length)  # the i-th new token is drawn by a query that sees `length + i` tokens
        assert found[i][:count] == dense("qwen2")[i][:count], length
    assert found[2] != dense("qwen2")[2]


@pytest.mark.parametrize("kvp", [3, pytest.param(1, marks=SLOW)])
def test_all_blocks_is_dense(kvp: int) -> None:
    everything = Sparse(replace(BUDGET, topk=40), choice="local")
    assert tokens("qwen2", HelixLayout.create("helix", kvp), everything) == dense("qwen2")


@pytest.mark.parametrize("block, kvp", [(8, 3), *(pytest.param(*x, marks=SLOW) for x in ((1, 2), (16, 4), (64, 2)))])
def test_each_rank_its_own_share(block: int, kvp: int) -> None:
    """Fewer blocks of each rank, of whatever tokens they are; with enough of them, dense."""
    layout = HelixLayout.create("helix", kvp)
    few = tokens("qwen2", layout, Sparse(BUDGET, choice="local"), block=block)
    assert few != dense("qwen2") and few.keys() == dense("qwen2").keys()
    assert tokens("qwen2", layout, Sparse(replace(BUDGET, topk=80), choice="local"), block=block) == dense("qwen2")


def test_chunks_change_no_token() -> None:
    """Attention and exchange in turns (HOP-B): what a step has prepared for all rows is cut with them."""

    def chunked(engine: Engine) -> None:
        engine.runner.hopb = "2"

    layout, local = HelixLayout.create("helix", 2), Sparse(BUDGET, choice="local")
    assert tokens("qwen2", layout, local, chunked) == tokens("qwen2", layout, local)


@pytest.mark.parametrize("choice", ["global", pytest.param("local", marks=SLOW)])
def test_a_window_alone(choice: str) -> None:
    budget = replace(BUDGET, topk=0)
    found = tokens("qwen2", HelixLayout.create("helix", 2), Sparse(budget, choice=choice))
    assert found == wanted("qwen2", budget)


def test_sampled() -> None:
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=11)
    found = tokens("qwen2", HelixLayout.create("helix", 2), Sparse(BUDGET), sampling=sampling)
    assert found == wanted("qwen2", BUDGET, sampling=sampling)


SHORT_WINDOW = replace(BUDGET, local_blocks=1)


def test_new_text_can_be_chosen() -> None:
    """Pages that were filled by generated tokens have bounds as those of the prompt do."""
    assert tokens("qwen2", HelixLayout.create("helix", 2), Sparse(SHORT_WINDOW)) == wanted("qwen2", SHORT_WINDOW)


def without_bounds_of_new_text(engine: Engine) -> None:
    """Pages that generated tokens fill keep what their former owners left."""
    fold = engine.runner.cache.fold

    def only_prompts(span: Span) -> None:
        if span.most != 1:  # a decode step of one token
            fold(span)

    engine.runner.cache.fold = only_prompts  # type: ignore[method-assign]


def bounds_of_an_unfinished_page(engine: Engine) -> None:
    """A page gets its bounds with its first token that is certain."""
    fold = engine.runner.cache.fold

    def early(span: Span) -> None:
        fold(replace(span, before=span.before + PAGE - 1, after=span.after + PAGE - 1))

    engine.runner.cache.fold = early  # type: ignore[method-assign]


def a_block_less(engine: Engine) -> None:
    policy = engine.runner.policy
    policy.budget = replace(policy.budget, topk=policy.budget.topk - 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("tamper", [without_bounds_of_new_text, bounds_of_an_unfinished_page, a_block_less])
def test_mistakes_are_caught(tamper: Callable[[Engine], None]) -> None:
    found = tokens("qwen2", HelixLayout.create("helix", 2), Sparse(SHORT_WINDOW), tamper)
    assert found != wanted("qwen2", SHORT_WINDOW)


@pytest.mark.gpu
@pytest.mark.parametrize("choice", ["global", "local"])
@pytest.mark.parametrize("family", ["qwen2", "gpt-oss"])
def test_loopback_ranks_on_one_gpu(family: str, choice: str) -> None:
    """Eager steps of the kernels against the masked oracle, or against the references' own choice of each rank."""
    for layout in (HelixLayout.create("helix", kvp, tpa) for kvp, tpa in ((1, 1), (3, 1), (4, 2))):
        sparse = Sparse(BUDGET, choice=choice)
        expected = wanted(family, BUDGET) if choice == "global" else tokens(family, layout, sparse)
        assert tokens(family, layout, sparse, device="cuda") == expected, layout


def captured_rank(
    rank: int,
    world_size: int,
    path: Path,
    kind: type[TorchDistCommunicator],
    sparse: Sparse,
    drafts: int,
    dtype: torch.dtype,
    kv: str = "auto",
) -> list[Tokens]:
    """Tokens of a run whose steps are captured as they come, and of two that replay them."""
    layout = HelixLayout.create("helix", world_size)
    comm = kind(layout.kvp_groups(), torch.device("cuda", rank), timedelta(seconds=60))
    drafter = SuffixDrafter(drafts, 1) if drafts else None
    engine = build_engine(
        path, layout, comm, PAGE, page_size=PAGE, sparse=sparse, drafter=drafter, adaptive=False, dtype=dtype, kv=kv
    )  # fmt: skip
    assert engine.runner.graphs is not None
    found = [generate(engine) for _ in range(3)]
    engine.close()
    comm.close()
    return found


KINDS = [
    pytest.param(TorchDistCommunicator, 1, marks=pytest.mark.gpu, id="nccl-1"),
    *(pytest.param(kind, 2, marks=pytest.mark.gpu(2)) for kind in (TorchDistCommunicator, SymmMemCommunicator)),
]


@pytest.mark.parametrize("kind, world", KINDS)
@pytest.mark.parametrize("drafts", [0, 3])
def test_captured_steps(drafts: int, kind: type[TorchDistCommunicator], world: int) -> None:
    """One graph serves sequences of 7 to 278 tokens, with and without drafts, dense and sparse ones in one batch."""
    for budget in (replace(BUDGET, local_blocks=2), replace(BUDGET, from_tokens=140)):
        task = captured_rank, checkpoint("qwen2"), kind, Sparse(budget), drafts, torch.float32
        found = pool(world, "nccl").run(*task, timeout_s=120.0)[0]
        assert found == [wanted("qwen2", budget)] * 3


@pytest.mark.parametrize("kind, world", KINDS)
def test_all_blocks_is_dense_in_bf16(kind: type[TorchDistCommunicator], world: int) -> None:
    everything = Sparse(replace(BUDGET, topk=40), choice="local")
    nothing = Sparse(replace(BUDGET, from_tokens=10_000), choice="local")  # dense throughout
    task = captured_rank, checkpoint("qwen2"), kind
    sparse, plain = (
        pool(world, "nccl").run(*task, policy, 0, torch.bfloat16, timeout_s=120.0)[0]
        for policy in (everything, nothing)
    )
    assert sparse == plain
