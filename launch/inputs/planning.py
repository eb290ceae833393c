"""Planner queries: a run's settings and a few more; and the command that runs an answer."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite

from helix.checks import check as check_config
from helix.checks import check_model
from helix.config import AttentionConfig, Config, LayoutConfig, SpeculationConfig
from helix.hub import local_directory
from helix.layout import HelixLayout
from helix.planner.hardware import Hardware
from helix.planner.plan import (
    CHUNKS,
    MODES,
    PlannedLayout,
    PlanQuery,
    Ranking,
    largest_batch,
    longest_context,
    min_gpus,
    plan,
)
from helix.schema import field_types
from helix.setup.parts import make_spec
from launch.inputs.auto_layout import layer_drafts, planner_options
from launch.inputs.break_even import sparse_pays_from
from launch.inputs.command_parser import Settings
from launch.inputs.compose import compose_config
from launch.inputs.hardware import device_here, hardware_of, load_hardware
from launch.inputs.planner_commands import PLAN, PlanConfig

WIDTHS = ("kvp", "tpa", "tpf", "ep", "dp")
FP8 = ("kv.dtype=fp8", "model.weights=fp8")


PLANNER_KEYS = {*field_types(PlanConfig)} - {*field_types(Config)}


@dataclass(frozen=True)
class CheckedQuery:
    """A planner query, as typed and as the planner takes it.

    Attributes:
        overrides: as typed, in Hydra's grammar; plus model.dtype if a float32 checkpoint is planned in bfloat16.
        settings: which keys the overrides may set.
    """

    overrides: tuple[str, ...]
    settings: Settings
    config: PlanConfig
    query: PlanQuery

    @cached_property
    def values(self) -> dict[str, str]:
        return {override_key(text): text.partition("=")[2] for text in self.overrides}

    @property
    def model(self) -> str:
        return self.values.get("model.path", self.values.get("model", "the model"))

    def runtime_overrides(self, choice: PlannedLayout) -> list[str]:
        """Returns the overrides that make the runtime use this layout, without the model."""
        q, layout, sparse, offload = self.query, choice.layout, self.query.options.sparse, self.query.options.offload
        tokens = None
        if sparse is not None:
            tokens = 0 if offload is not None else sparse_pays_from(q, choice)
        choice_overrides = [f"layout={layout.mode}"] if layout.mode != "helix" else []
        widths = {key: getattr(layout, key) for key in WIDTHS if key != "tpf"}  # tpf follows from the others
        choice_overrides += [f"layout.{key}={width}" for key, width in widths.items() if width > 1]
        excluded = {*PLANNER_KEYS, "layout"}
        config = self.config
        if choice.gamma:
            choice_overrides += [f"speculation.gamma={choice.gamma}"]
        else:
            excluded, config = excluded | {"speculation"}, replace(config, speculation=SpeculationConfig())
        if tokens is None:
            excluded, config = excluded | {"attention"}, replace(config, attention=AttentionConfig())
        elif "attention.from_tokens" not in self.values:
            choice_overrides += [f"attention.from_tokens={tokens}"]
        if choice.append_block != config.blocks.append:
            choice_overrides += [f"kv.append_block={choice.append_block}"]
        if offload is not None:
            host = offload.host_bytes if isfinite(offload.host_bytes) else 1.02 * choice.host_bytes
            gpu = offload.gpu_bytes or q.options.memory_fraction * (choice.free_bytes + choice.kv_bytes)
            choice_overrides += [f"kv.offload_host_bytes={host:.3g}", f"kv.offload_gpu_bytes={gpu:.3g}"]
        if config.batch is not None or q.ttl_s is not None:
            choice_overrides += [f"decode.max_batch={choice.batch}"]
        choice_keys = {*map(override_key, choice_overrides), "model", "model.path"}
        keys = [(text, override_key(text)) for text in self.overrides]
        return [
            t for t, key in keys if key not in choice_keys and key.partition(".")[0] not in excluded
        ] + choice_overrides

    def command(self, choice: PlannedLayout) -> list[str]:
        """Returns the words of the command that serves this layout, shell-quoted; a model shape becomes DIR."""
        model = "DIR" if self.config.model.path is None else self.model
        return [shlex.quote(word) for word in ("helix", "serve", model, *self.runtime_overrides(choice))]


def override_key(override: str) -> str:
    """Returns the key that an override sets."""
    return override.lstrip("+~").partition("=")[0]


def check_query(overrides: Sequence[str], settings: Settings = PLAN.settings) -> CheckedQuery:
    """Composes a query from overrides.

    Raises:
        ValueError: a value is wrong or missing, or the model family is not supported.
    """
    overrides = [re.sub(r"^modes=(?=[^\[])(.*)", r"modes=[\1]", text) for text in overrides]  # modes=tp,helix is a list
    typed = {override_key(text): text.partition("=")[2] for text in overrides}
    auto = [] if typed.keys() & {"layout", "layout.mode"} else ["layout=auto"]
    config = compose_config([*auto, *overrides], settings)
    assert isinstance(config, PlanConfig)
    missing = [] if any(key.split(".")[0] == "model" for key in typed) else ["MODEL"]
    missing += [key for key in ("gpus", "context") if getattr(config, key) is None]
    if missing or config.gpus is None or config.context is None:
        raise ValueError(f"{' and '.join(missing)} missing, as in helix plan llama-3.1-8b gpus=8 context=128K")
    _check(config, typed)
    speculation, layout, kv = config.speculation, config.layout, config.kv
    if config.model.path is not None:
        config.model.path = str(local_directory(config.model.path, weights=False))
    spec = make_spec(config)
    if config.model.dtype == "auto" and spec.dtype == "float32":
        config.model.dtype = "bfloat16"
        overrides = [*overrides, "model.dtype=bfloat16"]
    check_model(config, HelixLayout.create(), spec)
    if "attention.from_tokens" not in typed:
        config.attention.from_tokens = 0  # predict sparse at every length; the command sets where it pays off
    if config.context > spec.max_positions:
        model = typed.get("model.path", typed.get("model", "the model"))
        raise ValueError(
            f"context={config.context} exceeds {model}'s {spec.context}: set at most {spec.max_positions}"
            f"{spec.stretched(config.context)}"
        )
    if spec.indexers and "hits" in typed:
        raise ValueError(
            f"hits={config.hits:g}: this model's indexers select tokens, and each step fetches all that it selects: "
            "leave it out"
        )
    given = [(key, getattr(layout, key)) for key in WIDTHS]
    options = planner_options(config, spec)
    if options.offload is not None:
        offload = replace(
            options.offload, hit_rate=config.hits, prefetch=config.guessed if kv.offload_prefetch else None
        )
        options = replace(options, offload=offload)
    question = PlanQuery(
        replace(spec, draft=None, aux_hidden_state_layers=()),
        pick_hardware(config.hardware, config.comm.backend),
        config.gpus,
        config.context,
        config.batch if config.batch is not None or config.ttl_ms is not None else 1,
        None if config.ttl_ms is None else config.ttl_ms / 1e3,
        config.acceptance,
        speculation.gamma if "speculation.gamma" in typed else None,
        speculation.sparsity if speculation.drafter == "sparse" else None,
        layer_drafts(config, spec),
        tuple(config.modes) or (MODES if layout.mode == "auto" else (layout.mode,)),
        tuple((key, n) for key, n in given if n is not None and (f"layout.{key}" in typed or n != _default_width(key))),
        CHUNKS[:1] if config.hopb.chunks == "none" else CHUNKS,
        options,
    )
    return CheckedQuery(tuple(overrides), settings, config, question)


def _default_width(width: str) -> int | None:
    default: int | None = getattr(LayoutConfig(), width)
    return default


def _check(config: PlanConfig, typed: Collection[str]) -> None:
    drafter, acceptance = config.speculation.drafter, config.acceptance
    if drafter == "none" and acceptance is not None:
        raise ValueError(f"acceptance={acceptance:g} needs drafts, but there are none: set speculation=ngram")
    if drafter == "model":
        raise ValueError("speculation.drafter=model is not predicted: set another drafter, or speculation=none")
    if drafter != "none" and acceptance is None:
        raise ValueError(
            f"speculation.drafter={drafter} needs acceptance: set it to the probability that a draft is accepted"
        )
    for key, needed in (("hits", "kv.offload=host"), ("guessed", "kv.offload_prefetch=true")):
        is_set = config.kv.offload == "host" and (key == "hits" or config.kv.offload_prefetch)
        if key in typed and not is_set:
            raise ValueError(f"{key}={getattr(config, key):g} needs {needed}: add it, or leave out {key}")
    if config.hopb.chunks not in ("auto", "best", "none"):
        raise ValueError(f"hopb.chunks={config.hopb.chunks}: the planner chooses the number itself: leave out hopb")
    if config.kv.append_block is not None:
        raise ValueError(f"kv.append_block={config.kv.append_block}: the planner chooses this itself: leave it out")
    if config.comm.backend not in ("auto", "symm_mem", "nccl"):
        raise ValueError(f"comm.backend={config.comm.backend} is not predicted: set auto, symm_mem or nccl")
    if config.modes and config.layout.mode != "auto":
        raise ValueError(f"modes={','.join(config.modes)} and layout.mode={config.layout.mode}: set only one of them")
    prefixes = f"kv.prefix_host_bytes={config.kv.prefix_host_bytes:.0f}" if config.kv.prefix_host_bytes else ""
    modes = config.modes or [config.layout.mode]
    if "dp" in modes and (refused := prefixes or str(config.hopb) * config.hopb.may_cut):
        raise ValueError(f"modes={','.join(modes)}: mode dp does not support {refused}: leave out either")
    if config.kv.offload == "host" and config.kv.offload_host_bytes is None:
        config.kv.offload_host_bytes = inf  # unlimited
    check_config(config)


def pick_hardware(name: str | None, backend: str) -> Hardware:
    """Loads a hardware description by name; None: of this machine's GPU, or without a GPU of an H200.

    Raises:
        ValueError: the name is unknown, or this machine's GPU has no description.
    """
    if name is not None:
        hardware = load_hardware(name)
    elif (device := device_here()) is not None:
        hardware = hardware_of(device)
    else:
        hardware = load_hardware("h200")
    return hardware.over_nccl() if backend == "nccl" else hardware


def remedies(checked: CheckedQuery) -> list[tuple[list[str], Ranking]]:
    """Finds changes to a query for which nothing fits; returns each with its ranking.

    In this order: FP8, for the same work on the same GPUs; more GPUs; offloading to host memory; less work. If none
    helps, FP8 on all GPUs of an NVLink domain. Each is planned as if it were typed.
    """
    q, config = checked.query, checked.config
    needs_blocks = config.attention.policy == "dense" and not q.spec.indexers
    offload = ["kv.offload=host", *(["attention=block_sparse"] if needs_blocks else [])]
    found = [_replan(checked, [change]) for change in FP8]
    if not any(found):
        found.append(_replan(checked, FP8))
    if (gpus := min_gpus(q)) is not None:
        found.append(_replan(checked, [f"gpus={gpus}"]))
    if config.kv.offload == "none":
        found.append(_replan(checked, offload))
    if (q.batch or 1) > 1 and (batch := largest_batch(q)):
        found.append(_replan(checked, [f"batch={batch}"]))
    if context := longest_context(q):
        found.append(_replan(checked, [f"context={context // 1024}K"]))
    if not any(found):
        found.append(_replan(checked, [*FP8, f"gpus={q.hardware.gpus}"]))
    return [change for change in found if change is not None]


def _replan(checked: CheckedQuery, change: Sequence[str]) -> tuple[list[str], Ranking] | None:
    """Plans a query with further overrides; None if it is invalid or nothing fits."""
    keys = {override_key(text) for text in change}
    other_overrides = [
        t for t in checked.overrides if override_key(t) not in keys and override_key(t).partition(".")[0] not in keys
    ]
    try:
        return [*change], plan(check_query([*other_overrides, *change], checked.settings).query)
    except ValueError:
        return None
