"""Tables of what block-sparse attention changes, for a terminal and for docs/sparse.md: the same columns in both."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.quality.agreement import MARGIN, wilson
from benchmarks.quality.fidelity_tasks import BUDGETS
from benchmarks.records.columns import Columns, at, lines
from benchmarks.records.rows import Row, results

OF_KEYS = f"{', '.join(f'{keys:,}' for keys in BUDGETS)} chosen keys"
# What names a row among all that were recorded. Texts are this repository's sources, which change: see `SOURCES`.
KEY = ("kind", "model", "length", "kvp", "choice", "policy", "haystack", "page", "score", "ranks", "hot", "commit")


def _ranged(name: str) -> Callable[[Row], str]:
    return lambda r: "{:.3f} ({:.3f} to {:.3f})".format(r[name], *r[f"{name}_range"])


def _number(name: str, digits: int = 4) -> Callable[[Row], str]:
    return lambda r: f"{r[name]:.{digits}f}" if name in r else "-"


def _shares(name: str) -> Callable[[Row], str]:
    return lambda r: " ".join(f"{share:.2f}" for share in r[name]) if name in r else "-"


def _spread(r: Row) -> str:
    """A mean with the lowest and the highest of the texts."""
    if "kl_by_window" not in r:
        return f"{r['kl']:.4f}"
    return f"{r['kl']:.4f} ({min(r['kl_by_window']):.4f} to {max(r['kl_by_window']):.4f})"


def _ranks(r: Row) -> str:
    return f"{r['kvp']}, {r['choice']}" if r["kvp"] > 1 else "1"


def _depths(r: Row) -> str:
    """Hits in each tenth of the text, from its beginning."""
    return " ".join(str(hits) for hits, count in r["by_depth"] if count)


def _layers(r: Row) -> str:
    return " ".join(f"{kept:.3f}" for kept in r["kept_by_layer"][-1]) if "kept_by_layer" in r else "-"


def _balance(r: Row) -> str:
    return " ".join(f"{most:.1f}/{share}" for most, share in zip(r["most"], r["share"], strict=True))


def _by_budget(what: str, name: str) -> Columns:
    """One column: a number for each budget of chosen keys."""
    return {f"{what} {OF_KEYS}": lambda r: " ".join(f"{x:.3f}" for x in r[name])}


MATCHED = ["dense", "window-640", "window-4736", "quest-64", "parts-128-of-256"]
MATCHED += [f"{score}-{k}" for score in ("bounds", "mean", "mean_std") for k in (8, 32)]
POOLED = [name for name in MATCHED if name != "dense"]
LONGEST = 32 << 10  # of the demo model's texts
OUTSIDE = "outside of sink and window (95%)"
SOURCES: Columns = {"texts of": lambda r: r["commit"][:7]}
TEXTS: Columns = {"text": lambda r: f"{r['windows']} x {r['length'] >> 10}K", **SOURCES, "ranks": _ranks}
POLICY: Columns = {
    "policy": lambda r: r["policy"],
    "keys": lambda r: "all" if r["keys"] is None else f"{r['keys']:,}",
    "blocks read": lambda r: "all" if r["blocks_read"] is None else f"{r['blocks_read']:.1f}",
}
STEPS: Columns = {
    "agrees (95%)": _ranged("agrees"),
    "where dense is sure (95%)": _ranged("sure"),
    "perplexity": _number("perplexity", 3),
    "KL (by text)": _spread,
    "TV": _number("tv"),
}
ANSWERS: Columns = {
    "haystack": lambda r: f"{r['haystack']}, {r['length'] >> 10}K",
    **SOURCES,
    "ranks": _ranks,
    **POLICY,
    "found (95%)": lambda r: "{} of {} ({:.3f} to {:.3f})".format(r["hits"], r["count"], *r["hits_range"]),
    OUTSIDE: lambda r: "{} of {} ({:.3f} to {:.3f})".format(r["distant_hits"], r["distant"], *r["distant_range"]),
    "only dense, only this": lambda r: f"{r['lost']}, {r['won']}",
    "p": lambda r: f"{r['p']:.2g}",
}
CHOSEN: Columns = {
    "text": lambda r: f"{r['windows']} x {r['length'] >> 10}K",
    "page": lambda r: str(r["page"]),
    "read anyway": _number("fixed", 3),
}


COLUMNS: dict[str, Columns] = {
    "text": TEXTS | POLICY | STEPS,
    "generated": TEXTS
    | POLICY
    | STEPS
    | {
        "late: agrees (95%)": lambda r: _ranged("agrees")(r["late"]),
        "late: KL (by text)": lambda r: _spread(r["late"]),
    },
    "free": TEXTS
    | POLICY
    | {
        "tokens like dense, of": lambda r: f"{r['mean_common']:.1f} of {r['steps']}",
        "by text": lambda r: " ".join(map(str, sorted(r["common"]))),
    },
    "needles": ANSWERS | {"in each tenth of the text": _depths},
    **dict.fromkeys(("facts", "hops"), ANSWERS | {"all of a prompt": lambda r: f"{r['whole']} of {r['prompts']}"}),
    "hits": TEXTS
    | POLICY
    | {
        "hot cache": lambda r: f"{r['hot']:.0%}",
        "hits": _number("hits", 3),
        "in each layer": _shares("hits_by_layer"),
        "hits with kv.ahead": _number("hits_ahead", 3),
        "what comes then, x": _number("fetched_ahead", 2),
        "named ahead": _number("named", 3),
        "named in each layer": _shares("named_by_layer"),
        "agrees (95%)": _ranged("agrees"),
        "KL (by text)": _spread,
    },
    "recall": CHOSEN
    | {"score": lambda r: r["score"]}
    | _by_budget("weight kept with", "kept")
    | _by_budget("of the best blocks, found with", "recall")
    | {f"weight kept in each layer with {BUDGETS[-1]:,}": _layers},
    "ranks": CHOSEN
    | {"ranks": lambda r: str(r["ranks"])}
    | _by_budget("weight kept by local choice of", "local")
    | _by_budget("by one choice of", "global")
    | _by_budget("of the one choice, found locally with", "same")
    | {"most blocks on a rank, and its share": _balance},
}


def table(name: str, records: str = "fidelity") -> list[str]:
    """What was recorded of one kind, as lines of a page; none where nothing was."""
    return lines(COLUMNS[name], [r for r in results(records, *KEY) if r["kind"] == name])


def matched() -> list[str]:
    """Tabulates what dense attention finds and what other policies do, on one rank in code.

    Source:
        Gather-decode (BRL-2026-07), table 4.
    """
    recorded = [r for r in results("fidelity", *KEY) if r["kvp"] == 1 and r.get("haystack", "code") == "code"]
    with_facts = {r["commit"] for r in recorded if r["kind"] == "facts"}
    found = {(r["commit"], r["policy"], r["kind"], r["length"]): r for r in recorded if r["commit"] in with_facts}
    shown = [r for r in found.values() if r["kind"] == "facts" and r["length"] == LONGEST]

    def hits(kind: str, length: int) -> Callable[[Row], str]:
        def cell(r: Row) -> str:
            row = found.get((r["commit"], r["policy"], kind, length))
            return "-" if row is None else f"{row['hits']} of {row['count']}"

        return cell

    def on_text(show: Callable[[Row], str]) -> Callable[[Row], str]:
        def cell(r: Row) -> str:
            row = found.get((r["commit"], r["policy"], "text", LONGEST))
            return "-" if row is None else show(row)

        return cell

    columns: Columns = {
        **SOURCES,
        "policy": POLICY["policy"],
        "keys": POLICY["keys"],
        **{f"needles, {n >> 10}K": hits("needles", n) for n in (LONGEST // 4, LONGEST // 2, LONGEST)},
        f"facts, {LONGEST >> 10}K": hits("facts", LONGEST),
        "all four": lambda r: f"{r['whole']} of {r['prompts']}",
        "agrees": on_text(_number("agrees", 3)),
        "where dense is sure": on_text(_number("sure", 3)),
        "KL": on_text(_number("kl")),
    }
    return lines(columns, shown)


def pooled() -> list[Row]:
    """Counts of each policy, all recorded texts of one rank together: steps, misses, and those where dense is sure."""
    by_policy: dict[str, list[Row]] = {}
    for r in results("fidelity", *KEY):
        if r["kind"] == "text" and r["kvp"] == 1 and r["policy"] in POOLED:
            by_policy.setdefault(r["policy"], []).append(r)
    rows = []
    for policy, texts in by_policy.items():
        misses = [margin for r in texts for margin in r["margins_of_misses"]]
        sure, steps = (sum(r[name] for r in texts) for name in ("sure_steps", "steps"))
        held = sure - sum(margin > MARGIN for margin in misses)
        rows.append(
            {
                "policy": policy, "texts": sum(r["windows"] for r in texts), "steps": steps, "misses": len(misses),
                "ties": sum(margin <= MARGIN / 2 for margin in misses), "sure": held / sure,
                "sure_steps": sure, "sure_range": wilson(held, sure), "largest": max(misses, default=0.0),
            }
        )  # fmt: skip
    return rows


def margins() -> list[str]:
    """Tabulates how sure dense attention was where a policy says otherwise, of all recorded texts together.

    Source:
        Gather-decode (BRL-2026-07), section 8.3.
    """
    columns: Columns = {
        **{name: at(name) for name in ("policy", "texts", "steps", "misses")},
        f"of margins up to {MARGIN / 2:g}": lambda r: f"{r['ties'] / max(r['misses'], 1):.0%}",
        "largest": _number("largest", 2),
        f"held where the margin is above {MARGIN:g} (95%)": lambda r: f"{_ranged('sure')(r)} of {r['sure_steps']}",
    }
    return lines(columns, pooled())


def policies() -> list[str]:
    """Tabulates two budgets of the product on one rank: needles in code beside the shortest and the longest texts.

    Source:
        Gather-decode (BRL-2026-07), table 4.
    """
    recorded = [r for r in results("fidelity", *KEY) if r["kvp"] == 1]
    texts = [r for r in recorded if r["kind"] == "text" and r["policy"] in MATCHED]
    lengths = sorted({r["length"] for r in texts})
    together = {r["commit"] for r in texts if r["policy"] != "dense"}  # texts on which these were compared
    texts = [r for r in texts if r["length"] in (lengths[0], lengths[-1]) and r["commit"] in together]
    needles_in_code = [r for r in recorded if r["kind"] == "needles" and r["haystack"] == "code"]
    hits = {(r["commit"], r["length"], r["policy"]): r for r in needles_in_code}

    def found(r: Row) -> str:
        needles = hits.get((r["commit"], r["length"], r["policy"]))
        return "-" if needles is None else ANSWERS[OUTSIDE](needles)

    columns = {"text": TEXTS["text"], "policy": POLICY["policy"], "keys": POLICY["keys"]}
    return lines(columns | {"needles found": found} | STEPS, texts)
