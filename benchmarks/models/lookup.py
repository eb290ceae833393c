"""Counts steps with drafts by lookup on recorded turns of agents, without a model: `helix bench lookup`.

The answers of `assets/agent-turns.jsonl` are said again, word by word, each behind what was said before it. A step
accepts the drafts that agree with the recorded answer, and one word more. `ngram` looks in the sequence itself,
`suffix` in the answers before as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.quality import agent_turns
from benchmarks.runner import BenchContext, Row
from helix.engine.scheduler_output import NewRequest
from helix.kv_placement import NO_PAGES
from helix.sampling_params import SamplingParams
from helix.speculation import Drafter, SuffixDrafter
from helix.worker.graph_keys import DecodeGraphKey

DRAFTS = 6  # most of a step
POOL_TOKENS = 1 << 15  # tokens of answers before: all of them
MAX_MATCHES = {"ngram": (3, 8), "suffix": (3, 8)}  # the most final words that are compared
Turn = tuple[np.ndarray, np.ndarray]


def tokenized_turns() -> list[Turn]:
    """Numbers words, spaces and signs of the turns: what was said before each answer, and the answer, int32."""
    ids: dict[str, int] = {}

    def words(*messages: str) -> np.ndarray:
        found = [ids.setdefault(word, len(ids)) for text in messages for word in re.findall(r"\w+|\W", text + "\n")]
        return np.array(found, dtype=np.int32)

    return [(words(*(m["content"] for m in before)), words(answer)) for before, answer in agent_turns.turns()]


class Replay:
    """A drafter in one slot, whose drafts are compared with what an agent said.

    Args:
        most: words of the longest prompt and its answer together.
    """

    def __init__(self, drafter: Drafter, max_tokens: int = 1 << 13) -> None:
        self.drafter = drafter
        self.history = torch.full((1, max_tokens), -1, dtype=torch.int32)

    def steps(self, prompt: np.ndarray, answer: np.ndarray, cache_salt: int = 0) -> int:
        """Counts the steps in which an answer is decoded, behind a prompt, both int32."""
        token_ids = np.concatenate((prompt, answer))
        limit = len(token_ids) - 1
        sampling = SamplingParams()
        first_token: Any = SimpleNamespace(slots=torch.tensor([0]))
        self.drafter.admit(
            NewRequest("", 0, len(prompt), prompt, 0, NO_PAGES, limit, limit, sampling, cache_salt=cache_salt)
        )
        self.drafter.on_first_token(first_token)
        self.history[0, : len(token_ids)] = torch.from_numpy(token_ids)
        at, steps = len(prompt), 0
        while at < limit:
            state: Any = SimpleNamespace(history=self.history, lengths=torch.tensor([at]))
            drafts = self.drafter.propose(state, DecodeGraphKey(1, DRAFTS)).tokens[0].tolist()
            accepted = 0
            while accepted < DRAFTS and at + 1 + accepted <= limit and drafts[accepted] == token_ids[at + 1 + accepted]:
                accepted += 1
            at, steps = at + 1 + accepted, steps + 1
        released: Any = SimpleNamespace(slot=0, history=self.history[0], length=torch.tensor([min(at, limit)]))
        self.drafter.release(released)
        return steps


def measure(ctx: BenchContext, name: str, longest: int) -> Iterator[Row]:
    """Counts the steps of all answers, said one after the other."""
    drafter = SuffixDrafter(DRAFTS, longest, POOL_TOKENS if name == "suffix" else 0, 1)
    replay, turns = Replay(drafter), tokenized_turns()
    steps, words = sum(replay.steps(*turn) for turn in turns), sum(len(answer) for _, answer in turns)
    yield {
        "kind": "lookup", "drafter": name, "longest": longest, "drafts": DRAFTS, "answers": len(turns),
        "words": words, "steps": steps, "words_per_step": words / steps,
    }  # fmt: skip


def cases(ctx: BenchContext) -> list[tuple[str, int]]:
    return [(name, longest) for name, lengths in MAX_MATCHES.items() for longest in lengths]
