"""Tables of drafts with few keys in one engine: time, gain by measured acceptance, and its price.

With as many drafts, iterations of one commit differ by 2 to 5% between drafters, and those of two commits by up to 28%.
So drafters are compared within a commit, and each commit has its own line.
"""

from __future__ import annotations

from benchmarks.records.columns import POINT, Columns, Show, at, lines, ms, of, page, us
from benchmarks.records.draft_gains import DEMO, REAL, best, gained, gains
from benchmarks.records.rows import Row, check_commit, grouped, kv, results, shape

KEY = ("model", "layout", "drafter", "batch", "length", "gamma", "commit")
DRAFTERS = ("any", "c2q", "window", "quest", "ngram")
PHASES = ("draft", "verify", "choose", "accept")
GROUPS = (1, 2, 3, 5, 7, 9, 12, 20, 28, 40)  # rows of a verified group: sequences x (drafts + 1)


def timed(name: str = "drafters") -> list[Row]:
    """Reads the steps of every drafter, the newest of each point and commit, and their gains; also what did not fit."""
    jobs = grouped(results(name, *KEY, kind="drafters"), "model", "layout", "drafter", "commit")
    return [r | gains(r, job) for job in jobs.values() for r in job]


def beside(name: str, model: str) -> list[str]:
    """Tabulates the least gain of each drafter by a trained model's acceptance, and its drafts, a line a commit."""
    found = timed(name)
    chosen = {(*_line(r), r["drafter"]): r for r in best(found, model)}

    def cell(drafter: str) -> Show:
        def show(r: Row) -> str:
            of = chosen.get((*_line(r), drafter))
            return "-" if of is None else f"{gained(of, model):.2f} x ({of['gamma']})"

        return show

    points = {_line(r): r for r in found if not r["gamma"]}
    columns: Columns = {
        **POINT,
        "commit": lambda r: "-" if "failed" in r else r["commit"][:7],
        "plain step": lambda r: "does not fit" if "failed" in r else ms("ttl_p50_us")(r),
        **{drafter: cell(drafter) for drafter in DRAFTERS},
    }
    return lines(columns, sorted(points.values(), key=lambda r: (shape(r), r["batch"], r["length"])))


def _line(r: Row) -> tuple[str, ...]:
    """The shape, point and commit of a row; what does not fit is the same at all commits."""
    return shape(r), kv(r), "" if "failed" in r else r["commit"]


def drafters() -> list[str]:
    """Tabulates gains by the demo model's acceptance, the least of its tasks and lengths up to 32K."""
    return beside("drafters", DEMO)


def drafters_real() -> list[str]:
    """Tabulates gains by SmolLM2's acceptance, the least of its tasks at 4K and 8K."""
    return beside("drafters", REAL)


def drafters_of_eight() -> list[str]:
    """Tabulates gains of eight emulated ranks by the demo model's acceptance."""
    return beside("drafters.emulated-8", DEMO)


def breakdown() -> list[str]:
    """Tabulates what the parts of an iteration of four drafts take, and the choice as a share of the others."""

    def part(name: str) -> Show:
        return lambda r: ms("us")({"us": r["phase_us"].get(name)})

    first: Columns = {**POINT, "commit": lambda r: r["commit"][:7], "drafter": at("drafter")}
    columns = first | {name: part(name) for name in PHASES}
    found = [r for r in timed() if r["gamma"] == 4 and "choose" in (r.get("phase_us") or {})]
    found.sort(key=lambda r: (shape(r), r["batch"], r["length"]))
    return lines({**columns, "choice over all else": lambda r: f"{choice_over_rest(r):.1%}"}, found)


def choice_over_rest(r: Row) -> float:
    """Returns what the choice of keys adds to an iteration, over what it takes without."""
    return _over_rest(r, r["phase_us"].get("choose", 0.0))


def selection_over_rest(r: Row, window: Row) -> float:
    """Returns what the choice of keys and its scores add to an iteration, over what it takes without.

    Args:
        window: a row of the same point and commit, whose verification keeps no scores.
    """
    check_commit(r, window)
    scores = r["phase_us"]["verify"] - window["phase_us"]["verify"]
    return _over_rest(r, r["phase_us"].get("choose", 0.0) + scores)


def _over_rest(r: Row, own: float) -> float:
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
    found = results("drafters", "model", "drafter", "batch", "length", kind="adaptive")
    return [r for r in found if "failed" not in r]


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


PAGE = {"drafters": drafters, "drafters-real": drafters_real, "drafters-eight": drafters_of_eight,
        "drafters-breakdown": breakdown, "drafters-adaptive": adaptive, "experts-verified": experts}  # fmt: skip
