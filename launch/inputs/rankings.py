"""Formats rankings of layouts: as tables and sentences, or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from helix.planner.plan import NoLayoutFits, PlannedLayout, Ranking
from helix.planner.points import Options
from launch.inputs.break_even import compare_drafts, compare_sparse, ms, sparse_pays_from, ttl_s
from launch.inputs.planning import CheckedQuery, remedies
from launch.inputs.tables import command_line, table, wrapped

LEGEND = (
    "user, GPU: tokens/s of one sequence, and of one GPU. weights, KV, left: on the fullest GPU. most, longest: how "
    "many sequences of this length fit, and how many tokens per sequence at this batch."
)
MATRICES = {  # kinds of `Options.matrices`
    "weights": "inputs of attention",
    "output": "output projections",
    "dense": "dense FFNs",
    "shared_experts": "shared experts",
    "experts": "experts",
    "head": "head",
}


def as_json(ranking: Ranking, checked: CheckedQuery) -> dict[str, Any]:
    """Returns everything in the tables, and more, for JSON."""
    q = ranking.query

    def described(choice: PlannedLayout) -> dict[str, Any]:
        more = {"meets_ttl": ranking.meets_ttl(choice), "command": " ".join(checked.command(choice))}
        if q.options.sparse is not None:
            more |= {"dense_ttl_s": ttl_s(q, choice, q.context), "pays_from": sparse_pays_from(q, choice)}
        return asdict(choice) | more

    return {
        "question": checked.overrides,
        "hardware": q.hardware.name,
        "weights": {kind: asdict(stored) for kind, stored in q.options.matrices.items()},
        "reason": ranking.reason,
        "verdict": ranking.verdict,
        **({"compared": compare_sparse(ranking)} if q.options.sparse else {}),
        **({"drafting": compare_drafts(ranking)} if q.draft_has_cost else {}),
        "choices": [described(choice) for choice in ranking.choices],
        "rejected": [asdict(rejected) for rejected in ranking.rejected],
    }


def as_text(ranking: Ranking, checked: CheckedQuery, width: int) -> str:
    """Returns the tables, the reasons and the command, in lines of at most `width` columns."""
    q, choices, first = ranking.query, ranking.choices, ranking.choices[0]
    gb = {
        name: [f"{getattr(c, key) / 1e9:.1f}" for c in choices]
        for name, key in (("weights\nGB", "weight_bytes"), ("KV\nGB", "kv_bytes"), ("left\nGB", "free_bytes"))
    }
    dense = {"dense\nms": [f"{1e3 * ttl_s(q, c, q.context):.2f}" for c in choices]} if q.options.sparse else {}
    late = {} if q.ttl_s is None else {"in time": [("no", "yes")[ranking.meets_ttl(c)] for c in choices]}
    columns = {
        "layout": [c.name for c in choices],
        "batch": [str(c.batch) for c in choices],
        "chunks": [str(c.chunks) if c.chunks > 1 else "none" for c in choices],
        "block": [str(c.append_block) for c in choices],
        **({"gamma": [str(c.gamma) for c in choices]} if q.acceptance is not None else {}),
        "TTL\nms": [f"{1e3 * c.ttl_s:.2f}" for c in choices],
        **late,
        **dense,
        "user\ntok/s": [f"{c.tokens_per_s_user:.1f}" for c in choices],
        "GPU\ntok/s": [f"{c.tokens_per_s_gpu:.1f}" for c in choices],
        **gb,
        "most\nseqs": [f"{c.largest_batch:,}" for c in choices],
        "longest\ntokens": [f"{c.longest_context:,}" for c in choices],
        "known": [c.provenance for c in choices],
    }
    title = f"{checked.model}, {q.context:,} tokens on {q.gpus} x {q.hardware.name}"
    formats = _formats(q.options)
    sections = [wrapped(title, width), *([wrapped(formats, width)] if formats else [])]
    sections += [table(columns, width), wrapped(LEGEND, width)]
    lacking = [
        f"does not fit: {r.layout} lacks {r.missing_bytes / 1e9:.1f} GB per GPU; "
        + (f"{r.largest_batch} would fit" if r.largest_batch else "not one sequence fits")
        for r in ranking.rejected
    ]
    sections += [wrapped("\n".join(lacking), width)] if lacking else []
    if q.options.offload is not None:
        hits = "" if q.spec.indexers else f"with {q.options.offload.hit_rate:.0%} hits "
        fetched = f"{hits}fetches its part in {1e3 * first.phases['fetch']:.2f} ms"
        sections.append(wrapped(f"In host memory: {first.host_bytes / 1e9:.1f} GB per rank; a step {fetched}.", width))
    if prefixes := _prefixes(checked, first):
        sections.append(wrapped(prefixes, width))
    why = [ranking.reason, ranking.verdict]
    why += [compare_sparse(ranking)] if q.options.sparse is not None else []
    if q.draft_has_cost:
        why.append(compare_drafts(ranking))
    elif q.acceptance is not None:
        why.append("Drafting is assumed to be free, and acceptance to be the same at every draft index.")
    sections.append(wrapped("\n".join(why), width))
    shape = ", where DIR is a checkpoint of this shape (Helix has no weights)"
    to_serve = f"To serve it{shape if checked.config.model.path is None else ''}:"
    sections.append(f"{wrapped(to_serve, width)}\n{command_line(checked.command(first), width)}")
    return "\n\n".join(sections)


def _prefixes(checked: CheckedQuery, choice: PlannedLayout) -> str:
    # How many prefixes of the query's length fit in host memory and on disk; empty if none are kept there.
    kv, size, link = checked.config.kv, choice.prefix_bytes, checked.query.hardware.link_bytes_per_s
    if not kv.prefix_host_bytes:
        return ""
    text = f"A prefix of this length takes {size / 1e9:.3g} GB per rank: "
    text += f"host memory holds {kv.prefix_host_bytes / size:.3g}"
    text += f", the disk {kv.prefix_disk_bytes / size:.3g}" if kv.prefix_disk_bytes else ""
    return text + (f". One comes back from host memory in {ms(size / link.value)}." if link is not None else ".")


def _formats(options: Options) -> str:
    # Which matrices are quantized; empty if none are.
    found: dict[str, list[str]] = {}
    for kind, name in MATRICES.items():
        if kind in options.matrices and (stored := options.stored(kind)).kind != "bf16":
            names = {"e4m3": "FP8", "e2m1": "NVFP4" if stored.row_bytes else "MXFP4"}
            found.setdefault(f"{names.get(stored.kind, stored.kind)} ({8 * stored.bytes:.3g} bits)", []).append(name)
    weights = "; ".join(f"{', '.join(names)} in {stored}" for stored, names in found.items())
    return f"Weights: {weights}; the rest in bf16." if weights else ""


def nothing_fits(error: NoLayoutFits, checked: CheckedQuery, width: int) -> str:
    """Describes what is missing, and lists changes with which a layout would fit."""
    found = [(" ".join(change), ranking, ranking.choices[0]) for change, ranking in remedies(checked)]
    if not found:
        return _error(f"{error.reason}. FP8, more GPUs, host memory or less work would not help either", width)
    columns = {
        "What would fit": [change for change, _, _ in found],
        "layout": [choice.name for _, _, choice in found],
        "TTL": [ms(choice.ttl_s) + ("" if ranking.meets_ttl(choice) else " (late)") for _, ranking, choice in found],
        "host memory\nper rank": [f"{c.host_bytes / 1e9:.1f} GB" if c.host_bytes else "-" for _, _, c in found],
    }
    if not any(choice.host_bytes for _, _, choice in found):
        del columns["host memory\nper rank"]
    return f"{_error(error.reason, width)}\n\n{table(columns, width)}"


def _error(text: str, width: int) -> str:
    return wrapped(f"error: {text}", width).removeprefix("error: ")
