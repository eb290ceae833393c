"""Validation of a config before anything starts: everything that can be wrong with it is reported here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from comm import emulated
from helix.config import Config, check
from helix.devices import choose_backend, ranks
from helix.layout import HelixLayout
from helix.models import DecoderSpec
from helix.models.loading import Checkpoint
from helix.place import Place
from helix.setup.checks import (
    CheckedDraft,
    check_attention,
    check_eagle3,
    check_layout,
    check_own_sequences,
    check_self_drafts,
    check_states,
    make_checkpoint,
    make_draft,
)
from helix.setup.parts import check_cache, check_weights, make_layout, make_spec, models_of, resolved_config
from helix.tokenizer import check_tokenizer_files, has_tokenizer
from launch.inputs.auto_layout import choose
from launch.inputs.files import check_record, check_writable
from launch.inputs.prompts import PromptFile, PromptLine, check_defaults, kept_results
from launch.inputs.work import DECODE, Work, work_of

TIMED = "python -m benchmarks.entry bench=decode"  # a benchmark's command, which says only what takes how long


@dataclass(frozen=True)
class CheckedRun:
    """A config whose parts fit each other, the machine aside.

    Attributes:
        checkpoint: weights to load; None: random ones.
        draft: the model of speculation.drafter=model.
        prompts: content of decode.prompts; empty in a benchmark.
        finished: decode.output has results of all prompts, as found by rank 0; False on other ranks.
        reason: reason of layout=auto for this layout; None: it was given.
        resolved: the config of each model as it is run, overrides included, by the key under which the model is set.
    """

    config: Config
    layout: HelixLayout
    spec: DecoderSpec
    checkpoint: Checkpoint | None
    draft: CheckedDraft | None
    prompts: Sequence[PromptLine]
    finished: bool
    reason: str | None
    resolved: dict[str, dict[str, Any]]


def preflight(
    config: Config,
    rank: int,
    world_size: int,
    device: str | None = None,
    work: Work | None = None,
    writes: bool = True,
) -> CheckedRun:
    """Checks a config and returns the run; errors are the same on every rank, except those of a rank's own slices.

    Args:
        device: name of this rank's GPU, for layout=auto; None on a CPU.
        work: its work; None: that of a run.
        writes: whether rank 0 checks that files can be written; else the client has begun to write them.

    Raises:
        ValueError: the config is wrong; the message names the key, its value and the remedy.
    """
    check(config)
    check_defaults(config.decode)
    work = work_of(config) if work is None else work
    auto = config.layout.mode == "auto"
    layout = HelixLayout.create(kvp=world_size) if auto else make_layout(config.layout)
    if config.comm.backend == "emulated":
        _check_emulated(config, work, layout, world_size)
        rank, world_size = emulated.rank_of(rank, world_size, layout.world_size), layout.world_size
    if layout.world_size != world_size:
        raise ValueError(
            f"{layout.ranks}, but {world_size} were started: use torchrun --nproc-per-node={layout.world_size} or "
            f"change {'layout.dp' if layout.mode == 'dp' else 'layout.kvp or layout.tpa'}"
        )
    spec = make_spec(config)
    check_weights(config.model, "model")
    prompts = _prompts(config, work)
    check_cache(config, spec)
    reason = None
    if auto:
        layout, reason = choose(config, spec, prompts, world_size, device, work.load)
    check_layout(layout, spec)
    check_attention(config, layout, spec)
    check_self_drafts(config, spec)
    check_own_sequences(config, layout)
    check_states(config, layout, spec)
    work.check(prompts)
    checkpoint, spec = make_checkpoint(config.model, spec, layout, rank)
    draft = make_draft(config, layout, spec, rank) if config.speculation.drafter == "model" else None
    if config.speculation.drafter == "eagle3":
        check_eagle3(config, layout, spec, rank)
    files = {"decode.prompts": config.decode.prompts, "decode.output": config.decode.output, "record": config.record}
    files |= work.files
    given = {key: path for key, path in files.items() if path is not None}
    if len({os.path.realpath(path) for path in given.values()}) < len(given):
        *all_but_last, last = (f"{key}={path}" for key, path in given.items())
        raise ValueError(f"{', '.join(all_but_last)} and {last} must be different files")
    finished = False
    if rank == 0 and writes:
        for key, value in files.items():
            if value is not None and key != "decode.prompts":
                check_writable(key, Path(value))
        if config.record is not None:
            check_record(Path(config.record))
        finished = len(prompts) > 0 and bool((kept_results(config, prompts) >= 0).all())
    resolved = {key: resolved_config(model) for key, model in models_of(config).items()}
    return CheckedRun(config, layout, spec, checkpoint, draft, prompts, finished, reason, resolved)


def prepared(config: Config, work: Work | None = None) -> CheckedRun:
    """Checks all that can be checked without ranks; returns the run, as rank 0 of those that this host starts.

    Raises:
        ValueError: as in `preflight`; or there are fewer GPUs than comm.backend needs.
    """
    check(config)
    world_size = ranks(config)
    plan = preflight(config, 0, world_size, work=work)
    check_tokenizer_files(config.model.path)
    # Whether GPUs reach each other they say themselves.
    here = {"gpus": torch.cuda.device_count(), "peers": True}
    choose_backend(config.comm.backend, Place(0, world_size, 0, world_size), [here])
    return plan


def _check_emulated(config: Config, work: Work, layout: HelixLayout, processes: int) -> None:
    """Raises ValueError if these processes cannot emulate ranks of the layout."""
    what = "comm.backend=emulated: one or two GPUs emulate ranks of a larger layout"
    if not work.timed:
        raise ValueError(f"{what}, and tokens mean nothing: use `{TIMED}`, or bench=comm, hopb or prefill there")
    if config.layout.mode == "auto" or not 1 <= processes <= min(emulated.PROCESSES, layout.world_size - 1):
        raise ValueError(
            f"{what}: {processes} processes were started for {layout}; start {emulated.PROCESSES} at most, and set "
            "layout.kvp and layout.tpa to more"
        )


def _prompts(config: Config, work: Work) -> Sequence[PromptLine]:
    """Reads the prompts to decode."""
    if work.prompts == "none" or (work.prompts == "taken" and config.decode.prompts is None):
        return []
    if config.decode.prompts is None:
        raise ValueError(f"nothing to do: set decode.prompts=FILE.jsonl, or time decode steps with `{TIMED}`")
    prompts = PromptFile(Path(config.decode.prompts))
    if work is not DECODE and prompts.has_bodies:
        raise ValueError(f'{config.decode.prompts} holds messages, forms or a batch: measure "prompt" or "prompt_ids"')
    if prompts.has_text and not has_tokenizer(config.model.path):
        why = "a shape without model.path has no tokenizer"
        if config.model.path is not None:
            why = f"model.path={config.model.path} has no tokenizer.json"
        raise ValueError(f'{config.decode.prompts} holds text, but {why}: use "prompt_ids"')
    return prompts
