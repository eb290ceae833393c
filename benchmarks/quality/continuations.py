"""Long prompts for a model to continue: unseen code, an edited copy, facts to recall in turn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality import haystacks
from benchmarks.quality.copy_prompts import LINES, declared_names, edited_copy
from benchmarks.quality.haystacks import Haystack, encode

FACTS = 8


@dataclass(frozen=True)
class Continuation:
    """A prompt and the turns after it; the model generates the same number of tokens in each.

    Attributes:
        prompt: ids [n].
        turns: ids [m] appended before each of its turns; [0] if it just continues.
    """

    task: str
    prompt: Tensor
    turns: tuple[Tensor, ...]


def code(tokenizer: Any, length: int, count: int) -> list[Continuation]:
    """Returns evenly spread texts of this repository's sources, overlapping if tokens are too few.

    Raises:
        ValueError: the sources have fewer than `length` tokens.
    """
    ids = encode(tokenizer, "\n".join(haystacks.sources()))
    if len(ids) < length:
        raise ValueError(f"this repository's sources have {len(ids)} tokens: set a lower length")
    begins = [i * (len(ids) - length) // max(1, count - 1) for i in range(count)]
    return [Continuation("code", torch.tensor(ids[at : at + length]), (torch.empty(0).long(),)) for at in begins]


def copy(tokenizer: Any, length: int, count: int) -> list[Continuation]:
    """Returns prompts with a file somewhere in other code, which end with the start of its copy, a name replaced.

    Raises:
        ValueError: fewer than `count` files fit.
    """
    haystack = Haystack(tokenizer, "code", length)
    paths = sorted({path for folder in haystacks.SOURCES for path in folder.rglob("*.py")})
    random.Random(0).shuffle(paths)
    found: list[Continuation] = []
    for lines in (path.read_text(encoding="utf-8").splitlines() for path in paths):
        if len(found) < count and len(lines) >= LINES and declared_names(lines):
            before, after = (encode(tokenizer, text) for text in edited_copy(lines))
            if len(before) + len(after) < length:
                i, piece = len(found), [*encode(tokenizer, "\n"), *before]
                text, _ = haystack.plant([piece], [(i + 0.5) / count], length - len(after), random.Random(i))
                found.append(Continuation("copy", torch.tensor(text + after), (torch.empty(0).long(),)))
    if len(found) < count:
        raise ValueError(
            f"{count} files of {LINES} lines to copy are more than the {len(found)} of this repository that fit into "
            f"{length} tokens: set length higher or prompts lower"
        )
    return found


def facts(tokenizer: Any, length: int, count: int) -> list[Continuation]:
    """Returns prompts with one numbered line in each part of the text; questions about them precede the turns."""
    haystack = Haystack(tokenizer, "code", length)
    full_stop = len(encode(tokenizer, "."))
    found = []
    for i in range(count):
        hidden = haystack.hide([(j + (i + 0.5) / count) / FACTS for j in range(FACTS)], length, seed=i)
        ends = [answer.stop + full_stop for answer in hidden.answers[:-1]]
        between = [hidden.target_ids[a : b.start] for a, b in zip(ends, hidden.answers[1:], strict=True)]
        last = len(hidden.prompt) - hidden.question_tokens
        found.append(Continuation("facts", hidden.prompt[:last], (hidden.prompt[last:], *between)))
    return found


TASKS: dict[str, Callable[[Any, int, int], list[Continuation]]] = {"code": code, "copy": copy, "facts": facts}
