"""Questions to the planner, as a run's settings and a few more; and the command that runs an answer."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite

from helix.checks import check as check_config
from helix.checks import check_cache
from helix.config import AttentionConfig, Config, LayoutConfig, SpeculationConfig
from helix.hub import local_directory
from helix.layout import HelixLayout
from helix.planner.hardware import Hardware
from helix.planner.plan import (
    CHUNKS,
    MODES,
    PlannedLayout,
    Question,
    Ranking,
    enough_gpus,
    largest_batch,
    longest_context,
    plan,
)
from helix.schema import types
from helix.setup.parts import make_spec
from launch.inputs.auto_layout import layer_drafts, planned
from launch.inputs.comparing import sparse_pays_from
from launch.inputs.compose import composed
from launch.inputs.front import Settings
from launch.inputs.hardware import device_here, hardware_of, load_hardware
from launch.inputs.questions import PLAN, PlanConfig

WIDTHS = ("kvp", "tpa", "tpf", "ep", "dp")
FP8 = ("kv.dtype=fp8", "model.weights=fp8")


OWN = {*types(PlanConfig)} - {*types(Config)}


@dataclass(frozen=True)
class CheckedQuestion:
    """A question to the planner, as it was typed and as the planner takes it.

    Attributes:
        overrides: as typed, in Hydra's grammar; with the dtype, where that of a checkpoint in float32 is changed.
        settings: by which they were composed.
    """

    overrides: tuple[str, ...]
    settings: Settings
    config: PlanConfig
    question: Question

    @cached_property
    def values(self) -> dict[str, str]:
        """Values as typed, by key."""
        return {key_of(text): text.partition("=")[2] for text in self.overrides}

    @property
    def model(self) -> str:
        """The model's directory, or its name, as typed."""
        return self.values.get("model.path", self.values.get("model", "the model"))

    def runtime(self, choice: PlannedLayout) -> list[str]:
        """Returns the overrides with which the runtime takes this layout, beside the model's."""
        q, layout, sparse, tier = self.question, choice.layout, self.question.options.sparse, self.question.options.tier
        tokens = 0 if tier is not None else None if sparse is None else sparse_pays_from(q, choice)
        chosen = [f"layout={layout.mode}"] if layout.mode != "helix" else []
        widths = {key: getattr(layout, key) for key in WIDTHS if key != "tpf"}  # which the others leave
        chosen += [f"layout.{key}={width}" for key, width in widths.items() if width > 1]
        left_out = {*OWN, "layout"}
        config = self.config
        if choice.gamma:
            chosen += [f"speculation.gamma={choice.gamma}"]
        else:
            left_out, config = left_out | {"speculation"}, replace(config, speculation=SpeculationConfig())
        if tokens is None:
            left_out, config = left_out | {"attention"}, replace(config, attention=AttentionConfig())
        elif "attention.from_tokens" not in self.values:
            chosen += [f"attention.from_tokens={tokens}"]
        if choice.append_block != config.blocks.append:
            chosen += [f"kv.append_block={choice.append_block}"]
        if tier is not None:
            host = tier.host_bytes if isfinite(tier.host_bytes) else 1.02 * choice.host_bytes
            gpu = tier.gpu_bytes or q.options.memory_fraction * (choice.free_bytes + choice.kv_bytes)
            chosen += [f"kv.host_bytes={host:.3g}", f"kv.gpu_bytes={gpu:.3g}"]
        if config.batch is not None or q.ttl_s is not None:
            chosen += [f"decode.max_batch={choice.batch}"]
        mine = {*map(key_of, chosen), "model", "model.path"}
        keys = [(text, key_of(text)) for text in self.overrides]
        return [t for t, key in keys if key not in mine and key.partition(".")[0] not in left_out] + chosen

    def command(self, choice: PlannedLayout) -> list[str]:
        """Returns the words of the command that serves this layout, quoted for a shell; a shape's directory is DIR."""
        model = "DIR" if self.config.model.path is None else self.model
        return [shlex.quote(word) for word in ("helix", "serve", model, *self.runtime(choice))]


def key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def check_question(overrides: Sequence[str], settings: Settings = PLAN.settings) -> CheckedQuestion:
    """Composes a question.

    Raises:
        ValueError: a value is wrong or missing, or the runtime does not know the model's family.
    """
    overrides = [re.sub(r"^modes=(?=[^\[])(.*)", r"modes=[\1]", text) for text in overrides]  # modes=tp,helix is a list
    typed = {key_of(text) for text in overrides}
    config = composed([*([] if typed & {"layout", "layout.mode"} else ["layout=auto"]), *overrides], settings)
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
    check_cache(config, HelixLayout.create(), spec)
    if "attention.from_tokens" not in typed:
        config.attention.from_tokens = 0  # sparse at every length; the command says from where on it pays
    if config.context > spec.max_positions:
        model = next((t.partition("=")[2] for t in overrides if key_of(t) in ("model", "model.path")), "the model")
        raise ValueError(
            f"context={config.context} exceeds {model}'s {spec.context}: give at most {spec.max_positions}"
        )
    given = [(key, getattr(layout, key)) for key in WIDTHS]
    options = planned(config, spec)
    if options.tier is not None:
        tier = replace(options.tier, hits=config.hits, ahead=config.guessed if kv.ahead else None)
        options = replace(options, tier=tier)
    question = Question(
        replace(spec, draft=None, taps=()),
        pick_hardware(config.hardware, config.comm.backend),
        config.gpus,
        config.context,
        config.batch if config.batch is not None or config.ttl_ms is not None else 1,
        None if config.ttl_ms is None else config.ttl_ms / 1e3,
        config.acceptance,
        speculation.gamma if "speculation.gamma" in typed else None,
        speculation.sparsity if speculation.drafter == "sparse" else None,
        layer_drafts(speculation, spec),
        tuple(config.modes) or (MODES if layout.mode == "auto" else (layout.mode,)),
        tuple((key, n) for key, n in given if n is not None and (f"layout.{key}" in typed or n != _unset(key))),
        CHUNKS[:1] if config.hopb.chunks == "none" else CHUNKS,
        options,
    )
    return CheckedQuestion(tuple(overrides), settings, config, question)


def _unset(width: str) -> int | None:
    default: int | None = getattr(LayoutConfig(), width)
    return default


def _check(config: PlanConfig, typed: set[str]) -> None:
    """Raises ValueError for a value out of its range, or one of which there are no predictions."""
    drafter, acceptance = config.speculation.drafter, config.acceptance
    if drafter == "none" and acceptance is not None:
        raise ValueError(f"acceptance={acceptance:g} is of drafts, and there are none: set speculation=ngram")
    if drafter == "model":
        raise ValueError("speculation.drafter=model is not planned: nothing is known of a smaller model's drafts")
    if drafter != "none" and acceptance is None:
        raise ValueError(f"speculation.drafter={drafter} needs acceptance: the probability that a draft is accepted")
    if drafter == "eagle3" and config.speculation.path is None:
        raise ValueError("speculation.drafter=eagle3 needs speculation.path=DIR, the directory of its checkpoint")
    if drafter == "sparse" and config.attention.policy != "dense":
        raise ValueError("speculation.drafter=sparse is verified over all keys: leave out attention")
    for key, of in (("hits", "kv.tier=host"), ("guessed", "kv.ahead=true")):
        share, set_ = getattr(config, key), config.kv.tier == "host" and (key == "hits" or config.kv.ahead)
        if key in typed and not set_:
            raise ValueError(f"{key}={share:g} is of {of}: add it, or leave out {key}")
    if config.hopb.chunks not in ("auto", "best", "none"):
        raise ValueError(f"hopb.chunks={config.hopb.chunks}: the planner finds the best number itself: leave out hopb")
    if config.kv.append_block is not None:
        raise ValueError(f"kv.append_block={config.kv.append_block}: the planner finds the best itself: leave it out")
    if config.comm.backend not in ("auto", "symm_mem", "nccl"):
        raise ValueError(f"comm.backend={config.comm.backend} is not predicted; choose one of auto, symm_mem, nccl")
    if config.modes and config.layout.mode != "auto":
        raise ValueError(f"modes={','.join(config.modes)} and layout.mode={config.layout.mode}: give one of them")
    if config.kv.tier == "host" and config.kv.host_bytes is None:
        config.kv.host_bytes = inf  # as much as they take
    check_config(config)


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


def remedies(checked: CheckedQuestion) -> list[tuple[list[str], Ranking]]:
    """Finds changes of a question for which nothing fits, each with the ranking that it brings.

    First those for the same work on the same GPUs, in FP8; then more GPUs; then few keys out of host memory; last less
    work. Each is planned as if it were typed.
    """
    q, config = checked.question, checked.config
    offload = ["kv.tier=host", *(["attention=block_sparse"] if config.attention.policy == "dense" else [])]
    found = [_changed(checked, [change]) for change in FP8]
    if not any(found):
        found.append(_changed(checked, FP8))
    if (gpus := enough_gpus(q)) is not None:
        found.append(_changed(checked, [f"gpus={gpus}"]))
    if config.kv.tier == "gpu":
        found.append(_changed(checked, offload))
    if (q.batch or 1) > 1 and (batch := largest_batch(q)):
        found.append(_changed(checked, [f"batch={batch}"]))
    if context := longest_context(q):
        found.append(_changed(checked, [f"context={context // 1024}K"]))
    return [change for change in found if change is not None]


def _changed(checked: CheckedQuestion, change: Sequence[str]) -> tuple[list[str], Ranking] | None:
    """Plans a question with further overrides; None where it cannot be, or nothing fits."""
    keys = {key_of(text) for text in change}
    kept = [t for t in checked.overrides if key_of(t) not in keys and key_of(t).partition(".")[0] not in keys]
    try:
        return [*change], plan(check_question([*kept, *change], checked.settings).question)
    except ValueError:
        return None
