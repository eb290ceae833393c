"""Sequences that change their slots when few are left: what they draw stays the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helix.engine.core import Engine
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.sampling_params import SamplingParams
from tests.e2e.checkpoints import checkpoint, oracle
from tests.e2e.parity import Continuation, check, loopback, on_loopback
from tests.sequences import Generated, generated

LENGTHS = (7, 40, 15, 33, 60)  # in five slots, of which the last one goes on alone
LAST = 9


def moves_of(engine: Engine) -> list[tuple[int, int]]:
    """Returns a list that the engine's slot moves are added to."""
    moved: list[tuple[int, int]] = []
    move = engine.runner._move_slots

    def spy(sources: tuple[int, ...], to: tuple[int, ...]) -> None:
        moved.extend(zip(sources, to, strict=True))
        move(sources, to)

    engine.runner._move_slots = spy  # type: ignore[method-assign]
    return moved


@pytest.mark.parametrize(
    "family, layout",
    [
        ("qwen2", HelixLayout.create("helix", 2, 2)),
        ("mistral-windowed", HelixLayout.create("helix", 3)),
        ("gpt-oss", HelixLayout.create("helix", 2)),
        ("qwen3-next", HelixLayout.create("helix", 2)),
        ("deepseek-v3-yarn", HelixLayout.create("helix", 2)),
        ("glm-5", HelixLayout.create("helix", 2)),
        ("qwen2", HelixLayout.create("dp", dp=2)),
    ],
    ids=str,
)
def test_the_one_left_draws_as_before(family: str, layout: HelixLayout) -> None:
    """With pages, rings of windows, states, latents and selections, against transformers; on DP ranks of their own."""
    wanted = oracle(family, LENGTHS, LAST)
    short = [Continuation(c.prompt, c.tokens[: 2 + i], c.logits[: 2 + i]) for i, c in enumerate(wanted[:-1])]
    moved: list[list[tuple[int, int]]] = []
    max_batch = 3 if layout.dp > 1 else 5
    check(
        loopback(
            checkpoint(family), layout, 16, [*short, wanted[-1]], lambda engine: moved.append(moves_of(engine)),
            max_batch=max_batch,
        ),
        [*short, wanted[-1]],
    )  # fmt: skip
    assert any(moved) and all(to < source for one in moved for source, to in one)


def test_penalties_seeds_and_log_probabilities_go_along() -> None:
    sampled = SamplingParams(temperature=0.9, top_k=40, seed=3, frequency_penalty=0.8, presence_penalty=0.3, logprobs=2)
    prompts = [c.prompt for c in oracle("qwen2", LENGTHS, LAST)]

    def run(engine: Engine, moves: bool) -> tuple[dict[int, Generated], int]:
        moved = moves_of(engine)
        if not moves:
            engine._scheduler._compact = lambda: ()  # type: ignore[method-assign]
        requests = [
            Request(i, prompt, 2 + i if i < 4 else 3 * LAST, sampling=replace(sampled, seed=i))
            for i, prompt in enumerate(prompts)
        ]
        return generated(engine, requests), len(moved)

    layout = HelixLayout.create("helix", 2)
    (with_moves, count), (without, none) = (
        on_loopback(checkpoint("qwen2"), layout, 16, lambda engine, moves=moves: run(engine, moves))[0]
        for moves in (True, False)
    )
    assert count and not none
    for name, one in without.items():
        other = with_moves[name]
        assert other.token_ids == one.token_ids and other.finish_reason == one.finish_reason
        # Steps of fewer rows add up fp32 in another order.
        pairs = zip(other.logprobs, one.logprobs, strict=True)
        assert all(abs(a.sampled - b.sampled) < 1e-4 and [*dict(a.best)] == [*dict(b.best)] for a, b in pairs)
