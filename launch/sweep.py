"""Sweeps: `python -m launch.sweep -m layout.kvp=1,2,4 layout.tpa=1,2 decode.prompts=FILE.jsonl`.

One job a point through torch's elastic launcher, one after the other. Points that are no layout of the model are
skipped with the reason, and a point that fails does not end the sweep. At the end stand one table, one CSV and one
plot, next to each point's record and results in `sweeps/<time>/` (`hydra.sweep.dir=DIR` to choose).
"""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
import matplotlib as mpl
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from helix.config import Config
from launch import local
from launch.auto import ranks
from launch.preflight import check_layout, make_layout, make_spec
from launch.run import REFUSED, ROOT, as_config

mpl.use("Agg")  # before pyplot: there may be no display
import matplotlib.pyplot as plt

MEASURED = ("ttl_p50_us", "ttl_p90_us", "tokens_per_s_user", "tokens_per_s_gpu", "prefill_s", "decode_tokens")
LAYOUT = ("mode", "kvp", "tpa", "tpf", "ep", "world_size")


@dataclass
class Point:
    """One point of the sweep and what became of it.

    Attributes:
        overrides: what the command line set for it.
        status: ok, refused (some requests were), skipped or failed.
        reason: why it was skipped or failed.
        record: what the run measured.
    """

    number: int
    overrides: list[str]
    status: str
    reason: str = ""
    record: dict[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        layout = self.record.get("layout", {})
        kv = self.record.get("kv_bytes_per_rank")
        return {
            "point": self.number,
            "overrides": " ".join(self.overrides),
            "status": self.status,
            **{key: layout.get(key) for key in LAYOUT},
            **{key: self.record.get(key) for key in MEASURED},
            "kv_bytes_per_rank_max": max(kv) if kv else None,
            "reason": self.reason,
        }


POINTS: list[Point] = []  # Hydra's sweeper runs the points in this process and drops what they return
DIRECTORY: list[Path] = []


@hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name="config")
def _point(composed: DictConfig) -> None:
    job = HydraConfig.get()
    number = int(job.job.num)
    directory = Path(job.sweep.dir)
    if not DIRECTORY:
        DIRECTORY.append(directory)
    directory.mkdir(parents=True, exist_ok=True)
    overrides = list(job.overrides.task)
    print(f"--- point {number}: {' '.join(overrides)}", flush=True)
    record = directory / f"{number}.json"
    point = Point(number, overrides, "skipped", skip_reason(as_config(composed)) or "")
    if point.reason:
        print(f"skipped: {point.reason}")
    else:
        world_size = ranks(as_config(composed))
        output = [f"decode.output={directory / f'{number}.jsonl'}"] if composed.bench.kind == "none" else []
        code = local.launch(world_size, [*overrides, *output, f"record={record}"])
        point.status = {0: "ok", REFUSED: "refused"}.get(code, "failed")
        point.reason = f"exit code {code}" if point.status == "failed" else ""
        if record.exists():
            point.record = json.loads(record.read_text())
    POINTS.append(point)


def skip_reason(config: Config) -> str | None:
    """Why a point cannot run here, None where it can; what is wrong with all points alike is left to their jobs."""
    if config.layout.mode == "auto":
        return None
    try:
        layout = make_layout(config.layout)
    except ValueError as error:
        return str(error)
    try:
        spec = make_spec(config)
    except ValueError:
        return None
    try:
        check_layout(layout, spec)
    except ValueError as error:
        return str(error)
    gpus = torch.cuda.device_count()
    if gpus and config.comm.backend != "gloo" and layout.world_size > gpus:
        return f"{layout.world_size} ranks on {gpus} GPUs (comm.backend=gloo runs them on the CPU)"
    return None


def write_csv(path: Path, points: list[Point]) -> None:
    rows = [point.row() for point in points]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def plot(path: Path, points: list[Point]) -> None:
    """Throughput of a rank over what one user sees, a mark for each point that ran."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for point in points:
        x, y = point.record.get("tokens_per_s_user"), point.record.get("tokens_per_s_gpu")
        if x is not None and y is not None:
            width = point.record["layout"]
            label = f"{point.number}: {width['mode']} kvp={width['kvp']} tpa={width['tpa']} ep={width['ep']}"
            axes.scatter(x, y, color=f"C{point.number % 10}", label=label)
            axes.annotate(str(point.number), (x, y), textcoords="offset points", xytext=(5, 4), fontsize=8)
    if axes.collections:
        figure.legend(loc="outside right upper", fontsize=8)
        axes.set(xscale="log", yscale="log")
    axes.set(xlabel="tokens/s/user", ylabel="tokens/s/rank", title="Layouts: interactivity and throughput")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def show(points: list[Point]) -> None:
    """A table of all points, by what varies between them, and why some have no figures."""
    varying = {o for p in points for o in p.overrides if any(o not in other.overrides for other in points)}
    table = Table("point", "overrides", "status", "TTL p50", "tok/s/user", "tok/s/rank")
    for point in points:
        row = point.row()
        ttl, user, rank = (row[key] for key in ("ttl_p50_us", "tokens_per_s_user", "tokens_per_s_gpu"))
        cells = [
            "-" if ttl is None else f"{ttl / 1e3:.2f} ms",
            *("-" if v is None else f"{v:.1f}" for v in (user, rank)),
        ]
        differs = " ".join(o for o in point.overrides if o in varying)
        table.add_row(str(point.number), escape(differs), point.status, *cells)
    terminal = Console()
    terminal.print(table)
    for point in points:
        if point.reason:
            terminal.print(f"point {point.number} {point.status}: {point.reason}", markup=False, highlight=False)


def main() -> None:
    """Runs the sweep; the exit code is 0 where no point failed."""
    if not {"-m", "--multirun"} & set(sys.argv[1:]):
        sys.argv.append("--multirun")
    _point()
    if not POINTS:  # --help and its like
        return
    directory = DIRECTORY[0]
    write_csv(directory / "sweep.csv", POINTS)
    plot(directory / "sweep.png", POINTS)
    show(POINTS)
    print(f"wrote {directory / 'sweep.csv'} and {directory / 'sweep.png'}")
    sys.exit(any(point.status == "failed" for point in POINTS))


if __name__ == "__main__":
    main()
