"""Figures and tables of Kolawole's paper on verification kernels (CMU, 2026), from records of `helix bench verify`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.records.columns import Cells
from benchmarks.records.figures import footer
from benchmarks.records.rows import Row, grouped
from benchmarks.records.style import BLUE, GRAY, GREEN, ORANGE, PURPLE, SKY, Style, curves, facets, panels, save

KEY = "kind", "batch", "gamma", "alpha", "kv_dim"
HOW = {"_us": "from Python", "_graph_us": "in a graph"}
ALPHAS, GAMMAS = (0.3, 0.6, 0.9), (8, 64, 128)
WORST = 32, 128, 0.9  # sequences, drafts and acceptance rate with the most divergence for one lane per sequence
TIME = "time (us; lower is better)"
KERNELS: dict[str, Style] = {
    "torch": {"label": "plain torch", "color": GRAY, "marker": "D"},
    "naive": {"label": "a lane a sequence", "color": ORANGE, "marker": "s"},
    "ballot": {"label": "32-lane ballot", "color": PURPLE, "marker": "^"},
    "scan": {"label": "reduction", "color": BLUE, "marker": "o"},
}
PACKERS: dict[str, Style] = {
    "pack_torch": {"label": "torch's mask", "color": GRAY, "marker": "D"},
    "pack": {"label": "our pack", "color": BLUE, "marker": "o"},
    "pack_waiting": {"label": "the paper's pack", "color": ORANGE, "marker": "s"},
}
FUSED: dict[str, Style] = {
    "two_step_torch": {"label": "scan, torch's mask", "color": GRAY, "marker": "D"},
    "two_step": {"label": "scan, our pack", "color": SKY, "marker": "v"},
    "one_block": {"label": "one block", "color": ORANGE, "marker": "s"},
    "fused": {"label": "fused", "color": BLUE, "marker": "o"},
}
ORDERS: dict[str, Style] = {
    "naive": {"label": "a lane a sequence", "color": ORANGE, "marker": "s"},
    "naive_sorted": {"label": "the same, sorted", "color": GREEN, "marker": "P"},
    "naive_predicted": {"label": "sorted by a prediction", "color": PURPLE, "marker": "X"},
    "scan": {"label": "reduction", "color": BLUE, "marker": "o"},
}
# The paper's figures, on an L40S from Python: by gamma and alpha; by width; by batch, gamma, width and alpha.
TABLE_1 = {
    (8, 0.3): (83.90, 12.77, 12.83), (8, 0.6): (83.81, 12.90, 12.93), (8, 0.9): (84.38, 12.86, 12.80),
    (64, 0.3): (84.62, 13.22, 12.98), (64, 0.6): (84.06, 14.46, 12.83), (64, 0.9): (84.62, 17.31, 13.09),
    (128, 0.3): (84.14, 14.69, 12.99), (128, 0.6): (84.38, 18.21, 12.90), (128, 0.9): (84.82, 23.84, 12.93),
}  # fmt: skip
TABLE_2 = {128: (52.16, 55.18), 512: (52.32, 59.81), 1024: (57.42, 93.58), 2048: (57.95, 159.54)}
TABLE_3 = {
    (4, 8, 0.3, 128): (106.43, 27.74), (32, 8, 0.3, 128): (105.87, 30.46), (32, 8, 0.9, 2048): (105.46, 32.99),
    (32, 128, 0.3, 128): (96.16, 27.87), (32, 128, 0.9, 512): (96.74, 100.38), (32, 128, 0.9, 1024): (95.52, 195.65),
    (32, 128, 0.9, 2048): (108.90, 386.26),
}  # fmt: skip


class Records:
    """Rows of one record, by kind."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = [row for row in rows if row["kind"] in ("scan", "pack", "pack_alone", "sorted")]

    def of(self, kind: str, **fields: object) -> list[Row]:
        return [r for r in self.rows if r["kind"] == kind and all(r[name] == value for name, value in fields.items())]

    def us(self, kind: str, batch: int, gamma: int, alpha: float, *widths: int) -> Row:
        """Returns a point's row; empty if it was not recorded."""
        width = {"kv_dim": widths[0]} if widths else {}
        return next(iter(self.of(kind, batch=batch, gamma=gamma, alpha=alpha, **width)), {})

    def times(self, kernels: dict[str, Style], kind: str, **fields: object) -> list[Row]:
        """Returns a row for each kernel and way to launch it."""
        return [
            {**row, "kernel": kernel, "how": how, "us": row[kernel + suffix]}
            for row, kernel, (suffix, how) in product(self.of(kind, **fields), kernels, HOW.items())
            if row.get(kernel + suffix) is not None
        ]


# ---- tables


def _us(row: Row, *names: str) -> str:
    found = [row.get(name) for name in names]
    return " / ".join("-" if us is None else f"{us:.1f}" for us in found)


def _over(row: Row, slow: str, fast: str, suffix: str) -> str:
    a, b = row.get(slow + suffix), row.get(fast + suffix)
    return f"{a / b:.2f}" if a and b else "-"


def tables(records: Records) -> dict[str, Cells]:
    """Returns the cells of each table, the paper's numbers and ours; "-" where nothing is recorded."""
    one: list[Sequence[str]] = [
        ("gamma", "alpha", "paper: torch / naive / ballot", "here", "in a graph: naive / ballot / reduction",
         "naive over ballot: paper", "here", "in a graph"),
    ]  # fmt: skip
    for (gamma, alpha), paper in TABLE_1.items():
        r = records.us("scan", 32, gamma, alpha)
        here, graph = (
            _us(r, "torch_us", "naive_us", "ballot_us"),
            ("naive_graph_us", "ballot_graph_us", "scan_graph_us"),
        )
        ratios = f"{paper[1] / paper[2]:.2f}", *(_over(r, "naive", "ballot", suffix) for suffix in HOW)
        one.append((str(gamma), f"{alpha:g}", " / ".join(f"{us:.1f}" for us in paper), here, _us(r, *graph), *ratios))
    two: list[Sequence[str]] = [
        ("kv_dim", "paper: torch / pack", "here", "in a graph: pack", "pack over torch: paper", "here")
    ]
    for width, (by_torch, pack) in TABLE_2.items():
        r = records.us("pack_alone", *WORST, width)
        both = _us(r, "pack_torch_us", "pack_us"), _us(r, "pack_graph_us")
        slower = f"{pack / by_torch:.2f}", _over(r, "pack", "pack_torch", "_us")
        two.append((str(width), f"{by_torch:.1f} / {pack:.1f}", *both, *slower))
    three: list[Sequence[str]] = [
        ("sequences x drafts x width, alpha", "paper: two steps / fused", "here: two steps / one block / fused",
         "in a graph: two steps / one block / fused", "two steps over fused: paper", "here"),
    ]  # fmt: skip
    for (batch, gamma, alpha, width), (steps, fused) in TABLE_3.items():
        r = records.us("pack", batch, gamma, alpha, width)
        here = _us(r, "two_step_torch_us", "one_block_us", "fused_us")
        captured = _us(r, "two_step_graph_us", "one_block_graph_us", "fused_graph_us")
        wins = f"{steps / fused:.2f}", _over(r, "two_step_torch", "fused", "_us")
        three.append((f"{batch} x {gamma} x {width}, {alpha:g}", f"{steps:.1f} / {fused:.1f}", here, captured, *wins))
    return {"1": one, "2": two, "3": three, "4": limits(records)}


def limits(records: Records) -> Cells:
    """Lists the limits of each regime: the paper's evidence and ours."""
    table: list[Sequence[str]] = [("regime", "paper: bottleneck", "paper: evidence", "here")]

    def spread(name: str, rows: Sequence[Row]) -> str:
        found = [r[name] for r in rows if r.get(name) is not None]
        return f"{min(found):.1f} to {max(found):.1f} us" if found else "-"

    def slope(name: str, gamma: int) -> str:
        low, high = (records.us("scan", 32, gamma, alpha).get(name) for alpha in (0.3, 0.9))
        return f"{high - low:+.1f} us" if low and high else "-"

    small = [r for r in records.of("scan") if r["gamma"] <= 32]
    table.append(
        ("gamma to 32, tokens alone", "launches, 12 us each", "flat curves; 1.7 us of GPU time",
         f"from Python {spread('ballot_us', small)}, in a graph {spread('ballot_graph_us', small)}"),
    )  # fmt: skip
    slopes = "; ".join(
        f"gamma {gamma}: naive {slope('naive_graph_us', gamma)}, ballot {slope('ballot_graph_us', gamma)}"
        for gamma in (64, 128)
    )
    table.append(("naive, gamma from 64, high alpha", "divergence", "+4.3 and +9.3 us from alpha 0.3 to 0.9", slopes))
    worst = records.us("pack_alone", *WORST, 2048)
    alone = f"{_over(worst, 'pack', 'pack_torch', '_us')} x torch's: no wait for the host, many programs"
    table.append(("packing alone", "a wait for the host, few programs", "2.75 x torch's", alone))
    wide = records.us("pack", *WORST, 2048)
    us = _us(wide, "one_block_graph_us", "fused_graph_us")
    rate = 2 * wide["packed_bytes"] / wide["fused_graph_us"] / 1e6 if wide else 0.0
    table.append(
        ("fused, 32 x 128, wide KV", "bandwidth of one SM", "386 us for 15 MB",
         f"one block / all SMs {us} us: {rate:.1f} TB/s read and written"),
    )  # fmt: skip
    return table


# ---- figures


def _by_kernel(rows: list[Row], x: str, kernels: dict[str, Style], *fields: str, title: str, label: str) -> Figure:
    styles: dict[str, dict[Any, Style]] = {"kernel": {**kernels}}
    if x != "alpha":
        styles["alpha"] = dict(zip(ALPHAS, ({"linestyle": s} for s in (":", "--", "-")), strict=True))
    keys = [
        *kernels.values(),
        *({**s, "label": f"alpha {a}" if a == ALPHAS[0] else str(a)} for a, s in styles.get("alpha", {}).items()),
    ]

    def draw(panel: Axes, same: list[Row]) -> None:
        curves(panel, same, x, "us", **styles)
        panel.set_ylim(0, None)

    base = None if x == "alpha" else 2
    return facets(grouped(rows, *fields), draw, keys, title.format, label, TIME, base=base)


def _worst_case(records: Records) -> Figure:
    figure, axes = panels(len(HOW))
    row = records.us("scan", *WORST)
    for panel, (suffix, how) in zip(axes[0], HOW.items(), strict=True):
        for i, (name, style) in enumerate(KERNELS.items()):
            us = row.get(name + suffix)
            if us is not None:
                p95_excess = row[name + suffix.replace("_us", "_p95_us")] - us
                panel.barh(i, us, xerr=[[0], [max(p95_excess, 0)]], color=style["color"], capsize=3)
                panel.text(us + max(p95_excess, 0), i, f"  {us:.1f}", va="center")
        panel.set_yticks(range(len(KERNELS)), [str(style["label"]) for style in KERNELS.values()])
        panel.set(title=how, xlabel=TIME, ylim=(len(KERNELS) - 0.5, -0.5))
        panel.margins(x=0.15)
    return figure


def _heat(records: Records) -> Figure:
    batches = (1, 4, 16, 32)
    figure, axes = panels(len(batches), height=2.2)
    for panel, batch in zip(axes[0], batches, strict=True):
        found = [[records.us("scan", batch, gamma, alpha) for alpha in ALPHAS] for gamma in GAMMAS]
        cells = [
            [r["naive_graph_us"] / r["ballot_graph_us"] if "ballot_us" in r else 0.0 for r in same] for same in found
        ]
        panel.imshow(cells, cmap="Blues", vmin=0, vmax=40, aspect="auto")
        panel.grid(False)
        for i, j in product(range(len(GAMMAS)), range(len(ALPHAS))):
            color = "white" if cells[i][j] > 20 else "black"
            panel.text(j, i, f"{cells[i][j]:.1f}", ha="center", va="center", color=color)
        panel.set_xticks(range(len(ALPHAS)), [f"{a:g}" for a in ALPHAS])
        panel.set_yticks(range(len(GAMMAS)), [str(g) for g in GAMMAS])
        panel.set(title=f"batch {batch}", xlabel="alpha", ylabel="gamma; higher is better" if batch == 1 else "")
    return figure


CAPTIONS = {
    "1": "Figure 1: time over drafts",
    "2": "Figure 2: time over acceptance",
    "3": "Figure 3: the point of most divergence",
    "4": "Figure 4: ballot over naive",
    "5": "Figure 5: packing alone",
    "6": "Figure 6: fused beside two steps",
    "sorted": "Sorted batches",
}


def drawable(records: Records) -> list[str]:
    """Lists the figures that have records."""
    kinds = {"5": "pack_alone", "6": "pack", "sorted": "sorted"}
    rows = {name: records.of(kinds.get(name, "scan")) for name in CAPTIONS}
    rows["4"] = [r for r in rows["4"] if "ballot_graph_us" in r]
    return [name for name, found in rows.items() if found]


def figures(records: Records) -> dict[str, Figure]:
    """Returns the paper's figures by number, and sorted batches, where recorded."""
    batch_32 = records.times(KERNELS, "scan", batch=32)
    long = [r for r in batch_32 if r["gamma"] > 32]
    alone, fused = records.times(PACKERS, "pack_alone"), records.times(FUSED, "pack", batch=32, gamma=128)
    ordered = [r for r in records.times(ORDERS, "sorted", gamma=128) if r["how"] == HOW["_graph_us"]]
    width = "elements of a row"
    makers: dict[str, Callable[[], Figure]] = {
        "1": partial(_by_kernel, batch_32, "gamma", KERNELS, "how", title="{}", label="drafts"),
        "2": partial(_by_kernel, long, "alpha", KERNELS, "how", "gamma", title="{}, gamma {}", label="alpha"),
        "3": partial(_worst_case, records),
        "4": partial(_heat, records),
        "5": partial(_by_kernel, alone, "kv_dim", PACKERS, "how", title="{}", label=width),
        "6": partial(_by_kernel, fused, "kv_dim", FUSED, "how", title="{}", label=width),
        "sorted": partial(_by_kernel, ordered, "alpha", ORDERS, "batch", title="batch {}, gamma 128", label="alpha"),
    }
    return {name: makers[name]() for name in drawable(records)}


# ---- writing


def draw(records: Records, directory: Path) -> None:
    """Draws all figures."""
    for name, figure in figures(records).items():
        save(figure, directory / f"verify-{name}.png", footer(records.rows))
