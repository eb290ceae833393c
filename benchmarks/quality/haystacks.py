"""Texts of this repository as token ids, and prompts that hide numbered lines in code or in a looped paragraph."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality.needles import WORDS, source_lines
from launch.inputs.compose import ROOT

SOURCES = [ROOT / part for part in ("helix", "kernels", "launch", "tests", "comm")]
KINDS = ("loop", "code")
PARAGRAPH = """
# The grass is green. The sky is blue. The sun is yellow. Here we go.
# There and back again. The night is long, and the road goes on."""


@dataclass(frozen=True)
class NeedleQuestions:
    """A prompt that ends with a question, and the tokens after it: answers, and further questions between them.

    Attributes:
        prompt: ids [n].
        target_ids: ids [m] of the true continuation.
        answers: slice of `target_ids` of each answer.
        depths: of the lines that the questions are about, as shares of the text, in the order of the questions.
        spans: token ranges of these lines in the prompt.
        question_tokens: tokens of the first question, at the end of the prompt.
    """

    prompt: Tensor
    target_ids: Tensor
    answers: tuple[slice, ...]
    depths: tuple[float, ...]
    spans: tuple[range, ...]
    question_tokens: int


def encode(tokenizer: Any, text: str) -> list[int]:
    """Tokenizes text without special tokens."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def sources() -> list[str]:
    """Returns the lines of this repository's Python files."""
    return source_lines([folder for part in SOURCES for folder in (part, *part.rglob("*/"))], seed=0)


def source_windows(tokenizer: Any, windows: int, length: int) -> Tensor:
    """Returns disjoint texts [windows, length] of this repository's sources.

    Raises:
        ValueError: there are not enough tokens.
    """
    ids = encode(tokenizer, "\n".join(sources()))
    if len(ids) < windows * length:
        raise ValueError(
            f"{windows} texts of {length} tokens are more than the {len(ids)} tokens of this repository's sources: "
            "lower windows or length"
        )
    return torch.tensor(ids[: windows * length]).view(windows, length)


class Haystack:
    """Text of one kind, to be cut into prompts of up to `length` tokens at line starts.

    Raises:
        ValueError: the sources have too few tokens, or no token begins with a newline.
    """

    def __init__(self, tokenizer: Any, kind: str, length: int) -> None:
        self.tokenizer = tokenizer
        if kind == "loop":
            once = encode(tokenizer, PARAGRAPH)
            self.ids = once * (2 * length // len(once) + 1)
        else:
            self.ids = encode(tokenizer, "\n".join(line for line in sources() if "magic number" not in line))
        if len(self.ids) <= length:
            raise ValueError(f"this repository's sources have {len(self.ids)} tokens: lower length={length}")
        begins = {i for i in {*self.ids} if tokenizer.decode([i]).startswith("\n")}
        self.lines = [at for at, token in enumerate(self.ids) if token in begins]
        if not self.lines:
            raise ValueError("no token of this model begins with a newline: needles cannot be hidden in its text")

    def hide(self, depths: Sequence[float], length: int, seed: int, chained: bool = False) -> NeedleQuestions:
        """Hides lines at `depths`, ascending shares of the text, and asks about them in random order.

        Prompt and continuation have at most `length` tokens, and as nearly that as whole lines allow. The seed fixes
        words, numbers, the order of the questions and where in the haystack the text begins.

        Args:
            chained: a line refers to the number of the one before it instead of a word.
        """
        rng = random.Random(seed)
        words = rng.sample(WORDS, len(depths))
        numbers = [f"{rng.randrange(100_000):05d}" for _ in depths]
        order = rng.sample(range(len(depths)), len(depths))
        for before, i in pairwise(order) if chained else ():
            words[i] = numbers[before]
        hidden = [self._encode(f"\n# The magic number for {w} is {n}.") for w, n in zip(words, numbers, strict=True)]
        first, *others = (self._encode(f"\n# The magic number for {words[i]} is") for i in order)
        target_ids: list[int] = []
        answers = []
        for i, question in zip(order, [*others, []], strict=True):
            answer = self._encode(f" {numbers[i]}")
            answers.append(slice(len(target_ids), len(target_ids) + len(answer)))
            target_ids += [*answer, *(self._encode(".") if question else []), *question]
        prompt, spans = self.plant(hidden, depths, length - len(first) - len(target_ids), rng)
        depths_and_spans = tuple(depths[i] for i in order), tuple(spans[i] for i in order)
        return NeedleQuestions(
            torch.tensor(prompt + first), torch.tensor(target_ids), tuple(answers), *depths_and_spans, len(first)
        )

    def plant(
        self, pieces: Sequence[list[int]], depths: Sequence[float], length: int, rng: random.Random
    ) -> tuple[list[int], list[range]]:
        """Returns whole lines of at most `length` tokens with pieces at `depths`, and the pieces' ranges."""
        room = length - sum(map(len, pieces))
        begin = self._line(rng.randrange(max(1, len(self.ids) - length)))
        end = max(begin, self._line(begin + room + 1, before=True))
        cuts = [min(self._line(begin + int(depth * (end - begin))), end) for depth in depths]
        token_ids = self.ids[begin : cuts[0]]
        spans = []
        for piece, cut, stop in zip(pieces, cuts, [*cuts[1:], end], strict=True):
            spans.append(range(len(token_ids), len(token_ids) + len(piece)))
            token_ids += [*piece, *self.ids[cut:stop]]
        return token_ids, spans

    def _encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text)

    def _line(self, at: int, before: bool = False) -> int:
        """The first line start at or after `at`, or the last one before it."""
        i = bisect_left(self.lines, at)
        return self.lines[max(0, i - 1) if before else min(i, len(self.lines) - 1)]
