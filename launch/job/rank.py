"""A rank of a job: preflight, connect, load, run, write the record."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from comm.base import Communicator
from comm.torch_dist import TorchDistCommunicator
from helix.config import Config, ModelConfig
from helix.devices import COMMUNICATORS, gpu_facts, gpu_name, ranks
from helix.errors import ConfigError, RankError
from helix.layers.specs import Formats
from helix.layers.weights import Weights
from helix.layout import HelixLayout
from helix.log import STDOUT_CLOSED, print_error
from helix.models.decoder import Decoder
from helix.models.draft_layer import DraftLayer
from helix.models.loading import is_untrained, randomize, weights_of
from helix.rank_info import RankInfo
from helix.setup.drafts import CheckedDraft, load_eagle3
from helix.setup.parts import make_formats
from helix.speculation import DraftModel
from helix.worker.kv_cache import free_bytes
from launch.client.errors import REFUSED
from launch.inputs.job_kinds import JobKind
from launch.inputs.preflight import CheckedRun, assemble, check_host, preflight, prepare_run
from launch.inputs.prompt_files import ResultFile
from launch.job import spawn
from launch.job.membership import Job
from launch.job.memory import shortage
from launch.job.report import Console, Phases, describe_weights, log_plan, write_record
from launch.job.spawn import SOCKET
from launch.job.task import JobResult, Task

LOG = logging.getLogger(f"helix.{__name__}")


def prepare(config: Config, job_kind: JobKind, rank_info: RankInfo | None, command: Sequence[str]) -> Callable[[], int]:
    """Checks a job; returns a function that runs this rank, or without a launcher all ranks of this host.

    Args:
        command: Python arguments that start the same job, for ranks that cannot be forked.

    Raises:
        ValueError: the config is wrong.
    """
    run = import_module(job_kind.module).run  # imported before forking, so that forks import nothing
    if rank_info is not None:
        return partial(_rank, config, job_kind, run)
    plan = prepare_run(config, job_kind)
    if plan.finished:
        return partial(_report_finished, config, plan)
    return partial(_launch, plan, job_kind, partial(_rank, config, job_kind, run, plan), command)


def _launch(plan: CheckedRun, job_kind: JobKind, rank: Callable[[], int], command: Sequence[str]) -> int:
    def run_client(socket: Path) -> Coroutine[Any, Any, int]:
        client: Coroutine[Any, Any, int] = import_module(str(job_kind.client)).decode(plan.config, plan.prompts, socket)
        return client

    code = spawn.launch(ranks(plan.config), rank, command, None if job_kind.client is None else run_client)
    if code == spawn.INTERRUPTED:
        kept = "results of finished requests are in decode.output; decode.resume=true runs the rest"
        print("interrupted" if plan.config.decode.output is None else f"interrupted: {kept}", file=sys.stderr)
    return code


def _report_finished(config: Config, plan: CheckedRun) -> int:
    ResultFile(config, plan.prompts).close()
    record = f"; record={config.record} is not written" if config.record is not None else ""
    print(f"decode.output={config.decode.output} already has the results of all {len(plan.prompts)} prompts{record}")
    return 0


def _rank(config: Config, job_kind: JobKind, run: Callable[[Task], JobResult], plan: CheckedRun | None = None) -> int:
    """Runs a rank; `plan` is the checked run if the launcher is this process's parent."""
    rank_info = RankInfo.from_environment()
    assert rank_info is not None, "the launcher sets the rank's environment variables"
    try:
        job = Job(rank_info)
    except RuntimeError as error:
        print_error(f"rank {rank_info.rank}: {error}")
        return 1
    try:
        return _run_job(job, config, job_kind, run, plan)
    except ConfigError as error:
        job.end(f"error: {error}")
    except SystemExit:  # rich raises it on a broken pipe
        job.fail(RankError(STDOUT_CLOSED))
    except Exception as error:
        job.fail(error)


def _run_job(
    job: Job, config: Config, job_kind: JobKind, run: Callable[[Task], JobResult], plan: CheckedRun | None
) -> int:
    phases = Phases()
    problem = None
    if plan is None and job.rank_info.local_rank == 0:  # checks for all ranks of its host
        try:
            device = gpu_name(job.rank_info) if config.comm.backend != "gloo" else None
            writes = job.leads and SOCKET not in os.environ  # else the client has already created the files
            check_host(config, job.rank_info.local_world_size)
            plan = preflight(config, job.rank_info.world_size, device, job_kind, writes)
        except (ValueError, OSError) as error:
            problem = str(error)
    checked = {} if plan is None else {"layout": asdict(plan.layout), "finished": plan.finished}
    facts = job.agree(problem, gpu_facts(job.rank_info) | checked)
    layouts = [HelixLayout(**fact["layout"]) for fact in facts if "layout" in fact]
    if len(distinct := set(map(str, layouts))) > 1:  # hosts differ in prompts or GPUs
        raise ConfigError(f"layout=auto differs between the hosts ({'; '.join(sorted(distinct))}): set the layout")
    if plan is None:
        plan = assemble(config, layouts[0])
    if facts[0]["finished"]:
        if job.leads:
            _report_finished(config, plan)
        job.leave()
        return 0
    phases.mark("preflight")

    job.connect(config.comm.backend, facts, config.comm.timeout_s)
    kind = COMMUNICATORS.get(job.backend, TorchDistCommunicator)
    comm = kind(plan.layout.kvp_groups(), job.device, job.timeout)
    comms: list[Communicator] = [comm]
    if plan.draft is not None:
        comms.append(kind(plan.draft.layout.kvp_groups(), job.device, job.timeout))
    console = Console(plan, job)
    if job.leads:
        log_plan(plan, job)
    phases.mark("connect")

    def load() -> tuple[Decoder, DraftModel | DraftLayer | None]:
        model = _load(plan, config.model, config.seed, comm, console)
        draft: DraftModel | DraftLayer | None = None
        if config.speculation.drafter == "eagle3":
            layer = draft = load_eagle3(config.speculation, model, plan.layout, comm)
            if job.leads:
                LOG.info(layer.description)
        if plan.draft is not None:
            draft_decoder = _load(plan.draft, config.speculation.model, config.seed, comms[1], console)
            draft = DraftModel(draft_decoder, plan.draft.layout, comms[1], config.kv.dtype)
        comm.barrier()
        phases.mark("load")
        return model, draft

    try:
        measured, refused = run(Task(plan, comm, job.backend, load, console, phases))
    except Exception as error:
        loaded, built = "load_s" in phases.seconds, "build_s" in phases.seconds or job_kind.timed
        if (memory_error := shortage(error, config, comm.rank, comm.device, loaded, built)) is not None:
            raise memory_error from error
        raise
    phases.mark(job_kind.name)
    comm.barrier()
    if job.leads and config.record is not None:
        write_record(Path(config.record), plan, job, phases, measured)
    job.leave(*comms)
    return REFUSED if refused and job.leads else 0


def _load(
    plan: CheckedRun | CheckedDraft, config: ModelConfig, seed: int, comm: Communicator, console: Console
) -> Decoder:
    dtype: str = config.dtype
    if dtype == "auto":
        dtype = plan.spec.dtype if comm.device.type == "cuda" else "float32"
    formats = make_formats(config, plan.checkpoint, comm.device.type == "cuda")
    _check_room(plan, getattr(torch, dtype), formats, comm)
    model = Decoder(plan.spec, plan.layout, comm, getattr(torch, dtype), comm.device, formats)
    _check_activations(config, model.weights, "speculation.model" if isinstance(plan, CheckedDraft) else "model")
    if plan.checkpoint is None:
        randomize(model.weights, seed)
    else:
        with console.progress("loading weights", len(model.weights.slices)) as advance:
            plan.checkpoint.load(model.weights, advance)
    if comm.rank == 0:
        LOG.info("%s%s", "the draft model's " if isinstance(plan, CheckedDraft) else "", describe_weights(model))
        for what in () if plan.checkpoint is None else plan.checkpoint.skipped:
            LOG.info("%s: skipped %s", config.path, what)
        if plan.checkpoint is not None and is_untrained(model.weights):
            LOG.warning(
                "the weights in %s look random: every norm has its initial value. This happens if a text-only class "
                "saved the text part of a vision-language checkpoint: use the original checkpoint",
                config.path,
            )
    return model


def _check_activations(config: ModelConfig, weights: Weights, key: str) -> None:
    """Raises ConfigError if `activations` rounds those of no matrix; every rank declares the same tensors."""
    found = {weights.formats(s.name) for s in weights.slices}
    if config.activations == "fp8" and not any(each is not None and each.fp8_rows for each in found):
        raise ConfigError(
            f"{key}.activations=fp8 rounds the activations of e4m3 weights, and with {key}.weights={config.weights} "
            f"the model has none here: set {key}.activations=auto, or {key}.weights=fp8, which keeps e4m3 weights on "
            "every device and rounds unquantized ones"
        )


def _check_room(plan: CheckedRun | CheckedDraft, dtype: torch.dtype, formats: Formats, comm: Communicator) -> None:
    """Raises ConfigError, before allocating anything, if a rank's weights exceed its free memory."""
    needed = weights_of(plan.spec, plan.layout, comm.rank, dtype, formats).bytes
    ranks = comm.all_gather_object((needed, free_bytes(comm.device), comm.rank))
    needed, free, rank = max(ranks, key=lambda r: r[0] - r[1])
    if needed > free:
        raise ConfigError(
            f"the weights of rank {rank} take {needed / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')} "
            f"({plan.layout}), but only {free / 1e9:.1f} GB of memory is free: use more ranks, a layout with fewer "
            "weights per rank or, without a checkpoint, fewer layers (model.config.num_hidden_layers)"
        )
