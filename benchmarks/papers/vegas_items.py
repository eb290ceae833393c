"""Vegas (Yue et al., ICML 2026): its items compared with our records."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.models.speculate import expected_tokens
from benchmarks.papers.items import NOT_RECORDED, Item, Table, filled_items, span
from benchmarks.records import tuned_tables
from benchmarks.records.acceptance_tables import KEY, join_tasks
from benchmarks.records.draft_gains import DEMO, REAL, best, gained
from benchmarks.records.draft_tables import (
    adapted,
    choice_over_rest,
    experts_over_inherent,
    one_commit,
    selection_over_rest,
    timed,
)
from benchmarks.records.rows import WORKLOAD, Row, results, tokens
from benchmarks.records.serving_tables import compared_servers
from benchmarks.records.tables import TABLES

ACCEPTANCE, DRAFTS, KERNELS = "helix acceptance", "helix bench self-drafts", "helix bench sparse"
DRAFTERS, TUNE = "helix bench drafters", "helix tune"
LONG = 112 * 1024
VLLM_POINTS = {"4 x 112K": (4, LONG), "20 x 32K": (20, 32 * 1024), "20 x 112K": (20, LONG)}  # by trace
MODELS = "qwen3-4b", "qwen3-8b", "qwen3-30b-a3b", "gpt-oss-20b", "llama-3.1-8b"
# Reprinted tables, and the command of their records.
RECORDED = {
    **dict.fromkeys(
        (f"acceptance-{name}" for name in ("policies", "variants", "positions", "sparsity", "sampled", "choices")),
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
    rows = join_tasks(
        [r for r in results("acceptance", *KEY) if r["kind"] in ("acceptance", "sweep") and r["kind"] == kind]
    )
    return [r for r in rows if all(r[name] == value for name, value in fields.items())]


def _accepted(*policies: str, gamma: int = 7) -> str:
    """Tokens per iteration at 32K, the mean over three tasks, by policy."""
    usual = {"length": 32768, "gamma": gamma, "prompts": 30, "kvp": 1, "temperature": 0.0}
    parts = []
    for policy in policies:
        rows = _joined("acceptance", policy=policy, **usual)
        parts.append(f"{policy} {rows[0]['mean']:.2f}" if rows else f"{policy} -")
    return ", ".join(parts)


def _rule() -> str:
    """Tokens per iteration by the paper's rule for two queries, and by the default one; the mean over three tasks."""
    rows = [r for r in join_tasks(results("acceptance-rule", *KEY)) if r["policy"] == "c2q"]
    found = {(r["recent"], r["reach"], r["heads"]): r["mean"] for r in rows}
    named = {"as in the paper": (0.0, 0, "all"), "by default": (0.5, 8, "each")}
    return ", ".join(f"{name} {found[of]:.2f}" for name, of in named.items() if of in found) or NOT_RECORDED


def _attention() -> str:
    """Tokens per iteration of models with latents and with states, the mean over three tasks."""
    rows = [r for r in join_tasks(results("acceptance-attention", *KEY)) if r["policy"] != "none"]
    parts = (
        f"{model} " + ", ".join(f"{r['policy']} {r['mean']:.2f}" for r in rows if r["model"] == model)
        for model in dict.fromkeys(r["model"] for r in rows)
    )
    return "; ".join(parts) or NOT_RECORDED


def _runs(kind: str, policy: str, length: int | None = None, needs: str = "kind") -> str:
    """Prompts and lengths of a figure's lines, and their GPU."""
    rows = [r for r in results("acceptance", *KEY) if (r["kind"], r["policy"]) == (kind, policy) and r.get(needs)]
    rows = [r for r in rows if length in (None, r["length"])]
    parts = dict.fromkeys(
        f"{r['prompts']} x {tokens(r['length'])}, {r['device'].removeprefix('NVIDIA ')}" for r in rows
    )
    return "; ".join(parts) or NOT_RECORDED


def _beyond() -> str:
    """The number of drafts that gains most by acceptance rate, Qwen3-8B, 4 x 112K."""
    rows = [r for r in timed() if _is_long(r) and r["drafter"] == "any" and "step_over_plain" in r]
    parts = []
    for rate in (0.8, 0.9, 0.96) if rows else ():
        most = max(rows, key=lambda r: expected_tokens(r["gamma"], rate) / r["step_over_plain"])
        parts.append(
            f"{rate}: {most['gamma']} drafts {expected_tokens(most['gamma'], rate) / most['step_over_plain']:.2f} x"
        )
    return ", ".join(parts) or NOT_RECORDED


def _pays() -> str:
    """The smallest timed batch of Qwen3-8B with a gain, by acceptance rate, for prompts of 8K, 32K and 112K."""
    rows = [r for r in timed() if (r["model"], r["drafter"]) == ("qwen3-8b", "any") and "step_over_plain" in r]
    parts = []
    for rate in (0.8, 0.9, 0.96):
        gained_at = [r for r in rows if expected_tokens(r["gamma"], rate) > r["step_over_plain"]]
        batches = [min((r["batch"] for r in gained_at if r["length"] == n), default=None) for n in (8192, 32768, LONG)]
        parts.append(f"{rate}: " + ", ".join("-" if batch is None else str(batch) for batch in batches))
    return "; ".join(parts) if rows else NOT_RECORDED


def _overlap() -> str:
    """Keys that two tokens share, neighbors and the most distant, the mean over the tasks; and on what."""
    rows = results("neighbors", "model", "task", "length", "prompts", "keys")
    if not rows:
        return NOT_RECORDED
    near, far = (sum(r["overlap"][at] for r in rows) / len(rows) for at in (0, -1))
    on = f"{sum(r['prompts'] for r in rows)} x {rows[0]['length']:,}, the best {rows[0]['keys']:,} keys"
    return f"{on}: neighbors {near:.2f}, {len(rows[0]['overlap'])} apart {far:.2f}"


def _sweep() -> str:
    found = {r["sparsity"]: r["mean"] for r in _joined("sweep", policy="any", length=8192)}
    return ", ".join(f"{share:.0%} {tokens:.2f}" for share, tokens in sorted(found.items())) or NOT_RECORDED


def _collect(name: str) -> str:
    """Time of verification that keeps scores, relative to verification without; the newest that kept them that way."""
    point = "group", "dim", "queries", "batch", "length"
    rows = results("sparse", *point, "commit", kind="collect")
    found = {tuple(r[key] for key in point): r[over] for r in rows if (over := f"{name}_over_plain") in r}
    return span([*found.values()], ".2f", "x")


def _attend() -> str:
    """Time of attention over runs of adjacent keys relative to single keys at the same point."""
    rows = results("sparse", "heads", "batch", "length", "run", kind="attend")
    single = {(r["heads"], r["batch"], r["length"]): r for r in rows if r["run"] == 1}
    pairs = [(r, single[r["heads"], r["batch"], r["length"]]) for r in rows]
    return span([r["us"] / one["us"] for r, one in pairs if r["commit"] == one["commit"]], ".2f", "x of single keys")


def _gain(rate: str) -> str:
    """Maximum gain of drafts at an acceptance rate, by model, over all recorded points."""
    rows = [
        r
        for r in results("self-drafts", "model", "batch", "length", "sparsity", "gamma")
        if "failed" not in r and r["gamma"]
    ]
    best = {m: max((r["gain_at_rates"][rate] for r in rows if r["model"] == m), default=None) for m in MODELS}
    return (
        ", ".join(f"{m} {'-' if gain is None else format(gain, '.2f')} x" for m, gain in best.items())
        + f" at a rate of {rate}"
    )


def _beside(*drafters: str, model: str = DEMO) -> str:
    """Minimum gain over the tasks relative to plain steps, Qwen3-8B, 4 x 112K, by measured acceptance."""
    left = [r for r in best(timed(), model) if r["drafter"] in drafters and _is_long(r)]
    parts = []
    while left:
        rows = sorted(one_commit(left), key=lambda r: drafters.index(r["drafter"]))
        gains = (f"{r['drafter']} {gained(r, model):.2f} x ({r['gamma']} drafts)" for r in rows)
        parts.append(f"{', '.join(gains)} ({rows[0]['commit'][:7]})")
        left = [r for r in left if r["drafter"] not in {one["drafter"] for one in rows}]
    return "; ".join(parts) or NOT_RECORDED


def _is_long(r: Row) -> bool:
    return (r["model"], r["batch"], r["length"]) == ("qwen3-8b", 4, LONG)


def _choosing(*drafters: str) -> str:
    """Time of key selection over the rest of an iteration, Qwen3-8B, 4 x 112K, four drafts."""
    parts = (f"{name} {choice_over_rest(r):.1%}" for name, r in _parts().items() if name in drafters)
    return ", ".join(parts) or NOT_RECORDED


def _selecting(*drafters: str) -> str:
    """The same with the cost of scores: verification's extra time relative to `window`, which needs none."""
    found = _parts()
    parts = (f"{name} {selection_over_rest(found[name], found['window']):.1%}" for name in drafters if name in found)
    return ", ".join(parts) or NOT_RECORDED


def _parts() -> dict[str, Row]:
    found = [r for r in timed() if _is_long(r) and r["gamma"] == 4 and "choose" in (r.get("phase_us") or {})]
    return {r["drafter"]: r for r in one_commit(found, "any", "c2q", "window")}


def _by_length(drafter: str) -> str:
    rows = [r for r in best(timed()) if (r["model"], r["drafter"], r["batch"]) == ("qwen3-8b", drafter, 4)]
    newest = {r["length"]: r for r in rows}
    parts = (f"{tokens(n)} {gained(r):.2f} x" for n, r in sorted(newest.items()))
    return ", ".join(parts) or NOT_RECORDED


def _lost() -> str:
    return span([max(0.0, 1 - r["gain"]) for r in adapted() if r["speculation"]], ".1%", "lost where none holds")


def _rejected() -> str:
    rows = [r for r in results("acceptance", *KEY) if (r["kind"], r["policy"]) == ("acceptance", "any")]
    rows = [r for r in rows if r.get("rejected")]
    likely, count = sum(sum(r["rejected_tenths"][3:]) for r in rows), sum(r["rejected"] for r in rows)
    return f"any: {likely / count:.0%} of {count} with 0.3 or more" if rows else NOT_RECORDED


def _full() -> str:
    """Tokens per second of a full batch with self-drafts, over those without."""
    found = {r["drafter"]: r["tokens_per_s"] for r in results("full-batch", "model", "drafter", "gamma")}
    if not {"none", "sparse"} <= found.keys():
        return NOT_RECORDED
    return f"{found['sparse']:,.0f} tokens/s, {found['none']:,.0f} without: {found['sparse'] / found['none']:.2f} x"


def _plain() -> str:
    """A plain step of the paper's 4 x 128K."""
    rows = results("step.1gpu", *WORKLOAD, model="qwen3-8b", batch=4, length=128 * 1024)
    return span([r["ttl_p50_us"] / 1e3 for r in rows], ".1f", "ms")


def _tokens_ms() -> dict[tuple[str, str], tuple[float, float]]:
    """Time of a plain token of ours and of vLLM, by model and trace, each pair of one call."""
    found = {
        (r["model"], r["trace"]): (r["helix"]["p50_itl_ms"], r["other"]["p50_itl_ms"])
        for r in compared_servers(1)
        if r["trace"] in VLLM_POINTS
    }
    for theirs in results("filled-cache", "model", "trace", "engine", free=("run",)):
        batch, length = VLLM_POINTS[theirs["trace"]]
        for ours in results(
            "step.1gpu", *WORKLOAD, commit=theirs["commit"], model=theirs["model"], batch=batch, length=length
        ):
            found[theirs["model"], theirs["trace"]] = ours["ttl_p50_us"] / 1e3, theirs["p50_itl_ms"]
    return found


def _vllm() -> str:
    parts = (
        f"{model} {trace} {ours:.1f} ms, vLLM {theirs:.1f}" for (model, trace), (ours, theirs) in _tokens_ms().items()
    )
    return "; ".join(parts) or NOT_RECORDED


def _over_vllm() -> str:
    """Gain of drafts over plain steps, times that of plain steps over vLLM."""
    parts = []
    rows = [r for r in best(timed()) if r["drafter"] == "any"]
    for (model, trace), (ours, theirs) in _tokens_ms().items():
        at = [r for r in rows if (r["model"], r["batch"], r["length"]) == (model, *VLLM_POINTS[trace])]
        if at and (gain := gained(at[-1])) is not None:
            parts.append(
                f"{model} {trace} {gain * theirs / ours:.2f} x ({at[-1]['gamma']} drafts of {at[-1]['commit'][:7]})"
            )
    return ", ".join(parts) or NOT_RECORDED


FIGURES: dict[str, Callable[..., str]] = {
    "attend": _attend,
    "attention": _attention,
    "beside": _beside,
    "beside_real": partial(_beside, model=REAL),
    "beyond": _beyond,
    "by_length": _by_length,
    "choosing": _choosing,
    "collect": _collect,
    "experts": experts_over_inherent,
    "gain": _gain,
    "accepted": _accepted,
    "accepted_11": partial(_accepted, gamma=11),
    "full": _full,
    "lost": _lost,
    "over_vllm": _over_vllm,
    "overlap": _overlap,
    "pays": _pays,
    "plain": _plain,
    "rejected": _rejected,
    "rule": _rule,
    "runs": _runs,
    "runs_rejected": partial(_runs, "acceptance", "any", needs="rejected"),
    "selecting": _selecting,
    "sweep": _sweep,
    "tuned": tuned_tables.worst,
    "vllm": _vllm,
}


def items() -> list[Item]:
    """Lists the paper's items in order."""
    return filled_items("vegas", FIGURES)


def tabled() -> dict[str, Table]:
    """Lists the reprinted tables."""
    return {name: Table(command, TABLES[name]) for name, command in RECORDED.items()}
