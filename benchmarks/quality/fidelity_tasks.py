"""Tasks of `helix fidelity`; each returns rows of one kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality.agreement import common_prefix, compare, paired, wilson
from benchmarks.quality.haystacks import Haystack, NeedleQuestions, source_windows
from benchmarks.quality.prefill import EvalSetup
from benchmarks.quality.teacher_forcing import ForcedOutcome, Policy, run
from benchmarks.runner import Row
from helix.kv_placement import BlockBudget

FACTS = 4
HOPS = 3  # lines in a chain
DEPTHS = 10  # depth bins of the text
RESIDENT_SHARES = (0.02, 0.05, 0.1, 0.2, 0.33, 0.5)  # shares of a text's blocks
LATE = 640  # generated tokens after which some are outside every selecting policy's window


def blocks(topk: int, local: int = 4) -> BlockBudget:
    """Returns a budget of one sink block, `local` window blocks and `topk` selected ones."""
    return BlockBudget(1, local, topk, 0)


def parts(topk: int, candidates: int, tokens: int = 16) -> BlockBudget:
    """Returns a budget of `topk` subblocks of `tokens` tokens among those of `candidates` blocks of 128."""
    return replace(blocks(topk), parts=128 // tokens, candidates=candidates)


def policies() -> list[Policy]:
    """Returns dense attention and the policies to compare: FP8, block budgets, windows, and each score."""
    return [
        Policy("dense"),
        *(Policy(f"dense-{kv}", kv=kv) for kv in ("fp8", "k16v8")),
        Policy("dense-w8a8", activations="fp8"),
        Policy("window-640", blocks(0)),
        Policy("window-4736", blocks(0, 36)),
        *(Policy(f"{score}-{k}", blocks(k), score=score) for score in ("bounds", "mean") for k in (4, 8, 16, 32)),
        *(Policy(f"mean_query-{k}", blocks(k), score="mean_query") for k in (8, 32)),
        Policy("quest-64", blocks(64, 32), page=16),
        *(
            Policy(f"parts-{k}-of-{n}", parts(k, n))
            for k, n in ((64, 64), (128, 64), (128, 128), (128, 256), (192, 256), (256, 256))
        ),
    ]


KEPT_UP = ("bounds-8", "bounds-32", "quest-64")  # policies that also run with frozen bounds


@dataclass(frozen=True)
class FidelityTask:
    """What a task runs with.

    Attributes:
        policies: dense attention first.
        count: texts, or prompts, per cell.
    """

    setting: EvalSetup
    tokenizer: Any
    policies: tuple[Policy, ...]
    length: int
    steps: int
    count: int
    haystack: str = "code"


def describe(task: FidelityTask, outcome: ForcedOutcome) -> Row:
    """Returns the fields that identify a row."""
    policy = outcome.policy
    budget = None if policy.budget is None else asdict(policy.budget)
    kind = {name: getattr(policy, name) for name in ("keys", "page", "score", "choice", "frozen", "kv", "activations")}
    return {"policy": policy.name, **kind, "budget": budget, "blocks_read": outcome.blocks_read}


def text(task: FidelityTask) -> list[Row]:
    """Compares every step with dense attention, with teacher forcing."""
    ids = source_windows(task.tokenizer, task.count, task.length)
    found, target_ids = _on_text(task, ids, task.policies)
    dense = found["dense"].logits
    return [
        describe(task, outcome) | {"windows": task.count} | compare(outcome.logits, dense, target_ids)
        for outcome in found.values()
    ]


def generated(task: FidelityTask) -> list[Row]:
    """Compares generated text with and without updated bounds after the prefill; `late` counts steps from LATE on."""
    if task.steps <= LATE:
        raise ValueError(
            f"steps={task.steps} must be more than {LATE}: only then is text after the prefill outside of the window"
        )
    selected = [p for p in task.policies if p.name == "dense" or p.name in KEPT_UP]
    selected += [replace(p, name=f"{p.name}-frozen", frozen=True) for p in selected if p.budget is not None]
    found, target_ids = _on_text(task, source_windows(task.tokenizer, task.count, task.length), selected)
    dense, late = found["dense"].logits, (slice(None), slice(LATE, None))
    return [
        describe(task, outcome)
        | {"windows": task.count, "late": compare(outcome.logits[late], dense[late], target_ids[late])}
        | compare(outcome.logits, dense, target_ids)
        for outcome in found.values()
    ]


def free(task: FidelityTask) -> list[Row]:
    """Counts the tokens of each policy's greedy output before it diverges from dense attention's."""
    ids = source_windows(task.tokenizer, task.count, task.length)
    found = run(task.setting, [*ids[:, : -task.steps]], task.steps, task.policies)
    dense = found["dense"].logits.argmax(-1)
    rows = []
    for outcome in found.values():
        common = common_prefix(outcome.logits.argmax(-1), dense)
        whole = sum(n == task.steps for n in common)
        same = {"mean_common": sum(common) / len(common), "whole": whole, "common": common}
        rows.append(describe(task, outcome) | {"windows": task.count, "steps": task.steps} | same)
    return rows


def needles(task: FidelityTask) -> list[Row]:
    """Asks for the number of one hidden line per prompt."""
    return _questions(task, [[(i + 0.5) / task.count] for i in range(task.count)])


def facts(task: FidelityTask) -> list[Row]:
    """Asks in turn for the numbers of lines hidden in each part of the text, given the true earlier answers."""
    return _questions(task, _spread(task.count, FACTS))


def hops(task: FidelityTask) -> list[Row]:
    """Asks for facts in a chain: each line refers to the number of the one before it."""
    return _questions(task, _spread(task.count, HOPS), chained=True)


def _spread(prompts: int, lines: int) -> list[list[float]]:
    return [[(j + (i + 0.5) / prompts) / lines for j in range(lines)] for i in range(prompts)]


def _questions(task: FidelityTask, depths: Sequence[Sequence[float]], chained: bool = False) -> list[Row]:
    """An answer is right if its tokens are all top-1, given the true tokens before them."""
    haystack = Haystack(task.tokenizer, task.haystack, task.length)
    hidden = [haystack.hide(prompt_depths, task.length, seed, chained) for seed, prompt_depths in enumerate(depths)]
    expected_ids = torch.zeros(len(hidden), max(len(x.target_ids) for x in hidden), dtype=torch.int64)
    for row, x in zip(expected_ids, hidden, strict=True):
        row[: len(x.target_ids)] = x.target_ids
    found = run(task.setting, [x.prompt for x in hidden], expected_ids.shape[1], task.policies, expected_ids)
    dense = _right(found["dense"].logits, expected_ids, hidden)
    every = [depth for x in hidden for depth in x.depths]
    rows = []
    for outcome in found.values():
        right = _right(outcome.logits, expected_ids, hidden)
        by_depth = [[0, 0] for _ in range(DEPTHS)]
        for hit, depth in zip(right, every, strict=True):
            cell = by_depth[int(depth * DEPTHS)]
            cell[0] += hit
            cell[1] += 1
        each = len(hidden[0].answers)
        prompts = [all(right[i : i + each]) for i in range(0, len(right), each)]
        distant = [_distant(outcome.policy, span, len(x.prompt)) for x in hidden for span in x.spans]
        hits = sum(hit and far for hit, far in zip(right, distant, strict=True))
        more = {"haystack": task.haystack, "prompts": len(prompts), "whole": sum(prompts), "by_depth": by_depth}
        more |= {"distant": sum(distant), "distant_hits": hits, "distant_range": wilson(hits, sum(distant))}
        rows.append(describe(task, outcome) | more | paired(right, dense))
    return rows


def _distant(policy: Policy, span: range, length: int) -> bool:
    """Whether a line is between sink and window, so that the policy has to select it."""
    if policy.budget is None:
        return True
    last = (length - 1) // policy.page - policy.budget.local_blocks + 1
    return span.start >= policy.budget.sink_blocks * policy.page and span.stop <= last * policy.page


def _right(logits: Tensor, expected_ids: Tensor, hidden: Sequence[NeedleQuestions]) -> list[bool]:
    same = logits.argmax(-1) == expected_ids
    return [bool(row[answer].all()) for row, x in zip(same, hidden, strict=True) for answer in x.answers]


def hits(task: FidelityTask) -> list[Row]:
    """Counts selected blocks that a resident-block cache would hit, or a prefetch predict, with the fidelity."""
    selected = [
        replace(p, resident_shares=RESIDENT_SHARES) if p.budget is not None and p.budget.topk else p
        for p in task.policies
    ]
    found, target_ids = _on_text(task, source_windows(task.tokenizer, task.count, task.length), selected)
    dense = found["dense"].logits
    rows = []
    for outcome in found.values():
        shared = describe(task, outcome) | {"windows": task.count} | compare(outcome.logits, dense, target_ids)
        for share, layer_counts in outcome.hits.items():
            layers = [_hits(*counts) for counts in layer_counts]
            total = _hits(*(sum(counts) for counts in zip(*layer_counts, strict=True)))
            by_layer = {f"{key}_by_layer": [layer[key] for layer in layers] for key in total}
            rows.append(shared | {"resident": share} | total | by_layer)
    return rows


def _hits(
    resident: int,
    fetched: int,
    resident_with_prefetch: int,
    fetched_with_prefetch: int,
    _: int,
    guessed: int,
    predicted: int,
    selected: int,
) -> Row:
    """Shares of what `HitMeter.hits` counts; `fetched_with_prefetch` is fetches with prefetch over fetches without."""
    return {
        "hits": resident / max(resident + fetched, 1),
        "hits_with_prefetch": resident_with_prefetch / max(resident_with_prefetch + fetched_with_prefetch, 1),
        "fetched_with_prefetch": (fetched_with_prefetch + guessed) / max(fetched, 1),
        "predicted": predicted / max(selected, 1),
    }


def _on_text(task: FidelityTask, ids: Tensor, selected: Sequence[Policy]) -> tuple[dict[str, ForcedOutcome], Tensor]:
    target_ids = ids[:, -task.steps :]
    return run(task.setting, [*ids[:, : -task.steps]], task.steps, selected, target_ids), target_ids


TASKS: dict[str, Callable[[FidelityTask], list[Row]]] = {
    "text": text, "needles": needles, "facts": facts, "hops": hops, "free": free, "generated": generated,
    "hits": hits,
}  # fmt: skip
