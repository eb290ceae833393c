"""Rows of KV caches in host memory, and of offline throughput compared with vLLM."""

from __future__ import annotations

from statistics import median

from benchmarks.records.rows import Row, results, tokens

OFFLINE_LOAD = "engine", "model", "gpus", "goal", "requests", "length", "new"


def _offline_load(r: Row) -> tuple[int, int, int]:
    """Requests, prompt tokens rounded up to a power of two (other engines had a few less), and new tokens."""
    return r["requests"], 1 << (r["length"] - 1).bit_length(), r["new"]


def offload_steps() -> list[Row]:
    """Reads the newest steps over host memory of each point; all have `kv`."""
    key = "batch", "length", "topk", "repeat", "prefetch"
    # Older records also vary `overlap` and `hopb_chunks`, which were removed: benchmarks/LOG.md says that they gained
    # nothing.
    every = results("offload-steps", "kv", *key, "overlap", "hopb_chunks", kind="offload-steps", offload="host")
    today = [r for r in every if not r.get("overlap") and r.get("hopb_chunks", 1) == 1]
    return list({(kv, *map(r.get, key)): r | {"kv": kv} for r in today for kv in (r.get("kv", "auto"),)}.values())


def named(r: Row) -> str:
    """Formats a load: requests, prompt tokens, new tokens."""
    requests, length, new = _offline_load(r)
    return f"{requests} x {length if length < 1 << 10 else tokens(length)}, {new}"


def _a_token(r: Row) -> float:
    return float(r["seconds"] / r["requests"] / (r["length"] + r["new"]))


def compared_servers(gpus: int) -> list[Row]:
    """Returns each trace's medians over its runs, of Helix and of the `other` server, and the ratios of seconds."""
    runs: dict[tuple[str, str], dict[str, dict[int, Row]]] = {}
    for r in results("compare-servers", "model", "gpus", "trace", "engine", "run"):
        if r["gpus"] == gpus:
            engines = runs.setdefault((r["model"], r["trace"]), {})
            engines.setdefault("helix" if r["engine"] == "helix" else "other", {})[r["run"]] = r
    found = []
    for (model, trace), engines in runs.items():
        row: Row = {"model": model, "trace": trace, "commit": engines["helix"][1]["commit"]}
        for engine, of in engines.items():
            columns = next(iter(of.values()))
            row[engine] = {c: median(r[c] for r in of.values()) for c in columns if isinstance(columns[c], float)}
        pairs = zip(engines["helix"].values(), engines["other"].values(), strict=True)
        row["ratios"] = sorted(ours["seconds"] / theirs["seconds"] for ours, theirs in pairs)
        row["ratio"] = median(row["ratios"])
        found.append(row)
    return found


def offline_vs_vllm(gpus: int) -> list[Row]:
    """Returns the seconds of each load by goal, vLLM's, and the seconds per token."""
    found: dict[tuple[str, tuple[int, int, int]], Row] = {}
    for r in (r for r in results("throughput", *OFFLINE_LOAD) if r["gpus"] == gpus):
        name, key = r["goal"] or "vllm", (r["model"], _offline_load(r))
        found.setdefault(key, dict(r))[f"{name}_s"] = r["seconds"]
        found[key][f"{name}_token"] = _a_token(r)
    return [r for r in found.values() if "vllm_s" in r and ("throughput_s" in r or "balance_s" in r)]
