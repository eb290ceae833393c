r"""Measures this machine for the simulator and planner, or fits their remaining constants to recorded steps.

  helix calibrate output=conf/hardware/mine.yaml      on all GPUs of this host, in under 100 s
  helix calibrate fit=benchmarks/results/step.jsonl,benchmarks/results/baselines.jsonl \
      hardware=conf/hardware/mine.yaml output=conf/hardware/mine.yaml

The first starts its own ranks, times reads, projections, attention, block selection, the link to host memory and
the collectives of a step, and writes a hardware description that `launch.simulate`, `launch.plan` and layout=auto take.
The rows go to a .jsonl next to it as each part ends. If a part fails or takes too long, its constants come from this
GPU's existing description, or from an H200's, marked as extrapolated.

The second fits on half of the recorded workloads and prints the prediction errors on the other half. To
record them: helix bench step, and baselines. Without a GPU the smallest sizes run, and mean nothing.

  output    the description to write, path/mine.yaml (default: only print it)
  fit       comma-separated files of recorded steps: fit instead of measuring
  hardware  the description that supplies what is neither measured nor fitted (default: this GPU's)
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from benchmarks import constants
from benchmarks.cases import cases as listed
from benchmarks.jobs import JobError
from benchmarks.kernels import attention as bench_attention
from benchmarks.kernels import comm as bench_comm
from benchmarks.kernels import mla as bench_mla
from benchmarks.kernels import offload as bench_offload
from benchmarks.kernels import sparse as bench_sparse
from benchmarks.records.fit import errors, fit, quantiles
from benchmarks.records.recorded_steps import Cell, halves, read_cells
from benchmarks.runner import BenchContext, Row
from benchmarks.timer import ROTATED, seconds
from helix.planner.hardware import MEASURED, PROVENANCE, Collective, Constant, Hardware
from kernels.dense.linear import linear
from kernels.dense.linear_sm90 import MAX_ROWS, MIN_ROWS
from launch.inputs.arguments import handle_help, parse
from launch.inputs.files import write_atomically
from launch.inputs.hardware import hardware_of, load_hardware, read_hardware
from launch.job.report import provenance

PART_S = 15.0  # a part starts no new row after this
JOBS_S = 60.0  # the same for collectives: each width is a job that has to start
HANGS_S = 120.0  # a part that takes longer counts as hung and ends the command
COMM_S = 40.0  # timeout of each collective in the jobs
TARGETS = (0.10, 0.20)  # median and p90 error of held-out steps
READ_BYTES = 4 << 30
SQUARE = 8192
PIECES = (128, 32, 512)  # 64 KB blocks that one layer's step fetches
TOPK = 32  # blocks, as in conf/attention/block_sparse.yaml
ROWS = (1, MIN_ROWS, 8, 16, MAX_ROWS, MAX_ROWS + 1, 64)


def read(device: torch.device) -> Iterator[Row]:
    """Times a read-only sum: the bandwidth ceiling."""
    count = (READ_BYTES if device.type == "cuda" else 1 << 20) // 4
    x = torch.ones(count, device=device)
    yield {"bytes": 4 * count, "seconds": seconds(lambda i: x.sum(), 1, device)}


def matrix(device: torch.device) -> Iterator[Row]:
    """Times the library's largest GEMMs: the peak FLOP rate."""
    n = SQUARE if device.type == "cuda" else 64
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    yield {"size": n, "flops": 2.0 * n**3, "seconds": seconds(lambda i: a @ b, 1, device)}


def attention(device: torch.device) -> Iterator[Row]:
    """Times `flash_decode` over pages in random order, four query heads per KV head."""
    for heads, batch, length in listed("calibrate-attention", device.type == "cuda"):
        s = bench_attention.setting(4 * heads, heads, batch, length, 1, device)
        size = 2 * s.caches[0][0].numel() * s.q.itemsize
        yield {"kv_heads": heads, "batch": batch, "bytes": size, "seconds": seconds(s.ours, len(s.caches), device)}


def latents(device: torch.device) -> Iterator[Row]:
    """Times `mla_decode`."""
    for heads, batch, length in listed("calibrate-latents", device.type == "cuda"):
        m = bench_mla.setting(heads, batch, length, 1, device)
        size = m.caches[0].numel() * m.caches[0].itemsize
        flops = 2.0 * batch * length * heads * (2 * bench_mla.LATENT + bench_mla.ROPE)
        row = {"heads": heads, "batch": batch, "bytes": size, "flops": flops}
        yield row | {"seconds": seconds(m.ours, len(m.caches), device)}


def finding(device: torch.device) -> Iterator[Row]:
    """Times `select_blocks`, and `flash_decode` over its table, four query heads per KV head."""
    for heads, batch, length in listed("calibrate-finding", device.type == "cuda"):
        s = bench_sparse.setting(4 * heads, heads, batch, length, device)
        size = bench_sparse.read_bytes(heads, batch, length, TOPK)
        took = seconds(s.choose_and_attend(TOPK), len(s.q), device)
        row = {"kv_heads": heads, "batch": batch, "length": length, "topk": TOPK, "bytes": size, "seconds": took}
        yield row | {"bounds": bench_sparse.bounds_bytes(heads, batch, length)}


def products(device: torch.device) -> Iterator[Row]:
    """Times `linear` and, from a few rows on, the library over the matrices of a rank."""
    for count in ROWS if device.type == "cuda" else (1, MIN_ROWS):
        for rows, columns in listed("calibrate-products", device.type == "cuda"):
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            size = rows * columns * dtype.itemsize
            copies = -(-ROTATED // size) if device.type == "cuda" else 1
            weights = torch.randn(copies, rows, columns, device=device, dtype=dtype)
            x = torch.randn(count, columns, device=device, dtype=dtype)
            ours = seconds(lambda i, x=x, w=weights: linear(x, w[i]), copies, device)  # type: ignore[misc]
            library = seconds(lambda i, x=x, w=weights: F.linear(x, w[i]), copies, device)  # type: ignore[misc]
            yield {"rows": count, "bytes": size, "seconds": ours, "library_seconds": library}


def launches(device: torch.device) -> Iterator[Row]:
    """Times a one-element kernel in a captured graph, and launched by the host."""
    x = torch.zeros(1, device=device)
    yield {"kind": "in a graph", "seconds": seconds(lambda i: x.add_(1), 100, device)}
    count = 1000 if device.type == "cuda" else 10
    begin = time.perf_counter()
    for _ in range(count):
        x.add_(1)
    if device.type == "cuda":
        torch.cuda.synchronize()
    yield {"kind": "by the host", "seconds": (time.perf_counter() - begin) / count}


def link(device: torch.device) -> Iterator[Row]:
    """Times `copy_blocks` from host memory on all GPUs at once, and `resolve` with the same number of misses."""
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if device.type == "cuda" else [device]
    num_selected, num_resident = (37, 2048) if device.type == "cuda" else (5, 8)
    (resolved,) = bench_offload.find(BenchContext(gpus[0], 1), 1, num_selected, num_resident, False)
    for pieces in PIECES if device.type == "cuda" else (4, 8):
        size, took = bench_offload.fetch_at_once(gpus, pieces)
        row = {"pieces": pieces, "gpus": len(gpus), "bytes": size, "seconds": took}
        yield row | {"resolve_seconds": resolved["us"] / 1e6}


def collectives(device: torch.device) -> Iterator[Row]:
    """Times a step's collectives over 2, 4, ... ranks, each width in its own job; ours and NCCL's."""
    for width in bench_comm.widths(torch.cuda.device_count() if device.type == "cuda" else 2):
        yield from bench_comm.measure(width, f"comm.timeout_s={COMM_S}")


PARTS: dict[str, Callable[[torch.device], Iterator[Row]]] = {
    part.__name__: part for part in (read, matrix, attention, finding, products, latents, launches, link, collectives)
}


# The fit of each part's rows; attention comes first, as its rate enters the others.
FITTED = {
    "attention": constants.attention, "finding": constants.finding, "link": constants.link,
    "products": constants.products, "latents": constants.latents,
}  # fmt: skip


def measure(device: torch.device, save: Callable[[str, list[Row]], None]) -> dict[str, list[Row]]:
    """Measures all parts and returns rows by part; calls `save` as each part ends.

    Failed parts are reported and left out.
    """
    parts: dict[str, list[Row]] = {}
    for name, part in PARTS.items():
        rows: list[Row] = []
        begin, limit_s = time.perf_counter(), JOBS_S if name == "collectives" else PART_S
        with _ends_if_it_hangs(name):
            try:
                for row in part(device):
                    rows.append(row)
                    if time.perf_counter() - begin > limit_s:
                        print(f"{name}: stopped after {len(rows)} rows, at {limit_s:.0f} s")
                        break
            except Exception as error:  # one failed part must not lose the others
                print(f"{name}: failed after {len(rows)} rows: {type(error).__name__}: {error}", file=sys.stderr)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if rows:
            parts[name] = rows
            save(name, rows)
        print(f"{name}: {len(rows)} rows in {time.perf_counter() - begin:.1f} s", flush=True)
    return parts


@contextmanager
def _ends_if_it_hangs(name: str) -> Iterator[None]:
    def end() -> None:
        print(f"error: {name} hangs after {HANGS_S:.0f} s; earlier parts are saved", file=sys.stderr)
        sys.stderr.flush()
        time.sleep(1.0)  # stderr may be a pipe into a thread of this process (launch/job/spawn.py)
        os._exit(1)  # a kernel that never returns cannot be interrupted

    guard = threading.Timer(HANGS_S, end)
    guard.daemon = True
    guard.start()
    try:
        yield
    finally:
        guard.cancel()


def assemble(base: Hardware, name: str, gpus: int, memory: float | None, parts: dict[str, list[Row]]) -> Hardware:
    """Builds a description from what was measured; the rest is `base`'s, marked as assumed if that is another GPU."""
    same = base.name == name
    hardware = replace(base if same else constants.assumed(base), name=name, gpus=max(gpus, base.gpus if same else 1))
    if memory is not None:
        hardware = replace(hardware, memory_bytes=Constant(memory, MEASURED, "total of cudaMemGetInfo"))
    if rows := parts.get("matrix"):
        rate = Constant(rows[0]["flops"] / rows[0]["seconds"], MEASURED, f"{rows[0]['size']}^3 product of the library")
        hardware = replace(hardware, flops={**hardware.flops, "bf16": rate})
    for part, fitted in FITTED.items():
        if rows := parts.get(part):
            hardware = fitted(hardware, rows)
    if rows := parts.get("collectives"):
        hardware = replace(
            hardware, collectives=constants.collectives(rows, "symm_us"), nccl=constants.collectives(rows, "nccl_us")
        )
    return hardware


def to_mapping(hardware: Hardware) -> dict[str, Any]:
    """Converts the hardware to a mapping for `Hardware.from_mapping`."""

    def plain(value: Any) -> Any:
        if isinstance(value, Constant):
            return {"value": value.value, "provenance": PROVENANCE[value.level], "source": value.source}
        if isinstance(value, Mapping):
            return {key: plain(inner) for key, inner in value.items()}
        return plain(vars(value)) if isinstance(value, Collective) else value

    return {key: value for key, value in plain(vars(hardware)).items() if value not in (None, {})}


def write(path: Path, hardware: Hardware, notes: dict[str, Any]) -> None:
    """Writes a description, with what it was made from under `calibrated`.

    Raises:
        ValueError: it cannot be read back.
    """
    data = _rounded(to_mapping(hardware)) | {"calibrated": notes}
    Hardware.from_mapping(data)
    write_atomically(path, f"# Written by benchmarks/calibrate.py.\n{OmegaConf.to_yaml(OmegaConf.create(data))}")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: float(f"{v:.4g}") if k == "value" else _rounded(v) for k, v in value.items()}
    return value


def show(hardware: Hardware) -> None:
    """Prints every constant with its provenance."""
    table = Table("constant", "value", "provenance", "source", title=hardware.name)

    def add(key: str, value: Any) -> None:
        if isinstance(value, dict) and set(value) == {"value", "provenance", "source"}:
            table.add_row(key, f"{value['value']:.4g}", value["provenance"], value["source"])
        elif isinstance(value, dict):
            for inner, of in value.items():
                add(f"{key} {inner}", of)

    for key, value in to_mapping(hardware).items():
        add(key, value)
    Console(width=max(140, Console().width), highlight=False).print(table)


# ---- the two commands


def calibrate(output: Path | None, base: Hardware | None) -> None:
    """Measures and, if `output` is given, writes the description."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = provenance(device)
    name = facts["device"]
    if base is None:
        try:
            base = hardware_of(name)
        except ValueError:
            base = load_hardware("h200")
    notes = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "driver": _driver(), **facts,
        "gpus": torch.cuda.device_count(),
    }  # fmt: skip

    def save(part: str, rows: list[Row]) -> None:
        if output is not None:
            with output.with_suffix(".jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({"name": "calibrate", "part": part, **notes, **row}) + "\n" for row in rows)

    if output is not None:  # fail now rather than after two minutes
        output.parent.mkdir(parents=True, exist_ok=True)
        save("start", [{}])
    if device.type == "cpu":
        print("no GPU: running the smallest sizes on the CPU as a smoke test; the figures mean nothing")
    parts = measure(device, save)
    memory = float(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else None
    hardware = assemble(base, name, max(torch.cuda.device_count(), 1), memory, parts)
    show(hardware)
    for part in PARTS:
        sizes = [row["bytes"] for row in parts.get(part, []) if "bytes" in row]
        notes.setdefault("measured", {})[part] = {"rows": len(parts.get(part, []))} | (
            {"bytes": [min(sizes), max(sizes)]} if sizes else {}
        )
    if rows := parts.get("read"):
        notes["read_only_bytes_per_s"] = float(f"{rows[0]['bytes'] / rows[0]['seconds']:.4g}")
        print(f"a read-only sum: {notes['read_only_bytes_per_s'] / 1e12:.2f} TB/s")
    if rows := parts.get("launches"):
        notes["launch_us"] = {row["kind"]: float(f"{1e6 * row['seconds']:.3g}") for row in rows}
        print("a launch: " + ", ".join(f"{us:.2f} us {kind}" for kind, us in notes["launch_us"].items()))
    if missing := [part for part in PARTS if part not in parts]:
        print(f"not measured: {', '.join(missing)}; using the constants of {base.name}")
    if output is not None:
        write(output, hardware, notes)
        print(f"wrote {output}")


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None


def fit_steps(files: Sequence[Path], name: str | None, output: Path | None) -> None:
    """Fits on half of the recorded workloads of dense models, prints the errors on the others, and writes the result.

    Raises:
        ValueError: the files cannot be read, are from several devices, or have too few steps.
    """
    cells = read_cells(files)
    devices = sorted({cell.device for cell in cells})
    if len(devices) != 1:
        raise ValueError(f"fit needs steps of one device, but these are of {', '.join(devices) or 'none'}")
    base = hardware_of(devices[0]) if name is None else load_hardware(name)
    fitted, held_out = halves(cell for cell in cells if cell.is_dense)
    if not held_out:
        raise ValueError(
            f"{len(cells)} recorded steps are too few: give steps of at least two workloads of dense models"
        )
    split = "every other workload of dense models, in order of model, batch and length, with all its layouts"
    source = f"fitted on {len(fitted)} of {len(fitted) + len(held_out)} recorded steps: {split}"
    hardware = fit(base, fitted, source)

    def off(cells: Sequence[Cell], by: Hardware = hardware) -> tuple[float, float]:
        return quantiles(errors(by, cells))

    table = Table("steps", "cells", "median error", "p90 error", title=f"{devices[0]}: {split}")
    sides = {"fitted": fitted, "held out": held_out}
    sides |= {f"held out: {m}": [c for c in held_out if c.model == m] for m in dict.fromkeys(c.model for c in held_out)}
    sides |= {"with experts or latents": [cell for cell in cells if not cell.is_dense]}
    rows = {side: (of, hardware) for side, of in sides.items()}
    rows["dense, by the description as it was"] = (fitted + held_out, base)
    rows["with experts or latents, by the description as it was"] = (sides["with experts or latents"], base)
    for side, (of, by) in rows.items():
        if of:
            median, p90 = off(of, by)
            table.add_row(side, str(len(of)), f"{median:.1%}", f"{p90:.1%}")
    show(hardware)
    Console(width=max(120, Console().width), highlight=False).print(table)
    median, p90 = off(held_out)
    within = "within" if median <= TARGETS[0] and p90 <= TARGETS[1] else "BEYOND"
    print(f"held out: {within} the targets of {TARGETS[0]:.0%} (median) and {TARGETS[1]:.0%} (p90)")
    if output is not None:
        old = read_hardware(Path(name)).get("calibrated", {}) if name is not None and name.endswith(".yaml") else {}
        notes = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
        held_out_errors = {"cells": len(held_out), "median_error": round(median, 4), "p90_error": round(p90, 4)}
        write(
            output,
            hardware,
            old | notes | {"fitted": {"split": split, "cells": len(fitted), "held_out": held_out_errors}},
        )
        print(f"wrote {output}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures or fits; exits with a one-line error for a wrong value."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if handle_help(arguments, __doc__):
        return
    try:
        if "RANK" in os.environ:
            raise ValueError("calibration starts its own ranks: run it without torchrun, once on a host")
        options = parse(arguments, {"output": Path, "fit": list[str], "hardware": str})
        output, name = options.get("output"), options.get("hardware")
        if output is not None and output.suffix != ".yaml":
            raise ValueError(f"output={output} must end in .yaml")
        if "fit" in options:
            fit_steps([Path(file) for file in options["fit"]], name, output)
        else:
            calibrate(output, None if name is None else load_hardware(name))
    except (ValueError, OSError, JobError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
