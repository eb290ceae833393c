"""Validates a config before anything starts: all errors in it are reported here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import floor
from pathlib import Path
from typing import Any

import torch

from comm import emulated
from helix.checks import check, check_cache, check_model, check_weights
from helix.config import Config
from helix.devices import choose_backend, ranks
from helix.files import is_directory
from helix.layout import HelixLayout
from helix.models import DecoderSpec
from helix.models.loading import Checkpoint
from helix.rank_info import RankInfo
from helix.setup.drafts import CheckedDraft, check_draft_files, check_eagle3, check_tensors, make_draft, open_checkpoint
from helix.setup.parts import make_layout, make_spec, models_of, resolved_config
from helix.tokenizer import check_tokenizer_files, has_tokenizer, without_tokenizer
from helix.worker.host_store import available_memory
from launch.inputs.auto_layout import choose
from launch.inputs.files import check_record, check_writable
from launch.inputs.hardware import device_here
from launch.inputs.job_kinds import DECODE, JobKind, select_job_kind
from launch.inputs.prompt_files import PromptFile, PromptLine, check_defaults, existing_results

TIMED = "helix bench bench=decode"  # suggested where only times matter


@dataclass(frozen=True)
class CheckedRun:
    """A consistent config, not yet checked against the machine.

    Attributes:
        checkpoint: weights to load; None: random weights.
        draft: the model of speculation.drafter=model.
        resolved: config of each model with overrides applied, by the key of the model.
        prompts: content of decode.prompts; empty in benchmarks, and on ranks that did not check it.
        finished: decode.output already has the results of all prompts.
        reason: why layout=auto chose this layout; None: the layout was set.
    """

    config: Config
    layout: HelixLayout
    spec: DecoderSpec
    checkpoint: Checkpoint | None
    draft: CheckedDraft | None
    resolved: dict[str, dict[str, Any]]
    prompts: Sequence[PromptLine] = ()
    finished: bool = False
    reason: str | None = None


def preflight(
    config: Config, world_size: int, device: str | None = None, job_kind: JobKind | None = None, writes: bool = True
) -> CheckedRun:
    """Checks a config, without the machine; once, for all ranks of a host.

    Args:
        world_size: number of processes that were or will be started.
        device: name of the ranks' GPU, for layout=auto; None on CPUs.
        job_kind: None: that of a run.
        writes: whether this process creates rank 0's files.

    Raises:
        ValueError: the config is wrong; the message has the key, its value and the remedy.
    """
    check(config)
    check_defaults(config.decode)
    job_kind = select_job_kind(config) if job_kind is None else job_kind
    auto = config.layout.mode == "auto"
    layout = HelixLayout.create(kvp=world_size) if auto else make_layout(config.layout)
    if config.comm.backend == "emulated":
        _check_emulated(config, job_kind, layout, world_size)
    elif layout.world_size != world_size:
        raise ValueError(
            f"{layout.ranks}, but {world_size} were started: use torchrun --nproc-per-node={layout.world_size} or "
            f"change {'layout.dp' if layout.mode == 'dp' else 'layout.kvp or layout.tpa'}"
        )
    spec = make_spec(config)
    check_weights(config.model, "model")
    prompts = _prompts(config, job_kind)
    reason = None
    if auto:
        check_cache(config, layout, spec)
        layout, reason = choose(config, spec, prompts, world_size, device, job_kind.load)
    check_model(config, layout, spec)
    job_kind.check(prompts)
    run = assemble(config, layout)
    check_tensors(run.checkpoint, run.spec)
    if run.draft is not None:
        check_draft_files(config, run.draft)
    if config.speculation.drafter == "eagle3":
        check_eagle3(config, layout, run.spec)
    finished = _check_files(config, job_kind, prompts) if writes else False
    return replace(run, prompts=prompts, finished=finished, reason=reason)


def assemble(config: Config, layout: HelixLayout) -> CheckedRun:
    """Creates the run of a config that was already checked, on any rank; reads no prompts."""
    checkpoint, spec = open_checkpoint(config.model, make_spec(config))
    draft = make_draft(config, layout, spec) if config.speculation.drafter == "model" else None
    resolved = {key: resolved_config(model) for key, model in models_of(config).items()}
    return CheckedRun(config, layout, spec, checkpoint, draft, resolved)


def prepare_run(config: Config, job_kind: JobKind | None = None) -> CheckedRun:
    """Checks everything that needs no ranks, for a job that this host starts; returns the run.

    Raises:
        ValueError: as in `preflight`; or there are fewer GPUs than comm.backend needs.
    """
    world_size, gpus = ranks(config), torch.cuda.device_count()
    device = device_here() if gpus >= world_size and config.comm.backend != "gloo" else None
    check_host(config, world_size)
    run = preflight(config, world_size, device, job_kind)
    check_tokenizer_files(config.model.path)
    # Peer access between the GPUs is checked later, by the ranks.
    choose_backend(config.comm.backend, RankInfo(0, world_size, 0, world_size), [{"gpus": gpus, "peers": True}])
    return run


def check_host(config: Config, local_ranks: int) -> None:
    """Checks that this host has the memory and the disk space that each of its ranks is to use.

    Raises:
        ValueError: it has less.
    """
    kv = config.kv
    offload_bytes = kv.offload_host_bytes if kv.offload == "host" else 0.0
    wanted = [("kv.prefix_host_bytes", kv.prefix_host_bytes, "memory", available_memory)]
    wanted += [("kv.offload_host_bytes", offload_bytes or 0.0, "memory", available_memory)]
    if kv.prefix_dir is not None:
        wanted += [("kv.prefix_disk_bytes", kv.prefix_disk_bytes, "disk space", partial(disk_space, kv.prefix_dir))]
    for key, each, what, available in wanted:
        if each and each * local_ranks > (free := available()):
            at_most = floor(free / local_ranks / 1e6) * 1e6
            raise ValueError(
                f"{key}={each:.3g} is per rank, {each * local_ranks / 1e9:.1f} GB of {what} for the {local_ranks} "
                f"ranks on this host, which has {free / 1e9:.1f} GB: set at most {at_most:.4g}"
            )


def disk_space(directory: str) -> int:
    """Counts the bytes that files in a directory may have: what is free, and what they have already."""
    path = Path(directory)
    free = shutil.disk_usage(next(p for p in (path, *path.absolute().parents) if is_directory(p))).free
    return free + sum(file.stat().st_blocks * 512 for file in path.glob("*/*/*.seg"))


def _check_files(config: Config, job_kind: JobKind, prompts: Sequence[PromptLine]) -> bool:
    """Checks the files that a run writes; returns whether decode.output already has the results of all prompts."""
    files = {"decode.prompts": config.decode.prompts, "decode.output": config.decode.output, "record": config.record}
    given = {key: path for key, path in (files | job_kind.files).items() if path is not None}
    if len({os.path.realpath(path) for path in given.values()}) < len(given):
        *all_but_last, last = (f"{key}={path}" for key, path in given.items())
        raise ValueError(f"{', '.join(all_but_last)} and {last} must be different files")
    for key, path in given.items():
        if key != "decode.prompts":
            check_writable(key, Path(path))
    if config.record is not None:
        check_record(Path(config.record))
    return len(prompts) > 0 and bool((existing_results(config, prompts) >= 0).all())


def _check_emulated(config: Config, job_kind: JobKind, layout: HelixLayout, processes: int) -> None:
    what = "comm.backend=emulated: one or two GPUs emulate ranks of a larger layout"
    if not job_kind.timed:
        raise ValueError(f"{what}, so tokens are meaningless: use `{TIMED}`, or bench=comm, hopb or prefill there")
    if config.layout.mode == "auto" or not 1 <= processes <= min(emulated.PROCESSES, layout.world_size - 1):
        raise ValueError(
            f"{what}: {processes} processes were started for {layout}; start at most {emulated.PROCESSES}, and raise "
            "layout.kvp or layout.tpa"
        )


def _prompts(config: Config, job_kind: JobKind) -> Sequence[PromptLine]:
    if job_kind.prompts == "none" or (job_kind.prompts == "taken" and config.decode.prompts is None):
        return []
    if config.decode.prompts is None:
        raise ValueError(f"no prompts: set decode.prompts=FILE.jsonl, or time decode steps with `{TIMED}`")
    prompts = PromptFile(Path(config.decode.prompts))
    if job_kind is not DECODE and prompts.has_bodies:
        raise ValueError(f'{config.decode.prompts} has messages, structured outputs or a batch: use "prompt"')
    if prompts.has_text and not has_tokenizer(config.model.path):
        why = "a shape without model.path has no tokenizer"
        if config.model.path is not None:
            why = f"model.path={config.model.path} has {without_tokenizer(config.model.path)}"
        raise ValueError(f'{config.decode.prompts} has text, but {why}: use "prompt_ids"')
    return prompts
