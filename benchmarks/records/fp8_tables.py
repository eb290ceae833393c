"""Tables of weights, keys, values and latents in FP8 beside bf16."""

from __future__ import annotations

from benchmarks.records.columns import Columns, Show, at, kilo, lines, ms, of, us
from benchmarks.records.fidelity_tables import ANSWERS, STEPS, TEXTS
from benchmarks.records.rows import Row, results, tokens
from helix.layout import HelixLayout

STEP = "model", "weights", "kv", "tier", "attention", "layout_name", "batch", "length", "variant"
QUALITY = "kind", "model", "length", "policy", "haystack"


def _over(one: str, other: str) -> Show:
    return lambda r: f"{r[one] / r[other]:.2f}"


def _rows(kind: str, *key: str) -> list[Row]:
    found = results("fp8", "gpu", *key, kind=kind)
    return sorted(found, key=lambda r: str(r["gpu"]), reverse=True)


def fp8_linear() -> list[str]:
    """Projections: bf16, the same in e4m3, and their ratio."""
    columns: Columns = {
        "GPU": at("gpu"),
        "matrix": at("matrix"),
        "rows of x": at("rows"),
        "bf16": us("us"),
        "e4m3": us("fp8_us"),
        "e4m3 / bf16": _over("fp8_us", "us"),
        "target": us("bar_us"),
    }
    return lines(columns, _rows("linear-fp8", "matrix", "rows"))


def fp8_attention() -> list[str]:
    """Decode attention over keys and values in bf16, both in e4m3, and values alone."""
    columns: Columns = {
        "GPU": at("gpu"),
        "heads q/kv": at("heads"),
        "batch": at("batch"),
        "KV": kilo("length"),
        "queries": at("queries"),
        "bf16": us("us"),
        "fp8": us("fp8_us"),
        "fp8 / bf16": _over("fp8_us", "us"),
        "k16v8": us("k16v8_us"),
        "k16v8 / bf16": _over("k16v8_us", "us"),
        "target, fp8": us("bar_us"),
    }
    return lines(columns, _rows("decode-kv", "heads", "batch", "length", "queries"))


def fp8_prefill() -> list[str]:
    """Attention of a prefill chunk over keys and values in bf16 and in e4m3."""
    columns: Columns = {
        "GPU": at("gpu"),
        "heads q/kv": at("heads"),
        "KV": kilo("length"),
        "chunk": at("chunk"),
        "bf16": us("us"),
        "fp8": us("fp8_us"),
        "fp8 / bf16": _over("fp8_us", "us"),
    }
    return lines(columns, _rows("prefill-kv", "heads", "length", "chunk"))


def fp8_latents() -> list[str]:
    """Decode attention over latents."""
    columns: Columns = {
        "heads": at("heads"),
        "batch": at("batch"),
        "latents": kilo("length"),
        "queries": at("queries"),
        "bf16": us("us"),
        "fp8": us("fp8_us"),
        "fp8 / bf16": _over("fp8_us", "us"),
        "target": us("bar_us"),
    }
    return lines(columns, _rows("mla-fp8", "heads", "batch", "length", "queries"))


def fp8_experts() -> list[str]:
    """Routed experts of a rank of eight in bf16 and in few bits."""
    found = _rows("moe", "model", "tpf", "ep", "tokens")
    whole = {(r["gpu"], r["model"], r["tpf"], r["ep"], r["tokens"]): r["us"] for r in found if " in " not in r["model"]}
    rows = []
    for r in found:
        name, _, stored = r["model"].partition(" in ")
        point = r["gpu"], name, r["tpf"], r["ep"], r["tokens"]
        if stored and point in whole:
            rows.append(r | {"name": name, "stored": stored, "whole_us": whole[point]})
    columns: Columns = {
        "GPU": at("gpu"),
        "model": at("name"),
        "tpf x ep": lambda r: f"{r['tpf']} x {r['ep']}",
        "tokens": at("tokens"),
        "stored in": at("stored"),
        "bf16": us("whole_us"),
        "few bits": us("us"),
        "few bits / bf16": _over("us", "whole_us"),
    }
    return lines(columns, rows)


def fp8_steps() -> list[str]:
    """Decode steps."""

    def weights(r: Row) -> str:
        stored = r["model"].startswith("DeepSeek") and r["weights"] == "auto"
        return "fp8, as stored" if stored else "bf16" if r["weights"] == "auto" else str(r["weights"])

    def layout(r: Row) -> str:
        made = HelixLayout.create(**{k: v for k, v in r["layout"].items() if k != "world_size"})
        return f"{made}, emulated" if r["emulated"] else "one GPU" if made.world_size == 1 else str(made)

    def attention(r: Row) -> str:
        sparse = "dense" if r["attention"] == "dense" else "32 blocks"
        return sparse + (", KV in host memory" if r["tier"] == "host" else "") + of_variant(r["variant"])

    def of_variant(variant: str) -> str:
        return f", {float(variant.rsplit('=', 1)[1]):.0%} of them hot" if "repeat" in variant else ""

    columns: Columns = {
        "GPU": at("gpu"),
        "model": at("model"),
        "layout": layout,
        "weights": weights,
        "KV": lambda r: "bf16" if r["kv"] == "auto" else str(r["kv"]),
        "tokens": lambda r: f"{r['batch']} x {tokens(r['length']) if r['length'] % 1024 == 0 else r['length']}",
        "attention": attention,
        "step p50": ms("ttl_p50_us"),
        "weights, GB": of("weight_bytes", "", 1, 1e9),
        "KV, GB": of("kv_bytes", "", 1, 1e9),
        "at": at("commit"),
    }
    return lines(columns, _rows("step-fp8", *STEP))


def fp8_text() -> list[str]:
    """What an FP8 cache changes of true text."""
    found = [r for r in results("fidelity-fp8", *QUALITY) if r["kind"] == "text"]
    return lines({"model": at("model"), **TEXTS, "KV": _kept, **STEPS}, found)


def fp8_answers() -> list[str]:
    """What an FP8 cache changes of needles and facts."""
    found = [r for r in results("fidelity-fp8", *QUALITY) if r["kind"] in ("needles", "facts")]
    shown = ("haystack", "texts of", "found (95%)")
    columns: Columns = {"model": at("model"), "task": at("kind"), "KV": _kept, **{k: ANSWERS[k] for k in shown}}
    columns["only bf16, only this"] = ANSWERS["only dense, only this"]
    return lines(columns, found)


PAGE = {
    "fp8-linear": fp8_linear, "fp8-attention": fp8_attention, "fp8-prefill": fp8_prefill, "fp8-latents": fp8_latents,
    "fp8-experts": fp8_experts, "fp8-steps": fp8_steps, "fp8-text": fp8_text, "fp8-answers": fp8_answers,
}  # fmt: skip


def _kept(r: Row) -> str:
    return str(r["policy"]).removeprefix("dense").removeprefix("-") or "bf16"
