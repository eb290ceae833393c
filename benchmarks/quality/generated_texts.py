"""Texts that a model generates, as answers and as continuations of code: training data for draft layers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MAX_NEW_TOKENS = 512  # per answer
TOGETHER = 1024  # answers per batch
BEGIN = 64  # tokens of code to continue
TEMPERATURE = 0.7
QUESTIONS = (
    "Explain {} to a child.", "Write a short story about {}.", "What are the advantages and disadvantages of {}?",
    "Write a Python function about {}, with comments.", "List ten facts about {}.", "Write an email about {}.",
    "Describe the history of {}.", "How do I start with {}? Give me a plan in steps.", "Summarize what is known of {}.",
    "Write a dialogue of two friends about {}.", "Make a table that compares kinds of {}.", "Write a poem about {}.",
)  # fmt: skip
SUBJECTS = (
    "bicycles", "the moon", "binary search", "bread", "volcanoes", "chess", "the French revolution", "hash tables",
    "gardens", "whales", "jazz", "elections", "vaccines", "sorting a list", "trains", "the Roman empire", "glaciers",
    "coffee", "prime numbers", "birds", "reading files", "photography", "earthquakes", "tea", "parsing dates", "maps",
    "the stock market", "bridges", "honey bees", "swimming", "matrices", "cooking rice", "rivers", "robots", "silk",
    "unit tests", "football", "the heart", "deserts", "web servers", "cats", "ancient Egypt", "solar power", "novels",
    "recursion", "clouds", "languages", "money", "steel", "databases",
)  # fmt: skip


def prompts(tokenizer: Any, code: Tensor, count: int) -> list[list[int]]:
    """Returns questions in the model's chat format and beginnings of code [n], alternating; only code without a format.

    Args:
        count: of both together.
    """
    rng = random.Random(0)
    found = []
    for i in range(count):
        if i % 2 and getattr(tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": rng.choice(QUESTIONS).format(rng.choice(SUBJECTS))}]
            question = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            found.append(tokenizer(question, add_special_tokens=False)["input_ids"])
        else:
            at = rng.randrange(len(code) - BEGIN)
            found.append(code[at : at + BEGIN].tolist())
    return found


@torch.no_grad()
def generate(model: Any, prompts: Sequence[Sequence[int]], end: int) -> Tensor:
    """Returns prompts with the output of a transformers model, concatenated, [n] int64.

    Args:
        end: EOS token.
    """
    token_ids: list[int] = []
    for first in range(0, len(prompts), TOGETHER):
        group = prompts[first : first + TOGETHER]
        max_length = max(map(len, group))
        ids = torch.tensor([[end] * (max_length - len(p)) + list(p) for p in group], device=model.device)
        mask = torch.tensor([[0] * (max_length - len(p)) + [1] * len(p) for p in group], device=model.device)
        found = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=True,
            temperature=TEMPERATURE,
            pad_token_id=end,
        )
        for prompt, answer in zip(group, found[:, max_length:].tolist(), strict=True):
            token_ids += [*prompt, *(answer[: answer.index(end) + 1] if end in answer else answer)]
    return torch.tensor(token_ids)
