"""From a config to tokens: the whole of a run, on every rank."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NoReturn, cast, get_type_hints

import hydra
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from comm.base import Communicator
from comm.stand_in import StandInCommunicator
from comm.symm_mem import SymmMemCommunicator
from comm.torch_dist import TorchDistCommunicator
from helix.attention.dense import DenseAttention
from helix.config import Config, ModelConfig
from helix.kv_cache import free_bytes
from helix.loading import randomize
from helix.models import Decoder
from helix.speculation import DraftModel
from launch import auto, decode, local
from launch.bench_comm import time_collectives
from launch.bench_hopb import ablate
from launch.bench_prefill import time_prompts
from launch.distributed import AlikeError, Job, Place, gpu_facts, gpu_name
from launch.preflight import DraftPlan, RunPlan, load_tokenizer, preflight, weights_of
from launch.prompts import ResultFile
from launch.report import Console, Phases, write_record
from launch.timing import time_steps

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = {"symm_mem": SymmMemCommunicator, "stand_in": StandInCommunicator}
REFUSED = 3  # exit code where requests were refused and the others served

OmegaConf.register_new_resolver("root", lambda: str(ROOT))
ConfigStore.instance().store(name="schema", node=Config)


def main() -> None:
    """Composes the config, runs it and exits with the run's code."""
    if {"-m", "--multirun"} & set(sys.argv[1:]):
        why = "; under torchrun every rank would run the whole sweep" if "TORCHELASTIC_RUN_ID" in os.environ else ""
        sys.exit(f"error: one run has one config{why}: for several use `python -m launch.sweep -m ...`")
    try:
        check_overrides(sys.argv[1:], sweeps=False)
    except ValueError as error:
        _refuse(error)
    _composed()


@hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name="config")
def _composed(config: DictConfig) -> None:
    # Left by exit and not by return: Hydra's main passes no value on.
    try:
        checked = as_config(config)
    except ValueError as error:
        _refuse(error)
    sys.exit(run(checked, HydraConfig.get().overrides.task))


def _refuse(error: ValueError) -> NoReturn:
    """Ends this process; of a launcher's ranks, which all come here, the first says why."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(2.0)  # the first to exit takes the others down
        sys.exit(1)
    sys.exit(f"error: {error}")


def check_overrides(arguments: Sequence[str], sweeps: bool) -> None:
    """Looks for mistakes of a command line of which Hydra would say something else.

    Args:
        sweeps: several values of a key, `layout.kvp=1,2`, are none.

    Raises:
        ValueError: a key that there is not, or several values.
    """
    parser = OverridesParser.create()
    for text in arguments:
        try:
            override = parser.parse_override(text)
        except HydraException:  # an option, or what Hydra explains
            continue
        key = override.key_or_group
        if override.is_sweep_override() and not sweeps:
            raise ValueError(f"{text}: one run has one config; for several use `python -m launch.sweep -m ...`")
        if override.type is OverrideType.CHANGE and not key.startswith("hydra") and not (ROOT / "conf" / key).is_dir():
            _check_key(key)


def _check_key(key: str) -> None:
    schema: Any = Config
    for depth, name in enumerate(parts := key.split(".")):
        if not is_dataclass(schema):  # a dict, of any keys
            return
        kinds = get_type_hints(schema)
        if name not in kinds:
            prefix = "".join(f"{part}." for part in parts[:depth])
            raise ValueError(f"{key} is unknown; known: {', '.join(prefix + known for known in kinds)}")
        schema = kinds[name]


def as_config(config: DictConfig) -> Config:
    """The dataclasses behind a composed config.

    Raises:
        ValueError: a key that they do not have was added to it (`+key=value`).
    """
    refuse_unknown(config, Config, "")
    return cast(Config, OmegaConf.to_object(config))


def refuse_unknown(config: DictConfig, schema: type, prefix: str) -> None:
    """Raises ValueError for a key that is no field of the dataclass `schema`, or of those in it."""
    kinds = get_type_hints(schema)
    for key, value in config.items_ex(resolve=False):
        name = str(key)
        if name not in kinds:
            raise ValueError(f"{prefix}{name} is unknown; known: {', '.join(prefix + known for known in kinds)}")
        if is_dataclass(kinds[name]) and isinstance(value, DictConfig):
            refuse_unknown(value, cast(type, kinds[name]), f"{prefix}{name}.")


def run(config: Config, overrides: Sequence[str]) -> int:
    """Runs a config on this rank, or on new ranks where no launcher started this process; returns the exit code."""
    try:
        place = Place.from_environment()
        if place is None:
            return local.launch(auto.ranks(config), overrides)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    job = Job(place)
    try:
        return _run_rank(job, config)
    except KeyboardInterrupt:  # who started the ranks says so
        os._exit(local.INTERRUPTED)
    except AlikeError as error:
        job.end(error)
    except Exception as error:
        job.fail(error)


def _run_rank(job: Job, config: Config) -> int:
    phases = Phases()
    plan, tokenizer, results, problem = None, None, None, None
    try:
        device = gpu_name(job.place) if config.comm.backend != "gloo" else None
        plan = preflight(config, job.place.rank, job.place.world_size, device)
        if job.leads:
            tokenizer = load_tokenizer(config)
            results = ResultFile(config, plan.prompts) if plan.prompts else None  # there are none in a benchmark
    except (ValueError, OSError) as error:
        problem = str(error)
    found = {"layout": str(plan and plan.layout), "finished": plan is not None and plan.finished}
    facts = job.agree(problem, gpu_facts(job.place) | found)
    assert plan is not None  # or nobody would have agreed
    if len(chosen := {fact["layout"] for fact in facts}) > 1:  # hosts with other prompts or other GPUs
        raise AlikeError(f"layout=auto came out differently on the ranks ({'; '.join(sorted(chosen))}): set the layout")
    if facts[0]["finished"]:  # a resumed run that has nothing left needs no model
        if results is not None:
            results.close()
            record = f"; record={config.record} is not written" if config.record is not None else ""
            count = len(plan.prompts)
            print(f"decode.output={config.decode.output} holds the results of all {count} prompts already{record}")
        job.leave()
        return 0
    phases.mark("preflight")

    job.connect(config.comm.backend, facts, config.comm.timeout_s)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on what was done is kept (torchrun_entry.py)
    kind = BACKENDS.get(job.backend, TorchDistCommunicator)
    comm = kind(plan.layout.kvp_groups(), job.device, job.timeout)
    comms: list[Communicator] = [comm]
    if plan.draft is not None:
        comms.append(kind(plan.draft.layout.kvp_groups(), job.device, job.timeout))
    console = Console(plan, job)
    phases.mark("connect")

    measured: dict[str, Any]
    refused = 0
    if config.bench.kind == "comm":
        measured = {"collectives": time_collectives(comm)}
    else:
        model = _load(plan, config.model, config.seed, comm, console)
        draft = None
        if plan.draft is not None:
            own = _load(plan.draft, config.speculation.model, config.seed, comms[1], console)
            draft = DraftModel(own, plan.draft.layout, comms[1])
        comm.barrier()
        phases.mark("load")
        if config.bench.kind == "decode":
            measured = time_steps(plan, comm, model, draft, console)
        elif config.bench.kind == "hopb":
            measured = {"hopb": ablate(plan, comm, model, job.backend, console)}
        elif config.bench.kind == "prefill":
            measured = time_prompts(plan, comm, model, console)
        else:
            measured, refused = decode.decode(plan, comm, model, draft, tokenizer, results, console)
    phases.mark(config.bench.kind if config.bench.kind != "none" else "decode")
    comm.barrier()
    if job.leads and config.record is not None:
        write_record(Path(config.record), plan, job, phases, measured)
    job.leave(*comms)
    return REFUSED if refused and job.leads else 0


def _load(plan: RunPlan | DraftPlan, config: ModelConfig, seed: int, comm: Communicator, console: Console) -> Decoder:
    dtype = config.dtype
    if dtype == "auto":
        dtype = plan.spec.dtype if comm.device.type == "cuda" else "float32"
    _check_room(plan, getattr(torch, dtype), comm)
    model = Decoder(plan.spec, plan.layout, comm, DenseAttention(), getattr(torch, dtype), comm.device)
    if plan.checkpoint is None:
        randomize(model.weights, seed)
    else:
        with console.progress("loading", len(model.weights.slices)) as advance:
            plan.checkpoint.load(model.weights, advance)
    console.loaded(model)
    return model


def _check_room(plan: RunPlan | DraftPlan, dtype: torch.dtype, comm: Communicator) -> None:
    """Raises AlikeError where the weights of a rank take more than the memory it has free, before any is taken."""
    needed = weights_of(plan.spec, plan.layout, comm.rank, dtype).bytes
    ranks = comm.all_gather_object((needed, free_bytes(comm.device), comm.rank))
    needed, free, rank = max(ranks, key=lambda r: r[0] - r[1])
    if needed > free:
        raise AlikeError(
            f"the weights of rank {rank} take {needed / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')} "
            f"({plan.layout}), but {free / 1e9:.1f} GB of its memory are free: take more ranks, a layout whose ranks "
            "hold less, or, of a shape alone, fewer layers (model.config.num_hidden_layers)"
        )
