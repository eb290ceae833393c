"""Rows of `helix acceptance`: the draft configs, and one row per config and task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

from benchmarks.quality.agreement import mean_range, wilson
from benchmarks.quality.drafting import LAYER_DRAFTERS, POLICIES, DraftConfig, Outcome
from benchmarks.runner import Row
from helix.speculation import DraftBudget

DEFAULTS = DraftBudget()
SCORED = ("sparsity", "recent", "reach", "heads")  # options of score-based policies
LOOKUPS = ("ngram", "suffix")  # their drafts have no sampling noise
READS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*LOOKUPS, *LAYER_DRAFTERS), ()),
    "window": ("sparsity",), "quest": ("sparsity", "recent"), "full": (),
}  # fmt: skip


def budgets(policy: str, options: dict[str, list[Any]]) -> Iterator[DraftBudget]:
    """Yields budgets for all combinations of the options that a policy reads."""
    reads = READS.get(policy, SCORED)
    kind = POLICIES.get(policy, "any")
    for values in product(*(options[name] for name in SCORED)):
        yield DraftBudget(kind, **{name: x for name, x in zip(SCORED, values, strict=True) if name in reads})


def draft_configs(policies: Sequence[str], options: dict[str, list[Any]]) -> list[DraftConfig]:
    """Returns all combinations once: at temperature 0, and for lookups, noise is irrelevant."""
    found: list[DraftConfig] = []
    for temperature in options["temperature"]:
        found.append(DraftConfig("none", temperature=temperature))
        for policy, gamma, noise in product(policies, options["gamma"], options["noise"]):
            draft_noise = noise if temperature and policy not in LOOKUPS else "shared"
            found += [
                DraftConfig(policy, gamma, budget, draft_noise, temperature) for budget in budgets(policy, options)
            ]
    return list(dict.fromkeys(found))


def describe(config: DraftConfig) -> Row:
    """Returns the fields that identify a config; None for options its policy does not read."""
    b, reads = asdict(config.budget), READS.get(config.policy, SCORED)
    noise = config.noise if config.temperature and config.policy not in LOOKUPS else None
    block = 1 if "reach" in reads else None  # older records have configs that selected in blocks
    return {
        "policy": config.policy, "gamma": config.gamma, **{name: b[name] if name in reads else None for name in SCORED},
        "block": block, "temperature": config.temperature, "noise": noise,
    }  # fmt: skip


def count_drafts(outcomes: Sequence[Outcome], gamma: int) -> Row:
    """Counts the drafts tried and accepted at each position; a draft is tried if all before it were accepted.

    `rejected_tenths` is a histogram of the first rejected drafts by their probability under the model.
    """
    by_prompt = [sum(1 + n for n in x.accepted) / len(x.accepted) for x in outcomes]
    accepted_lengths = [n for x in outcomes for n in x.accepted]
    rejected_probs = [p for x in outcomes for p in x.rejected_probs]
    tried = [sum(n >= position for n in accepted_lengths) for position in range(gamma)]
    accepted = [sum(n > position for n in accepted_lengths) for position in range(gamma)]
    return {
        "prompts": len(outcomes),
        "iterations": len(accepted_lengths),
        "drafts": gamma * len(accepted_lengths),
        "tokens": sum(by_prompt) / len(by_prompt),
        "tokens_range": mean_range(by_prompt),
        "tokens_by_prompt": [round(x, 4) for x in by_prompt],
        "tried": tried,
        "accepted": accepted,
        "accepted_share": [k / n if n else None for k, n in zip(accepted, tried, strict=True)],
        "accepted_range": [wilson(k, n) for k, n in zip(accepted, tried, strict=True)],
        "rejected": len(rejected_probs),
        "rejected_tenths": [sum(min(9, int(10 * p)) == tenth for p in rejected_probs) for tenth in range(10)],
    }


def acceptance(config: DraftConfig, outcomes: Sequence[Outcome], plain: Sequence[Outcome], exact: bool) -> Row:
    """Returns a config's row of one task.

    Args:
        plain: outcomes without drafts.
        exact: whether tokens have to be equal.

    Raises:
        RuntimeError: they differ.
    """
    same = sum(a.tokens == b.tokens for a, b in zip(outcomes, plain, strict=True))
    lossless = config.noise == "shared"  # token for token
    if lossless and exact and same < len(outcomes):
        raise RuntimeError(
            f"{config.policy} with gamma={config.gamma} changed the output of "
            f"{len(outcomes) - same} of {len(outcomes)} prompts: "
            "drafts must not"
        )
    return describe(config) | count_drafts(outcomes, config.gamma) | {"as_plain": same if lossless else None}


def rows(found: dict[DraftConfig, list[Outcome]], tasks: Sequence[str], exact: bool) -> list[Row]:
    """Returns rows of kind `acceptance`, one per config and task; of kind `sweep` for several shares of keys.

    Args:
        tasks: the task of each prompt.
    """
    made: list[Row] = []
    shares = {
        config.budget.sparsity for config in found if "sparsity" in READS.get(config.policy, SCORED) and config.gamma
    }
    kind = "sweep" if len(shares) > 1 else "acceptance"
    for config, config_outcomes in found.items():
        if not config.gamma:
            continue
        plain = found[config.plain]
        for task in dict.fromkeys(tasks):
            ours, theirs = (
                [x for x, of in zip(outcomes, tasks, strict=True) if of == task]
                for outcomes in (config_outcomes, plain)
            )
            made.append({"kind": kind, "task": task} | acceptance(config, ours, theirs, exact))
    return made
