"""A model that drafts for itself over few keys says what it says without drafts, and its drafts mean something."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.ranks.phases import phase_us
from helix.attention.selected import ScoringAttention
from helix.engine.core import Engine
from helix.engine.draft_policy import DraftPolicy
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.speculation import Draft, DraftBudget, SparseDrafter
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.kv_cache import LayerCache
from helix.worker.sequence_observer import StepCommitted
from helix.worker.step import DecodeState, Step
from helix.worker.warmup import fill
from kernels.attention.split_kv import PartialAttention
from tests.e2e.checkpoints import checkpoint, oracle
from tests.e2e.fuzz_runs import CODE_PATHS, SMALL_CHUNKS, random_pace
from tests.e2e.parity import SelfDrafts, on_loopback
from tests.e2e.parity_cases import SAMPLED
from tests.e2e.test_parity import LENGTHS, NEW_TOKENS
from tests.sequences import generated

# Few enough keys that a wrong table shows in what is kept.
FEW = DraftBudget(sparsity=0.1, recent=0.25, reach=2)


@pytest.fixture(autouse=True)
def few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of hundreds of tokens are long enough to leave keys out."""
    monkeypatch.setattr("helix.speculation.sparse.LEAST_KEYS", 16)


def requests(model: str = "qwen2") -> list[Request]:
    prompts = [c.prompt for c in oracle(model, LENGTHS, NEW_TOKENS) if len(c.prompt) > 1]
    return [Request(i, prompts[i], 24, p) for i, p in enumerate(SAMPLED[:4])]


class SelectionChecker:
    """Checks every choice of one rank's drafter against what the queries of verification made of the keys.

    Scores are summed in float64, one key at a time, from the queries as attention got them.
    """

    def __init__(self, engine: Engine) -> None:
        drafter = engine.runner.drafter
        assert isinstance(drafter, SparseDrafter) and isinstance(drafter.verify_policy, ScoringAttention)
        assert drafter.selected is not None
        self.drafter = drafter
        self.checked, self.state = 0, engine.runner.state
        self.queries: dict[tuple[int, int], Tensor] = {}  # by layer and slot, [T, Hq, D] of rows that are tokens
        self.attend = drafter.verify_policy.attend
        drafter.verify_policy.attend = self.record_queries  # type: ignore[method-assign]
        self.on_step, self.choose, self.propose = drafter.on_step, drafter._select, drafter.propose
        drafter.propose = self.check_propose  # type: ignore[method-assign]
        drafter.on_step = self.check_taken  # type: ignore[method-assign]
        drafter._select = self.check_choose  # type: ignore[method-assign]

    def record_queries(self, q: Tensor, cache: LayerCache, step: Step, *args: object) -> PartialAttention:
        if step.cu_q is None:
            by_slot = q.unflatten(0, (-1, step.max_q)), step.live.view(-1, step.max_q)
            for i, (rows, live) in enumerate(zip(*by_slot, strict=True)):
                self.queries[cache.index, step.first + i] = rows[live].clone()
        return self.attend(q, cache, step, *args)  # type: ignore[arg-type]

    def check_propose(self, state: DecodeState, kind: DecodeGraphKey) -> Draft:
        """Every sequence has a choice of its own, made where it is now or a few drafts before."""
        selected, p = self.drafter.selected, self.drafter.placement
        assert selected is not None
        for slot in range(kind.rows):
            if state.active[slot] and state.lengths[slot] < state.limits[slot]:
                where = p.kvp_rank, p.append_block, int(state.starts[slot])
                behind = p.layout.local_length(int(state.lengths[slot]), *where) - int(selected.num_candidates[slot])
                assert 0 <= behind <= self.drafter.limit, slot
                pages = selected.tables[:, slot, :, : int(selected.counts[slot])] // p.page_size
                assert set(pages.flatten().tolist()) <= set(state.block_tables[slot].tolist()), slot
        return self.propose(state, kind)

    def check_taken(self, step: StepCommitted) -> None:
        self.on_step(step)
        state, before = self.state, step.span.before
        for slot in range(step.kind.rows):
            if state.active[slot] and state.lengths[slot] > before[slot]:  # else it was at its end
                held = int(state.lengths[slot] - before[slot]) - 1
                self.check(state, slot, int(before[slot]) + 1, held)

    def check_choose(
        self, slots: slice, tables: Tensor, starts: Tensor, positions: Tensor, live: Tensor, queries: int, *rest: Tensor
    ) -> None:
        self.choose(slots, tables, starts, positions, live, queries, *rest)
        state = self.state
        if not queries:
            for slot, last in zip(range(*slots.indices(len(state.active))), positions.tolist(), strict=True):
                self.check(state, slot, last + 1 if live[slot - slots.start] else 0, None)

    def check(self, state: DecodeState, slot: int, num_tokens: int, held: int | None) -> None:
        """The choice among the first `num_candidates` tokens; `held` drafts held, or nothing was verified."""
        d, budget = self.drafter, self.drafter.budget
        p = d.placement
        kvp, block = p.layout.kvp, p.append_block
        mine = [t for t in range(num_tokens) if (t // block + int(state.starts[slot])) % kvp == p.kvp_rank]
        n = len(mine)
        k = min(n, max(-(-n * round(budget.sparsity * 1e6) // 1_000_000), 16 // kvp))
        sinks = {i for i, t in enumerate(mine) if t < 4}
        latest = range(n - max(0, int(k * budget.recent) - len(sinks)), n)
        forced = set(sorted(sinks)[:k]) | set(latest)
        cache_slots = [
            int(state.block_tables[slot, i // p.page_size]) * p.page_size + i % p.page_size for i in range(n)
        ]
        for layer, place in d.selected._layer_indices.items():
            tensors = d.cache.layer(layer).tensors
            stored = tensors["keys"] if "keys" in tensors else tensors["latents"].unsqueeze(2)
            keys = stored.flatten(0, 1)[cache_slots].double()  # [n, Hkv, D]
            for h in range(d.selected.tables.shape[2]):
                row = d.selected.tables[place, slot, h].tolist()
                selected = [cache_slots.index(x) for x in row[:k]]
                assert selected == sorted(set(selected)) and forced <= set(selected), (num_tokens, slot, layer, h)
                if held is None:
                    assert set(selected) == set(list(range(n))[n - (k - len(forced & sinks)) :]) | (forced & sinks)
                    continue
                q = self.queries[layer, slot].double()
                counting = q[[0, -1]] if budget.policy == "c2q" and len(q) > 1 else q
                added = range(keys.shape[1]) if budget.heads == "all" else [h]
                total = sum(self.scores(keys, counting, each, "latents" in tensors) for each in added)
                assert isinstance(total, Tensor)
                scores = [float(total[max(0, i - budget.reach) : i + 1].max()) for i in range(n)]
                free, left = set(selected) - forced, set(range(n)) - set(selected)
                if free and left:  # fp16 keeps 2^-11 of scores below 16, of each head
                    worst, best = min(scores[i] for i in free), max(scores[i] for i in left)
                    assert worst >= best - 0.02 * len(added), (num_tokens, slot, layer, h)
                    self.checked += 1

    def scores(self, keys: Tensor, queries: Tensor, head: int, latents: bool) -> Tensor:
        products = keys[:, head] @ queries.unflatten(1, (keys.shape[1], -1))[:, head].flatten(0, 1).T
        if self.drafter.budget.policy == "c2q":
            return products.mean(1)
        # A score is the sum of what tiles of rows found: 32 of them here, with latents 16.
        bests = [part.amax(1) for part in products.split(16 if latents else 32, 1)]
        return sum(bests[1:], bests[0])


ANY = DraftBudget("any", 0.1, recent=0.25, reach=4)
BUDGETS = {
    "any": ANY,
    "c2q": replace(ANY, policy="c2q"),
    "any of all heads": replace(ANY, heads="all"),
    "as in Vegas": DraftBudget("c2q", 0.1, recent=0.0, reach=0, heads="all"),
}


@pytest.mark.parametrize(
    "budget, pads, model",
    [
        ("any", False, "qwen2"),
        ("any", True, "qwen2"),
        ("c2q", False, "qwen2"),
        ("as in Vegas", False, "qwen2"),
        ("any of all heads", True, "qwen2"),
        ("any", False, "qwen3.5-tied"),
        ("any", False, "deepseek-v3-yarn"),
        ("c2q", True, "deepseek-v3-yarn"),
    ],
)
def test_tables(budget: str, pads: bool, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of all counts, of which some are not verified, on both ranks; behind chunks that are padded."""
    for target, value in SMALL_CHUNKS.items() if pads else ():
        monkeypatch.setattr(target, value)
    monkeypatch.setattr(DraftPolicy, "plan_steps", random_pace(0))
    watches = []

    def run(engine: Engine) -> None:
        engine.runner.pads_chunks |= pads
        watches.append(SelectionChecker(engine))
        generated(engine, requests(model))

    drafts = SelfDrafts(3, BUDGETS[budget])
    on_loopback(checkpoint(model), HelixLayout.create("helix", 2), 16, run, drafter=drafts, adaptive=True)
    least = 20 if model != "qwen2" else 60 if BUDGETS[budget].heads == "all" else 100
    assert min(watch.checked for watch in watches) > least


Read = dict[tuple[object, ...], set[int]]  # positions of a rank's tokens, by request, layer and position of the query


def latents_read(engine: Engine, requests: list[Request]) -> tuple[Read, Read]:
    """Generates, and returns what queries of exact steps read, at last, and those of drafts, by cached tokens, too."""
    exact, drafted, state, runner = Read(), Read(), engine.runner.state, engine.runner
    drafter, dense = engine.runner.drafter, engine.runner.dense
    assert isinstance(drafter, SparseDrafter) and drafter.stored is not None
    attend, attend_stored, p = dense.attend, drafter.stored.attend, drafter.placement

    def positions(slot: int, cache_slots: list[int]) -> set[int]:
        pages, first = state.block_tables[slot].tolist(), (p.kvp_rank - int(state.starts[slot])) % p.layout.kvp
        local = [pages.index(x // p.page_size) * p.page_size + x % p.page_size for x in cache_slots]
        found = {(i // p.append_block * p.layout.kvp + first) * p.append_block + i % p.append_block for i in local}
        assert len(found) == len(cache_slots), "a token is read once"
        return found

    def record(q: Tensor, cache: LayerCache, step: Step, *args: object) -> PartialAttention:
        owners = step.owners() if step.cu_q is not None else torch.arange(len(q)) // step.max_q
        assert owners is not None
        for row in range(len(q)) if step.placement is p else ():
            slot, position = int(step.slots[owners[row]]), int(step.positions[row])
            if step.live[row]:
                read = set(range(position + 1))
                if step.selected is not None:
                    slots, lo, hi = (x[row] for x in step.selected)
                    read = positions(slot, slots[int(lo) : int(hi)].tolist())
                exact[runner.requests[slot].id, cache.index, position] = read
        return attend(q, cache, step, *args)  # type: ignore[arg-type]

    def record_drafts(q: Tensor, cache: LayerCache, step: Step, *args: object) -> PartialAttention:
        lo, hi = drafter.stored._read_ranges(step)
        for slot in range(len(q)):
            if step.live[slot]:
                place = drafter.stored._positions[cache.index]
                row = drafter.stored.tables[place, slot, int(lo[slot]) : int(hi[slot, place])].tolist()
                key = runner.requests[slot].id, cache.index, int(step.positions[slot]), int(state.lengths[slot])
                drafted[key] = positions(slot, row)
        return attend_stored(q, cache, step, *args)  # type: ignore[arg-type]

    dense.attend, drafter.stored.attend = record, record_drafts  # type: ignore[method-assign, assignment]
    generated(engine, requests)
    return exact, drafted


@pytest.mark.parametrize("model", ["glm-5-shared", "glm-5-all", "deepseek-v32"])
def test_selections_of_indexers_are_reused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft reads what the last token in the cache read, and all since, whatever ranks gathered and padded."""
    prompts = [c.prompt for c in oracle(model, (7, 1, 60, 200), 14)]
    asked = [Request(i, prompt, 24, p) for i, (prompt, p) in enumerate(zip(prompts, SAMPLED, strict=False))]

    def run(layout: str, **code_paths: object) -> list[tuple[Read, Read]]:
        with monkeypatch.context() as patch:
            patch.setattr(DraftPolicy, "plan_steps", random_pace(0))
            for target, value in code_paths.items():
                patch.setattr(target, value)

            def body(engine: Engine) -> tuple[Read, Read]:
                engine.runner.pads_chunks |= "padded" in layout
                return latents_read(engine, asked)

            size = HelixLayout.create("helix", int(layout[0]))
            return on_loopback(checkpoint(model), size, 4, body, drafter=SelfDrafts(3, DraftBudget()), adaptive=True)

    ((exact, drafted),) = run("1")
    assert len(drafted) > 150 and any(len(read) < key[2] for key, read in drafted.items())  # type: ignore[operator]
    for (request, layer, position, length), read in drafted.items():
        assert isinstance(length, int) and isinstance(position, int)
        assert read == exact[request, layer, length - 1] | set(range(length, position + 1)), (request, layer, length)
    for layout, paths in (("2 padded", SMALL_CHUNKS), ("3 dealt", CODE_PATHS["dealt"])):
        ranks, common = [drafts for _, drafts in run(layout, **paths)], 0
        for key in drafted.keys() & ranks[0].keys():
            assert set().union(*(rank[key] for rank in ranks)) == drafted[key], (layout, key)
            common += 1
        assert common > 100, layout


def test_phases_of_an_iteration() -> None:
    def run(engine: Engine) -> dict[str, float]:
        fill(engine.runner, 2, 200)
        with torch.inference_mode():
            return phase_us(engine.runner, engine.comm, DecodeGraphKey(2, 3))

    layout, options = HelixLayout.create("helix", 2), dict(drafter=SelfDrafts(3, FEW), adaptive=False)
    first, second = on_loopback(checkpoint("qwen2"), layout, 16, run, **options)
    assert first == second and list(first) == ["draft", "verify", "accept", "choose"]
    assert first["draft"] > first["verify"] > 0 and min(first.values()) > 0
