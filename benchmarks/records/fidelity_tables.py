"""Rows and cells of the fidelity of block-sparse attention."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.quality.agreement import MARGIN, wilson
from benchmarks.records.rows import Row, results

# Fields that identify a row in the record. Texts are this repository's sources, which change: each commit counts.
KEY = ("kind", "model", "length", "kvp", "choice", "policy", "haystack", "page", "score", "ranks", "resident", "commit")


MATCHED = ["dense", "window-640", "window-4736", "quest-64", "parts-128-of-256"]
MATCHED += [f"{score}-{k}" for score in ("bounds", "mean", "mean_std") for k in (8, 32)]
POOLED = [name for name in MATCHED if name != "dense"]
MAX_LENGTH = 32 << 10  # of texts for the demo model


def spread(r: Row) -> str:
    """Returns a mean with the texts' minimum and maximum."""
    windows = r.get("kl_by_window")
    return f"{r['kl']:.4f}" + (f" ({min(windows):.4f} to {max(windows):.4f})" if windows else "")


def depths(by_depth: Sequence[tuple[int, int]]) -> str:
    """Returns the hits in each tenth of the text."""
    return " ".join(str(hits) for hits, count in by_depth if count)


def balance(max_blocks: Sequence[float], share: Sequence[float]) -> str:
    """Returns the maximum blocks of a rank over its even share."""
    return " ".join(f"{blocks:.1f}/{of}" for blocks, of in zip(max_blocks, share, strict=True))


def _single_rank() -> list[Row]:
    return [r for r in results("fidelity", *KEY) if r["kvp"] == 1]


def matched() -> list[Row]:
    """Joins the facts, needles and texts of each policy and dense attention, on one rank in code."""
    recorded = [r for r in _single_rank() if r.get("haystack", "code") == "code"]
    with_facts = {r["commit"] for r in recorded if r["kind"] == "facts"}
    found = {(r["commit"], r["policy"], r["kind"], r["length"]): r for r in recorded if r["commit"] in with_facts}
    rows = []
    for (commit, policy, kind, length), r in found.items():
        if (kind, length) == ("facts", MAX_LENGTH):
            needles = {
                n >> 10: found.get((commit, policy, "needles", n), {})
                for n in (MAX_LENGTH // 4, MAX_LENGTH // 2, MAX_LENGTH)
            }
            rows.append({**r, "needles": needles, "text": found.get((commit, policy, "text", MAX_LENGTH), {})})
    return rows


def policies() -> list[Row]:
    """Returns texts, the shortest and the longest, for two budgets on one rank, joined with needles in code."""
    recorded = _single_rank()
    text_rows = [r for r in recorded if r["kind"] == "text" and r["policy"] in MATCHED]
    lengths = sorted({r["length"] for r in text_rows})
    together = {r["commit"] for r in text_rows if r["policy"] != "dense"}  # commits whose texts compare policies
    in_code = [r for r in recorded if r["kind"] == "needles" and r["haystack"] == "code"]
    hits = {(r["commit"], r["length"], r["policy"]): r for r in in_code}
    return [
        {**r, "needles": hits.get((r["commit"], r["length"], r["policy"]))}
        for r in text_rows
        if r["length"] in (lengths[0], lengths[-1]) and r["commit"] in together
    ]


def pooled() -> list[Row]:
    """Pools each policy's counts over all texts of one rank: steps, misses, and misses where dense is sure."""
    by_policy: dict[str, list[Row]] = {}
    for r in results("fidelity", *KEY):
        if r["kind"] == "text" and r["kvp"] == 1 and r["policy"] in POOLED:
            by_policy.setdefault(r["policy"], []).append(r)
    rows = []
    for policy, text_rows in by_policy.items():
        misses = [margin for r in text_rows for margin in r["margins_of_misses"]]
        sure, steps = (sum(r[name] for r in text_rows) for name in ("sure_steps", "steps"))
        agreeing = sure - sum(margin > MARGIN for margin in misses)
        rows.append(
            {
                "policy": policy, "texts": sum(r["windows"] for r in text_rows), "steps": steps, "misses": len(misses),
                "ties": sum(margin <= MARGIN / 2 for margin in misses), "sure": agreeing / sure,
                "sure_steps": sure, "sure_range": wilson(agreeing, sure), "largest": max(misses, default=0.0),
            }
        )  # fmt: skip
    return rows
