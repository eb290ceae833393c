"""Tables of an engine that serves, of caches in host memory, and of models that draft for themselves."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.records.columns import Columns, lines
from benchmarks.records.rows import Row, results

K, M = 1 << 10, 1 << 20


def _shape(r: Row) -> str:
    return f"{r['batch']} x {r['length'] // M}M" if r["length"] >= M else f"{r['batch']} x {r['length'] // K}K"


def _of(name: str, unit: str, digits: int = 1) -> Callable[[Row], str]:
    return lambda r: "-" if r.get(name) is None else f"{r[name]:,.{digits}f} {unit}".strip()


def _set_beside(r: Row) -> str:
    return "kv.ahead" if r["ahead"] else "-"


def tiers() -> list[str]:
    """Steps over host memory beside what the planner says of them."""
    columns: Columns = {
        "KV": _shape,
        "`topk`": lambda r: str(r["topk"]),
        "stays": lambda r: f"{r['repeat']:.0%}",
        "set beside": _set_beside,
        "a token": _of("ms", "ms", 2),
        "predicted": _of("predicted_ms", "ms", 2),
        "over reading all": _of("over_dense", "x", 0),
        "hot": lambda r: f"{r['hot']:.0%}",
        "over the link": _of("link_mb", "MB", 0),
        "at": lambda r: f"{r['link_gbs']:.1f} GB/s" if r["link_gbs"] else "-",
        "GPU in use": _of("used_gb", "GB"),
    }
    key = "kind", "batch", "length", "topk", "repeat", "ahead", "pieces"
    # Older records have two ways more, `overlap` and `hopb_chunks`, which are gone: benchmarks/LOG.md says that they
    # gained nothing.
    every = results("tier-steps", *key, "overlap", "hopb_chunks")
    found = {tuple(map(r.get, key)): r for r in every if not r.get("overlap") and r.get("hopb_chunks", 1) == 1}
    return lines(
        columns, [r for r in found.values() if r["kind"] == "tier-steps" and "ms" in r and r["tier"] == "host"]
    )


def fetches() -> list[str]:
    """Blocks of 64 KB that come alone."""
    columns: Columns = {"blocks": lambda r: str(r["pieces"]), "together": _of("us", "us"), "rate": _of("gbs", "GB/s")}
    return lines(columns, [r for r in results("tier-steps", "kind", "pieces") if r["kind"] == "fetch"])


def finding_places() -> list[str]:
    """What it takes to turn chosen pages into places."""
    columns: Columns = {
        "sequences": lambda r: str(r["batch"]),
        "chosen of each": lambda r: str(r["chosen"]),
        "places": lambda r: f"{r['places']:,}",
        "missing": lambda r: f"{r['missing']:,}",
        "time": _of("us", "us"),
    }
    found = results("tier", "kind", "batch", "chosen", "places", "missing", "pieces", "programs", "bytes")
    return lines(columns, [r for r in found if r["kind"] == "resolve"])


def long_prompts() -> list[str]:
    """Prompts over a cache in host memory, beside one on the GPU."""
    columns: Columns = {
        "prompt": lambda r: f"{r['length'] // K}K",
        "cache": lambda r: "host memory" if r["tier"] == "host" else "GPU",
        "of the GPU": lambda r: "-" if r["gpu_bytes"] is None else f"{r['gpu_bytes'] / 1e9:.0f} GB",
        "chunks of": lambda r: f"{r['prefill_chunk']:,}",
        "prompt takes": _of("prefill_s", "s", 2),
        "100 more tokens": _of("turn_ms", "ms", 0),
    }
    return lines(columns, results("tier-prefill", "tier", "length"))


def needles_over_host_memory() -> list[str]:
    """Needles found over a cache in host memory, beside one on the GPU."""
    columns: Columns = {
        "ranks": lambda r: str(r["ranks"]),
        "cache": lambda r: "host memory" if r["tier"] == "host" else "GPU",
        "hot places, of all blocks": lambda r: f"{r['hot_places']:.0%}" if r["tier"] == "host" else "-",
        "hits": lambda r: "-" if r["hits"] is None else f"{r['hits']:.0%}",
        "found": lambda r: f"{r['found']} of {r['prompts']}",
        "same tokens": lambda r: f"{r['same']} of {r['prompts']}",
    }
    return lines(columns, results("tier-needles", "ranks", "tier", "hot_places"))


def served() -> list[str]:
    """What clients inside a job see."""
    columns: Columns = {
        "trace": lambda r: r["trace"],
        "streams": lambda r: _shape(r) if "batch" in r else f"{r['running']} x {r['length'] // K}K",
        "new prompts": lambda r: str(r.get("arrivals", r.get("waiting", "-"))),
        "decision p50": _of("decide_p50_us", "us", 0),
        "mean gap": _of("gap_ms", "ms", 2),
        "over a step": _of("over_step", "", 3),
        "gap p99": _of("gap_p99_ms", "ms", 0),
        "first token p50": _of("first_p50_ms", "ms", 0),
        "p99": _of("first_p99_ms", "ms", 0),
        "long prompt": lambda r: f"{r['prefill_s']:.2f} s" if "over_alone" in r else "-",
    }
    found = results("serve", "trace", "batch", "length", "arrivals")
    return lines(columns, [r for r in found if "length" in r])


def crowds() -> list[str]:
    """Many requests that come and go."""
    columns: Columns = {
        "trace": lambda r: r["trace"],
        "requests": lambda r: f"{r['requests']:,}",
        "aborted": _of("aborted", "", 0),
        "requests/s": lambda r: f"{r['requests_per_s'] if 'requests_per_s' in r else r['requests'] / r['seconds']:.1f}",
        "tokens/s": _of("tokens_per_s", "", 0),
        "first token p50": _of("first_p50_ms", "ms", 0),
        "gap p99": _of("gap_p99_ms", "ms", 0),
        "longest gap": _of("gap_max_ms", "ms", 0),
        "pages, slots left": lambda r: f"{r['pages_left']}, {r['slots_left']}" if "pages_left" in r else "-",
    }
    return lines(columns, [r for r in results("serve", "trace", "requests") if "requests" in r])


def served_over_http() -> list[str]:
    """What clients of a server see."""
    columns: Columns = {
        "trace": lambda r: r["trace"],
        "streams": _shape,
        "new prompts": lambda r: str(r["arrivals"]),
        "mean `tpot`": _of("mean_tpot_ms", "ms", 2),
        "over a step": _of("over_step", "", 2),
        **{f"`itl` p{p}": _of(f"p{p}_itl_ms", "ms") for p in (50, 99)},
        **{f"`ttft` p{p}": _of(f"p{p}_ttft_ms", "ms", 0) for p in (50, 99)},
        "tokens/s": _of("output_throughput", "", 0),
    }
    return lines(columns, results("serve-http", "trace", "batch", "length", "arrivals"))


def starts() -> list[str]:
    """Where the time of a start goes."""
    columns: Columns = {"model": lambda r: r["model"], "kernels": lambda r: r["kernels"]}
    names = "launcher_s", "connect_s", "compile_s", "first_request_s", "capture_s", "ready_s"
    columns |= {name.removesuffix("_s").replace("_", " "): _of(name, "s") for name in names}
    return lines(columns, results("start", "model", "kernels"))


def kills() -> list[str]:
    """What a server does when a process of it is killed."""
    columns: Columns = {
        "killed": lambda r: r["killed"],
        "while the server": lambda r: {"idle": "is idle", "prefill": "reads a prompt", "drain": "ends"}.get(
            r["state"], "decodes"
        ),
        "times": lambda r: str(r["kills"]),
        "refused new requests after": _of("most_refused_s", "s", 2),
        "new ranks started after": _of("most_back_s", "s", 2),
        "no rank left after": _of("most_gone_s", "s", 2),
    }
    return lines(columns, results("serve-kills", "killed", "state"))


def _drafts(name: str) -> list[str]:
    def gain(rate: str) -> Callable[[Row], str]:
        return lambda r: f"{r['gain_at_rates'][rate]:.2f}"

    def phase(name: str) -> Callable[[Row], str]:
        return lambda r: f"{r['phase_us'][name] / 1e3:.2f} ms" if name in r.get("phase_us", {}) else "-"

    columns: Columns = {
        "model": lambda r: r["model"],
        "KV": _shape,
        "keys": lambda r: "-" if r["sparsity"] is None else f"{r['sparsity']:.0%}",
        "drafts": lambda r: str(r["gamma"]),
        "iteration": lambda r: f"{r['ttl_p50_us'] / 1e3:.2f} ms",
        **{name: phase(name) for name in ("draft", "verify", "choose", "accept")},
        **{f"gain at {rate}": gain(rate) for rate in ("0.8", "0.9", "0.96")},
    }
    found = results(name, "model", "batch", "length", "sparsity", "gamma")
    return lines(columns, [r for r in found if "failed" not in r])


def self_drafts() -> list[str]:
    """Iterations of models that draft for themselves, and what they gain where a share of the drafts holds."""
    return _drafts("self-drafts")


def self_drafts_of_8() -> list[str]:
    """The same of eight ranks that fewer GPUs emulate."""
    return _drafts("self-drafts.emulated-8")


PAGE: dict[str, Callable[[], list[str]]] = {
    "tier-steps": tiers,
    "tier-fetch": fetches,
    "tier-resolve": finding_places,
    "tier-prefill": long_prompts,
    "tier-needles": needles_over_host_memory,
    "serve": served,
    "serve-crowds": crowds,
    "serve-http": served_over_http,
    "serve-kills": kills,
    "start": starts,
    "self-drafts": self_drafts,
    "self-drafts-of-8": self_drafts_of_8,
}
