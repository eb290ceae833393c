"""What the simulator says of the Helix paper: the record `simulate.jsonl`, and its tables."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain

from benchmarks.papers.rows import CLAIMS, SPEEDS, Row, Setting, figure_3, hopb_sweep, rounded, simulated
from benchmarks.records.columns import fill_tables, page
from benchmarks.records.rows import grouped
from launch.inputs.compose import ROOT
from launch.inputs.hardware import load_hardware
from launch.inputs.shapes import load_spec

PAGE, RECORD = ROOT / "docs" / "simulator.md", ROOT / "benchmarks" / "results" / "simulate.jsonl"
SHORT = {"deepseek-r1": "DeepSeek-R1", "llama-3.1-405b": "Llama-405B"}
HALF = 0.5  # of the fastest speed: the range of the losses in the table of the paper's claims
FACTOR = 1.5  # a loss is near the paper's if it is at most this many times larger or smaller


def write_record() -> None:
    """Simulates the paper on GB200 and writes the record; prints to stderr what is done."""
    specs, setting = {model: load_spec(model) for model in CLAIMS}, Setting(load_hardware("gb200"))
    rows: list[Row] = []
    for row in chain(*(simulated(model, spec, setting) for model, spec in specs.items()), hopb_sweep(specs, setting)):
        rows.append(rounded(row))
        if len(rows) % 50 == 0 or row["kind"] == "sensitivity":
            words = (str(row[key]) for key in ("model", "kind", "change") if key in row)
            print(f"{len(rows)} rows: {' '.join(words)}", file=sys.stderr, flush=True)
    RECORD.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@cache
def paper() -> Paper:
    """Reads the record."""
    return Paper(json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines())


class Paper:
    """What figures and tables show: the rows that `simulated` makes, by kind and model."""

    def __init__(self, rows: Iterable[Row]) -> None:
        kinds = grouped(rows, "kind")
        models = {
            kind: {m: found for (m,), found in grouped(kinds[kind,], "model").items()}
            for (kind,) in kinds
            if kind != "hopb-sweep"
        }
        self.headlines = {model: found[0] for model, found in models["headline"].items()}
        self.fronts, self.curves, self.sensitivity = models["front"], models["gain"], models["sensitivity"]
        self.hopb, self.lost, self.sweep = models["hopb"], models["hopb-lost"], kinds["hopb-sweep",]

    def lost_from(self, speed: float, model: str) -> list[Row]:
        """Returns the loss without HOP-B of each exchange over this range of speeds."""
        return [row for row in self.lost[model] if row["speed"] == speed]

    @property
    def points(self) -> int:
        """Number of configurations of the headlines."""
        return sum(row["points"] for row in self.headlines.values())

    def tables(self) -> dict[str, list[Sequence[str]]]:
        """Returns the cells of each table, headings first."""
        ours: list[Sequence[str]] = [("model", "claim", "paper", "here", "operating point", "provenance")]
        for model, claim in CLAIMS.items():
            row, name = self.headlines[model], SHORT[model]
            best = f"{row['fastest_helix']} against {row['baseline']}"
            ours += [
                (name, "fastest for a user", f"{claim.user:g}x", f"{row['user_gain']:.2f}x", best, row["provenance"]),
                (name, "batch", f"{claim.batch:g}x", f"{row['batch_gain']:g}x",
                 f"at {row['tokens_per_s_user']:.0f} tokens/s/user, the baseline's fastest: "
                 f"{row['helix_users']} against {row['baseline_users']}", row["provenance"]),
                (name, "tokens/s/GPU", f"{claim.gpu:g}x", f"{row['gpu_gain']:.1f}x",
                 f"there: {row['helix']}", row["provenance"]),
                (name, "tokens/s/GPU", "-", f"{row['gpu_gain_95']:.1f}x", "at 95% of that speed", row["provenance"]),
            ]  # fmt: skip
            for lost in self.lost_from(HALF, model):
                mode = f"exchange {lost['exchange']}; median {lost['median']:.1%}; most at {lost['at']}"
                cells = (f"up to {claim.hopb_off:.0%}", f"{lost['fixed']:.1%}")
                ours.append((name, "lost without HOP-B, at most", *cells, mode, lost["provenance"]))
        ends = [max(row["end"] for row in figure_3() if row["hopb"] == on) for on in ("off", "on")]
        timeline = f"{ends[0]:g} -> {ends[1]:g}"
        ours.append(("-", "figure 3, units of time", "25.6 -> 17", timeline, "8 requests, 2 and 1.2 units", "roofline"))
        curves: list[Sequence[str]] = [
            (
                "baseline's fastest x",
                *(f"{SHORT[m]}: {what}" for m in self.curves for what in ("tokens/s/GPU", "batch")),
            )
        ]
        for rows in zip(*self.curves.values(), strict=True):
            gains = [f"{r[key]:.2f}x" for r in rows for key in ("gpu_gain", "batch_gain")]
            curves.append((f"{rows[0]['fraction']:g}", *gains))
        heads = ("user", "batch", "GPU", "GPU at 95%")
        changes: list[Sequence[str]] = [("changed", *(f"{SHORT[m]}: {h}" for m in self.sensitivity for h in heads))]
        for rows in zip(*self.sensitivity.values(), strict=True):
            found = [f"{r[key]:.2f}" for r in rows for key in ("user_gain", "batch_gain", "gpu_gain", "gpu_gain_95")]
            changes.append((rows[0]["change"], *found))
        return {"paper": ours, "gain": curves, "sensitivity": changes, "hopb-lost": self._hopb_lost(),
                "hopb-sweep": self._hopb_sweep()}  # fmt: skip

    def _hopb_lost(self) -> list[Sequence[str]]:
        table: list[Sequence[str]] = [("model", "paper", "exchange", *(_speeds(speed) for speed in SPEEDS))]
        for model, rows in self.lost.items():
            for (exchange,), found in grouped(rows, "exchange").items():
                lost = (f"{row['fixed']:.1%}" for row in found)
                table.append((SHORT[model], f"{CLAIMS[model].hopb_off:.0%}", exchange, *lost))
        return table

    def _hopb_sweep(self) -> list[Sequence[str]]:
        # How many sets of constants come near both of the paper's losses, and the nearest.
        constants = {
            "kernel": "kernels",
            "collective": "collectives",
            "latency": "the exchange's latency",
            "link": "its rate",
        }
        table: list[Sequence[str]] = [("speeds", "sets near both", *map(SHORT.__getitem__, CLAIMS), "nearest set")]
        for i, speed in enumerate(SPEEDS):
            apart = [[_apart(row[m][i], claim.hopb_off) for m, claim in CLAIMS.items()] for row in self.sweep]
            near = sum(max(both) <= math.log(FACTOR) for both in apart)
            best = self.sweep[min(range(len(apart)), key=lambda at: sum(apart[at]))]
            lost = (f"{best[model][i]:.1%}" for model in CLAIMS)
            changed = [f"{name} x {best[key]:g}" for key, name in constants.items() if best[key] != 1]
            cells = f"{near} of {len(apart)}", *lost, f"{best['exchange']}; {', '.join(changed) or 'as stated'}"
            table.append((_speeds(speed), *cells))
        return table


def _speeds(speed: float) -> str:
    return f"from {speed:.0%} of the fastest" if speed else "any speed"


def _apart(lost: float, paper: float) -> float:
    return abs(math.log(max(lost, 1e-4) / paper))


def with_tables(text: str) -> str:
    """Returns the simulator's page with its tables filled."""
    tables = paper().tables()
    return fill_tables(text, lambda name: page(tables[name]))
