"""Tables of drafts of a layer: their time, how many hold, how it was trained; and of drafts by lookup."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.records.columns import POINT, Columns, Show, at, lines, ms, of, page
from benchmarks.records.rows import results

KEY = ("model", "layout", "drafter", "batch", "length", "gamma")


def layers(name: str) -> list[str]:
    """Tabulates drafts of a layer: what parts of an iteration take, and what they gain with the published tokens."""

    def part(*names: str) -> Show:
        return lambda r: ms("us")({"us": sum(r["phase_us"].get(name, 0) for name in names)})

    columns: Columns = {
        **POINT,
        "drafter": at("drafter"),
        "drafts": at("gamma"),
        "iteration": ms("ttl_p50_us"),
        "verify": part("verify"),
        "draft": part("draft"),
        "accept, rewrite": part("accept", "choose"),
        "over a plain step": of("step_over_plain", "x", 2),
        "gain, published tokens": of("gain_published", "x", 2),
    }
    found = [r for r in results(name, *KEY) if "failed" not in r and r["gamma"]]
    found.sort(key=lambda r: (r["drafter"], r["model"], r["batch"] * r["length"], r["batch"], r["gamma"]))
    return lines(columns, found)


def trained() -> list[str]:
    """Tabulates layers that were trained here, and the drafts that held on texts which they had not seen."""
    columns: Columns = {
        "model": at("model"),
        "layer": at("drafter"),
        "texts": at("texts"),
        "minutes": at("minutes"),
        "steps": at("steps"),
        "kept of each draft behind kept ones": lambda r: " ".join(f"{share:.2f}" for share in r["kept"]),
    }
    return lines(columns, results("trained-drafters", "model", "drafter", "texts"))


def turns() -> list[str]:
    """Tabulates drafts by lookup on turns of agents and elsewhere."""
    columns: Columns = {
        "text": at("text"),
        "model": at("model"),
        "drafts": at("drafting"),
        "tokens a step": of("tokens_per_step", "", 2),
        "step p50": ms("ttl_p50_us"),
        "tokens/s/user": lambda r: f"{r['tokens_per_s_user']:.0f}",
        "gain": of("gain", "x", 2),
        "over ngram": of("over_ngram", "x", 3),
        "answers as without": lambda r: f"{r['as_plain']} of {r['prompts']}",
    }
    return lines(columns, results("turns", "text", "model", "layout", "drafting"))


def beside_vllm() -> list[str]:
    """Tabulates drafts looked up in the text by both engines, on copies of files."""
    found = {(r["engine"].split()[0], r["drafts"]): r for r in results("vllm-drafts", "engine", "model", "drafts")}
    table = [("engine", "without drafts", "with up to 5 drafts", "gain")]
    for engine in ("helix", "vllm"):
        plain, drafted = (found[engine, drafts]["tokens_per_s"] for drafts in (0, 5))
        name = {"helix": "Helix", "vllm": found["vllm", 0]["engine"].replace("vllm", "vLLM")}[engine]
        table.append((name, f"{plain:,.0f} tokens/s", f"{drafted:,.0f} tokens/s", f"{drafted / plain:.2f} x"))
    return page(table)


PAGE: dict[str, Callable[[], list[str]]] = {
    **{name: partial(layers, name) for name in ("layer-drafts", "layer-drafts.emulated-8")},
    "trained-drafters": trained,
    "turns": turns,
    "vllm-drafts": beside_vllm,
}
