"""Reports of a sweep: table, CSV, plot, gain over a baseline, and whether all points give the same tokens."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from launch.inputs.sweep_points import TIMED, Point

mpl.use("Agg")  # before pyplot: there may be no display
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

Row = dict[str, Any]
BASELINES = {"hopb": "off", "hopb.chunks": "none"}  # values that are the baseline, in whatever order they are swept
# Decode settings that do not change tokens.
IGNORED_DECODE_KEYS = {"output", "resume", "max_batch", "prefill_chunk", "stream"}
# Columns to drop on a narrow terminal, in this order.
OPTIONAL = ("tok/s/user", "tok/s/rank", "exchange")
UNLIMITED = 1 << 16  # characters; to measure the natural width of a table
LOG_FROM = 3.0  # use a logarithmic axis if max/min is larger
LEGEND = 24  # maximum points in the legend; the table has all


def swept_keys(points: Sequence[Point]) -> list[str]:
    """Returns the keys that differ between points, in the command line's order."""
    keys = dict.fromkeys(key for point in points for key in point.values)
    return [key for key in keys if len({point.values.get(key) for point in points}) > 1]


def comparison_rows(points: Sequence[Point]) -> list[Row]:
    """Returns the rows of all points (`Point.rows`), with the values of the swept keys and the gain over a baseline.

    If HOP-B is swept, rows that differ only in HOP-B are compared, and off is the baseline. Otherwise all rows (of the
    same entry of `bench.points`) are compared with the first one that has measurements. `gain_percent` is the saved
    share of the baseline's TTL, negative for a slowdown.
    """
    swept = swept_keys(points)
    varied = [key for key in swept if key in BASELINES]
    same = [key for key in swept if key not in BASELINES] if varied else []
    rows = [
        {
            "point": point.number,
            **{key: point.values.get(key, "") for key in swept},
            "baseline": None,
            "gain_percent": None,
            **row,
        }
        for point in points
        for row in point.rows()
    ]
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in (*same, *TIMED)), []).append(row)
    for group in groups.values():
        off_rows = [row for row in group if varied and all(row[key] == BASELINES[key] for key in varied)]
        baseline = next((row for row in off_rows or group if row["ttl_p50_us"] is not None), None)
        for row in group:
            if baseline is not None and row["ttl_p50_us"] is not None:
                row["baseline"] = baseline["point"]
                row["gain_percent"] = 100 * (1 - row["ttl_p50_us"] / baseline["ttl_p50_us"])
    return rows


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Writes the rows as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def show(points: Sequence[Point], rows: Sequence[Row]) -> None:
    """Prints common settings, the table, why points have no measurements, and the comparison of tokens."""
    terminal = Console(highlight=False)
    swept = swept_keys(points)
    if constant := [text for text in points[0].overrides if _key(text) not in swept]:
        terminal.print(f"all points: {' '.join(constant)}", markup=False)
    columns = _columns(rows, swept)
    for hidden in range(len(OPTIONAL) + 1):
        shown_columns = {title: cells for title, cells in columns.items() if title not in OPTIONAL[:hidden]}
        table = _table(shown_columns, swept)
        if Measurement.get(terminal, terminal.options.update(max_width=UNLIMITED), table).maximum <= terminal.width:
            break
    terminal.print(table)
    if "gain" in shown_columns:
        terminal.print("gain: share of the baseline's TTL that is saved", markup=False)
    if "exchange" in shown_columns:
        terminal.print("exchange: attention exchanges of a decode step, timed alone, without overlap", markup=False)
    why: dict[tuple[str, str], list[str]] = {}
    for point in points:
        why.setdefault((point.status, point.reason), []).append(str(point.number))
    for (status, reason), numbers in why.items():
        if reason:
            terminal.print(f"point {', '.join(numbers)} {status}: {reason}", markup=False)
    if (text := compare_tokens(points)) is not None:
        terminal.print(text, markup=False)


def _columns(rows: Sequence[Row], swept: Sequence[str]) -> dict[str, list[str]]:

    def cells(key: str, text: Callable[[Any], str]) -> list[str]:
        return ["-" if row[key] is None else text(row[key]) for row in rows]

    columns = {"point": cells("point", str), **{key: _shortened([row[key] for row in rows]) for key in swept}}
    if any(row["batch"] is not None for row in rows):
        columns["cache"] = ["-" if row["batch"] is None else f"{row['batch']} x {row['length']}" for row in rows]
    if any(row["gamma"] for row in rows):
        columns["drafts"] = cells("gamma", str)
    columns["TTL p50"] = [row["status"] if row["ttl_p50_us"] is None else _ms(row["ttl_p50_us"]) for row in rows]
    if any(row["exchange_us"] is not None for row in rows):
        columns["exchange"] = cells("exchange_us", _ms)
    if sum(row["gain_percent"] is not None for row in rows) > 1:
        columns["gain"] = cells("gain_percent", lambda gain: f"{gain:+.1f}%" if gain else "baseline")
    columns["tok/s/user"] = cells("tokens_per_s_user", lambda x: f"{x:.1f}")
    columns["tok/s/rank"] = cells("tokens_per_s_gpu", lambda x: f"{x:.1f}")
    return columns


def _table(columns: dict[str, list[str]], swept: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for title in columns:
        given = title in swept  # on a narrow terminal, truncate settings, not measurements
        table.add_column(title, justify="left" if given else "right", no_wrap=not given, overflow="ellipsis")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(escape, cells))
    return table


def _shortened(values: Sequence[str]) -> list[str]:
    bare = [value.strip("'\"") for value in values]
    directories = {value.rpartition("/")[0] for value in bare}
    return [value.rpartition("/")[2] for value in bare] if len(directories) == 1 else bare


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f} ms"


def compare_tokens(points: Sequence[Point]) -> str | None:
    """Compares the tokens of points with equal prompts, seed and sampling; returns a line, or None without such points.

    In bf16 the order of summation decides between nearly equal logits, so layouts may differ in a few tokens.
    """
    groups: dict[str, list[tuple[int, dict[str, str]]]] = {}
    for point in points:
        if point.status in ("ok", "refused") and (found := _answers(point)):
            config = point.config
            sampling = {key: value for key, value in asdict(config.decode).items() if key not in IGNORED_DECODE_KEYS}
            alike = (config.model.path, config.model.config, config.model.load, config.seed, sampling)
            groups.setdefault(str(alike), []).append((point.number, found))
    findings: list[str] = []
    for (first, wanted), *others in (group for group in groups.values() if len(group) > 1):
        differing = {n: sum(found.get(key) != wanted.get(key) for key in {*found, *wanted}) for n, found in others}
        equal = [str(first), *(str(n) for n, count in differing.items() if not count)]
        if len(equal) == (total := sum(map(len, groups.values()))):
            return f"tokens: equal in {'both' if total == 2 else f'all {total}'} points"
        findings += [f"equal in points {', '.join(equal)}"] if len(equal) > 1 else []
        findings += [
            f"point {n} differs from point {first} in {count} of {len(wanted)} prompts"
            for n, count in differing.items()
            if count
        ]
    return f"tokens: {'; '.join(findings)}" if findings else None


def _answers(point: Point) -> dict[str, str]:
    path = point.config.decode.output
    if path is None or not Path(path).exists():
        return {}
    answers = {}
    with Path(path).open(encoding="utf-8") as file:
        for line in map(json.loads, file):
            answer = line["token_ids"] if "token_ids" in line else line["response"]["body"].get("choices")
            answers[str(line.get("custom_id", line["id"]))] = str(answer)
    return answers


def plot(path: Path, rows: Sequence[Row], swept: Sequence[str]) -> None:
    """Plots tokens/s/rank over tokens/s/user, one mark per row with measurements."""
    figure, axes = plt.subplots(figsize=(7, 5))
    axes.ticklabel_format(useOffset=False)  # labels distinguish 80.61 and 80.62
    shown = [row for row in rows if row["tokens_per_s_user"] is not None and row["tokens_per_s_gpu"] is not None]
    for row in shown:
        timed = "" if row["batch"] is None else f" {row['batch']} x {row['length']}"
        drafts = f" {row['gamma']} drafts" if row["gamma"] else ""
        label = " ".join([f"{row['point']}:", *(f"{key}={row[key]}" for key in swept)]) + timed + drafts
        at = row["tokens_per_s_user"], row["tokens_per_s_gpu"]
        axes.scatter(*at, color=f"C{row['point'] % 10}", label=label)
        axes.annotate(str(row["point"]), at, textcoords="offset points", xytext=(5, 4), fontsize=8)
    for axis, scale, key in (
        (axes.xaxis, axes.set_xscale, "tokens_per_s_user"),
        (axes.yaxis, axes.set_yscale, "tokens_per_s_gpu"),
    ):
        values = [row[key] for row in shown]
        if values and max(values) > LOG_FROM * min(values):
            scale("log")
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            axis.set_minor_formatter(NullFormatter())
    if 0 < len(shown) <= LEGEND:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8)
    axes.set(xlabel="tokens/s/user", ylabel="tokens/s/rank", title="Points: interactivity and throughput")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
