"""Mode dp: which rank has which sequence."""

from __future__ import annotations

from typing import Any

from comm.loopback import LoopbackWorld, run_ranks
from helix.engine.request import Request
from helix.layout import HelixLayout
from tests.e2e.checkpoints import checkpoint
from tests.e2e.parity import build_engine
from tests.e2e.test_serve import ServeResult, serve


def test_sequences_are_spread_and_a_prefix_decides_where() -> None:
    """Three of six sequences on each of two ranks; one that begins as another goes to its rank, if half of it does."""

    def body(world: LoopbackWorld, rank: int) -> tuple[int, ServeResult]:
        e = build_engine(
            checkpoint("qwen2"), HelixLayout.create("dp", dp=2), world.communicator(rank, (rank,)), 4, page_size=4
        )
        prompts = [tuple(range(40 * i, 40 * i + 40)) for i in range(6)]
        max_lengths: list[int] = []

        def count(*_: Any) -> None:
            max_lengths.append(len(e.runner.requests))

        e.runner.logits_hook = count
        first = [Request(i, prompt, 8) for i, prompt in enumerate(prompts)]
        more = [Request(f"like {i}", (*prompts[i], 7), 2) for i in range(6)]
        burst = [Request(f"begins {i}", (*prompts[0], *range(100 + 9 * i, 148 + 9 * i)), 2) for i in range(6)]
        served = serve(e, first, more, burst)
        return max(max_lengths), served

    (ours, served), (theirs, _) = run_ranks(2, body, timeout_s=60.0)
    assert ours == theirs == 3
    assert all(served.cached[f"like {i}"] >= 40 for i in range(6))
