"""Rows of MTP, EAGLE-3 and self-drafts compared with the planner, and of lookup drafts compared with vLLM."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from benchmarks.models.layer_drafts import OPTIONS
from benchmarks.models.speculate import expected_tokens
from benchmarks.models.workloads import named
from benchmarks.records.columns import Cells
from benchmarks.records.rows import Row, grouped, kv, results
from benchmarks.records.step_tables import points_of
from helix.models import DecoderSpec
from helix.planner.points import LayerDrafts, Options, Speculation
from helix.planner.step import predict
from helix.setup.parts import make_spec
from launch.inputs.auto_layout import layer_drafts, planner_options
from launch.inputs.compose import compose_config
from launch.inputs.hardware import hardware_of
from launch.inputs.shapes import load_spec

KEY = ("model", "layout", "drafter", "batch", "length", "gamma")
BESIDE_MTP = {"glm-5.2": ["kv.dtype=fp8"]}  # options of the record self-drafts-and-mtp


def whole(rows: list[Row]) -> list[Row]:
    """Keeps each model's rows with its largest number of layers."""
    max_layers = {model: max(r["layers"] for r in of) for (model,), of in grouped(rows, "model").items()}
    return [r for r in rows if r["layers"] == max_layers[r["model"]]]


def compare_with_vllm() -> list[Row]:
    """Returns tokens per second of both engines on copies of files, with and without lookup drafts."""
    found = {(r["engine"].split()[0], r["drafts"]): r for r in results("vllm-drafts", "engine", "model", "drafts")}
    rows = []
    for engine, label in (("helix", "Helix"), ("vllm", found["vllm", 0]["engine"].replace("vllm", "vLLM"))):
        plain, drafted = (found[engine, drafts]["tokens_per_s"] for drafts in (0, 5))
        rows.append({"said": label, "plain": plain, "drafted": drafted})
    return rows


def predicted() -> Cells:
    """Tabulates the planner's error on recorded iterations with MTP drafts."""
    gammas = (0, 1, 2, 3, 4, 5, 7)
    table: list[tuple[str, ...]] = [("shape", "KV", "layout", *(f"{n} drafts" if n else "none" for n in gammas))]
    for name in ("layer-drafts", "layer-drafts.emulated-8"):
        for (model, layout, batch, length), rows in grouped(
            whole(results(name, *KEY, "layers")), *KEY[:2], *KEY[3:5]
        ).items():
            timed = {r["gamma"]: r for r in rows if r["drafter"] == "mtp" and "failed" not in r}
            if timed and rows[0]["layers"] == len(load_spec(model).layers):
                off = (_error(timed[n], layout) if n in timed else "-" for n in gammas)
                table.append((model, kv({"batch": batch, "length": length}), layout.split()[1], *off))
    return table


def self_drafts_and_mtp() -> list[Row]:
    """Returns self-drafts and MTP drafts of the same models, with what the planner predicts and gains at two rates."""
    found = []
    timed = results("self-drafts-and-mtp.emulated-8", *KEY, "commit")
    for rows in grouped(timed, "model", "drafter", "batch", "length", "commit").values():
        plain = next(r["ttl_p50_us"] for r in rows if not r["gamma"])
        for row in (r for r in rows if r["gamma"]):
            over = row["ttl_p50_us"] / plain
            gains = {f"gain_{rate}": expected_tokens(row["gamma"], rate / 100) / over for rate in (80, 90)}
            predicted_us = _predict_us(row, BESIDE_MTP.get(row["model"], []))
            found.append(row | {"plain_us": plain, "predicted_us": predicted_us} | gains)
    return found


def _error(row: Row, layout: str) -> str:
    return f"{_predict_us({**row, 'layout': layout}, OPTIONS.get(row['model'], [])) / row['ttl_p50_us'] - 1:+.1%}"


def _predict_us(row: Row, overrides: list[str]) -> float:
    plain, layer, options = _planned(row["model"], row["drafter"], tuple(overrides))
    drafts = Speculation(row["gamma"], 1.0, sparsity=row.get("sparsity"), layer=layer) if row["gamma"] else None
    options = replace(options, speculation=drafts)
    step = predict(plain, _hardware(row["device"]), points_of(row), row["length"], options)
    return 1e6 * float(step.step_s[0])


_hardware = cache(hardware_of)  # reads each file once


@cache
def _planned(model: str, drafter: str, overrides: tuple[str, ...]) -> tuple[DecoderSpec, LayerDrafts | None, Options]:
    config = compose_config([*named(model), *overrides, f"speculation={drafter}", "speculation.gamma=7"])
    spec = make_spec(config)
    plain = replace(spec, layers=spec.stack, draft=None)
    return plain, layer_drafts(config, spec), replace(planner_options(config, plain), hopb=False)
