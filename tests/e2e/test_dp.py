"""Mode dp gives what transformers gives: attention of whole sequences by rank, the FFN over all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from comm.loopback import LoopbackWorld, run_ranks
from helix.engine.request import Request
from helix.layout import HelixLayout
from tests.e2e.checkpoints import checkpoint, oracle
from tests.e2e.parity import build_engine
from tests.e2e.test_parity import MOE_LENGTHS, MOE_TOKENS
from tests.e2e.test_serve import CLOSE, Served, left_behind, serve, turns
from tests.sequences import resize


def layout_of(dp: int, ep: int = 1) -> HelixLayout:
    return HelixLayout.create("dp", dp=dp, ep=ep)


@pytest.mark.parametrize("family", ["qwen3", "mistral-windowed", "gpt-oss", "deepseek-v3-yarn"])
def test_serving_with_hits_preemptions_and_an_abort(family: str) -> None:
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    first, second = turns(wanted)
    crowd = [Request(f"beside {i}", c.prompt, 40) for i, c in enumerate(wanted)]
    gone = Request("gone", wanted[2].prompt, 30)

    def body(world: LoopbackWorld, rank: int) -> tuple[Served, tuple[int, int, int], int]:
        comm = world.communicator(rank, (rank,))
        e = build_engine(checkpoint(family), layout_of(2), comm, 4, page_size=4, pages=38, **CLOSE)
        resize(e, run_steps=2)
        served = serve(e, [*reversed(first), *crowd, gone], second, aborts={"gone": 2})
        return served, left_behind(e), e.timings.preemptions

    (served, held, preemptions), (_, elsewhere, _) = run_ranks(2, body, timeout_s=120.0)
    assert held == elsewhere == (0, 0, 0)
    for i, c in enumerate(wanted):
        assert tuple(served.tokens[i]) == c.tokens and served.ends[i] == "length"
        assert tuple(served.tokens[f"next {i}"]) == c.tokens[-3:], f"prompt {i}, continued"
        assert tuple(served.tokens[f"beside {i}"][: len(c.tokens)]) == c.tokens
    assert served.ends["gone"] == "abort" and served.cached["next 2"] > 0 and preemptions > 0


def test_sequences_are_spread_and_a_prefix_decides_where() -> None:
    """Three of six sequences on each of two ranks; one that begins as another goes to its rank, if half of it does."""

    def body(world: LoopbackWorld, rank: int) -> tuple[int, Served]:
        e = build_engine(checkpoint("qwen2"), layout_of(2), world.communicator(rank, (rank,)), 4, page_size=4)
        prompts = [tuple(range(40 * i, 40 * i + 40)) for i in range(6)]
        most: list[int] = []

        def count(*_: Any) -> None:
            most.append(len(e.runner.admitted))

        e.runner.observer = count
        first = [Request(i, prompt, 8) for i, prompt in enumerate(prompts)]
        more = [Request(f"like {i}", (*prompts[i], 7), 2) for i in range(6)]
        crowd = [Request(f"begins {i}", (*prompts[0], *range(100 + 9 * i, 148 + 9 * i)), 2) for i in range(6)]
        served = serve(e, first, more, crowd)
        return max(most), served

    (ours, served), (theirs, _) = run_ranks(2, body, timeout_s=60.0)
    assert ours == theirs == 3
    assert all(served.cached[f"like {i}"] >= 40 for i in range(6))
