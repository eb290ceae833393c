"""Block-sparse decode of models whose other layers keep states: those with keys choose, states are as they were."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from comm.loopback import LoopbackWorld, run_ranks
from helix.engine.core import Engine
from helix.engine.decision import Admission
from helix.layout import HelixLayout
from helix.speculation import Drafter, SuffixDrafter
from tests.e2e import mtp
from tests.e2e.checkpoints import HYBRID_FAMILIES, checkpoint
from tests.e2e.parity import LayerDrafts, Sparse, build_engine
from tests.e2e.test_block_sparse import (
    GRIDS,
    LENGTHS,
    PAGE,
    SHORT_WINDOW,
    Tokens,
    dense,
    generate,
    tokens,
    wanted,
)

FEW = replace(SHORT_WINDOW, topk=2)  # so few that tokens of all families are not those of dense attention
DRAFTED = replace(FEW, local_blocks=2)
HOT = 30  # places of a KV head: more than what five sequences with three drafts choose at once


@pytest.mark.parametrize("hot", [None, HOT])
@pytest.mark.parametrize("kvp, tpa", [grid for grid in GRIDS if grid.values[1] in (1, 2)])
def test_every_grid(kvp: int, tpa: int, hot: int | None) -> None:
    """The family has two KV heads."""
    family = "qwen3.5-tied"
    found = tokens(family, HelixLayout.create("helix", kvp, tpa), Sparse(FEW, hot=hot))
    assert found == wanted(family, FEW) != dense(family)


@pytest.mark.parametrize("hot", [None, HOT])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_families_with_drafts_and_without(family: str, drafts: int, hot: int | None) -> None:
    """A draft is a row more of a state, and a query more that chooses."""
    found = tokens(family, HelixLayout.create("helix", 2), Sparse(DRAFTED, hot=hot), drafts=drafts)
    assert found == wanted(family, DRAFTED) != dense(family)


@pytest.mark.parametrize("mode, kvp, tpa", [("medha", 3, 1), ("tp", 1, 2)])
def test_modes(mode: str, kvp: int, tpa: int) -> None:
    found = tokens("qwen3-next", HelixLayout.create(mode, kvp, tpa), Sparse(FEW))
    assert found == wanted("qwen3-next", FEW)


@pytest.mark.parametrize("kv", ["fp8", "k16v8"])
def test_keys_in_few_bits(kv: str) -> None:
    layout = HelixLayout.create("helix", 2)
    on_gpu, on_host = (tokens("qwen3.5-tied", layout, Sparse(FEW, hot=hot), kv=kv) for hot in (None, HOT))
    assert on_gpu == on_host


def twice(
    family: str,
    layout: HelixLayout,
    sparse: Sparse,
    drafter: Drafter | LayerDrafts | None = None,
    tamper: Callable[[Engine], None] = lambda engine: None,
    snapshots: int = 5,
) -> tuple[Tokens, Tokens, list[Admission]]:
    """Tokens of the same prompts, which in the second round go on behind snapshots; and its admissions."""
    path = mtp.with_layer(family) if isinstance(drafter, LayerDrafts) else checkpoint(family)

    def body(world: LoopbackWorld, rank: int) -> Any:
        comm = world.communicator(rank, layout.kvp_group(rank))
        engine = build_engine(
            path, layout, comm, PAGE, page_size=PAGE, sparse=sparse, drafter=drafter, adaptive=False,
            snapshots=snapshots,
        )  # fmt: skip
        admitted: list[Admission] = []
        admit = engine.runner.admit

        def noted(*admissions: Admission) -> None:
            admitted.extend(admissions)
            admit(*admissions)

        with closing(engine):
            first = generate(engine)
            tamper(engine)
            engine.runner.admit = noted  # type: ignore[method-assign]
            return first, generate(engine), admitted

    found: tuple[Tokens, Tokens, list[Admission]] = run_ranks(layout.world_size, body, timeout_s=120.0)[0]
    return found


@pytest.mark.parametrize("hot", [None, HOT])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("kvp", [1, 2])
def test_behind_snapshots(kvp: int, drafts: int, hot: int | None) -> None:
    family, layout = "qwen3.5-tied", HelixLayout.create("helix", kvp)
    drafter = SuffixDrafter(drafts, 1) if drafts else None
    first, second, admitted = twice(family, layout, Sparse(DRAFTED, hot=hot), drafter)
    assert first == second == wanted(family, DRAFTED)
    behind = {admission.length: admission.resumes for admission in admitted if admission.state >= 0}
    stripe = PAGE * kvp
    assert behind == {n: (n - 1) // stripe * stripe for n in LENGTHS if n > stripe}


def test_drafts_of_the_layer_behind_the_last_one() -> None:
    """It reads all keys, and chooses nothing."""
    path, layout = mtp.with_layer("qwen3.5-tied"), HelixLayout.create("helix", 2)

    def body(world: LoopbackWorld, rank: int) -> list[Tokens]:
        comm = world.communicator(rank, layout.kvp_group(rank))
        sparse, drafts = Sparse(DRAFTED, choice="global"), LayerDrafts(3)
        drafted = build_engine(path, layout, comm, PAGE, page_size=PAGE, sparse=sparse, drafter=drafts, adaptive=False)
        plain = build_engine(path, layout, comm, PAGE, page_size=PAGE, sparse=sparse)
        return [generate(engine) for engine in (drafted, plain)]

    drafted, plain = run_ranks(2, body, timeout_s=120.0)[0]
    assert drafted == plain


def with_bounds_of_other_pages(engine: Engine) -> None:
    """Beginnings are found in pages, and judged by the bounds of others."""
    cache = engine.runner.cache
    admit = cache.admit

    def shifted(*admissions: Admission) -> None:
        admit(*admissions)
        assert cache.bounds is not None
        cache.bounds.copy_(cache.bounds.roll(1, 1))

    cache.admit = shifted  # type: ignore[method-assign]


def without_the_state(engine: Engine) -> None:
    """Keys are found, and the state that belongs to them is left at zero."""
    admit = engine.runner.cache.admit
    engine.runner.cache.admit = lambda *them: admit(*(replace(a, state=-1) for a in them))  # type: ignore[method-assign]


@pytest.mark.parametrize("mistake", [with_bounds_of_other_pages, without_the_state])
def test_mistakes_are_caught(mistake: Callable[[Engine], None]) -> None:
    first, second, _ = twice("qwen3.5-tied", HelixLayout.create("helix", 2), Sparse(FEW), tamper=mistake)
    assert first == wanted("qwen3.5-tied", FEW) != second


@pytest.mark.gpu
@pytest.mark.parametrize("hot", [None, HOT])
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_loopback_ranks_on_one_gpu(family: str, hot: int | None) -> None:
    """Eager steps and prompts, by the kernels."""
    found = tokens(family, HelixLayout.create("helix", 3), Sparse(FEW, hot=hot), device="cuda")
    assert found == wanted(family, FEW)
