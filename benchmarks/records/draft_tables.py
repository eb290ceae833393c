"""Rows of sparse drafters in one engine: time, gain with measured acceptance, and overhead.

At the same gamma, iterations of one commit differ by 2 to 5% between drafters, and those of two commits by up to 28%.
So drafters are compared within a commit, and each commit has its own line.
"""

from __future__ import annotations

from benchmarks.records.draft_gains import best, gained, gains
from benchmarks.records.rows import Row, check_commit, grouped, kv, results, shape

KEY = ("model", "layout", "drafter", "batch", "length", "gamma", "commit")
PHASES = ("draft", "verify", "choose", "accept")


def timed(name: str = "drafters") -> list[Row]:
    """Reads the newest steps of every drafter, point and commit with their gains; also points that did not fit."""
    jobs = grouped(results(name, *KEY, kind="drafters"), "model", "layout", "drafter", "commit")
    return [r | gains(r, job) for job in jobs.values() for r in job]


def compare_drafters(name: str, model: str) -> list[Row]:
    """Returns one row per point and commit, with each drafter's minimum gain with a trained model's acceptance."""
    found = timed(name)
    points = {_line(r): r for r in found if not r["gamma"]}
    shown = {line: dict(r) for line, r in points.items()}
    for r in best(found, model):
        if _line(r) in shown:
            shown[_line(r)][r["drafter"]] = f"{gained(r, model):.2f} x ({r['gamma']})"
    return sorted(shown.values(), key=lambda r: (shape(r), r["batch"], r["length"]))


def _line(r: Row) -> tuple[str, ...]:
    """The shape, point and commit of a row; a point that does not fit is the same at all commits."""
    return shape(r), kv(r), "" if "failed" in r else r["commit"]


def one_commit(rows: list[Row], *needed: str) -> list[Row]:
    """Keeps the rows of the commit with most of the needed drafters, or of all, and of these the newest."""
    by_commit: dict[str, list[Row]] = {}
    for r in rows:
        if not needed or r["drafter"] in needed:
            by_commit.setdefault(r["commit"], []).append(r)
    return max(reversed(by_commit.values()), key=lambda same: len({r["drafter"] for r in same}), default=[])


def choice_over_rest(r: Row) -> float:
    """Returns the time of selecting keys over the rest of an iteration."""
    return _ratio_to_rest(r, r["phase_us"].get("choose", 0.0))


def selection_over_rest(r: Row, window: Row) -> float:
    """Returns the time of selecting keys and writing scores over the rest of an iteration.

    Args:
        window: a row of the same point and commit, whose verification writes no scores.
    """
    check_commit(r, window)
    scores = r["phase_us"]["verify"] - window["phase_us"]["verify"]
    return _ratio_to_rest(r, r["phase_us"].get("choose", 0.0) + scores)


def _ratio_to_rest(r: Row, part_us: float) -> float:
    return float(part_us / (sum(r["phase_us"].values()) - part_us))


def adapted() -> list[Row]:
    """Reads the jobs with adaptive gamma, the newest of each point."""
    found = results("drafters", "model", "drafter", "batch", "length", kind="adaptive")
    return [r for r in found if "failed" not in r]


def experts_over_inherent(*models: str) -> str:
    """Returns the time of a verified group of five rows relative to reading its distinct experts, by model."""
    rows = results("moe", "model", "tpf", "ep", "tokens", tpf=1, ep=1, tokens=5)
    found = {r["model"]: r for r in rows if r.get("inherent_us") and r["model"] in models}
    parts = (f"{model} {r['us'] / r['inherent_us']:.2f} x" for model, r in found.items())
    return ", ".join(parts) + " of what five rows must read" if found else "not recorded"


def by_point(rows: list[Row]) -> list[Row]:
    """Groups rows by point, in the order of their gammas."""
    points = [(shape(r), kv(r)) for r in rows]
    return sorted(rows, key=lambda r: (points.index((shape(r), kv(r))), r["gamma"]))
