"""Suffix drafts: what they save on turns of agents, what they keep apart, and that they change no token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.models.lookup import DRAFTS, Replay, tokenized_turns
from comm.loopback import LoopbackWorld, run_ranks
from helix.engine.core import Engine
from helix.engine.request import Request
from helix.kv_placement import NO_PAGES
from helix.layout import HelixLayout
from helix.sampling_params import SamplingParams
from helix.speculation import SuffixDrafter
from tests.e2e.checkpoints import checkpoint, oracle
from tests.e2e.parity import UNHURRIED, build_engine
from tests.e2e.test_parity import LENGTHS, NEW_TOKENS
from tests.sequences import generated_ids, new_request

CPU = torch.device("cpu")
FIRST, SOME = 8, 60  # answers of the first conversation, and of those that are said again here


def test_turns_of_agents_take_fewer_steps_than_with_ngram() -> None:
    some = tokenized_turns()[:SOME]  # `helix bench lookup` counts them all
    by_ngram, by_suffix = Replay(SuffixDrafter(DRAFTS, 3)), Replay(SuffixDrafter(DRAFTS, 3, 4096, 1, CPU))
    found = [(by_ngram.steps(*turn), by_suffix.steps(*turn)) for turn in some]
    ngram, suffix = map(sum, zip(*found, strict=True))
    assert suffix < 0.9 * ngram, (ngram, suffix)
    # The first conversation has nothing to learn from but itself.
    assert sum(s for _, s in found[:FIRST]) <= 1.05 * sum(n for n, _ in found[:FIRST])


@pytest.mark.parametrize("remembered", [16, 100, 4096])
def test_memory_has_a_bound_and_salts_are_apart(remembered: int) -> None:
    bench, by_ngram = Replay(SuffixDrafter(DRAFTS, 8, remembered, 1, CPU)), Replay(SuffixDrafter(DRAFTS, 8))
    prompt, answer = tokenized_turns()[0]
    first = bench.steps(prompt, answer, cache_salt=7)
    size = len(bench.drafter._pool)  # type: ignore[attr-defined]
    assert first == by_ngram.steps(prompt, answer), "nobody has said anything yet"
    assert first == by_ngram.steps(prompt, answer), "ngram keeps nothing"
    assert bench.steps(prompt, answer, cache_salt=8) == first, "the other salt's is not looked at"
    again = bench.steps(prompt, answer, cache_salt=7)
    assert again <= -(-len(answer) // (1 + DRAFTS)) if remembered == 4096 else again <= first
    for prompt, answer in tokenized_turns()[: 2 * FIRST]:
        bench.steps(prompt, answer, cache_salt=9)
    assert size == remembered + 1 == len(bench.drafter._pool)  # type: ignore[attr-defined]


def test_an_aborted_prompt_leaves_nothing() -> None:
    """The length that stands in its slot is that of the sequence before."""
    drafter = SuffixDrafter(DRAFTS, 8, 64, 1, CPU)
    bench = Replay(drafter)
    bench.steps(*tokenized_turns()[0], cache_salt=1)
    before = drafter._pool[:64].clone()
    drafter.admit(new_request(0, 0, NO_PAGES, 500, np.zeros(100, dtype=np.int32), cache_salt=2))
    gone: Any = SimpleNamespace(slot=0, history=bench.history[0], length=torch.tensor([300]))
    drafter.release(gone)
    assert torch.equal(drafter._pool[:64], before)


def test_sampled_tokens_of_several_salts() -> None:
    prompts = [c.prompt for c in oracle("qwen2", LENGTHS, NEW_TOKENS) if len(c.prompt) > 1]
    params = [SamplingParams(), SamplingParams(temperature=0.9, seed=9), SamplingParams(temperature=0.7, seed=2)]

    def served(make: Any) -> list[tuple[dict[Any, tuple[int, ...]], int]]:
        def body(world: LoopbackWorld, rank: int) -> list[tuple[dict[Any, tuple[int, ...]], int]]:
            comm = world.communicator(rank, (0, 1))
            layout = HelixLayout.create("helix", 2, 1)
            engine: Engine = build_engine(
                checkpoint("qwen2"), layout, comm, 16, drafter=make(), adaptive=False, schedule=UNHURRIED
            )
            found = []
            for cache_salt in ("a", "a", "b"):
                requests = [Request(i, prompts[i], 24, p, cache_salt=cache_salt) for i, p in enumerate(params)]
                tokens = generated_ids(engine, requests)
                found.append((tokens, len(engine.timings.ttl_s)))
            return found

        return run_ranks(2, body, timeout_s=120.0)[0]

    plain, drafted = served(lambda: None), served(lambda: SuffixDrafter(5, 6, 1000, 5, CPU))
    assert [tokens for tokens, _ in drafted] == [tokens for tokens, _ in plain]
    first, again, apart = (steps for _, steps in drafted)
    assert again < 0.6 * first and apart == first, (first, again, apart)
