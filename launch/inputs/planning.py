"""Rankings of layouts for `helix plan`: compared with plain steps, as tables or JSON, with the command of the first."""

from __future__ import annotations

import shlex
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from math import inf, isfinite
from typing import Any

from rich.console import Console
from rich.table import Table

from helix.checks import check as check_config
from helix.checks import check_cache
from helix.config import Config, SpeculationConfig
from helix.hub import local_directory
from helix.layout import HelixLayout
from helix.models import DecoderSpec
from helix.planner.hardware import Hardware
from helix.planner.plan import MODES, PlannedLayout, Question, Ranking, plan
from helix.planner.points import Sparse, Tier
from helix.planner.step import predict
from helix.setup.parts import make_spec
from launch.inputs import front
from launch.inputs.auto_layout import layer_drafts, planned
from launch.inputs.compose import ROOT, composed
from launch.inputs.hardware import device_here, hardware_of, load_hardware

STORAGE = {"weights": "model.weights", "kv": "kv.dtype"}
TIMED = 1024  # tokens that a timing appends at most behind a context
BATCHES = (1, 2, 4, 8)  # for which sparse attention is compared, besides the question's
PROMPTS = "PROMPTS.jsonl"  # in the command of a checkpoint: the user's own file


def load_model(
    name: str, attention: Sequence[str] = (), storage: Sequence[str] = ()
) -> tuple[Config, DecoderSpec, list[str]]:
    """Loads a model's config and spec; returns them with the overrides that name it on the runtime's command line.

    Args:
        attention: overrides of the config that do not name the model.
        storage: overrides that do: of its weights and of its keys and values.

    Raises:
        ValueError: there is no such model, or the runtime does not know its family.
    """
    overrides = [front.model_override(name), *storage]
    config = composed([*overrides, *attention])
    if config.model.path is not None:
        config.model.path = str(local_directory(config.model.path, weights=False))
    spec = make_spec(config)
    if config.model.dtype == "auto" and spec.dtype == "float32":
        overrides.append("model.dtype=bfloat16")
        config.model.dtype = "bfloat16"
    return config, spec, overrides


def pick_hardware(name: str | None, backend: str) -> Hardware:
    """Loads the hardware description of this name; None: that of this machine's GPU, or of an H200 without a GPU.

    Raises:
        ValueError: the name is unknown.
    """
    if name is not None:
        hardware = load_hardware(name)
    elif (device := device_here()) is not None:
        hardware = hardware_of(device)
    else:
        hardware = load_hardware("h200")
    return hardware.over_nccl() if backend == "nccl" else hardware


def sparse_overrides(given: dict[str, Any]) -> list[str]:
    """Returns the runtime's overrides for block-sparse attention; empty if the question has none.

    Raises:
        ValueError: conf/attention/ has no such file, or it is that of dense attention.
    """
    if "sparse" not in given and "attention" not in given:
        return []
    name = given.get("attention", "block_sparse")
    known = sorted({path.stem for path in (ROOT / "conf" / "attention").glob("*.yaml")} - {"dense"})
    if name not in known:
        raise ValueError(f"attention={name} is unknown; known: {', '.join(known)}")
    return [f"attention={name}", *([f"attention.topk={given['sparse']}"] if "sparse" in given else [])]


def tier_of(given: dict[str, Any]) -> Tier | None:
    """Returns the cache in host memory that arguments describe; None without one.

    Raises:
        ValueError: it is described without tier=host, or tier=host without sparse; or a number is out of range.
    """
    said = [key for key in ("hits", "ahead", "host_bytes", "gpu_bytes") if key in given]
    if "tier" not in given:
        if said:
            raise ValueError(f"{said[0]}={given[said[0]]:g} is of tier=host: add it, or leave out {said[0]}")
        return None
    if "sparse" not in given and "attention" not in given:
        raise ValueError("tier=host reads the blocks that a step chooses: add sparse=32, or leave out tier")
    for key in said:
        if key in ("hits", "ahead") and not 0 <= given[key] <= 1:
            raise ValueError(f"{key}={given[key]:g} must be from 0 to 1: it is a share")
        if key in ("host_bytes", "gpu_bytes") and not given[key] > 0:
            raise ValueError(f"{key}={given[key]:g} must be positive")
    return Tier(given.get("hits", 0.0), given.get("host_bytes", inf), given.get("gpu_bytes"), given.get("ahead"))


def drafted_share(given: dict[str, Any]) -> float | None:
    """Returns the share of its keys with which the model drafts for itself; None with another drafter.

    Raises:
        ValueError: a share is given for another drafter, or it is not a share.
    """
    share = given.get("sparsity")
    if given.get("drafter") != "sparse":
        if share is not None:
            raise ValueError(f"sparsity={share:g} is of drafter=sparse: add it, or leave out sparsity")
        if "drafter" in given and "acceptance" not in given:
            raise ValueError(f"drafter={given['drafter']} needs acceptance: the probability that a draft is accepted")
        return None
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"sparsity={share:g} must be above 0 and at most 1")
    if "sparse" in given or "attention" in given:
        raise ValueError("drafter=sparse is verified over all keys: leave out sparse and attention")
    return SpeculationConfig().sparsity if share is None else share


def drafter_overrides(given: dict[str, Any]) -> list[str]:
    """Returns the runtime's overrides that name a layer that drafts; empty with another drafter.

    Raises:
        ValueError: eagle3 without a path, or a path without it.
    """
    drafter, path = given.get("drafter"), given.get("path")
    if (drafter == "eagle3") != (path is not None):
        raise ValueError("drafter=eagle3 and path=DIR, the directory of its checkpoint, go together")
    if drafter not in ("mtp", "eagle3"):
        return []
    return [f"speculation={drafter}", *([f"speculation.path={path}"] if path is not None else [])]


def answer(given: dict[str, Any]) -> tuple[Ranking, Callable[[PlannedLayout], list[str]]]:
    """Returns the ranking of layouts, with a function that gives the runtime's overrides for each.

    Raises:
        ValueError: a value is out of range, or nothing fits.
    """
    attention, share = sparse_overrides(given), drafted_share(given)
    storage = [f"{key}={given[name]}" for name, key in STORAGE.items() if name in given]
    drafter, tier = drafter_overrides(given), tier_of(given)
    config, spec, model = load_model(given["model"], [*attention, *drafter], storage)
    if tier is not None:  # it is checked with the rest
        config.kv.tier, config.kv.host_bytes, config.kv.ahead = "host", tier.host_bytes, tier.ahead is not None
    check_config(config)
    check_cache(config, HelixLayout.create(), spec)
    config.attention.from_tokens = 0  # sparse at every length; the command says from where on it pays
    if given["context"] > spec.max_positions:
        raise ValueError(
            f"context={given['context']} exceeds {given['model']}'s {spec.context}: give at most {spec.max_positions}"
        )
    backend = given.get("backend", "auto")
    question = Question(
        replace(spec, draft=None, taps=()),
        pick_hardware(given.get("hardware"), backend),
        given["gpus"],
        given["context"],
        given.get("batch", None if "ttl_ms" in given else 1),
        given["ttl_ms"] / 1e3 if "ttl_ms" in given else None,
        given.get("acceptance"),
        given.get("gamma"),
        share,
        layer_drafts(config.speculation, spec),
        tuple(given.get("modes", MODES)),
        replace(planned(config, spec), tier=tier),
    )
    model += ["comm.backend=nccl"] if backend == "nccl" else []

    def overrides(choice: PlannedLayout) -> list[str]:
        layout, chunks = choice.layout, choice.chunks
        widths = ("dp",) if layout.mode == "dp" else ("kvp", "tpa")
        settings = [*model, f"layout={layout.mode}", *(f"layout.{key}={getattr(layout, key)}" for key in widths)]
        settings += [f"layout.ep={layout.ep}"] if layout.ep > 1 else []
        settings += [f"hopb.chunks={chunks if chunks > 1 else 'none'}", f"kv.append_block={choice.append_block}"]
        random = config.model.path is None  # a shape without weights: there is only time to see
        if choice.gamma:
            settings += drafter or [f"speculation={'ngram' if share is None else 'sparse'}"]
            settings += [f"speculation.gamma={choice.gamma}"]
            settings += [f"speculation.sparsity={share:g}"] if share is not None else []
        if choice.gamma and question.priced:
            settings += [f"bench.acceptance={given['acceptance']:g}"] if random else []
        tokens = (
            0 if tier is not None else None if question.options.sparse is None else sparse_pays_from(question, choice)
        )
        if tokens is not None:
            settings += [*attention, f"attention.from_tokens={tokens}"]
        if tier is not None:
            room = tier.host_bytes if isfinite(tier.host_bytes) else 1.02 * choice.host_bytes
            on_gpu = tier.gpu_bytes or question.options.memory_fraction * (choice.free_bytes + choice.kv_bytes)
            settings += ["kv.tier=host", f"kv.host_bytes={room:.3g}", f"kv.gpu_bytes={on_gpu:.3g}"]
            settings += ["kv.ahead=true"] if tier.ahead is not None else []
        if random and (least := given["context"] + TIMED) > spec.max_positions:
            settings += [f"model.config.max_position_embeddings={least}"]
        if random:
            return [*settings, "model.load=random", "bench=decode", f"bench.points=[{choice.batch}x{given['context']}]"]
        return [*settings, f"decode.prompts={PROMPTS}", f"decode.max_batch={choice.batch}"]

    return plan(question), overrides


# ---- the same layout with dense attention, or without drafts


def crossover(gain: Callable[[int], float], most: int) -> int | None:
    """Finds the least length at which the increasing `gain` is not negative; None: it is negative at `most`."""
    if gain(most) < 0:
        return None
    return 1 + bisect_left(range(1, most), True, key=lambda length: gain(length) >= 0)


def ttl_s(q: Question, choice: PlannedLayout, length: int, sparse: Sparse | None = None) -> float:
    """Predicts the seconds of a token with a choice's layout and settings, at any length and with any attention."""
    options = q.settings(q.options, choice.chunks, choice.gamma, choice.append_block)
    options = replace(options, sparse=sparse, tier=None if sparse is None else options.tier)
    return float(predict(q.spec, q.hardware, choice.points, length, options).ttl_s[0])


def sparse_pays_from(q: Question, choice: PlannedLayout) -> int | None:
    """Returns the least length at which sparse attention is no slower than dense; None: none in the model's context."""
    assert q.options.sparse is not None
    always = replace(q.options.sparse, from_tokens=0)
    return crossover(lambda n: ttl_s(q, choice, n) - ttl_s(q, choice, n, always), q.spec.max_positions)


def compare_sparse(ranking: Ranking) -> str:
    """Describes in words whether sparse or dense attention is faster here, and the length below which dense is."""
    q, first = ranking.question, ranking.choices[0]
    assert q.options.sparse is not None
    times, name = min((ttl_s(q, c, q.context), c.name) for c in ranking.choices if c.batch == first.batch)
    ours = f"{_ms(first.ttl_s)} a token with {first.name} and {q.options.sparse.chosen}"
    dense = f"{_ms(times)} with {name} and dense attention"
    if times < first.ttl_s:
        said = f"Dense attention is faster here: {ours}, {dense}."
    else:
        said = f"Block-sparse attention pays here: {ours}, {dense}, {times / first.ttl_s:.2f} times as long."
    lengths = {batch: sparse_pays_from(q, replace(first, batch=batch)) for batch in sorted({*BATCHES, first.batch})}
    named = ", ".join(f"{_below(tokens)} at batch {batch}" for batch, tokens in lengths.items())
    return f"{said} With {first.name}, dense attention is faster below {named}."


def best_drafts(q: Question, choice: PlannedLayout, length: int) -> tuple[float, int]:
    """Predicts a token's seconds with a choice's layout and the best number of drafts, at least 1; and that number."""
    return min((ttl_s(q, replace(choice, gamma=n), length), n) for n in q.gammas if n)


def drafts_pay_from(q: Question, choice: PlannedLayout) -> int | None:
    """Returns the least length at which drafts are no slower than plain decoding; None: none in the model's context."""
    plain = replace(choice, gamma=0)
    return crossover(lambda n: ttl_s(q, plain, n) - best_drafts(q, choice, n)[0], q.spec.max_positions)


def compare_drafts(ranking: Ranking) -> str:
    """Describes in words which is faster here, and the length below which plain decoding is."""
    q, first = ranking.question, ranking.choices[0]
    over = "by the layer" if q.sparsity is None else f"over {q.sparsity:.3g} of the keys"
    if first.gamma:
        plain = plan(replace(q, acceptance=None, gamma=None, sparsity=None, layer=None)).choices[0]
        gain = first.user / plain.user if q.batch is not None else first.gpu / plain.gpu
        drafts = f"{first.gamma} draft{'s' if first.gamma > 1 else ''}"
        said = f"Drafting pays here, {gain:.2f} times: {_speed(first)} and {drafts} {over}, {_speed(plain)} and none."
    else:
        seconds, gamma, name = min((*best_drafts(q, c, q.context), c.name) for c in ranking.choices)
        said = f"Drafting does not pay here: {_speed(first)} and none; the best drafts would be {gamma} {over}, "
        said += f"{_ms(seconds)} a token with {name}."
    if q.layer is not None:  # there is no such length: a layer costs about as much at any
        return said
    below = _below(drafts_pay_from(q, first))
    return f"{said} With {first.name} at batch {first.batch}, plain decoding is faster below {below}."


def _below(tokens: int | None) -> str:
    return f"{tokens:,} tokens" if tokens else "every length of the model's context"


def _speed(choice: PlannedLayout) -> str:
    return f"{_ms(choice.ttl_s)} a token ({choice.gpu:.1f} tokens/s/GPU) with {choice.name}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


# ---- as JSON, and on the terminal


def command(gpus: int, overrides: Sequence[str]) -> str:
    entry = "-m benchmarks.entry" if "bench=decode" in overrides else "torchrun_entry.py"
    return f"torchrun --nproc-per-node={gpus} {entry} {shlex.join(overrides)}"


def as_json(ranking: Ranking, overrides: Callable[[PlannedLayout], list[str]], given: dict[str, Any]) -> dict[str, Any]:
    """Returns everything that the tables show, and more, for JSON."""
    q = ranking.question

    def described(choice: PlannedLayout) -> dict[str, Any]:
        more = {"in_time": ranking.in_time(choice), "command": command(q.gpus, overrides(choice))}
        if q.options.sparse is not None:
            more |= {"dense_ttl_s": ttl_s(q, choice, q.context), "pays_from": sparse_pays_from(q, choice)}
        return asdict(choice) | more

    return {
        "question": given,
        "hardware": q.hardware.name,
        "reason": ranking.reason,
        "verdict": ranking.verdict,
        **({"compared": compare_sparse(ranking)} if q.options.sparse else {}),
        **({"drafting": compare_drafts(ranking)} if q.priced else {}),
        "choices": [described(choice) for choice in ranking.choices],
        "refused": [asdict(refused) for refused in ranking.refused],
    }


def show(ranking: Ranking, overrides: Callable[[PlannedLayout], list[str]]) -> None:
    """Prints the tables, the reasons and the command."""
    q = ranking.question
    speculates = q.acceptance is not None
    sparse = q.options.sparse is not None
    table = Table(
        "layout", "batch", "chunks", "block", *(["gamma"] if speculates else []), "TTL", *(["dense"] if sparse else []),
        "tok/s/user", "tok/s/GPU", "weights", "KV", "left", "room for", "known",
        title=f"{q.context:,} tokens on {q.gpus} x {q.hardware.name}",
        caption="GB on the fullest GPU; room for: sequences of this length, or tokens at this batch",
    )  # fmt: skip
    for c in ranking.choices:
        sizes = (f"{size / 1e9:.1f}" for size in (c.weight_bytes, c.kv_bytes, c.free_bytes))
        late = "" if ranking.in_time(c) else " (late)"
        table.add_row(
            c.name, str(c.batch), str(c.chunks if c.chunks > 1 else "none"), str(c.append_block),
            *([str(c.gamma)] if speculates else []), f"{1e3 * c.ttl_s:.2f} ms{late}",
            *([f"{1e3 * ttl_s(q, c, q.context):.2f} ms"] if sparse else []), f"{c.user:.1f}", f"{c.gpu:.1f}", *sizes,
            f"{c.largest_batch:,}, or {c.longest:,} tokens", c.provenance,
        )  # fmt: skip
    terminal = Console(width=max(165, Console().width), highlight=False)
    terminal.print(table)
    for refused in ranking.refused:
        room = f"{refused.largest_batch} would fit" if refused.largest_batch else "not one sequence fits"
        print(f"no room: {refused.layout} lacks {refused.missing_bytes / 1e9:.1f} GB a GPU; {room}")
    if q.options.tier is not None:
        first = ranking.choices[0]
        print(
            f"\nIn host memory: {first.host_bytes / 1e9:.1f} GB a rank, of which a step with {q.options.tier.hits:.0%} "
            f"hits fetches its part in {1e3 * first.phases['fetch']:.2f} ms."
        )
    print(f"\n{ranking.reason}\n{ranking.verdict}\n" + (f"{compare_sparse(ranking)}\n" if sparse else ""))
    if q.priced:
        print(compare_drafts(ranking))
    elif speculates:
        print("Drafting is counted as free, and acceptance as the same at every place.")
    print(f"To run it:\n  {command(q.gpus, overrides(ranking.choices[0]))}")
