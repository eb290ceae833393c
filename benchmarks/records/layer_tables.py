"""Tables of drafts of a layer: their time, how many hold, how it was trained; and of drafts by lookup."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from benchmarks.models.layer_drafts import OPTIONS
from benchmarks.models.workloads import named
from benchmarks.records.columns import POINT, Columns, Show, at, lines, ms, of, page
from benchmarks.records.rows import Row, grouped, kv, results
from helix.models import DecoderSpec
from helix.planner.points import LayerDrafts, Options, Points, Speculation
from helix.planner.step import predict
from helix.setup.parts import make_spec
from launch.inputs.auto_layout import layer_drafts, planned
from launch.inputs.compose import composed
from launch.inputs.hardware import hardware_of
from launch.inputs.shapes import load_spec

KEY = ("model", "layout", "drafter", "batch", "length", "gamma")


def _whole(name: str) -> list[Row]:
    """Iterations of a record; of a model with as many layers as it was measured with at most."""
    found = results(name, *KEY, "layers")
    most = {model: max(r["layers"] for r in rows) for (model,), rows in grouped(found, "model").items()}
    return [r for r in found if r["layers"] == most[r["model"]]]


def layers(name: str) -> list[str]:
    """Tabulates drafts of a layer: what parts of an iteration take, and what they gain with the published tokens."""

    def part(*names: str) -> Show:
        return lambda r: ms("us")({"us": sum(r["phase_us"].get(name, 0) for name in names)})

    columns: Columns = {
        **POINT,
        "drafter": at("drafter"),
        "drafts": at("gamma"),
        "iteration": ms("ttl_p50_us"),
        "verify": part("verify"),
        "draft": part("draft"),
        "accept, rewrite": part("accept", "choose"),
        "over a plain step": of("step_over_plain", "x", 2),
        "gain, published tokens": of("gain_published", "x", 2),
    }
    found = [r for r in _whole(name) if "failed" not in r and r["gamma"]]
    found.sort(key=lambda r: (r["drafter"], r["model"], r["batch"] * r["length"], r["batch"], r["gamma"]))
    return lines(columns, found)


def trained() -> list[str]:
    """Tabulates layers that were trained here, and the drafts that held on texts which they had not seen."""
    columns: Columns = {
        "model": at("model"),
        "layer": at("drafter"),
        "texts": at("texts"),
        "minutes": at("minutes"),
        "steps": at("steps"),
        "kept of each draft behind kept ones": lambda r: " ".join(f"{share:.2f}" for share in r["kept"]),
    }
    return lines(columns, results("trained-drafters", "model", "drafter", "texts"))


def turns() -> list[str]:
    """Tabulates drafts by lookup on turns of agents and elsewhere."""
    columns: Columns = {
        "text": at("text"),
        "model": at("model"),
        "drafts": at("drafting"),
        "tokens a step": of("tokens_per_step", "", 2),
        "step p50": ms("ttl_p50_us"),
        "tokens/s/user": lambda r: f"{r['tokens_per_s_user']:.0f}",
        "gain": of("gain", "x", 2),
        "over ngram": of("over_ngram", "x", 3),
        "answers as without": lambda r: f"{r['as_plain']} of {r['prompts']}",
    }
    return lines(columns, results("turns", "text", "model", "layout", "drafting"))


def lookup() -> list[str]:
    """Tabulates the steps that drafts by lookup save on recorded turns of agents."""
    columns: Columns = {
        "drafts": at("drafter"),
        "compares up to": lambda r: f"{r['longest']} words",
        "steps": lambda r: f"{r['steps']:,}",
        "words a step": of("words_per_step", "", 2),
    }
    return lines(columns, results("lookup", "drafter", "longest"))


def beside_vllm() -> list[str]:
    """Tabulates drafts looked up in the text by both engines, on copies of files."""
    found = {(r["engine"].split()[0], r["drafts"]): r for r in results("vllm-drafts", "engine", "model", "drafts")}
    table = [("engine", "without drafts", "with up to 5 drafts", "gain")]
    for engine in ("helix", "vllm"):
        plain, drafted = (found[engine, drafts]["tokens_per_s"] for drafts in (0, 5))
        name = {"helix": "Helix", "vllm": found["vllm", 0]["engine"].replace("vllm", "vLLM")}[engine]
        table.append((name, f"{plain:,.0f} tokens/s", f"{drafted:,.0f} tokens/s", f"{drafted / plain:.2f} x"))
    return page(table)


def predicted() -> list[str]:
    """Tabulates how far the planner's iterations with a layer for multi-token prediction are from recorded ones."""
    gammas = (0, 1, 2, 3, 4, 5, 7)
    table: list[tuple[str, ...]] = [(*POINT, "layout", *(f"{n} drafts" if n else "none" for n in gammas))]
    for name in ("layer-drafts", "layer-drafts.emulated-8"):
        for (model, layout, batch, length), rows in grouped(_whole(name), *KEY[:2], *KEY[3:5]).items():
            timed = {r["gamma"]: r for r in rows if r["drafter"] == "mtp" and "failed" not in r}
            if timed and rows[0]["layers"] == len(load_spec(model).layers):
                off = (_error(timed[n], layout) if n in timed else "-" for n in gammas)
                table.append((model, kv({"batch": batch, "length": length}), layout.split()[1], *off))
    return page(table)


def _error(row: Row, layout: str) -> str:
    """Predicted over recorded time of an iteration, less one."""
    plain, layer, options = _planned(row["model"])
    drafts = Speculation(row["gamma"], 1.0, layer=layer) if row["gamma"] else None
    widths = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", layout)}
    points = Points.of(layout.split()[0], row["batch"], **widths)
    step = predict(plain, _hardware(row["device"]), points, row["length"], replace(options, speculation=drafts))
    return f"{1e6 * float(step.step_s[0]) / row['ttl_p50_us'] - 1:+.1%}"


_hardware = cache(hardware_of)  # its files are read once


@cache
def _planned(model: str) -> tuple[DecoderSpec, LayerDrafts | None, Options]:
    """A model without the layer that drafts, that layer, and what else the planner is told."""
    config = composed([*named(model), *OPTIONS.get(model, []), "speculation=mtp", "speculation.gamma=7"])
    spec = make_spec(config)
    plain = replace(spec, layers=spec.stack, draft=None)
    return plain, layer_drafts(config.speculation, spec), replace(planned(config, plain), hopb=False)


PAGE: dict[str, Callable[[], list[str]]] = {
    **{name: partial(layers, name) for name in ("layer-drafts", "layer-drafts.emulated-8")},
    "trained-drafters": trained,
    "turns": turns,
    "lookup": lookup,
    "vllm-drafts": beside_vllm,
    "layer-drafts-predicted": predicted,
}
