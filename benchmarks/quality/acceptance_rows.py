"""Rows of `helix acceptance`: the ways to draft, and a row for each and for each task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

from benchmarks.quality.agreement import mean_range, wilson
from benchmarks.quality.drafting import LAYERED, POLICIES, Drafting, Outcome
from benchmarks.runner import Row
from helix.speculation import DraftBudget

DEFAULTS = DraftBudget()
SCORED = ("sparsity", "recent", "reach")  # what a policy that goes by scores is told
LOOKUPS = ("ngram", "suffix")  # whose drafts have no noise
READS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*LOOKUPS, *LAYERED), ()),
    "window": ("sparsity",), "quest": ("sparsity", "recent"), "full": (),
}  # fmt: skip


def budgets(policy: str, options: dict[str, list[Any]]) -> Iterator[DraftBudget]:
    """Budgets of all combinations of the options that a policy reads."""
    reads = READS.get(policy, SCORED)
    kind = POLICIES.get(policy, "any")
    for told in product(*(options[name] for name in SCORED)):
        yield DraftBudget(kind, **{name: x for name, x in zip(SCORED, told, strict=True) if name in reads})


def ways(policies: Sequence[str], options: dict[str, list[Any]]) -> list[Drafting]:
    """All combinations, each once: at temperature 0, and for prompt lookup, there is no noise to choose."""
    found: list[Drafting] = []
    for temperature in options["temperature"]:
        found.append(Drafting("none", temperature=temperature))
        for policy, gamma, noise in product(policies, options["gamma"], options["noise"]):
            drawn = noise if temperature and policy not in LOOKUPS else "shared"
            found += [Drafting(policy, gamma, budget, drawn, temperature) for budget in budgets(policy, options)]
    return list(dict.fromkeys(found))


def described(way: Drafting) -> Row:
    """What names a way; None for what its policy does not read."""
    b, reads = asdict(way.budget), READS.get(way.policy, SCORED)
    noise = way.noise if way.temperature and way.policy not in LOOKUPS else None
    # Older records have ways that chose in blocks, or alike for all heads of a rank; what names a way stays.
    every = {"block": 1 if "reach" in reads else None, "heads": None if way.policy in READS else "each"}
    return {
        "policy": way.policy, "gamma": way.gamma, **{name: b[name] if name in reads else None for name in SCORED},
        **every, "temperature": way.temperature, "noise": noise,
    }  # fmt: skip


def counted(outcomes: Sequence[Outcome], gamma: int) -> Row:
    """Numbers of drafts tried and held at each place; one is tried where all before it held.

    refused_tenths: by how probable the model found them, how many of the first drafts that did not hold.
    """
    by_prompt = [sum(1 + n for n in x.held) / len(x.held) for x in outcomes]
    held = [n for x in outcomes for n in x.held]
    probable = [p for x in outcomes for p in x.refused]
    tried = [sum(n >= place for n in held) for place in range(gamma)]
    kept = [sum(n > place for n in held) for place in range(gamma)]
    return {
        "prompts": len(outcomes),
        "iterations": len(held),
        "drafts": gamma * len(held),
        "tokens": sum(by_prompt) / len(by_prompt),
        "tokens_range": mean_range(by_prompt),
        "tokens_by_prompt": [round(x, 4) for x in by_prompt],
        "tried": tried,
        "kept": kept,
        "kept_share": [k / n if n else None for k, n in zip(kept, tried, strict=True)],
        "kept_range": [wilson(k, n) for k, n in zip(kept, tried, strict=True)],
        "refused": len(probable),
        "refused_tenths": [sum(min(9, int(10 * p)) == tenth for p in probable) for tenth in range(10)],
    }


def acceptance(way: Drafting, outcomes: Sequence[Outcome], plain: Sequence[Outcome], exact: bool) -> Row:
    """A way's row of one task.

    Args:
        plain: what is said without drafts.
        exact: whether that has to be the same.

    Raises:
        RuntimeError: it is not.
    """
    same = sum(a.tokens == b.tokens for a, b in zip(outcomes, plain, strict=True))
    lossless = way.noise == "shared"  # token for token
    if lossless and exact and same < len(outcomes):
        raise RuntimeError(
            f"{way.policy} with gamma={way.gamma} changed what {len(outcomes) - same} of {len(outcomes)} prompts say: "
            "drafts must not"
        )
    return described(way) | counted(outcomes, way.gamma) | {"as_plain": same if lossless else None}


def rows(found: dict[Drafting, list[Outcome]], tasks: Sequence[str], exact: bool) -> list[Row]:
    """Kind `acceptance`, one for each way and task; `sweep` of several shares of keys.

    Args:
        tasks: of each prompt.
    """
    made: list[Row] = []
    shares = {way.budget.sparsity for way in found if "sparsity" in READS.get(way.policy, SCORED) and way.gamma}
    kind = "sweep" if len(shares) > 1 else "acceptance"
    for way, of_way in found.items():
        if not way.gamma:
            continue
        plain = found[way.plain]
        for task in dict.fromkeys(tasks):
            ours, theirs = (
                [x for x, of in zip(outcomes, tasks, strict=True) if of == task] for outcomes in (of_way, plain)
            )
            made.append({"kind": kind, "task": task} | acceptance(way, ours, theirs, exact))
    return made
