"""A model that others trained says what transformers makes it say: in every layout, with every drafter, at 8K."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.papers.policies import FULL
from comm.loopback import LoopbackWorld, run_ranks
from helix.layout import HelixLayout
from helix.speculation import DraftBudget, SuffixDrafter
from tests.e2e.parity import (
    Continuation,
    ModelDrafts,
    Result,
    SelfDrafts,
    build_engine,
    check,
    distributed_rank,
    generate,
    loopback,
)
from tests.pool import Pool
from tests.real.smollm2 import CHATS, CONTEXT, MODEL, continuation, ids_of, licence, tokenizer, write_draft

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
# fp32 sums of different orders over 30 layers, with logits of sizes up to 46: up to 7e-5 apart where prompts have
# hundreds of tokens, and up to 3e-4 where they have 8,000.
TOLERANCE, LONG_TOLERANCE = 2e-4, 1e-3
NEW_TOKENS = 16
POLICIES = ["any", "c2q", "window", "quest", FULL]


def wanted() -> list[Continuation]:
    return [continuation(ids_of(chat), NEW_TOKENS) for chat in CHATS.values()]


def leads(continuation: Continuation) -> float:
    """By how much the drawn tokens lead, at least: as long as logits are off by less, none is a matter of rounding."""
    best, next_best = continuation.logits.topk(2).values.unbind(1)
    return float((best - next_best).min())


def test_no_token_is_a_matter_of_rounding() -> None:
    assert min(map(leads, wanted())) > 10 * TOLERANCE


@pytest.mark.parametrize("kvp", [1, 2, 3])
@pytest.mark.parametrize("tpa", [1, 3])
def test_layouts(kvp: int, tpa: int) -> None:
    check(loopback(MODEL, HelixLayout.create("helix", kvp, tpa), 16, wanted()), wanted(), TOLERANCE)


@pytest.mark.parametrize("kvp, tpa, block", [(2, 1, 64), (1, 3, 16)])
def test_gloo_ranks(gloo_pool: Callable[[int], Pool], kvp: int, tpa: int, block: int) -> None:
    task = MODEL, HelixLayout.create("helix", kvp, tpa), block, wanted(), "cpu"
    check(gloo_pool(kvp * tpa).run(distributed_rank, *task, timeout_s=240.0), wanted(), TOLERANCE)


def drafted(
    make: Callable[[LoopbackWorld, int], Any],
    layout: HelixLayout,
    wanted: list[Continuation],
    tolerance: float = TOLERANCE,
    **options: Any,
) -> float:
    """The share of drafts that were kept, once every token and logit has been compared."""

    def body(world: LoopbackWorld, rank: int) -> tuple[Result, float]:
        comm, drafter = world.communicator(rank, layout.kvp_group(rank)), make(world, rank)
        engine = build_engine(MODEL, layout, comm, 16, drafter=drafter, adaptive=False, **options)
        result, seen = generate(engine, wanted), engine.timings.acceptance
        return result, sum(seen.accepted) / sum(seen.verified) if rank == 0 else 0.0

    results, (share, *_) = zip(*run_ranks(layout.world_size, body, timeout_s=400.0), strict=True)
    check(results, wanted, tolerance)
    return share


def test_drafts_from_the_text() -> None:
    """A text that is said a second time is its own draft."""
    twice = tuple(tokenizer().encode(licence(500)[0]["content"] * 2)[: -NEW_TOKENS - 8])
    layout, prompts = HelixLayout.create("helix", 2), [*wanted(), continuation(twice, NEW_TOKENS)]
    assert drafted(lambda world, rank: SuffixDrafter(4, 3), layout, prompts) > 0.3


def test_drafts_of_a_smaller_model(tmp_path: Path) -> None:
    """In a layout of its own; the model itself as its own drafter is always right."""
    layout, own = HelixLayout.create("helix", 3), HelixLayout.create("helix", 1, 3)

    def proposing(path: Path) -> Callable[[LoopbackWorld, int], ModelDrafts]:
        return lambda world, rank: ModelDrafts(path, own, world.communicator(rank, own.kvp_group(rank)), 3)

    assert drafted(proposing(write_draft(tmp_path)), layout, wanted()) < 1
    assert drafted(proposing(MODEL), layout, wanted()[:2]) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_drafts_of_its_own_over_few_keys(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helix.speculation.sparse.LEAST_KEYS", 64)  # hundreds of tokens are long enough
    drafts = SelfDrafts(3, DraftBudget(policy, 0.1))
    share = drafted(lambda world, rank: drafts, HelixLayout.create("helix", 2), wanted()[2:])
    assert share == 1 if policy == FULL else share > 0.3


def test_8k_of_context() -> None:
    """A prompt of 8,160 tokens over three ranks, and to the last place: with drafts over a share of its keys."""
    prompt = ids_of(licence(50_000))
    tail = ids_of([{"role": "user", "content": ""}])[-6:]  # the end of a turn, and the beginning of the answer
    new_tokens = 32
    whole = prompt[: CONTEXT - new_tokens - len(tail)] + tail
    long = continuation(whole, new_tokens)
    assert len(long.prompt) + new_tokens == CONTEXT and leads(long) > 10 * LONG_TOLERANCE
    drafts = SelfDrafts(4, DraftBudget())
    options = dict(page_size=64, max_batch=1, max_length=CONTEXT, prefill_chunk=1024)
    share = drafted(lambda world, rank: drafts, HelixLayout.create("helix", 3), [long], LONG_TOLERANCE, **options)
    assert share > 0.3
