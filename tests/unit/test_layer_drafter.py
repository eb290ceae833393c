"""A drafting layer's attention reads bounds while the kernel before it runs: another one comes behind these."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from comm.solo import SoloCommunicator
from helix.attention.dense import DenseAttention
from helix.kv_placement import KVPlacement
from helix.layout import HelixLayout
from helix.speculation import LayerDrafter
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.kv_cache import KVCache
from helix.worker.kv_cache_spec import EngineSizes, KVCacheSpec
from helix.worker.sequence_observer import Span, StepCommitted
from helix.worker.step import Step

WIDTH, WINDOW = 8, 4


class Logged(DenseAttention):
    def __init__(self, events: list[str]) -> None:
        self.events = events

    def prepare(self, step: Step, windows: set[int | None]) -> None:
        self.events.append("bounds")
        super().prepare(step, windows)


class Parts:
    """Projections of a layer; choosing rows of them is a launch."""

    def __init__(self, events: list[str], rows: int) -> None:
        self.events, self.rows = events, rows

    def index_select(self, dim: int, index: Tensor) -> Parts:
        self.events.append("choose")
        return Parts(self.events, len(index))


class Layer:
    target_width = width = WIDTH
    vocab_rows, window, shared_topk = range(16), WINDOW, 0

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def append(self, cache: Any, step: Step, states: Tensor, *, from_draft: bool) -> tuple[Any, Any]:
        self.events.append("append")
        return Parts(self.events, len(step.tokens)), Parts(self.events, len(step.tokens))

    def attend(self, queries: Parts, x: Parts, cache: Any, step: Step, policy: Any) -> Tensor:
        assert WINDOW in step.shared and queries.rows == x.rows == len(step.tokens)
        self.events.append("attend")
        return torch.zeros(x.rows, WIDTH)

    def logits(self, states: Tensor) -> Tensor:
        return torch.zeros(len(states), 16)


def test_a_launch_is_between_bounds_and_attention() -> None:
    events: list[str] = []
    cpu = torch.device("cpu")
    placement = KVPlacement(HelixLayout.create("helix", 1), 0, 16, 16)
    model = SimpleNamespace(
        comm=SoloCommunicator(cpu), weights=SimpleNamespace(dtype=torch.float32), spec=SimpleNamespace(layers=())
    )
    cache = KVCache([(KVCacheSpec("target_state", (WIDTH,), "float32", "prompt"),)], placement, EngineSizes(2), cpu)
    drafter = LayerDrafter(Layer(events), model, cache, EngineSizes(2, 32, drafts=2), "shared")
    drafter.policy = Logged(events)
    state = drafter.sequences
    state.limits.fill_(30)
    state.active.fill_(True)
    state.lengths.fill_(5)
    drafter.propose(state, DecodeGraphKey(rows=2, drafts=2))
    assert events == ["bounds", "append", "attend"]
    events.clear()
    before, after = torch.tensor([5, 5]), torch.tensor([7, 6])
    span = Span(state.block_tables, state.starts, before, after, 3)
    tokens = torch.tensor([[1, 2, -(1 << 40)], [3, -(1 << 40), -(1 << 40)]])
    kind = DecodeGraphKey(rows=2, drafts=2)
    drafter.on_step(StepCommitted(kind, span, torch.ones(2, dtype=torch.bool), torch.zeros(6, WIDTH), tokens))
    assert events == ["append", "bounds", "choose", "choose", "attend"]
