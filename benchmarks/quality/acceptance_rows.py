"""Rows of `helix acceptance`: the ways to draft, and a row for each and for each task."""

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
SCORED = ("sparsity", "recent", "reach")  # what a policy that goes by scores is told
LOOKUPS = ("ngram", "suffix")  # whose drafts have no noise
READS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*LOOKUPS, *LAYER_DRAFTERS), ()),
    "window": ("sparsity",), "quest": ("sparsity", "recent"), "full": (),
}  # fmt: skip


def budgets(policy: str, options: dict[str, list[Any]]) -> Iterator[DraftBudget]:
    """Budgets of all combinations of the options that a policy reads."""
    reads = READS.get(policy, SCORED)
    kind = POLICIES.get(policy, "any")
    for values in product(*(options[name] for name in SCORED)):
        yield DraftBudget(kind, **{name: x for name, x in zip(SCORED, values, strict=True) if name in reads})


def draft_configs(policies: Sequence[str], options: dict[str, list[Any]]) -> list[DraftConfig]:
    """All combinations, each once: at temperature 0, and for prompt lookup, there is no noise to choose."""
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
    """What names a way; None for what its policy does not read."""
    b, reads = asdict(config.budget), READS.get(config.policy, SCORED)
    noise = config.noise if config.temperature and config.policy not in LOOKUPS else None
    # Older records have ways that chose in blocks, or alike for all heads of a rank; what names a way stays.
    every = {"block": 1 if "reach" in reads else None, "heads": None if config.policy in READS else "each"}
    return {
        "policy": config.policy, "gamma": config.gamma, **{name: b[name] if name in reads else None for name in SCORED},
        **every, "temperature": config.temperature, "noise": noise,
    }  # fmt: skip


def count_drafts(outcomes: Sequence[Outcome], gamma: int) -> Row:
    """Numbers of drafts tried and held at each place; one is tried where all before it held.

    refused_tenths: by how probable the model found them, how many of the first drafts that did not hold.
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
        "kept": accepted,
        "kept_share": [k / n if n else None for k, n in zip(accepted, tried, strict=True)],
        "kept_range": [wilson(k, n) for k, n in zip(accepted, tried, strict=True)],
        "refused": len(rejected_probs),
        "refused_tenths": [sum(min(9, int(10 * p)) == tenth for p in rejected_probs) for tenth in range(10)],
    }


def acceptance(config: DraftConfig, outcomes: Sequence[Outcome], plain: Sequence[Outcome], exact: bool) -> Row:
    """A way's row of one task.

    Args:
        plain: what is said without drafts.
        exact: whether that has to be the same.

    Raises:
        RuntimeError: it is not.
    """
    same = sum(a.tokens == b.tokens for a, b in zip(outcomes, plain, strict=True))
    lossless = config.noise == "shared"  # token for token
    if lossless and exact and same < len(outcomes):
        raise RuntimeError(
            f"{config.policy} with gamma={config.gamma} changed what "
            f"{len(outcomes) - same} of {len(outcomes)} prompts say: "
            "drafts must not"
        )
    return describe(config) | count_drafts(outcomes, config.gamma) | {"as_plain": same if lossless else None}


def rows(found: dict[DraftConfig, list[Outcome]], tasks: Sequence[str], exact: bool) -> list[Row]:
    """Kind `acceptance`, one for each way and task; `sweep` of several shares of keys.

    Args:
        tasks: of each prompt.
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
