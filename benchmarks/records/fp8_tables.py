"""Rows and cells that compare FP8 weights, keys, values and latents with bf16."""

from __future__ import annotations

from benchmarks.records.rows import Row, results
from helix.layout import HelixLayout


def experts() -> list[Row]:
    """Returns low-bit routed experts of one rank of eight, each with its bf16 time."""
    point = "gpu", "model", "tpf", "ep", "tokens"
    found = results("fp8", *point, kind="moe")
    whole = {tuple(r[name] for name in point): r["us"] for r in found if " in " not in r["model"]}
    rows = []
    for r in found:
        name, _, stored = r["model"].partition(" in ")
        in_bf16 = whole.get((r["gpu"], name, r["tpf"], r["ep"], r["tokens"]))
        if stored and in_bf16 is not None:
            rows.append(r | {"name": name, "stored": stored, "whole_us": in_bf16})
    return rows


def stored(dtype: str) -> str:
    """Returns the name of a stored dtype."""
    return "bf16" if dtype == "auto" else dtype


def layout(r: Row) -> str:
    """Returns a row's layout, and whether it was emulated."""
    made = HelixLayout.create(**{k: v for k, v in r["layout"].items() if k != "world_size"})
    return f"{made}, emulated" if r["emulated"] else "one GPU" if made.world_size == 1 else str(made)


def attention(r: Row) -> str:
    """Returns a row's attention, with its variant."""
    sparse = "dense" if r["attention"] == "dense" else "32 blocks"
    variant = r["variant"]
    resident = f", {float(variant.rsplit('=', 1)[1]):.0%} of them resident" if "repeat" in variant else ""
    return sparse + (", KV in host memory" if r["offload"] == "host" else "") + resident
