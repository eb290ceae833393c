"""Vegas (Yue et al., ICML 2026): its items beside ours, from records."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.papers.items import NOT_RECORDED, Item, Table, span
from benchmarks.records import tuned_tables
from benchmarks.records.acceptance_tables import KEY, joined
from benchmarks.records.draft_gains import DEMO, REAL, best, gained
from benchmarks.records.draft_tables import (
    adapted,
    choice_over_rest,
    experts_over_inherent,
    selection_over_rest,
    timed,
)
from benchmarks.records.rows import Row, results, tokens
from benchmarks.records.tables import TABLES

ACCEPTANCE, DRAFTS, KERNELS = "helix acceptance", "helix bench self-drafts", "helix bench sparse"
DRAFTERS, TUNE = "helix bench drafters", "helix tune"
LONG = 112 * 1024
# The tables that are reprinted, and what makes their records.
RECORDED = {
    **dict.fromkeys(
        (f"acceptance-{name}" for name in ("policies", "variants", "places", "sparsity", "sampled", "choices")),
        ACCEPTANCE,
    ),
    "sparse-collect": KERNELS,
    "sparse-choose": KERNELS,
    "sparse-attend": KERNELS,
    "drafters": DRAFTERS,
    "drafters-real": DRAFTERS,
    "drafters-eight": f"{DRAFTERS} ranks=8",
    "drafters-breakdown": DRAFTERS,
    "drafters-adaptive": DRAFTERS,
    "tuned": TUNE,
    "experts-verified": "helix bench moe",
    "self-drafts": DRAFTS,
    "self-drafts-of-8": f"{DRAFTS} ranks=8",
}


def _joined(kind: str, **fields: object) -> list[Row]:
    rows = joined(
        [r for r in results("acceptance", *KEY) if r["kind"] in ("acceptance", "sweep") and r["kind"] == kind]
    )
    return [r for r in rows if all(r[name] == value for name, value in fields.items())]


def _kept(*policies: str, gamma: int = 7) -> str:
    """Tokens an iteration of some policies with 32K tokens, the mean over three tasks."""
    usual = {"length": 32768, "gamma": gamma, "prompts": 30, "kvp": 1, "temperature": 0.0}
    said = []
    for policy in policies:
        rows = _joined("acceptance", policy=policy, **usual)
        said.append(f"{policy} {rows[0]['mean']:.2f}" if rows else f"{policy} -")
    return ", ".join(said)


def _choice(policy: str, length: int, name: str) -> Sequence[float]:
    rows = [
        r
        for r in results("acceptance", *KEY)
        if r["kind"] == "choices" and (r["policy"], r["length"]) == (policy, length)
    ]
    return rows[-1][name] if rows else []


def _runs(kind: str, policy: str, needs: str = "kind", **fields: object) -> str:
    """How many prompts of which length the lines of a figure had, and on what."""
    rows = [r for r in results("acceptance", *KEY) if (r["kind"], r["policy"]) == (kind, policy) and r.get(needs)]
    rows = [r for r in rows if all(r[name] == value for name, value in fields.items())]
    said = dict.fromkeys(f"{r['prompts']} x {tokens(r['length'])}, {r['device'].removeprefix('NVIDIA ')}" for r in rows)
    return "; ".join(said) or NOT_RECORDED


def _beyond() -> str:
    """Gains of Qwen3-8B, 4 x 112K, with the most drafts that the table chooses from, and with the most recorded."""
    found = results("self-drafts", "sparsity", "gamma", model="qwen3-8b", batch=4, length=LONG)
    gains = {r["gamma"]: r["gain_at_rates"]["0.96"] for r in found if r["gamma"] in (6, 8) and "failed" not in r}
    said = ", ".join(f"{gamma} drafts {gain:.2f} x" for gamma, gain in sorted(gains.items()))
    return f"at a rate of 0.96: {said}" if said else NOT_RECORDED


def _overlap() -> str:
    found = _choice("all", 4096, "overlap")
    return f"neighbours {found[0]:.2f}, six apart {found[-1]:.2f}" if found else NOT_RECORDED


def _sweep() -> str:
    found = {r["sparsity"]: r["mean"] for r in _joined("sweep", policy="any", length=8192)}
    return ", ".join(f"{share:.0%} {tokens:.2f}" for share, tokens in sorted(found.items())) or NOT_RECORDED


def _collect(name: str) -> str:
    rows = results("sparse", "group", "dim", "queries", "batch", "length", kind="collect")
    return span([r[f"{name}_over_plain"] for r in rows if f"{name}_over_plain" in r], ".2f", "x")


def _attend() -> str:
    """Attention over runs of neighbouring keys, over that of single ones at the same point."""
    rows = results("sparse", "heads", "batch", "length", "run", kind="attend")
    single = {(r["heads"], r["batch"], r["length"]): r for r in rows if r["run"] == 1}
    pairs = [(r, single[r["heads"], r["batch"], r["length"]]) for r in rows]
    return span([r["us"] / one["us"] for r, one in pairs if r["commit"] == one["commit"]], ".2f", "x of single keys")


def _gain(models: Sequence[str], rate: str = "0.9") -> str:
    """The most that drafts gain at a rate, by model, over all recorded points."""
    rows = [
        r
        for r in results("self-drafts", "model", "batch", "length", "sparsity", "gamma")
        if "failed" not in r and r["gamma"]
    ]
    best = {m: max((r["gain_at_rates"][rate] for r in rows if r["model"] == m), default=None) for m in models}
    return (
        ", ".join(f"{m} {'-' if gain is None else format(gain, '.2f')} x" for m, gain in best.items())
        + f" at a rate of {rate}"
    )


def _beside(*drafters: str, model: str = DEMO) -> str:
    """Gains over plain steps on the task that gains least, Qwen3-8B, 4 x 112K, by measured acceptance."""
    found = [r for r in best(timed(), model) if r["drafter"] in drafters and _is_long(r)]
    said = []
    found.sort(key=lambda r: drafters.index(r["drafter"]))
    for commit in dict.fromkeys(r["commit"] for r in found):
        rows = [r for r in found if r["commit"] == commit]
        gains = (f"{r['drafter']} {gained(r, model):.2f} x ({r['gamma']} drafts)" for r in rows)
        said.append(f"{', '.join(gains)} ({commit[:7]})")
    return "; ".join(said) or NOT_RECORDED


def _is_long(r: Row) -> bool:
    return (r["model"], r["batch"], r["length"]) == ("qwen3-8b", 4, LONG)


def _choosing(*drafters: str) -> str:
    """Share of the choice of keys in an iteration, Qwen3-8B, 4 x 112K, four drafts."""
    said = (f"{name} {choice_over_rest(r):.1%}" for name, r in _parts().items() if name in drafters)
    return ", ".join(said) or NOT_RECORDED


def _selecting(*drafters: str) -> str:
    """The same with the scores that verification keeps: it takes longer by these than a window's, which needs none."""
    found = _parts()
    said = (f"{name} {selection_over_rest(found[name], found['window']):.1%}" for name in drafters if name in found)
    return ", ".join(said) or NOT_RECORDED


def _parts() -> dict[str, Row]:
    """Iterations of four drafts by drafter, Qwen3-8B, 4 x 112K, whose choice was timed apart."""
    found = [r for r in timed() if _is_long(r) and r["gamma"] == 4 and "choose" in (r.get("phase_us") or {})]
    return {r["drafter"]: r for r in found}


def _by_length(drafter: str) -> str:
    rows = [r for r in best(timed()) if (r["model"], r["drafter"], r["batch"]) == ("qwen3-8b", drafter, 4)]
    said = (f"{r['length'] // 1024}K {gained(r):.2f} x" for r in sorted(rows, key=lambda r: int(r["length"])))
    return ", ".join(said) or NOT_RECORDED


def _lost() -> str:
    return span([max(0.0, 1 - r["gain"]) for r in adapted() if r["speculation"]], ".1%", "lost where none holds")


def _refused() -> str:
    rows = [r for r in results("acceptance", *KEY) if r.get("refused") and r["policy"] == "any"]
    likely, count = sum(sum(r["refused_tenths"][3:]) for r in rows), sum(r["refused"] for r in rows)
    return f"any: {likely / count:.0%} of {count} with 0.3 or more" if rows else NOT_RECORDED


def items() -> list[Item]:
    """Lists the paper's items, in its order."""
    models = ("qwen3-8b", "qwen3-30b-a3b", "gpt-oss-20b", "llama-3.1-8b")
    return [
        Item(
            "Figure 1: iteration of drafts and verification",
            "done",
            "tokens are those of plain decoding",
            "pytest tests/e2e/test_sparse_drafts.py",
        ),
        Item(
            "2.2: 36.9 ms a step, Qwen3-8B, 4 x 128K, H100",
            "partly: 4 x 112K on an H200",
            _plain("qwen3-8b", 4),
            DRAFTS,
        ),
        Item(
            "Figure 2: Quest keeps more than a window", "done, on the demo model", _kept("quest", "window"), ACCEPTANCE
        ),
        Item(
            "Figure 3: breakdown of an iteration",
            "done, four drafts",
            f"choice over all else: {_choosing('any', 'c2q', 'window')}; of quest it is a part of each draft",
            DRAFTERS,
        ),
        Item(
            "Equation 2: keys by all drafts' logits", "done: policy `all`, of the laboratory", _kept("all"), ACCEPTANCE
        ),
        Item(
            "Equation 3: collect two queries",
            "partly: policy `c2q`; half of the keys are the latest, scores reach 8 keys back, each KV head chooses for "
            "itself; none of it can be set",
            _kept("c2q"),
            ACCEPTANCE,
        ),
        Item("3.2: by the last accepted token", "done: policy `last`, of the laboratory", _kept("last"), ACCEPTANCE),
        Item("Ours: best row of all", "done: policy `any`, the default", _kept("any"), ACCEPTANCE),
        Item(
            "Figure 4: shares by place in the chain", "done, on the demo model", "table acceptance-places", ACCEPTANCE
        ),
        Item(
            "3.2: refused drafts' queries help, 3 to 14%",
            "done: `all` beside `accepted`: no difference here",
            _kept("all", "accepted"),
            ACCEPTANCE,
        ),
        Item(
            "Figure 5: how probable refused tokens were",
            f"partly: by tenths, on the demo model; {_runs('acceptance', 'any', 'refused')}",
            _refused(),
            ACCEPTANCE,
        ),
        Item(
            "Figure 6: cost of collecting",
            "done: all rows in one maximum or mean; the paper 5 to 189%",
            f"best row {_collect('any')}, each row {_collect('each')}",
            KERNELS,
        ),
        Item(
            "Table 1: two queries keep what all keep",
            "done, on the demo model; gamma 7 and 11",
            f"{_kept('all', 'c2q')}; 11 drafts: {_kept('all', 'c2q', gamma=11)}",
            ACCEPTANCE,
        ),
        Item(
            "Figure 7: neighbours choose alike",
            f"partly: 7% of the keys in place of 1,024; {_runs('choices', 'all', length=4096)}",
            _overlap(),
            ACCEPTANCE,
        ),
        Item(
            "Figure 8: tokens over the share of keys",
            f"partly: three shares; {_runs('sweep', 'any', length=8192)}",
            _sweep(),
            ACCEPTANCE,
        ),
        Item("3.4: three steps of tuning", "done: `helix tune`", tuned_tables.worst(), TUNE),
        Item("4: page size of one token", "done", _attend(), KERNELS),
        Item("4: in vLLM", "out of reach: our own engine; vLLM has no such drafts to take", "-", DRAFTS),
        Item(
            "5.1: Qwen3-4B, Qwen3-8B, Qwen3-30B, gpt-oss-20b",
            "partly: shapes with random weights, no Qwen3-4B",
            _gain(models),
            DRAFTS,
        ),
        Item("5.1: H100 NVL", "partly: H200 and emulated ranks", "-", DRAFTS),
        Item(
            "5.1: baselines MagicDec-Stream and -Quest",
            "done: both in our engine",
            f"{_beside('any', 'c2q', 'window', 'quest')}; tokens: {_kept('window', 'quest')}",
            DRAFTERS,
        ),
        Item("5.1: baseline SpecExtend", "partly: policy `last` in every layer; not timed", _kept("last"), ACCEPTANCE),
        Item(
            "Figure 9: AIME25, CodeElo",
            "partly: no trained 8B weights; times of Qwen3-8B, batch 4, acceptance of the demo model",
            f"{_by_length('any')}; {_gain(models, '0.96')}",
            DRAFTERS,
        ),
        Item(
            "Figure 10a: drafting accuracy",
            "done, on the demo model",
            _kept("any", "window", "quest", "last"),
            ACCEPTANCE,
        ),
        Item(
            "Figure 10b: overhead of choosing, 5.9 to 9.4%",
            "done, four drafts",
            f"with the scores that verification keeps {_selecting('any', 'c2q')}; the choice alone "
            f"{_choosing('any', 'c2q')}",
            DRAFTERS,
        ),
        Item(
            "Figure 11: LongBench-v2, 96K to 120K",
            "partly: 4 x 112K, times of random weights, acceptance of the demo model at 4K to 32K",
            f"{_beside('any', 'c2q', 'window', 'quest', 'ngram')}; SmolLM2's: {_beside('any', 'ngram', model=REAL)}",
            DRAFTERS,
        ),
        Item("Abstract: 1.25 to 2.81 x over vLLM", "partly: beside our own plain steps", _gain(models), DRAFTS),
        Item("Appendix B: weights in place of logits", "done, in the laboratory", _kept("weights", "any"), ACCEPTANCE),
        Item("Appendix C: a share or a fixed budget", "done, in the laboratory", _kept("fixed", "any"), ACCEPTANCE),
        Item("Appendix D, Table 2: page sizes 1 to 16", "done: runs of 1 to 16 keys", _attend(), KERNELS),
        Item("E.1: sampling parameters", "done: temperature 0.6, top-p, top-k", "table acceptance-sampled", ACCEPTANCE),
        Item(
            "Figure 13: map of gamma and share",
            "done, of the demo model: `helix tune ... bench.grid=true`",
            "figure tuned",
            TUNE,
        ),
        Item(
            "Table 3: gammas that were chosen",
            "partly: of 2, 4 and 6 what gains the most on the worst task; the best is often 6, the largest",
            f"{_beside('any', 'c2q', 'window')}; {_beyond()}",
            DRAFTERS,
        ),
        Item(
            "Experts under verification",
            "not in the paper: a group's rows take different experts",
            experts_over_inherent("gpt-oss-20b", "Qwen3-30B-A3B"),
            "helix bench moe",
        ),
        Item(
            "Drafts that do not hold",
            "not in the paper: `adaptive` weighs the price of a group",
            _lost(),
            DRAFTERS,
        ),
        Item(
            "Over several ranks", "not in the paper: each rank chooses its share", "table acceptance-ranks", ACCEPTANCE
        ),
    ]


def _plain(model: str, batch: int) -> str:
    found = results("self-drafts", "model", "batch", "length", "sparsity", "gamma")
    rows = [
        r["ttl_p50_us"] / 1e3
        for r in found
        if (r["model"], r["batch"], r["gamma"]) == (model, batch, 0) and "failed" not in r
    ]
    return span(rows, ".1f", "ms")


def tabled() -> dict[str, Table]:
    """Lists the tables that are reprinted."""
    return {name: Table(command, TABLES[name]) for name, command in RECORDED.items()}
