"""Tables of drafts with few keys, beside each other in one engine: time, gain by measured acceptance, and its price."""

from __future__ import annotations

from functools import partial

from benchmarks.records.columns import POINT, Columns, Show, at, lines, ms, of, page, us
from benchmarks.records.rows import Row, kv, results, shape

KEY = ("kind", "model", "layout", "drafter", "batch", "length", "gamma")
TASKS = {"gain_code": "code", "gain_copy": "copy", "gain_facts": "facts"}
PHASES = ("draft", "verify", "choose", "accept")
MOST_LOST = 0.02  # of plain decoding's speed, where drafts do not hold
GROUPS = (1, 2, 3, 5, 7, 9, 12, 20, 28, 40)  # rows of a verified group: sequences x (drafts + 1)


def timed() -> list[Row]:
    """Reads the steps of every drafter that ran, the newest of each point."""
    found = results("drafters", *KEY)
    return [r for r in found if r["kind"] == "drafters" and "failed" not in r]


def best(found: list[Row]) -> list[Row]:
    """Keeps of each model, drafter and point the number of drafts that gains the most on its worst task."""
    kept: dict[tuple[str, ...], Row] = {}
    for r in found:
        if TASKS.keys() <= r.keys():
            name = (shape(r), kv(r), r["drafter"])
            if name not in kept or gained(r) > gained(kept[name]):
                kept[name] = r
    return list(kept.values())


def gained(r: Row) -> float:
    """Returns the least gain over plain steps of a row's tasks, by measured acceptance."""
    return min(r[task] for task in TASKS)


def drafters() -> list[str]:
    """Tabulates each drafter at each point with the number of drafts that suits it."""
    columns: Columns = {
        **POINT,
        "drafter": at("drafter"),
        "drafts": at("gamma"),
        "iteration": ms("ttl_p50_us"),
        "over a plain step": of("step_over_plain", "x", 2),
        **{f"gain: {name}": of(task, "x", 2) for task, name in TASKS.items()},
    }
    return lines(columns, sorted(best(timed()), key=lambda r: (shape(r), r["batch"], r["length"])))


def breakdown() -> list[str]:
    """Tabulates what the parts of an iteration of four drafts take, and the choice as a share of the others."""

    def part(name: str) -> Show:
        return lambda r: ms("us")({"us": r["phase_us"].get(name)})

    columns: Columns = {**POINT, "drafter": at("drafter"), **{name: part(name) for name in PHASES}}
    found = [r for r in timed() if r["gamma"] == 4 and PHASES[0] in (r.get("phase_us") or {})]
    found.sort(key=lambda r: (shape(r), r["batch"], r["length"]))
    return lines({**columns, "choice over all else": lambda r: f"{choice_over_rest(r):.1%}"}, found)


def choice_over_rest(r: Row) -> float:
    """Returns what the choice of keys adds to an iteration, over what it takes without."""
    own = r["phase_us"].get("choose", 0.0)
    return float(own / (sum(r["phase_us"].values()) - own))


def adaptive() -> list[str]:
    """Tabulates text of random weights with as many drafts as pay, beside plain decoding."""
    columns: Columns = {
        **POINT,
        "drafter": at("drafter"),
        "drafts a step": lambda r: f"{r['speculation']['mean_drafts']:.3f}" if r["speculation"] else "-",
        "time per token": ms("ttl_p50_us"),
        "tokens/s/user": of("tokens_per_s_user"),
        "lost": lambda r: f"{max(0.0, 1 - r['gain']):.1%}" if r["speculation"] else "-",
    }
    return lines(columns, adapted())


def adapted() -> list[Row]:
    """Reads the jobs whose number of drafts was chosen while decoding, the newest of each point."""
    found = results("drafters", "kind", "model", "drafter", "batch", "length")
    return [r for r in found if r["kind"] == "adaptive" and "failed" not in r]


def _groups() -> dict[str, dict[int, Row]]:
    """Experts of one rank whose inherent time is recorded, by model and by rows of a group."""
    ranks: dict[str, dict[int, Row]] = {}
    for r in results("moe", "model", "tpf", "ep", "tokens"):
        if r.get("inherent_us") and (r["tpf"], r["ep"]) == (1, 1):
            ranks.setdefault(r["model"], {})[r["tokens"]] = r
    return ranks


def experts_over_inherent(*models: str) -> str:
    """Says what a verified group of five rows takes over reading its distinct experts, by model."""
    rows = {model: own[5] for model, own in _groups().items() if model in models and 5 in own}
    said = (f"{model} {r['us'] / r['inherent_us']:.2f} x" for model, r in rows.items())
    return ", ".join(said) + " of what five rows must read" if rows else "not recorded"


def experts() -> list[str]:
    """Tabulates experts of a verified group: time over that of reading the distinct ones, by rows."""
    ranks = _groups()
    counts = [n for n in GROUPS if any(n in own for own in ranks.values())]

    def cell(r: Row | None) -> str:
        return "-" if r is None else f"{us('us', 0)(r)} ({r['us'] / r['inherent_us']:.2f})"

    body = [(model, *(cell(own.get(n)) for n in counts)) for model, own in ranks.items()]
    return page([("experts", *map(str, counts)), *body]) if body else []


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


PAGE = {"drafters": drafters, "drafters-breakdown": breakdown, "drafters-adaptive": adaptive,
        "experts-verified": experts, "turns": turns, "trained-drafters": trained,
        **{name: partial(layers, name) for name in ("layer-drafts", "layer-drafts.emulated-8")}}  # fmt: skip
