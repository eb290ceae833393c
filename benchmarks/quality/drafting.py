"""Prompts that a model goes on with by drafts, several ways, each from the end of one prefill.

Steps are the product's own: a way's drafter proposes, the model verifies, and what held is committed. Lengths are then
set back, and what one way has appended the next overwrites. A sequence ends after its tokens and not at the end of a
text, and all drafts of a step may count: the step that comes to the last token may go beyond it.

What a model is told between its turns comes as drafts that hold: verification reads it like any other text.
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
from benchmarks.quality.prefilled import Subject, prefilled
from comm.base import Communicator
from comm.loopback import LoopbackWorld, run_ranks
from helix.config import MAX_QUERIES
from helix.models.decoder import Decoder
from helix.models.draft_layer import DraftLayer
from helix.placement import Placement, PromptChunk
from helix.sampling_params import SamplingParams
from helix.setup.drafts import load_eagle3
from helix.speculation import Draft, DraftBudget, Drafter, LayerDrafter, NoDrafts, SparseDrafter, SuffixDrafter
from helix.speculation.sparse import ROWS
from helix.worker.follower import Begun, Prefilled, Span, Taken
from helix.worker.graph_keys import StepKind
from helix.worker.keeps import EngineSizes
from helix.worker.kv_cache import KVCache
from helix.worker.model_runner import ModelRunner
from helix.worker.step import DecodeState

APPEND_BLOCK = 64
PAGES = {"quest": 16}  # tokens of a page
PAGE = 64
LONGEST, SUFFIX = 3, 8  # final tokens that ngram looks for, and suffix
REMEMBERED = 1 << 16  # tokens of others: one prompt says nothing to another here
LAYERED = ("mtp", "eagle3")  # drafters with a layer of their own, of which a model has one
SAMPLED = SamplingParams(top_k=20, top_p=0.95)  # of requests with a temperature
POLICIES = {**{name: name for name in (*ROWS, "quest")}, "full": FULL}  # what speculation.policy is for each
GIVEN = 7  # tokens of a turn that one step takes, where nothing is drafted
DEADLINE_S = 6 * 3600.0


@dataclass(frozen=True)
class Drafting:
    """How drafts come about.

    Attributes:
        policy: one of DRAFTERS, or none: a token a step.
        gamma: drafts of a step; 0 for none.
        budget: which keys they read.
        noise, temperature: how they and the tokens are drawn.
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
    def plain(self) -> Drafting:
        """The same without drafts."""
        return Drafting("none", temperature=self.temperature)


@dataclass(frozen=True)
class Outcome:
    """What a way made of one prompt.

    Attributes:
        tokens: [n] of all turns.
        held: drafts that held in each step.
        refused: of one rank, how probable the model with all its keys finds each first draft that did not hold.
    """

    tokens: list[int]
    held: list[int]
    refused: list[float] = field(default_factory=list)


def _sparse(way: Drafting, runner: ModelRunner) -> Drafter:
    # As many pages of a sequence as the runner has, whose room for drafts is that of any way.
    sizes = replace(runner.sizes, drafts=way.gamma, length=runner.sizes.length + runner.sizes.drafts - way.gamma)
    return SparseDrafter(runner.model, runner.cache, sizes, way.budget, way.noise)


def _ngram(way: Drafting, runner: ModelRunner) -> Drafter:
    return SuffixDrafter(way.gamma, LONGEST)


def _suffix(way: Drafting, runner: ModelRunner) -> Drafter:
    return SuffixDrafter(way.gamma, SUFFIX, REMEMBERED, runner.sizes.slots, runner.device)


class StartedLayer(LayerDrafter):
    """Layer that drafts behind prompts which are in the cache but for their last tokens."""

    def start(self, tokens: Tensor, lengths: Tensor) -> None:
        """Begins with the last tokens [n] of the prompts, behind so many others [n]."""
        slots = torch.arange(len(tokens), device=tokens.device)
        self.begun(Begun(slots, tokens, lengths, self._ends[: len(tokens)]))


def _of_prompts(way: Drafting, runner: ModelRunner) -> Drafter:
    """The layer that has followed the prompts."""
    assert isinstance(runner.drafter, StartedLayer)
    runner.drafter.noise = way.noise
    return runner.drafter


DRAFTERS: dict[str, Callable[[Drafting, ModelRunner], Drafter]] = {
    **dict.fromkeys(POLICIES, _sparse), **dict.fromkeys(LAYERED, _of_prompts), "ngram": _ngram, "suffix": _suffix,
}  # fmt: skip


class Told(Drafter):
    """Proposes what is given, which holds whatever the model says; another drafter learns from its verification."""

    def __init__(self, tokens: Tensor, learner: Drafter) -> None:
        super().__init__(tokens.shape[1])
        self.tokens = tokens
        self.learner = learner
        self.verification = learner.verification

    def propose(self, state: DecodeState, kind: StepKind) -> Draft:
        return Draft(self.tokens, outcome=self.tokens)

    def takes(self, kind: StepKind) -> bool:
        return self.learner.takes(kind)

    def taken(self, step: Taken) -> None:
        self.learner.taken(step)


class Watched(Drafter):
    """Proposes as another drafter does; and says how probable a refused proposal was."""

    def __init__(self, drafter: Drafter, temperature: float) -> None:
        super().__init__(drafter.limit)
        self.drafter = drafter
        self.verification = drafter.verification
        self.temperature = temperature or 1.0
        self.proposed = torch.empty(0)
        self.seen: tuple[Tensor, Tensor, Tensor] | None = None

    def propose(self, state: DecodeState, kind: StepKind) -> Draft:
        draft = self.drafter.propose(state, kind)
        self.proposed = draft.tokens
        return draft

    def takes(self, kind: StepKind) -> bool:
        return self.drafter.takes(kind)

    def taken(self, step: Taken) -> None:
        self.drafter.taken(step)

    def observe(self, slots: Tensor, positions: Tensor, logits: Tensor) -> None:
        """Keeps a step's logits [n, V] over the whole vocabulary, of `positions` [n] of `slots` [n]."""
        self.seen = slots, positions, logits

    def refused(self, slot: int, position: int, place: int) -> float:
        """Returns the probability of the draft at `place` that was refused, of a token for `position`."""
        assert self.seen is not None
        slots, positions, logits = self.seen
        (row,) = ((slots == slot) & (positions == position)).nonzero()[0].tolist()
        return float((logits[row] / self.temperature).softmax(-1)[self.proposed[slot, place]])


def run(
    setting: Subject, continuations: Sequence[Continuation], new_tokens: int, ways: Sequence[Drafting]
) -> dict[Drafting, list[Outcome]]:
    """What each way makes of the same prompts; progress goes to stderr.

    Args:
        new_tokens: of a prompt, the same number in each of its turns.
    """
    layout = setting.layout
    room = max(len(c.prompt) + sum(map(len, c.turns)) for c in continuations) + new_tokens + MAX_QUERIES
    at_once = setting.fitting(room)
    batches = [continuations[i : i + at_once] for i in range(0, len(continuations), at_once)]
    outcomes: dict[Drafting, list[Outcome]] = {way: [] for way in ways}

    @torch.inference_mode()
    def rank(world: LoopbackWorld, index: int) -> None:
        comm = world.communicator(index, layout.kvp_group(index))
        model = setting.load(comm)
        layer = _layer(setting, model, comm)
        for batch in batches:
            for page, group in groupby(sorted(ways, key=lambda way: way.page), key=lambda way: way.page):
                runner = _runner(model, layer, setting, comm, batch, room, page)
                follower = runner.drafter
                for way in group:
                    runner.drafter = follower
                    found = _decode(runner, way, batch, new_tokens)
                    if index == 0:
                        outcomes[way] += found
                        progress.advance(task)
                del runner  # before the next cache is made

    if setting.device == "cuda":
        torch.cuda.empty_cache()  # what an earlier run has left counts as free
    with Progress(console=Console(file=sys.stderr)) as progress:
        task = progress.add_task(f"{len(continuations)} x {room}, kvp={layout.kvp}", total=len(ways) * len(batches))
        run_ranks(layout.world_size, rank, DEADLINE_S, setting.device)
    return outcomes


def _layer(setting: Subject, model: Decoder, comm: Communicator) -> DraftLayer | None:
    """This rank's part of the layer that drafts; None where there is none."""
    if setting.layer is None or setting.layer.drafter == "mtp":
        return model.next_token
    return load_eagle3(setting.layer, model, setting.layout, comm)


def _runner(
    model: Decoder,
    layer: DraftLayer | None,
    setting: Subject,
    comm: Communicator,
    batch: Sequence[Continuation],
    room: int,
    page: int,
) -> ModelRunner:
    """A runner with the prompts in its cache, and bounds of their pages where some policy looks at them."""
    placement = Placement(setting.layout, setting.layout.kvp_rank(comm.rank), APPEND_BLOCK, page)
    bounded, most = page != PAGE, MAX_QUERIES - 1
    prompts = [c.prompt for c in batch]

    def follower(cache: KVCache, sizes: EngineSizes) -> Drafter:
        if layer is None:
            return SuffixDrafter(most, LONGEST)
        return StartedLayer(layer, model, cache, sizes, "shared")

    runner = prefilled(model, placement, comm, prompts, room, room, bounded=bounded, limit=most, make_drafter=follower)
    lengths = torch.tensor([len(prompt) - 1 for prompt in prompts], device=comm.device)
    runner.cache.fold(runner.state.span(len(batch), torch.zeros_like(lengths), lengths, int(lengths.max())))
    return runner


def _decode(runner: ModelRunner, way: Drafting, batch: Sequence[Continuation], new_tokens: int) -> list[Outcome]:
    """All turns of a batch, from the end of its prompts."""
    state, n, device, sampled = runner.state, len(batch), runner.device, way.temperature > 0
    drafter = DRAFTERS[way.policy](way, runner) if way.gamma else NoDrafts()
    params = [
        replace(SAMPLED, temperature=way.temperature, seed=slot) if sampled else SamplingParams()
        for slot in runner.admitted
    ]
    state.sampling.set(torch.tensor([*runner.admitted], device=device), params)
    drafter.admit(*runner.admitted.values())
    rows = torch.arange(n, device=device)
    lengths = torch.tensor([len(c.prompt) - 1 for c in batch], device=device)
    state.activate(rows, torch.stack([c.prompt[-1] for c in batch]).to(device), lengths)
    if isinstance(drafter, StartedLayer):
        drafter.start(state.tokens[:n].long(), lengths)
    steps: list[Tensor] = []
    tokens: list[list[int]] = [[] for _ in batch]
    refused: list[list[float]] = [[] for _ in batch]
    for turn in range(max(len(c.turns) for c in batch)):
        live = [turn < len(c.turns) for c in batch]
        told = [c.turns[turn].tolist() if here else [] for c, here in zip(batch, live, strict=True)]
        # The first token of a turn: behind what was told it is drawn already.
        first = state.lengths[:n] + torch.tensor([len(x) + 1 for x in told], device=device)
        _tell(runner, drafter, told, way)
        if begun := [PromptChunk(i, 0, c.prompt[:-1]) for i, c in enumerate(batch) if live[i] > len(told[i])]:
            slots = torch.tensor([chunk.slot for chunk in begun], device=device)
            most, zero = max(len(chunk.tokens) for chunk in begun), torch.zeros_like(slots)
            read = Span(state.block_tables[slots], state.starts[slots], zero, lengths[slots], most)
            if not isinstance(drafter, StartedLayer):  # which has followed the prompts
                drafter.prefilled(Prefilled(begun, read, ()))
        count = torch.tensor([new_tokens // len(c.turns) for c in batch], device=device)
        watched = Watched(drafter, way.temperature) if way.gamma and runner.layout.world_size == 1 else None
        runner.drafter, runner.observer = watched or drafter, None if watched is None else watched.observe
        last = first + count - 1
        turns = torch.tensor(live, device=device)
        while (state.active[:n].copy_(turns & (state.lengths[:n] < last))).any():
            active, before = state.active[:n].clone(), state.lengths[:n].clone()
            runner.decode(StepKind(n, way.gamma, sampled, sampled))
            steps.append(torch.where(active, state.lengths[:n] - before - 1, -1))
            if watched is not None:
                for slot, held in enumerate(steps[-1].tolist()):
                    if 0 <= held < way.gamma and watched.proposed[slot, held] >= 0:
                        refused[slot].append(watched.refused(slot, int(before[slot]) + 1 + held, held))
        runner.observer = None
        for slot in (slot for slot in range(n) if live[slot]):
            span = slice(int(first[slot]), int(last[slot]) + 1)
            tokens[slot] += state.history[slot, span].tolist()
        ends = torch.where(turns, last, state.lengths[:n])
        state.activate(rows, state.history[rows, ends].long(), ends)
    for slot in runner.admitted:
        drafter.retire(state.leaving(slot))
    held = torch.stack(steps, 1).tolist()
    return [Outcome(ids, [x for x in row if x >= 0], p) for ids, row, p in zip(tokens, held, refused, strict=True)]


def _tell(runner: ModelRunner, drafter: Drafter, told: list[list[int]], way: Drafting) -> None:
    """Appends what sequences are told, and draws the token behind it: all of them end with the same step.

    For a sequence that is no part of a step nothing is chosen.
    """
    state, n, device = runner.state, len(told), runner.device
    left = {row: tokens for row, tokens in enumerate(told) if tokens}
    if not left:
        return
    most = way.gamma or GIVEN
    final = min(most, *map(len, left.values()))

    def step(group: Sequence[int], size: int) -> None:
        state.active[:n] = torch.tensor([row in group for row in range(n)], device=device)
        drafts = torch.tensor([left[row][:size] if row in group else [0] * size for row in range(n)], device=device)
        runner.drafter = Told(drafts, drafter)
        sampled = way.temperature > 0
        runner.decode(StepKind(n, size, sampled, sampled))

    while sizes := {row: min(most, len(x) - final - 1) for row, x in left.items() if len(x) > final}:
        size = min(sizes.values())
        group = [row for row in sizes if sizes[row] == size]
        step(group, size)
        slots, tokens = torch.tensor(group, device=device), torch.tensor([left[row][size] for row in group])
        state.activate(slots, tokens.to(device), state.lengths[slots])  # in place of what was drawn
        left |= {row: left[row][size + 1 :] for row in group}
    step([*left], final)
