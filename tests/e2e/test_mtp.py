"""Drafts of a layer for multi-token prediction are those of transformers' own layer, and change no token."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import pytest
import torch

from comm.loopback import LoopbackWorld, run_ranks
from helix.engine.draft_policy import DraftPolicy
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.worker.follower import Taken
from tests.e2e import mtp
from tests.e2e.parity import Continuation, LayerDrafts, build_engine, build_model, check, generate
from tests.e2e.recorded import Kept, Recorded, unlike
from tests.e2e.test_parity import MOE_LENGTHS, MOE_TOKENS
from tests.e2e.test_speculation import whimsical
from tests.pairs import params
from tests.sequences import generated

FAMILIES = ["deepseek-v3-yarn", "deepseek-v3-halves"]
INDEXED = ["deepseek-v32", "glm-5-shared"]  # the layer chooses tokens too
HEADS = ["glm4-moe", "hy-v3", "qwen3-next", "qwen3.5-tied", "qwen3.5-moe"]  # of queries and keys, in place of latents
GRIDS, TILES = [(1, 1), (2, 1), (4, 1), (3, 1)], [(1, 2), (2, 2), (3, 1)]


@functools.cache
def plain(family: str) -> list[Continuation]:
    return mtp.plain(family, MOE_LENGTHS, MOE_TOKENS)


class NotRewritten(Kept):
    """Leaves the rows of kept drafts as drafts wrote them."""

    def taken(self, step: Taken) -> None:
        before = self.cache.layer(2).kept["latents"].clone()
        super().taken(step)
        now = self.cache.layer(2).kept["latents"]
        now.copy_(torch.where(before.isnan(), now, before))


class EachChooses(Kept):
    """Lets each draft choose its tokens."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.layer.choice = 0


@pytest.mark.parametrize(
    "family, grid, adaptive",
    params(
        [
            (family, grid, adaptive)
            for families, grids in ((FAMILIES, GRIDS), (INDEXED, GRIDS[:2]), (HEADS, TILES))
            for family, grid, adaptive in product(families, grids, (False, True))
        ]
    ),
)
def test_greedy_tokens_and_logits(
    family: str, grid: tuple[int, int], adaptive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the same prompts, the second time behind cached prefixes."""
    if adaptive:
        monkeypatch.setattr(DraftPolicy, "pace", whimsical())
    wanted, layout = plain(family), HelixLayout.create("helix", *grid)

    def body(world: LoopbackWorld, rank: int) -> Any:
        comm = world.communicator(rank, layout.kvp_group(rank))
        path, drafts = mtp.with_layer(family), LayerDrafts(3)
        engine = build_engine(path, layout, comm, 16, drafter=drafts, adaptive=adaptive, prefill_chunk=40)
        return [generate(engine, wanted) for _ in range(2)]

    for results in zip(*run_ranks(layout.world_size, body, timeout_s=120.0), strict=True):
        check(results, wanted)


def drafted(kind: type[Recorded], family: str, kvp: int, adaptive: bool = False, chunk: int = 40) -> Recorded:
    """The drafter of rank 0 after two rounds of the prompts; the second ones go on behind prefixes of the first."""
    layout = HelixLayout.create("helix", kvp, 1)
    prompts = [c.prompt for c in plain(family)]
    drafters: dict[int, Any] = {}

    def body(world: LoopbackWorld, rank: int) -> None:
        comm = world.communicator(rank, layout.kvp_group(rank))
        drafts = LayerDrafts(3, kind=kind)
        engine = build_engine(
            mtp.with_layer(family), layout, comm, 16, drafter=drafts, adaptive=adaptive, prefill_chunk=chunk
        )
        drafters[rank] = engine.runner.drafter
        generated(engine, [Request(i, p, 12) for i, p in enumerate(prompts)])
        generated(engine, [Request(i, (*p, 9, i), 12) for i, p in enumerate(prompts)])

    run_ranks(layout.world_size, body, timeout_s=120.0)
    return drafters[0]


@pytest.mark.parametrize(
    "family, kvp, kind",
    params(
        [*product([*FAMILIES, *INDEXED, *HEADS], (1, 3), (Recorded, Kept))],
        lambda family, kvp, kind: f"{family}-{kvp}-{kind.__name__}",
    ),
)
def test_drafts_are_those_of_the_layer(family: str, kvp: int, kind: type[Recorded]) -> None:
    found = drafted(kind, family, kvp)
    assert len(found.drafted) > 20
    assert unlike(found, mtp.oracle(family).drafts) == []


def test_drafts_after_steps_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftPolicy, "pace", whimsical())
    found = drafted(Kept, FAMILIES[0], 2, adaptive=True, chunk=7)
    assert len(found.drafted) > 10
    assert unlike(found, mtp.oracle(FAMILIES[0]).drafts) == []


def test_rows_that_are_not_written_anew_are_found() -> None:
    assert unlike(drafted(NotRewritten, FAMILIES[0], 1), mtp.oracle(FAMILIES[0]).drafts) != []


def test_drafts_that_choose_anew_are_found() -> None:
    """The model was trained to choose for the first draft alone."""
    assert unlike(drafted(EachChooses, "glm-5-shared", 1), mtp.oracle("glm-5-shared").drafts) != []


def test_without_the_drafter_its_layer_is_not_read() -> None:
    family = FAMILIES[0]
    layout = HelixLayout.create()

    def body(world: LoopbackWorld, rank: int) -> Any:
        comm = world.communicator(rank, (0,))
        return generate(build_engine(mtp.with_layer(family), layout, comm, 16, build=build_model), plain(family))

    check(run_ranks(1, body, timeout_s=120.0), plain(family))
