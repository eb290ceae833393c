"""Continues prompts with several draft configs, each from the end of the same prefill.

Steps are the engine's: a config's drafter proposes, the model verifies, and accepted tokens are committed. Then lengths
and states are reset, and the next config overwrites what this one appended. A sequence ends after its number of tokens,
not at EOS, and all drafts of its last step count, even beyond that number.

Tokens between the model's turns are forced drafts: verification reads them like any other text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from benchmarks.papers.policies import FULL
from benchmarks.quality.continuations import Continuation
from benchmarks.quality.prefill import EvalSetup, prefilled, restart
from comm.base import Communicator
from comm.loopback import LoopbackWorld, run_ranks
from helix.config import MAX_QUERIES
from helix.kv_placement import KVPlacement, PromptChunk
from helix.models.decoder import Decoder
from helix.models.draft_layer import DraftLayer
from helix.sampling_params import SamplingParams
from helix.setup.drafts import load_eagle3
from helix.speculation import Draft, DraftBudget, Drafter, LayerDrafter, NoDrafts, SparseDrafter, SuffixDrafter
from helix.speculation.sparse import SCORED_QUERIES
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.kv_cache import KVCache
from helix.worker.kv_cache_spec import EngineSizes
from helix.worker.model_runner import ModelRunner
from helix.worker.sequence_observer import FirstTokenSampled, PrefillCommitted, Span, StepCommitted
from helix.worker.step import DecodeState

APPEND_BLOCK = 64
PAGES = {"quest": 16}  # tokens per page
PAGE = 64
NGRAM_MAX, SUFFIX_MAX = 3, 8  # longest suffix that ngram and suffix look for
SUFFIX_POOL_TOKENS = 1 << 16  # pool of other sequences; here prompts do not share it
LAYER_DRAFTERS = ("mtp", "eagle3")  # drafters with their own layer; a model has at most one
SAMPLED = SamplingParams(top_k=20, top_p=0.95)  # for requests with a temperature
POLICIES = {**{name: name for name in (*SCORED_QUERIES, "quest")}, "full": FULL}  # speculation.policy of each policy
FORCED_STEP_TOKENS = 7  # forced tokens per step when nothing is drafted
DEADLINE_S = 6 * 3600.0


@dataclass(frozen=True)
class DraftConfig:
    """How tokens are drafted.

    Attributes:
        policy: one of DRAFTERS, or none.
        gamma: drafts per step; 0 for none.
        budget: which keys drafts read.
        noise, temperature: how drafts and tokens are sampled.
    """

    policy: str
    gamma: int = 0
    budget: DraftBudget = field(default_factory=DraftBudget)
    noise: str = "shared"
    temperature: float = 0.0

    @property
    def page(self) -> int:
        return PAGES.get(self.policy, PAGE)

    @property
    def plain(self) -> DraftConfig:
        """The same without drafts."""
        return DraftConfig("none", temperature=self.temperature)


@dataclass(frozen=True)
class Outcome:
    """The result of one prompt.

    Attributes:
        tokens: [n] of all turns.
        accepted: accepted drafts of each step.
        rejected_probs: on one rank, the model's probability of each first rejected draft.
    """

    tokens: list[int]
    accepted: list[int]
    rejected_probs: list[float] = field(default_factory=list)


def _sparse(config: DraftConfig, runner: ModelRunner) -> Drafter:
    # The same maximum pages per sequence as the runner, whose room for drafts is the maximum over configs.
    sizes = replace(runner.sizes, drafts=config.gamma, length=runner.sizes.length + runner.sizes.drafts - config.gamma)
    return SparseDrafter(runner.model, runner.cache, sizes, config.budget, config.noise)


def _ngram(config: DraftConfig, runner: ModelRunner) -> Drafter:
    return SuffixDrafter(config.gamma, NGRAM_MAX)


def _suffix(config: DraftConfig, runner: ModelRunner) -> Drafter:
    return SuffixDrafter(config.gamma, SUFFIX_MAX, SUFFIX_POOL_TOKENS, runner.sizes.slots, runner.device)


class PrefilledLayerDrafter(LayerDrafter):
    """A draft layer for prompts that are cached except for their last tokens."""

    def start(self, tokens: Tensor, lengths: Tensor) -> None:
        """Starts with the prompts' last tokens [n], after `lengths` [n] others."""
        slots = torch.arange(len(tokens), device=tokens.device)
        self.on_first_token(FirstTokenSampled(slots, tokens, lengths, self._prompt_states[: len(tokens)]))


def _by_layer(config: DraftConfig, runner: ModelRunner) -> Drafter:
    assert isinstance(runner.drafter, PrefilledLayerDrafter)
    runner.drafter.noise = config.noise
    return runner.drafter


DRAFTERS: dict[str, Callable[[DraftConfig, ModelRunner], Drafter]] = {
    **dict.fromkeys(POLICIES, _sparse), **dict.fromkeys(LAYER_DRAFTERS, _by_layer), "ngram": _ngram, "suffix": _suffix,
}  # fmt: skip


class ForcedDrafter(Drafter):
    """Proposes given tokens, which are always accepted; another drafter learns from their verification."""

    def __init__(self, tokens: Tensor, learner: Drafter) -> None:
        super().__init__(tokens.shape[1])
        self.tokens = tokens
        self.learner = learner
        self.verify_policy = learner.verify_policy

    def propose(self, state: DecodeState, kind: DecodeGraphKey) -> Draft:
        return Draft(self.tokens, forced_tokens=self.tokens)

    def observes_step(self, kind: DecodeGraphKey) -> bool:
        return self.learner.observes_step(kind)

    def on_step(self, step: StepCommitted) -> None:
        self.learner.on_step(step)


class RecordingDrafter(Drafter):
    """Proposes like another drafter, and returns the probability of rejected proposals."""

    def __init__(self, drafter: Drafter, temperature: float) -> None:
        super().__init__(drafter.limit)
        self.drafter = drafter
        self.verify_policy = drafter.verify_policy
        self.temperature = temperature or 1.0
        self.proposed = torch.empty(0)
        self.seen: tuple[Tensor, Tensor, Tensor] | None = None

    def propose(self, state: DecodeState, kind: DecodeGraphKey) -> Draft:
        draft = self.drafter.propose(state, kind)
        self.proposed = draft.tokens
        return draft

    def observes_step(self, kind: DecodeGraphKey) -> bool:
        return self.drafter.observes_step(kind)

    def on_step(self, step: StepCommitted) -> None:
        self.drafter.on_step(step)

    def observe(self, slots: Tensor, positions: Tensor, logits: Tensor) -> None:
        """Stores a step's logits [n, V] over the whole vocabulary, for `positions` [n] of `slots` [n]."""
        self.seen = slots, positions, logits

    def rejected_prob(self, slot: int, position: int, draft_index: int) -> float:
        """Returns the model's probability of the rejected draft `draft_index`, for the token at `position`."""
        assert self.seen is not None
        slots, positions, logits = self.seen
        (row,) = ((slots == slot) & (positions == position)).nonzero()[0].tolist()
        return float((logits[row] / self.temperature).softmax(-1)[self.proposed[slot, draft_index]])


def run(
    setting: EvalSetup, continuations: Sequence[Continuation], new_tokens: int, configs: Sequence[DraftConfig]
) -> dict[DraftConfig, list[Outcome]]:
    """Runs each config on the same prompts; progress goes to stderr.

    Args:
        new_tokens: per prompt, split evenly over its turns.
    """
    layout = setting.layout
    room = max(len(c.prompt) + sum(map(len, c.turns)) for c in continuations) + new_tokens + MAX_QUERIES
    at_once = setting.fitting(room)
    batches = [continuations[i : i + at_once] for i in range(0, len(continuations), at_once)]
    outcomes: dict[DraftConfig, list[Outcome]] = {config: [] for config in configs}

    @torch.inference_mode()
    def rank(world: LoopbackWorld, index: int) -> None:
        comm = world.communicator(index, layout.kvp_group(index))
        model = setting.load(comm)
        layer = _layer(setting, model, comm)
        for batch in batches:
            for page, group in groupby(sorted(configs, key=lambda config: config.page), key=lambda config: config.page):
                runner = _runner(model, layer, setting, comm, batch, room, page)
                observer = runner.drafter
                for config in group:
                    runner.drafter = observer
                    found = _decode(runner, config, batch, new_tokens)
                    if index == 0:
                        outcomes[config] += found
                        progress.advance(task)
                del runner  # free it before the next cache is made

    if setting.device == "cuda":
        torch.cuda.empty_cache()  # return an earlier run's memory
    with Progress(console=Console(file=sys.stderr)) as progress:
        task = progress.add_task(f"{len(continuations)} x {room}, kvp={layout.kvp}", total=len(configs) * len(batches))
        run_ranks(layout.world_size, rank, DEADLINE_S, setting.device)
    return outcomes


def _layer(setting: EvalSetup, model: Decoder, comm: Communicator) -> DraftLayer | None:
    if setting.layer is None or setting.layer.drafter == "mtp":
        return model.next_token
    return load_eagle3(setting.layer, model, setting.layout, comm)


def _runner(
    model: Decoder,
    layer: DraftLayer | None,
    setting: EvalSetup,
    comm: Communicator,
    batch: Sequence[Continuation],
    room: int,
    page: int,
) -> ModelRunner:
    """A runner with the prompts cached, and with page bounds if a policy needs them."""
    placement = KVPlacement(setting.layout, setting.layout.kvp_rank(comm.rank), APPEND_BLOCK, page)
    bounded, max_drafts = page != PAGE, MAX_QUERIES - 1
    prompts = [c.prompt for c in batch]

    def observer(cache: KVCache, sizes: EngineSizes) -> Drafter:
        if layer is None:
            return SuffixDrafter(max_drafts, NGRAM_MAX)
        return PrefilledLayerDrafter(layer, model, cache, sizes, "shared")

    runner = prefilled(
        model, placement, comm, prompts, room, room, bounded=bounded, limit=max_drafts, make_drafter=observer
    )
    lengths = torch.tensor([len(prompt) - 1 for prompt in prompts], device=comm.device)
    runner.cache.fold(runner.state.span(len(batch), torch.zeros_like(lengths), lengths, int(lengths.max())))
    return runner


def _decode(runner: ModelRunner, config: DraftConfig, batch: Sequence[Continuation], new_tokens: int) -> list[Outcome]:
    state, n, device, sampled = runner.state, len(batch), runner.device, config.temperature > 0
    restart(runner)
    drafter = DRAFTERS[config.policy](config, runner) if config.gamma else NoDrafts()
    params = [
        replace(SAMPLED, temperature=config.temperature, seed=slot) if sampled else SamplingParams()
        for slot in runner.requests
    ]
    state.sampling.set(torch.tensor([*runner.requests], device=device), params)
    drafter.admit(*runner.requests.values())
    rows = torch.arange(n, device=device)
    lengths = torch.tensor([len(c.prompt) - 1 for c in batch], device=device)
    state.activate(rows, torch.stack([c.prompt[-1] for c in batch]).to(device), lengths)
    if isinstance(drafter, PrefilledLayerDrafter):
        drafter.start(state.tokens[:n].long(), lengths)
    steps: list[Tensor] = []
    tokens: list[list[int]] = [[] for _ in batch]
    rejected_probs: list[list[float]] = [[] for _ in batch]
    for turn in range(max(len(c.turns) for c in batch)):
        live = [turn < len(c.turns) for c in batch]
        forced_ids = [c.turns[turn].tolist() if here else [] for c, here in zip(batch, live, strict=True)]
        # The first token of a turn; the one after forced tokens is already sampled.
        first = state.lengths[:n] + torch.tensor([len(x) + 1 for x in forced_ids], device=device)
        _append_forced(runner, drafter, forced_ids, config)
        if first_chunks := [
            PromptChunk(i, 0, c.prompt[:-1]) for i, c in enumerate(batch) if live[i] > len(forced_ids[i])
        ]:
            slots = torch.tensor([chunk.slot for chunk in first_chunks], device=device)
            max_tokens, zero = max(len(chunk.tokens) for chunk in first_chunks), torch.zeros_like(slots)
            read = Span(state.block_tables[slots], state.starts[slots], zero, lengths[slots], max_tokens)
            if not isinstance(drafter, PrefilledLayerDrafter):  # it has observed the prompts
                drafter.on_prefill(PrefillCommitted(first_chunks, read, ()))
        count = torch.tensor([new_tokens // len(c.turns) for c in batch], device=device)
        recorder = (
            RecordingDrafter(drafter, config.temperature) if config.gamma and runner.layout.world_size == 1 else None
        )
        runner.drafter, runner.logits_hook = recorder or drafter, None if recorder is None else recorder.observe
        last = first + count - 1
        live_mask = torch.tensor(live, device=device)
        while (state.active[:n].copy_(live_mask & (state.lengths[:n] < last))).any():
            active, before = state.active[:n].clone(), state.lengths[:n].clone()
            runner.decode(DecodeGraphKey(n, config.gamma, sampled, sampled))
            steps.append(torch.where(active, state.lengths[:n] - before - 1, -1))
            if recorder is not None:
                for slot, accepted in enumerate(steps[-1].tolist()):
                    if 0 <= accepted < config.gamma and recorder.proposed[slot, accepted] >= 0:
                        rejected_probs[slot].append(
                            recorder.rejected_prob(slot, int(before[slot]) + 1 + accepted, accepted)
                        )
        runner.logits_hook = None
        for slot in (slot for slot in range(n) if live[slot]):
            span = slice(int(first[slot]), int(last[slot]) + 1)
            tokens[slot] += state.history[slot, span].tolist()
        ends = torch.where(live_mask, last, state.lengths[:n])
        state.activate(rows, state.history[rows, ends].long(), ends)
    for slot in runner.requests:
        drafter.release(state.release_event(slot))
    accepted = torch.stack(steps, 1).tolist()
    return [
        Outcome(ids, [x for x in row if x >= 0], p)
        for ids, row, p in zip(tokens, accepted, rejected_probs, strict=True)
    ]


def _append_forced(runner: ModelRunner, drafter: Drafter, forced_ids: list[list[int]], config: DraftConfig) -> None:
    """Appends forced tokens and samples the token after them: all sequences end with the same step.

    Sequences that are not part of a step have no forced tokens in it.
    """
    state, n, device = runner.state, len(forced_ids), runner.device
    left = {row: tokens for row, tokens in enumerate(forced_ids) if tokens}
    if not left:
        return
    max_drafts = config.gamma or FORCED_STEP_TOKENS
    final = min(max_drafts, *map(len, left.values()))

    def step(group: Sequence[int], size: int) -> None:
        state.active[:n] = torch.tensor([row in group for row in range(n)], device=device)
        drafts = torch.tensor([left[row][:size] if row in group else [0] * size for row in range(n)], device=device)
        runner.drafter = ForcedDrafter(drafts, drafter)
        sampled = config.temperature > 0
        runner.decode(DecodeGraphKey(n, size, sampled, sampled))

    while sizes := {row: min(max_drafts, len(x) - final - 1) for row, x in left.items() if len(x) > final}:
        size = min(sizes.values())
        group = [row for row in sizes if sizes[row] == size]
        step(group, size)
        slots, tokens = torch.tensor(group, device=device), torch.tensor([left[row][size] for row in group])
        state.activate(slots, tokens.to(device), state.lengths[slots])  # replaces the sampled token
        left |= {row: left[row][size + 1 :] for row in group}
    step([*left], final)
