"""Traces of agent conversations, and the prefix cache's savings on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from helix.engine.block_tables import BlockTables
from helix.engine.pages import PagePool
from helix.engine.prefix import PrefixTree
from helix.kv_placement import Stripes
from helix.layout import HelixLayout

AT_ONCE = 24  # concurrent conversations; when one ends, another begins
LENGTH = 12.0  # mean turns per conversation
SYSTEMS, SYSTEM = 3, 3000  # number of system prompts, and tokens of each
USER, OUTPUT = 1500, 400  # mean input and output tokens per turn (exponentially distributed)
IDLE = 24.0  # mean pause between two turns, in service times of a turn; lognormal, since some people go to lunch
RETRIES = 0.05  # share of turns that are sent again


@dataclass(frozen=True)
class AgentTraces:
    """Conversations with shared system prompts; each turn's prompt is the whole conversation so far.

    Attributes:
        turns: of all conversations together.
        long: initial tokens of the first conversation, which never ends.
    """

    turns: int
    long: int

    def prompts(self, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields prompt and output, int32, of each turn, in the order they are served."""
        rng = np.random.default_rng(seed)

        def words(count: float) -> np.ndarray:
            return rng.integers(0, 50_000, max(int(count), 1), dtype=np.int32)

        systems = [words(SYSTEM) for _ in range(SYSTEMS)]

        def begin(long: bool) -> np.ndarray:
            first = systems[rng.integers(SYSTEMS)]
            return np.concatenate((first, words(self.long))) if long else first

        due: list[tuple[float, int]] = []
        histories = {}
        for i in range(AT_ONCE):
            histories[i] = begin(long=i == 0)
            heappush(due, (rng.exponential(IDLE), i))
        for _ in range(self.turns):
            now, i = heappop(due)
            prompt = np.concatenate((histories[i], words(rng.exponential(USER))))
            output = words(rng.exponential(OUTPUT))
            yield prompt, output
            if rng.random() < RETRIES:
                output = words(rng.exponential(OUTPUT))
                yield prompt, output
            histories[i] = np.concatenate((prompt, output))
            if i and rng.random() < 1 / LENGTH:
                histories[i] = begin(long=False)
            heappush(due, (now + IDLE * rng.lognormal(-0.72, 1.2), i))


@dataclass
class CacheSavings:
    """What a cache leaves to compute, in units of the first token's time."""

    computed: float = 0.0


def replay(
    prompts: Iterator[tuple[np.ndarray, np.ndarray]], tokens: int, doubling: float, cost: Callable[[int], float]
) -> CacheSavings:
    """Serves turns one by one over four ranks with room for `tokens` tokens.

    Args:
        doubling: depth at which a token takes twice as long as the first one.
        cost: the tree's eviction cost.
    """
    stripes = Stripes(HelixLayout.create(kvp=4), 16, 64)
    tables = BlockTables(PrefixTree(PagePool(tokens // stripes.page_tokens), stripes, cost))
    saved = CacheSavings()

    def seconds(begin: int, end: int) -> float:
        return end - begin + (end * end - begin * begin) / (2 * doubling)

    for turn, (prompt, output) in enumerate(prompts):
        held = tables.admit(prompt, len(prompt) + len(output), turn % 4)
        assert held is not None, "a turn is larger than the cache"
        tables.insert(held, prompt)
        tables.end(held, np.concatenate((prompt, output[:-1])))
        saved.computed += seconds(held.num_cached_tokens, len(prompt))
    return saved
