"""Figures and tables of the paper on verification kernels, from rows whose times are known."""

from __future__ import annotations

from typing import Any

from benchmarks.papers import verification
from benchmarks.papers.verification_figures import Records, figures, tables
from benchmarks.records import style


def row(kind: str, point: tuple[float, ...], **times: float) -> dict[str, Any]:
    """A recorded row: three times as long from Python as in a graph."""
    names = ("batch", "gamma", "alpha", "kv_dim")
    found = {"kind": kind, "device": "GPU", "commit": "a1", **dict(zip(names, point, strict=False))}
    for name, us in times.items():
        found |= {f"{name}_us": 3 * us, f"{name}_p95_us": 4 * us, f"{name}_graph_us": us, f"{name}_graph_p95_us": us}
    return found


def recorded() -> list[dict[str, Any]]:
    rows = [
        row("scan", (b, g, a), torch=14, naive=2 + g * a / 8, ballot=1 + g / 128, scan=1)
        for b, g, a in verification.SCANS
    ]
    for b, g, a, d in verification.PACKS:
        mb = b * g * a * d * 2 / 1e6
        times = row("pack", (b, g, a, d), fused=2 + mb / 2, one_block=2 + 20 * mb, two_step=3 + mb / 2, torch=40)
        rows.append(times | {"packed_bytes": mb * 1e6, "two_step_torch_us": 100.0})
    for b, g, a, d in verification.PACKS_ALONE:
        rows.append(row("pack_alone", (b, g, a, d), pack=d / 64) | {"pack_torch_us": 48.0})
    for b, g, a in verification.SORTED:
        rows.append(row("sorted", (b, g, a), naive=20, naive_sorted=10 + 10 * a, scan=1))
    return [*rows, {"kind": "summary"}]


def test_tables_set_ours_beside_the_papers() -> None:
    found = tables(Records(recorded()))
    first = {(line[0], line[1]): line for line in found["1"][1:]}
    assert first["128", "0.9"][2:] == (
        "84.8 / 23.8 / 12.9", "42.0 / 49.2 / 6.0", "16.4 / 2.0 / 1.0", "1.84", "8.20", "8.20"
    )  # fmt: skip
    assert [line[3:] for line in found["2"][1:]][-1] == ("32.0", "2.75", "2.00")
    assert found["3"][1][0] == "4 x 8 x 128, 0.3" and found["3"][-1][4:] == ("0.28", "3.49")
    cells = " ".join(line[-1] for line in found["4"][1:])
    assert "gamma 128: naive +9.6 us, ballot +0.0 us" in cells and "2.00 x torch's" in cells
    assert all(len({len(line) for line in table}) == 1 for table in found.values())


def test_what_is_not_recorded_is_a_dash() -> None:
    few = [row("scan", (32, 8, 0.3), torch=14, naive=2, scan=1), row("pack", (4, 8, 0.3, 128), fused=2)]
    found = tables(Records(few))
    assert found["1"][1][3:] == ("42.0 / 6.0 / -", "2.0 / - / 1.0", "1.00", "-", "-")
    assert found["2"][1][2:] == ("- / -", "-", "1.06", "-") and found["3"][1][2] == "- / - / 6.0"
    plotted = figures(Records(few))
    assert [*plotted] == ["1", "2", "3", "6"]
    for figure in plotted.values():
        style.plt.close(figure)
