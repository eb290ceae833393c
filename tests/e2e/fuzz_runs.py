"""Runs a fuzz case on its ranks: makes the engine of its settings, serves the requests, and counts events."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from comm.base import Communicator
from comm.loopback import LoopbackWorld, run_ranks
from comm.symm_mem import SymmMemCommunicator
from comm.torch_dist import TorchDistCommunicator
from helix.attention.policies import budget_of
from helix.config import Config
from helix.engine.core import Engine
from helix.engine.draft_policy import DraftPolicy
from helix.engine.inbox import Inbox
from helix.engine.prefix_moves import PrefixMoves
from helix.engine.request import Request
from helix.engine.scheduler_output import StepPlan
from helix.layers.specs import unquantized
from helix.layout import HelixLayout
from helix.models import DecoderSpec
from helix.models.decoder import Decoder
from helix.models.draft_layer import DraftLayer
from helix.models.loading import Checkpoint
from helix.sampling_params import SamplingParams
from helix.setup.drafts import load_eagle3
from helix.setup.engine import build_engine
from helix.speculation import DraftModel, ModelDrafter, SparseDrafter
from helix.worker.offloaded_cache import OffloadedCache
from helix.worker.offloaded_latents import OffloadedLatents
from launch.inputs.preflight import CheckedRun, preflight
from tests.e2e.fuzz_cases import Case, CaseRequest
from tests.e2e.masked_attention import MaskedAttention
from tests.sequences import generated, resize

SMALL_CHUNKS: dict[str, Any] = {  # chunks of up to 64 tokens are captured, or not
    "helix.worker.graph_keys.SIZES": (8, 14, 22, 27, 50, 70),
    "helix.worker.graph_keys.LONG": 70,
    "helix.worker.graph_keys.LAUNCHED": 20,
    "helix.worker.graph_keys.SEQUENCES": (2, 4),
    "helix.worker.graph_keys.DEEP": 16,
    "helix.layers.indexer.MAX_SCORES": 512,
}


def _always(value: object) -> Callable[..., object]:
    return lambda *args: value


# By a case's `code_paths`: patches, and the function whose calls are counted under that name.
CODE_PATHS: dict[str, dict[str, Any]] = {
    "padded": SMALL_CHUNKS,
    "halves": {"comm.dual_batch_overlap.MIN_MICRO_BATCH_TOKENS": 7},
    "at once": {"comm.loopback.LoopbackCommunicator.fuses_all_reduce_norm": True},
    "dealt": {"helix.layers.specs.GATHER_SPEEDUP": 1 << 20},
    "not dealt": {"helix.layers.specs.GATHER_SPEEDUP": 0},
    "values": {
        "helix.layers.mla.exchanges_values": _always(True),
        "helix.layers.mla.gathers_before_absorption": _always(True),
    },
    "latents": {
        "helix.layers.mla.exchanges_values": _always(False),
        "helix.layers.mla.gathers_before_absorption": _always(False),
    },
    "gathered": {"helix.layers.mla.gathers_queries": _always(True)},
    "replicated": {"helix.layers.mla.gathers_queries": _always(False)},
    "expanded": {"helix.worker.model_runner.min_rows_to_expand": _always(0.01)},
    "in pieces": {"helix.layers.mla.MAX_EXPANDED_BYTES": 1 << 12},
    "key by key": {"helix.layers.mla.MAX_EXPANDED_BYTES": 1},
    "shared": {},
    "few scores": {"helix.layers.indexer.MAX_SCORES": 1},
}
COUNTED = {
    "halves": "helix.worker.step.Step.micro_batches",
    "dealt": "helix.models.decoder.shard_rows",
    "expanded": "helix.layers.mla.MLA._attend_expanded",
    "padded": "helix.worker.step.DecodeState.packed",
    "shared": "helix.attention.dense.attend_prefixes",
}
Tamper = Callable[[Engine], None]

Connect = Callable[[HelixLayout], Communicator]  # returns this rank's communicator for a layout over all ranks
RunOnRanks = Callable[
    ..., list["RankResult"]
]  # runs `run` or `forced` on all ranks, with the arguments after their first two


class SettingsRefused(Exception):
    """All ranks refuse the settings."""


@dataclass
class ServeResult:
    """Results of the requests, on rank 0.

    Attributes:
        prompts, tokens, ends: by request name; `ends` is the finish reason.
        leaked: pages, slots and sequences in use at the end.
        seen: counts of events.
    """

    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    leaked: tuple[int, int, int] = (0, 0, 0)
    seen: Counter[str] = field(default_factory=Counter)


@dataclass
class RankResult:
    """A rank's results of a case.

    Attributes:
        served: of eager steps; `logits` has this rank's columns by request and position.
        captured: of captured steps, if the communicator allows them.
    """

    served: ServeResult
    logits: dict[tuple[str, int], torch.Tensor]
    captured: ServeResult | None = None


@dataclass
class ForcedTokens:
    """A grammar that allows one continuation."""

    tokens: tuple[int, ...]
    words: int
    at: int = 0

    def token_bitmask(self) -> np.ndarray:
        mask = np.zeros(self.words, dtype=np.int32)
        token = self.tokens[min(self.at, len(self.tokens) - 1)]
        mask.view(np.uint32)[token // 32] = 1 << token % 32
        return mask

    def accept_token(self, token: int) -> None:
        self.at += 1


def counting(name: str, target: str, counts: Counter[str]) -> Any:
    """Wraps a function to count its calls."""
    path, _, attribute = target.rpartition(".")
    owner = resolve_name(path)
    right = getattr(owner, attribute)

    def counted(*args: Any, **more: Any) -> Any:
        counts[name] += 1
        return right(*args, **more)

    return patch.object(owner, attribute, counted)


@contextmanager
def patched_environment(case: Case, counts: Counter[str] | None = None) -> Iterator[None]:
    """Patches limits for small models on all ranks of this process, and counts the code paths taken."""
    with ExitStack() as stack:
        for code_path in case.code_paths:
            for target, value in CODE_PATHS[code_path].items():
                stack.enter_context(patch(target, value))
            if code_path in COUNTED and counts is not None:
                stack.enter_context(counting(code_path, COUNTED[code_path], counts))
        stack.enter_context(patch("helix.speculation.sparse.LEAST_KEYS", case.min_keys))
        stack.enter_context(patch("helix.engine.prefix_moves.START_S", 0.0))  # restores of short prefixes pay off
        stack.enter_context(patch("helix.engine.prefix_moves.LINK_RATE", 1e30))
        stack.enter_context(patch("helix.engine.prefix_moves.DISK_RATE", 1e30))
        stack.enter_context(patch("helix.engine.prefix_moves.GRACE_S", 60.0))
        stack.enter_context(patch.object(PrefixMoves, "_start_restore", from_host_memory))
        stack.enter_context(patch("helix.setup.offload.PIECE_TOKENS", case.piece_tokens))
        if case.random_pace:
            stack.enter_context(patch.object(DraftPolicy, "plan_steps", random_pace(case.seed)))
        yield


def from_host_memory(moves: PrefixMoves, *args: Any, start: Callable[..., bool] = PrefixMoves._start_restore) -> bool:
    """Evicts all pages that nobody uses, so that prefixes come back from host memory if at all.

    Requests wait for stores under way, since pages are in use until all ranks have copied them, however long it takes.
    """
    if any(move.kind == "store" for move in moves._in_flight.values()):
        return True
    moves._tables.tree.evict(moves._tables.pool.available)
    return start(moves, *args)


def random_pace(seed: int) -> Callable[..., StepPlan]:
    """Returns a random pace: any number of drafts, any limit per row, runs of one to three steps."""
    rng = random.Random(seed)

    def pace(policy: DraftPolicy, rows: int, kv_tokens: int, takes_drafts: Mapping[int, bool]) -> StepPlan:
        some = 0, 1, 2, policy.sizes[-1]
        limits = tuple(rng.choice(some) if takes_drafts.get(n, True) else 0 for n in range(rows))
        plan = rng.choice(policy.sizes), 1.5, rng.randint(1, 3)
        return StepPlan(*plan, rng.choice(((), limits)) if all(takes_drafts.values()) else limits)

    return pace


def plan_of(case: Case, directory: Path, rank: int) -> CheckedRun:
    """Checks the settings; raises SettingsRefused on every rank if they are invalid."""
    config = case.config
    config.model.path = str(directory)
    if config.speculation.drafter == "model":
        config.speculation.model.path = str(directory / "draft")
        config.speculation.model.dtype = config.model.dtype
    if config.speculation.drafter == "eagle3":
        config.speculation.path = str(directory / "draft")
    if config.kv.prefix_dir is not None:
        config.kv.prefix_dir = str(directory / "prefixes")
    try:
        return preflight(config, case.world_size)
    except ValueError as error:
        raise SettingsRefused(str(error)) from error


def plain(case: Case, directory: Path, rank: int) -> CheckedRun:
    """Plans the same attention without drafts, chunks or offload, one sequence at a time.

    With a mask, which is computed for each query, several sequences may share a step, which is faster.
    """
    plan = plan_of(case, directory, rank)
    config = plan.config
    config.speculation.drafter, config.hopb.chunks = "none", "none"
    config.decode.max_batch = config.decode.max_batch if case.masked else "1"
    config.kv.offload, config.kv.offload_host_bytes, config.kv.offload_prefetch = "gpu", None, False
    config.kv.prefix_cache = False
    config.kv.prefix_host_bytes, config.kv.prefix_dir, config.kv.prefix_disk_bytes = 0.0, None, 0.0
    return replace(plan, draft=None)


@contextmanager
def engine_of(plan: CheckedRun, case: Case, connect: Connect) -> Iterator[Engine]:
    """Makes an engine as `launch` does; uninitialized memory is NaN.

    Raises:
        SettingsRefused: there is too little memory.
    """
    config, comm = plan.config, connect(plan.layout)
    model = _load(plan.spec, case, case.eos, plan.layout, comm, plan.checkpoint, config)
    draft: DraftModel | DraftLayer | None = None
    if config.speculation.drafter == "eagle3":
        draft = load_eagle3(config.speculation, model, plan.layout, comm)
    if plan.draft is not None:
        draft_comm = connect(plan.draft.layout)
        draft_decoder = _load(plan.draft.spec, case, (), plan.draft.layout, draft_comm, plan.draft.checkpoint, config)
        draft = DraftModel(draft_decoder, plan.draft.layout, draft_comm)
    given = plan.layout, model, config, int(config.decode.max_batch), 1, draft
    if config.kv.offload == "host" and case.min_offload_memory:
        config.kv.offload_gpu_bytes = _min_gpu_bytes(config, lambda: build_engine(*given).close(), comm)
    try:
        engine = build_engine(*given)
        resize(engine, run_steps=case.run_steps)
    except ValueError as error:
        raise SettingsRefused(str(error)) from error
    for tensor in _unwritten(engine):
        tensor.fill_(torch.nan if tensor.is_floating_point() else -1)  # -1 is NaN in every dtype
    engine.runner.pads_chunks |= "padded" in case.code_paths
    try:
        yield engine
    finally:
        engine.close()
        for each in {id(c): c for c in (comm, *([draft.comm] if isinstance(draft, DraftModel) else []))}.values():
            each.close()


def _load(
    spec: DecoderSpec, case: Case, eos: tuple[int, ...], layout: HelixLayout, comm: Communicator,
    checkpoint: Checkpoint | None, config: Config,
) -> Decoder:  # fmt: skip
    assert checkpoint is not None
    dtype, formats = getattr(torch, config.model.dtype), checkpoint.matrix_format if case.kept else unquantized
    model = Decoder(replace(spec, eos=eos), layout, comm, dtype, comm.device, formats)
    checkpoint.load(model.weights)
    return model


def _min_gpu_bytes(config: Config, build: Callable[[], None], comm: Communicator) -> float:
    """Maximum over ranks of the minimum kv.offload_gpu_bytes, from the error messages."""
    config.kv.offload_gpu_bytes = 1.0
    try:
        build()
    except ValueError as error:
        if (found := re.search(r"take (\d+): set at least", str(error))) is None:
            raise
        return float(max(comm.all_gather_object(int(found[1]))))
    raise AssertionError("one byte is no room")


def _unwritten(engine: Engine) -> Iterator[torch.Tensor]:
    cache, drafter = engine.runner.cache, engine.runner.drafter
    yield from cache.tensors
    yield from (tensor for group in cache.groups for tensor in group.on_host.values())
    if isinstance(cache, OffloadedCache):
        yield from cache.on_gpu
    if isinstance(cache, OffloadedLatents):
        yield from cache.buffer.tensors.values()
    if isinstance(drafter, SparseDrafter) and drafter.scores is not None:
        yield drafter.scores.planes
    if isinstance(drafter, ModelDrafter):
        yield from drafter.cache.tensors
    if engine.runner.slabs is not None:
        yield engine.runner.slabs.slabs.view(torch.int8)


def observe(engine: Engine) -> dict[tuple[str, int], torch.Tensor]:
    """Returns a dict that fills as the engine samples: this rank's logits columns by request and position."""
    logits: dict[tuple[str, int], torch.Tensor] = {}

    def note(slots: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> None:
        for slot, position, row in zip(slots.tolist(), positions.tolist(), rows.cpu(), strict=True):
            logits[str(engine.runner.requests[slot].id), position] = row.clone()

    engine.runner.logits_hook = note
    return logits


def serve(engine: Engine, case: Case, cache_salt: str) -> ServeResult:
    """Serves the rounds of a case; other ranks follow rank 0."""
    inbox, served, todo = Inbox(), ServeResult(), list(case.rounds)
    output_token_ids: dict[str, list[int]] = {}
    late: list[CaseRequest] = []

    def submit(request: CaseRequest) -> None:
        before: tuple[int, ...] = ()
        if request.follows is not None:
            before = served.prompts[request.follows] + (() if case.lossy else tuple(output_token_ids[request.follows]))
        prompt = before[: round(request.share * len(before))] + request.tokens
        served.prompts[request.name], output_token_ids[request.name] = prompt, []
        inbox.submit(Request(request.name, prompt, request.new, request.sampling, cache_salt=cache_salt))

    def next_round() -> None:
        if not todo:
            inbox.close()
            return
        requests = todo.pop(0)
        late.extend(request for request in requests if request.late)
        for request in requests:
            if not request.late:
                submit(request)

    aborts = {
        request.name: request.abort for requests in case.rounds for request in requests if request.abort is not None
    }
    outputs = 0
    next_round()
    while not output_token_ids and late:
        submit(late.pop(0))
    for delta in chain.from_iterable(engine.serve(inbox if engine.comm.rank == 0 else None)):
        name, outputs = str(delta.id), outputs + 1
        assert name not in served.ends, f"{name}: an update after its end"
        assert delta.finish_reason != "error", f"{name} is refused: {delta.reason}"
        output_token_ids[name] += delta.new_token_ids
        if delta.new_token_ids and not served.seen[f"cached {name}"]:
            served.seen[f"cached {name}"] = 1
            served.seen["hits"] += delta.cached_tokens > 0
        if delta.finish_reason is not None:
            served.ends[name] = delta.finish_reason
        if name in aborts and len(output_token_ids[name]) >= aborts[name]:
            inbox.abort(name)
        over = len(served.ends) == len(output_token_ids)
        for request in [request for request in late if over or request.late <= outputs]:
            late.remove(request)
            submit(request)
        if len(served.ends) == len(output_token_ids):
            next_round()
    served.tokens = {name: tuple(tokens) for name, tokens in output_token_ids.items()}
    timings, cache, moves = engine.timings, engine.runner.cache, engine.moves
    served.leaked = (
        sum(t.pool.used for t in engine.tables),
        len(engine.runner.requests),
        int(engine.runner.state.active.sum()),
    )
    seen = Counter({name: n for name, n in served.seen.items() if not name.startswith("cached ")})
    served.seen = seen + Counter(
        {
            "preemptions": timings.preemptions,
            "drafts kept": sum(kept * n for kept, n in timings.accepted.items()),
            "drafts refused": int(sum(timings.acceptance.verified) - sum(timings.acceptance.accepted)),
            "aborts": sum(end == "abort" for end in served.ends.values()),
            "ended by a token": sum(end == "stop" for end in served.ends.values()),
            "blocks from the host": int(cache.fetch_counts[1]) if isinstance(cache, OffloadedCache) else 0,
            "restored": 0 if moves is None else moves.counters["loaded_bytes"],
            "read": 0 if moves is None else moves.counters["read_bytes"],
            "blocks ahead": int(cache.prefetch_counts[1]) if isinstance(cache, OffloadedCache) else 0,
        }
    )
    return served


def run(rank: int, connect: Connect, case: Case, directory: Path, tamper: Tamper | None = None) -> RankResult:
    """Serves a case on a rank, and again with captured steps if supported.

    Args:
        tamper: plants a fault.

    Raises:
        SettingsRefused: the settings are invalid.
    """
    with engine_of(plan_of(case, directory, rank), case, connect) as engine:
        if tamper is not None:
            tamper(engine)
        logits = observe(engine)
        seen = RankResult(serve(engine, case, "observed"), logits)
        if engine.comm.capturable:  # a logits hook forces eager steps
            engine.runner.logits_hook = None
            seen.captured = serve(engine, case, "captured")
    return seen


def forced(rank: int, connect: Connect, case: Case, directory: Path, served: ServeResult) -> RankResult:
    """Samples the served tokens again, with an engine that has nothing but its attention."""
    plan = plain(case, directory, rank)
    budget = budget_of(plan.config.attention)
    if case.masked:
        plan.config.attention.policy = "dense"
    with engine_of(plan, case, connect) as engine:
        if case.masked:
            shared = plan.config.attention.choice == "global"
            engine.runner.policy = MaskedAttention(budget if shared else budget.per_rank(plan.layout.kvp))
        logits, words = observe(engine), -(-engine.runner.model.spec.vocab // 32)
        requests = [
            Request(name, prompt, len(tokens), SamplingParams(ignore_eos=True), matcher=ForcedTokens(tokens, words))
            for name, prompt in served.prompts.items()
            if (tokens := served.tokens[name])
        ]
        for one in generated(engine, requests).values():
            assert one.finish_reason != "error", one.reason
    return RankResult(served, logits)


def on_loopback(world_size: int, device: str, timeout_s: float, tamper: Tamper | None = None) -> RunOnRanks:
    """Returns a runner of ranks that are threads of this process; `tamper` plants a fault in ranks that run a case."""

    def ranks(work: Callable[..., RankResult], *args: Any) -> list[RankResult]:
        given = (*args, tamper) if work is run else args

        def body(world: LoopbackWorld, rank: int) -> RankResult | SettingsRefused:
            return _unless_refused(work, rank, lambda of: world.communicator(rank, of.kvp_group(rank)), *given)

        counts = Counter[str]()
        with patched_environment(args[0], counts):  # once: concurrent patching would not undo cleanly
            found = _served(run_ranks(world_size, body, timeout_s=timeout_s, device=device))
        found[0].served.seen |= counts
        return found

    return ranks


def on_processes(backend: str, device: torch.device) -> RunOnRanks:
    """Returns a runner of ranks that are processes of the default group: others repeat rank 0's calls in `follow`.

    Args:
        backend: symm_mem; otherwise the default group's.
    """

    def ranks(work: Callable[..., RankResult], *args: Any) -> list[RankResult]:
        dist.broadcast_object_list([(work, backend, args)], 0)
        return _served(_together(work, backend, device, args))

    return ranks


def follow(device: torch.device) -> None:
    """Repeats rank 0's calls until it calls `leave`."""
    while True:
        message: list[Any] = [None]
        dist.broadcast_object_list(message, 0)
        if message[0] is None:
            return
        work, backend, args = message[0]
        _together(work, backend, device, args)


def leave() -> None:
    """Lets the other processes return."""
    dist.broadcast_object_list([None], 0)


def _together(work: Callable[..., RankResult], backend: str, device: torch.device, args: tuple[Any, ...]) -> list[Any]:
    kind = SymmMemCommunicator if backend == "symm_mem" else TorchDistCommunicator

    def connect(layout: HelixLayout) -> Communicator:
        return kind(layout.kvp_groups(), device, timedelta(seconds=60))

    results, counts = [None] * dist.get_world_size(), Counter[str]()
    with patched_environment(args[0], counts):
        found = _unless_refused(work, dist.get_rank(), connect, *args)
    if isinstance(found, RankResult):
        found.served.seen |= counts
    dist.all_gather_object(results, found)
    return results


def _unless_refused(work: Callable[..., RankResult], *args: Any) -> RankResult | SettingsRefused:
    try:
        return work(*args)
    except SettingsRefused as refused:
        return refused


def _served(results: list[RankResult | SettingsRefused]) -> list[RankResult]:
    """Raises SettingsRefused if every rank refuses."""
    if refused := [r for r in results if isinstance(r, SettingsRefused)]:
        assert len(refused) == len(results), f"some ranks refuse and others do not: {refused[0]}"
        raise refused[0]
    return [r for r in results if isinstance(r, RankResult)]
