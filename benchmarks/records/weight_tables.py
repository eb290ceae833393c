"""What the planner says of checkpoints in four bits and in FP8: on which GPUs they fit, and how fast a step is."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.models.workloads import K
from benchmarks.records.recorded_steps import RESULTS
from benchmarks.records.rows import WORKLOAD, Row, newest
from helix.planner.plan import NoLayoutFits, PlannedLayout, plan
from launch.inputs.planning import check_query

_QUANTIZED = "+model.config.quantization_config="
# How a record's weights are asked for, unless the shape says it.
FORMATS = {
    "bf16": [],
    "fp8": ["model.weights=fp8"],
    "nvfp4": [_QUANTIZED + "{quant_method: modelopt,quant_algo: NVFP4,ignore: [lm_head]}"],
    "int4": [
        _QUANTIZED + "{quant_method: gptq,bits: 4,group_size: 128,sym: true,dynamic: {lm_head: {}}}",
    ],
    "mxfp4": [],
}

# Shapes in four bits -> the same in FP8.
SHAPES = {
    "kimi-k2.5": "kimi-k2",
    "deepseek-r1-nvfp4": "deepseek-r1",
    "glm-5.2-nvfp4": "glm-5.2",
    "qwen3.5-397b-a17b-gptq-int4": "qwen3.5-397b-a17b",
    "minimax-m2-nvfp4": "minimax-m2",
}
MACHINES = ((8, "h100"), (8, "h200"), (4, "h200"), (2, "h200"))
LONG, SHORT = (1, 128 * K), (8, 32 * K)  # sequences, and tokens of each
# Fields of a row -> how its run was asked for.
ASKED = {
    ("latents", "host"): ["kv.offload=host", "kv.offload_host_bytes=96e9"],
    ("shape", "48_layers_of_40_heads"): [
        f"model.config.{key}"
        for key in ("num_hidden_layers=48", "hidden_size=5120", "num_attention_heads=40", "head_dim=128")
    ],
}


def planned() -> Iterator[Row]:
    """Yields a row for each shape and machine: the fastest layout, and the one that holds most tokens."""
    for shape, fp8 in SHAPES.items():
        for gpus, hardware in MACHINES:
            one, many = (_layouts(shape, gpus, hardware, *work) for work in (LONG, SHORT))
            row: Row = {"shape": shape, "on": f"{gpus} x {hardware.upper()}"}
            if one and many:
                tokens = SHORT[1] * max(choice.largest_batch for choice in many)
                row |= {"layout": one[0].name, "gb": one[0].weight_bytes / 1e9, "kv_tokens": tokens}
                row |= {"one_us": 1e6 * one[0].ttl_s, "many_us": 1e6 * many[0].ttl_s}
            if in_fp8 := _layouts(fp8, gpus, hardware, *LONG):
                row |= {"fp8_gb": in_fp8[0].weight_bytes / 1e9, "fp8_us": 1e6 * in_fp8[0].ttl_s}
            yield row if one and many else row | {"failed": True}


def measured(one: str, emulated: str) -> Iterator[Row]:
    """Yields the recorded steps of one GPU and of eight emulated ranks, each with what is predicted for its layout."""
    for record, ranks in ((one, 1), (emulated, 8)):
        for row in newest(RESULTS / f"{record}.jsonl", *WORKLOAD, "weights"):
            asked = [] if row["model"].endswith(row["weights"]) else FORMATS[row["weights"]]
            kv = [f"kv.dtype={row['kv']}"] if "kv" in row else []
            layouts = _layouts(row["model"], ranks, "h200", row["batch"], row["length"], *asked, *kv)
            same = [found for found in layouts if ranks == 1 or row["layout"].startswith(f"{found.name} ")]
            tokens = row["length"] if row["length"] % 1024 else f"{row['length'] // K}K".replace("1024K", "1M")
            yield (
                {"kv": None}
                | row
                | {"work": f"{row['batch']} x {tokens}", "ranks": ranks, "predicted_us": 1e6 * same[0].ttl_s}
            )


def long_steps(record: str, field: str) -> Iterator[Row]:
    """Yields the recorded steps of eight emulated ranks at 1M tokens and more, with what is predicted for the layout.

    Args:
        field: distinguishes rows of one workload.
    """
    for row in newest(RESULTS / f"{record}.jsonl", *WORKLOAD, field):
        asked = [
            f"model.config.max_position_embeddings={row['length'] + K}",
            *ASKED.get((field, row.get(field, "")), []),
        ]
        layouts = _layouts(row["model"], 8, "h200", row["batch"], row["length"], *asked)
        (same,) = [found for found in layouts if row["layout"].startswith(f"{found.name} ")]
        yield row | {
            field: row.get(field),
            "predicted_us": 1e6 * same.ttl_s,
            "gb": max(row["used_bytes_per_gpu"]) / 1e9,
        }


def _layouts(model: str, gpus: int, hardware: str, batch: int, length: int, *more: str) -> list[PlannedLayout]:
    typed = [f"gpus={gpus}", f"hardware={hardware}", f"batch={batch}", f"context={length}"]
    try:
        return plan(check_query([f"model={model}", *typed, *more]).query).choices
    except NoLayoutFits:
        return []
