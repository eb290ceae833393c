"""Traces of agents that hold conversations, and what a prefix cache saves of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from helix.engine.block_tables import BlockTables
from helix.engine.pages import PagePool
from helix.engine.prefix import PrefixTree
from helix.layout import HelixLayout
from helix.placement import Stripes


@dataclass(frozen=True)
class Agents:
    """Conversations behind shared system prompts, each turn behind the whole conversation so far.

    Attributes:
        turns: of all conversations together.
        at_once: conversations under way; where one ends, another begins.
        length: turns of a conversation, on average.
        systems: different system prompts, each of `system` tokens.
        user, output: tokens of a turn that come in and go out, on average (exponentially distributed).
        idle: between two turns of a conversation, on average, in units of a turn's service; lognormal, so that some
            people go to lunch.
        retries: share of turns that are sent once more.
        long: tokens with which one conversation begins, that goes on for ever; 0 for none.
    """

    turns: int = 1500
    at_once: int = 24
    length: float = 12.0
    systems: int = 3
    system: int = 3000
    user: int = 1500
    output: int = 400
    idle: float = 24.0
    retries: float = 0.05
    long: int = 256_000

    def prompts(self, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Prompt and output, int32, of each turn, in the order in which they are served."""
        rng = np.random.default_rng(seed)

        def words(count: float) -> np.ndarray:
            return rng.integers(0, 50_000, max(int(count), 1), dtype=np.int32)

        systems = [words(self.system) for _ in range(self.systems)]

        def begin(long: bool) -> np.ndarray:
            first = systems[rng.integers(self.systems)]
            return np.concatenate((first, words(self.long))) if long else first

        due: list[tuple[float, int]] = []  # conversation 0 is the long one, if there is one
        told = {}
        endless = 0 if self.long else None
        for i in range(self.at_once):
            told[i] = begin(long=i == endless)
            heappush(due, (rng.exponential(self.idle), i))
        for _ in range(self.turns):
            now, i = heappop(due)
            prompt = np.concatenate((told[i], words(rng.exponential(self.user))))
            output = words(rng.exponential(self.output))
            yield prompt, output
            if rng.random() < self.retries:
                output = words(rng.exponential(self.output))
                yield prompt, output
            told[i] = np.concatenate((prompt, output))
            if i != endless and rng.random() < 1 / self.length:
                told[i] = begin(long=False)
            heappush(due, (now + self.idle * rng.lognormal(-0.72, 1.2), i))


@dataclass
class Saved:
    """Tokens of prompts, and those found in the cache or computed; cost in tokens at the beginning of a context."""

    tokens: int = 0
    hits: int = 0
    cost: float = 0.0
    computed: float = 0.0


def replay(
    prompts: Iterator[tuple[np.ndarray, np.ndarray]], tokens: int, doubling: float, cost: Callable[[int], float]
) -> Saved:
    """Serves one turn after the other over four ranks with room for so many tokens.

    Args:
        doubling: depth at which a token takes twice as long as the first one.
        cost: by which the tree evicts.
    """
    stripes = Stripes(HelixLayout.create(kvp=4), 16, 64)
    tables = BlockTables(PrefixTree(PagePool(tokens // stripes.page_tokens), stripes, cost))
    saved = Saved()

    def seconds(begin: int, end: int) -> float:
        return end - begin + (end * end - begin * begin) / (2 * doubling)

    for turn, (prompt, output) in enumerate(prompts):
        held = tables.admit(prompt, len(prompt) + len(output), turn % 4)
        assert held is not None, "a turn is larger than the cache"
        tables.enter(held, prompt)
        tables.end(held, np.concatenate((prompt, output[:-1])))
        saved.tokens += len(prompt)
        saved.hits += held.known
        saved.cost += seconds(0, len(prompt))
        saved.computed += seconds(held.known, len(prompt))
    return saved
