"""Counts decode steps with lookup drafts on recorded agent turns, without a model: `helix bench lookup`.

Replays the answers of `assets/agent-turns.jsonl` word by word, each after its conversation. A step accepts the drafts
that agree with the recorded answer, and one more word. `ngram` looks in the sequence itself, `suffix` also in earlier
answers.
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

DRAFTS = 6  # maximum per step
POOL_TOKENS = 1 << 15  # tokens of earlier answers: all of them
MAX_MATCHES = {"ngram": (3, 8), "suffix": (3, 8)}  # maximum length of the matched suffix, in words
Turn = tuple[np.ndarray, np.ndarray]


def tokenized_turns() -> list[Turn]:
    """Numbers the words, spaces and signs of the turns; returns (conversation, answer) of each turn, int32."""
    ids: dict[str, int] = {}

    def words(*messages: str) -> np.ndarray:
        found = [ids.setdefault(word, len(ids)) for text in messages for word in re.findall(r"\w+|\W", text + "\n")]
        return np.array(found, dtype=np.int32)

    return [(words(*(m["content"] for m in before)), words(answer)) for before, answer in agent_turns.turns()]


class Replay:
    """A drafter with one request, whose drafts are compared with the recorded answer.

    Args:
        max_tokens: words of the longest prompt and its answer together.
    """

    def __init__(self, drafter: Drafter, max_tokens: int = 1 << 13) -> None:
        self.drafter = drafter
        self.history = torch.full((1, max_tokens), -1, dtype=torch.int32)

    def steps(self, prompt: np.ndarray, answer: np.ndarray, cache_salt: int = 0) -> int:
        """Counts the steps to decode `answer` after `prompt`, both int32."""
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
    """Counts the steps over all answers in order."""
    drafter = SuffixDrafter(DRAFTS, longest, POOL_TOKENS if name == "suffix" else 0, 1)
    replay, turns = Replay(drafter), tokenized_turns()
    steps, words = sum(replay.steps(*turn) for turn in turns), sum(len(answer) for _, answer in turns)
    yield {
        "kind": "lookup", "drafter": name, "longest": longest, "drafts": DRAFTS, "answers": len(turns),
        "words": words, "steps": steps, "words_per_step": words / steps,
    }  # fmt: skip


def cases(ctx: BenchContext) -> list[tuple[str, int]]:
    """Returns every drafter with each maximum match length."""
    return [(name, longest) for name, lengths in MAX_MATCHES.items() for longest in lengths]
