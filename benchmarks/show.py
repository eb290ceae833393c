"""Prints the tables of README.md and docs/kernels.md from `benchmarks/results/`: `python benchmarks/show.py`."""

from __future__ import annotations

import json
from pathlib import Path

READ_CEILING = 4.69e12  # bytes/s; read-only sum over 4 GiB on an H200
RESULTS = Path(__file__).resolve().parent / "results"


def foundation() -> list[str]:
    """Rows of what `benchmarks/foundation.py` recorded."""
    lines = [json.loads(line) for line in (RESULTS / "foundation.jsonl").read_text().splitlines()]
    rows = []
    for line in lines:
        name = line["name"]
        if name.endswith("-equal"):
            dtype = name.split("-")[2]
            rows.append(
                f"| 50 needles in 32K tokens, {dtype}: answers token for token those of one rank, over {line['over']} "
                f"| {line['as_one_rank']} of {line['needles']} |"
            )
        elif name.startswith("needles"):
            gpus = line["layout"]["world_size"]
            rows.append(
                f"| 50 needles in 32K tokens, {name.split('-')[2]}: found over {gpus} GPU{'s' if gpus > 1 else ''} "
                f"| {line['needles_found']} of {line['needles']} |"
            )
        else:
            kv, weights = max(line["kv_bytes_per_rank"]), max(line["weight_bytes_per_rank"])
            floor_ms = (kv + weights) / READ_CEILING * 1e3
            rows.append(
                f"| Llama-3.1-8B's shape, 1 x {line['config']['bench']['length']:,} tokens of KV, "
                f"{line['layout']['world_size']} GPUs, {'captured' if line['captured'] else 'eager'} steps: "
                f"KV and weights of a GPU; TTL p50 (floor: these bytes, once) "
                f"| {kv / 1e9:.1f} GB, {weights / 1e9:.1f} GB; {line['ttl_p50_us'] / 1e3:.1f} ms ({floor_ms:.1f} ms) |"
            )
    device = next(line["device"] for line in lines if "device" in line)
    return [f"| on {device} | |", "|---|---|", *rows]


def kernels() -> list[str]:
    """Rows of what `python -m launch.bench kernels` recorded; the losing ones too."""
    rows = [
        "| heads q/kv | batch | KV | ours | cuDNN | flash | share of the read ceiling |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in map(json.loads, (RESULTS / "kernels.jsonl").read_text().splitlines()):
        times = " | ".join(f"{line[key]:.1f} us" for key in ("us", "cudnn_us", "flash_us"))
        length = f"{line['length'] // 1024}K"
        rows.append(f"| {line['heads']} | {line['batch']} | {length} | {times} | {line['of_ceiling']:.0%} |")
    return rows


if __name__ == "__main__":
    print("\n".join([*foundation(), "", *kernels()]))
