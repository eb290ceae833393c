"""Tables of an engine that serves, of caches in host memory, and of models that draft for themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.records.columns import Columns, at, lines, ms, of, share, us
from benchmarks.records.rows import Row, kv, results, tokens


def _set_beside(r: Row) -> str:
    kv = r.get("kv", "auto")
    return ", ".join([*["kv.ahead"] * r["ahead"], *[f"kv.dtype={kv}"] * (kv != "auto")]) or "-"


def tiers() -> list[str]:
    """Steps over host memory beside what the planner says of them."""
    columns: Columns = {
        "KV": kv,
        "`topk`": at("topk"),
        "stays": share("repeat"),
        "set beside": _set_beside,
        "a token": of("ms", "ms", 2),
        "predicted": of("predicted_ms", "ms", 2),
        "over reading all": of("over_dense", "x", 0),
        "hot": share("hot"),
        "over the link": of("link_mb", "MB", 0),
        "at": lambda r: f"{r['link_gbs']:.1f} GB/s" if r["link_gbs"] else "-",
        "GPU in use": of("used_gb", "GB"),
    }
    return lines(columns, [r for r in tier_steps() if "ms" in r])


def tier_steps() -> list[Row]:
    """Reads steps over host memory, the newest of each point; `kv` is set in all."""
    key = "batch", "length", "topk", "repeat", "ahead"
    # Older records have two ways more, `overlap` and `hopb_chunks`, which are gone: benchmarks/LOG.md says that they
    # gained nothing.
    every = results("tier-steps", "kv", *key, "overlap", "hopb_chunks", kind="tier-steps", tier="host")
    today = [r for r in every if not r.get("overlap") and r.get("hopb_chunks", 1) == 1]
    return list({(kv, *map(r.get, key)): r | {"kv": kv} for r in today for kv in (r.get("kv", "auto"),)}.values())


def fetches() -> list[str]:
    """Blocks of 64 KB that come alone."""
    columns: Columns = {"blocks": at("pieces"), "together": of("us", "us"), "rate": of("gbs", "GB/s")}
    return lines(columns, results("tier-steps", "pieces", kind="fetch"))


def finding_places() -> list[str]:
    """What it takes to turn chosen pages into places."""
    columns: Columns = {
        "sequences": at("batch"),
        "chosen of each": at("chosen"),
        "places": of("places", "", 0),
        "missing": of("missing", "", 0),
        "time": of("us", "us"),
    }
    key = "batch", "chosen", "places", "missing", "pieces", "programs", "bytes"
    return lines(columns, results("tier", *key, kind="resolve"))


def long_prompts() -> list[str]:
    """Prompts over a cache in host memory, beside one on the GPU."""
    columns: Columns = {
        "prompt": lambda r: tokens(r["length"]) if r["length"] % 1024 == 0 else f"{r['length']:,} tokens",
        "cache": lambda r: "host memory" if r["tier"] == "host" else "GPU",
        "of the GPU": of("gpu_bytes", "GB", 1, 1e9),
        "limit": of("limit_bytes", "GB", 0, 1e9),
        "in use": of("used_gb", "GB"),
        "chunks of": of("prefill_chunk", "", 0),
        "prompt takes": of("prefill_s", "s", 2),
        "100 more tokens": of("turn_ms", "ms", 0),
    }
    return lines(columns, results("tier-prefill", "tier", "length"))


def needles_over_host_memory() -> list[str]:
    """Needles found over a cache in host memory, beside one on the GPU."""
    columns: Columns = {
        "ranks": at("ranks"),
        "cache": lambda r: "host memory" if r["tier"] == "host" else "GPU",
        "hot places, of all blocks": lambda r: f"{r['hot_places']:.0%}" if r["tier"] == "host" else "-",
        "hits": share("hits"),
        "found": lambda r: f"{r['found']} of {r['prompts']}",
        "same tokens": lambda r: f"{r['same']} of {r['prompts']}",
    }
    return lines(columns, results("tier-needles", "ranks", "tier", "hot_places"))


def served() -> list[str]:
    """What clients inside a job see."""
    columns: Columns = {
        "trace": at("trace"),
        "streams": lambda r: kv(r) if "batch" in r else f"{r['running']} x {r['length'] >> 10}K",
        "new prompts": lambda r: str(r.get("arrivals", r.get("waiting", "-"))),
        "decision p50": of("decide_p50_us", "us", 0),
        "mean gap": of("gap_ms", "ms", 2),
        "over a step": of("over_step", "", 3),
        "gap p99": of("gap_p99_ms", "ms", 0),
        "first token p50": of("first_p50_ms", "ms", 0),
        "p99": of("first_p99_ms", "ms", 0),
        "long prompt": lambda r: f"{r['prefill_s']:.2f} s" if "over_alone" in r else "-",
    }
    found = results("serve", "trace", "batch", "length", "arrivals")
    return lines(columns, [r for r in found if "length" in r])


def crowds() -> list[str]:
    """Many requests that come and go."""
    columns: Columns = {
        "trace": at("trace"),
        "requests": of("requests", "", 0),
        "aborted": of("aborted", "", 0),
        "requests/s": lambda r: f"{r['requests_per_s'] if 'requests_per_s' in r else r['requests'] / r['seconds']:.1f}",
        "tokens/s": of("tokens_per_s", "", 0),
        "first token p50": of("first_p50_ms", "ms", 0),
        "gap p99": of("gap_p99_ms", "ms", 0),
        "longest gap": of("gap_max_ms", "ms", 0),
        "pages, slots left": lambda r: f"{r['pages_left']}, {r['slots_left']}" if "pages_left" in r else "-",
    }
    return lines(
        columns, [r for r in results("serve", "trace", "requests", "length", "batch", "arrivals") if "requests" in r]
    )


CROWD = "engine", "model", "gpus", "goal", "requests", "length", "new"


def _crowd(r: Row) -> tuple[int, int, int]:
    """Requests, tokens of each prompt up to a power of two, as other engines had a few less, and new tokens."""
    return r["requests"], 1 << (r["length"] - 1).bit_length(), r["new"]


def _named(r: Row) -> str:
    requests, length, new = _crowd(r)
    return f"{requests} x {length if length < 1 << 10 else tokens(length)}, {new}"


def _a_token(r: Row) -> float:
    return float(r["seconds"] / r["requests"] / (r["length"] + r["new"]))


def crowds_beside_vllm(gpus: int) -> list[str]:
    """Seconds for all requests of a crowd by goal, beside vLLM's, and the ratio of seconds for each token."""
    every = [r for r in results("crowds", *CROWD) if r["gpus"] == gpus]
    found: dict[tuple[str, tuple[int, int, int]], Row] = {}
    for r in every:
        name, key = r["goal"] or "vllm", (r["model"], _crowd(r))
        found.setdefault(key, dict(r))[f"{name}_s"] = r["seconds"]
        found[key][f"{name}_token"] = _a_token(r)
    columns: Columns = {"requests x prompt, new": _named, "vLLM 0.25.1": of("vllm_s", "s", 2)}
    for goal in ("throughput", "balance"):
        if any(f"{goal}_s" in r for r in found.values()):
            columns |= {f"`{goal}`": of(f"{goal}_s", "s", 2), f"over vLLM's, {goal}": _over_vllm(goal)}
    return lines(columns, [r for r in found.values() if "vllm_s" in r and ("throughput_s" in r or "balance_s" in r)])


def _over_vllm(goal: str) -> Callable[[Row], str]:
    return lambda r: f"{r[f'{goal}_token'] / r['vllm_token']:.2f}" if f"{goal}_token" in r else "-"


def crowds_waits() -> list[str]:
    """Waits of a crowd's requests on two GPUs, and the parts of its time."""
    columns: Columns = {
        "requests x prompt, new": _named,
        "goal": at("goal"),
        **{f"first token p{p}": of(f"first_p{p}_ms", "ms", 0) for p in (50, 99)},
        **{f"gap p{p}": of(f"gap_p{p}_ms", "ms", digits) for p, digits in ((50, 1), (99, 0))},
        "longest": of("gap_max_ms", "ms", 0),
        "prompts": of("prefill_s", "s", 2),
        "steps": of("steps", "", 0),
        "they take": of("decode_s", "s", 2),
        "neither": lambda r: f"{1e3 * (r['seconds'] - r['prefill_s'] - r['decode_s']):.0f} ms",
    }
    found = [r for r in results("crowds", *CROWD) if r["gpus"] == 2 and r["engine"] == "helix" and r["new"] > 100]
    return lines(columns, sorted(found, key=lambda r: -r["length"]))


def served_over_http() -> list[str]:
    """What clients of a server see."""
    columns: Columns = {
        "trace": at("trace"),
        "streams": kv,
        "new prompts": at("arrivals"),
        "mean `tpot`": of("mean_tpot_ms", "ms", 2),
        "over a step": of("over_step", "", 2),
        **{f"`itl` p{p}": of(f"p{p}_itl_ms", "ms") for p in (50, 99)},
        **{f"`ttft` p{p}": of(f"p{p}_ttft_ms", "ms", 0) for p in (50, 99)},
        "tokens/s": of("output_throughput", "", 0),
        "front end a token": lambda r: us("front_us")(r) if r.get("new", 0) >= 100 else "-",
    }
    return lines(columns, results("serve-http", "trace", "batch", "length", "arrivals"))


def starts() -> list[str]:
    """Where the time of a start goes."""
    columns: Columns = {"model": at("model"), "kernels": at("kernels")}
    names = "launcher_s", "connect_s", "compile_s", "first_request_s", "capture_s", "ready_s"
    columns |= {name.removesuffix("_s").replace("_", " "): of(name, "s") for name in names}
    return lines(columns, results("start", "model", "kernels"))


def kills() -> list[str]:
    """What a server does when a process of it is killed."""
    columns: Columns = {
        "killed": at("killed"),
        "while the server": lambda r: {"idle": "is idle", "prefill": "reads a prompt", "drain": "ends"}.get(
            r["state"], "decodes"
        ),
        "times": at("kills"),
        "refused new requests after": of("most_refused_s", "s", 2),
        "new ranks started after": of("most_back_s", "s", 2),
        "no rank left after": of("most_gone_s", "s", 2),
    }
    return lines(columns, results("serve-kills", "killed", "state"))


def _drafts(name: str) -> list[str]:
    def gain(rate: str) -> Callable[[Row], str]:
        return lambda r: f"{r['gain_at_rates'][rate]:.2f}"

    def phase(name: str) -> Callable[[Row], str]:
        return lambda r: f"{r['phase_us'][name] / 1e3:.2f} ms" if name in r.get("phase_us", {}) else "-"

    columns: Columns = {
        "model": at("model"),
        "KV": kv,
        "keys": share("sparsity"),
        "drafts": at("gamma"),
        "iteration": ms("ttl_p50_us"),
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
    "crowds": partial(crowds_beside_vllm, 2),
    "crowds.1gpu": partial(crowds_beside_vllm, 1),
    "crowds.8gpu": partial(crowds_beside_vllm, 8),
    "crowds-waits": crowds_waits,
    "serve-http": served_over_http,
    "serve-kills": kills,
    "start": starts,
    "self-drafts": self_drafts,
    "self-drafts-of-8": self_drafts_of_8,
    "self-drafts.8gpu": partial(_drafts, "self-drafts.8gpu"),
}
