"""DeepSeek's models give what transformers gives, wherever W_UV is applied and whoever makes the queries."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch

from benchmarks.ranks.hopb import without_exchange
from comm.symm_mem import SymmMemCommunicator
from comm.torch_dist import TorchDistCommunicator
from helix.engine.core import Engine
from helix.layers import mla
from helix.layout import HelixLayout
from helix.worker import model_runner
from helix.worker.graph_keys import StepKind
from helix.worker.warm_up import step_seconds
from tests.e2e.checkpoints import checkpoint, oracle
from tests.e2e.deepseek import MLA_FAMILIES
from tests.e2e.parity import check, distributed_rank, loopback
from tests.e2e.test_parity import BLOCKS, MOE_LENGTHS, MOE_TOKENS, WORLDS, ShiftedLSE
from tests.pool import Pool, pool

CHOICES = [(values, gathers) for values in (False, True) for gathers in (False, True)]


def choose(monkeypatch: pytest.MonkeyPatch, values: bool, gathers: bool) -> None:
    """Models as small as these would always take the same ways."""
    monkeypatch.setattr(mla, "exchanges_values", lambda *args: values)
    monkeypatch.setattr(mla, "gathers_queries", lambda *args: gathers)
    monkeypatch.setattr(mla, "gathers_first", lambda *args: values)


def matrix() -> list[object]:
    """Each family on every world, each world and each family with every choice, blocks and expert grids in turn."""
    cases, blocks = [], cycle(BLOCKS)
    for i, family in enumerate(MLA_FAMILIES):
        for j, world in enumerate(WORLDS):
            eps = [ep for ep in range(1, world + 1) if world % ep == 0 and ep <= 5]
            layout = HelixLayout.create("helix", world, ep=eps[i % len(eps)])
            values, gathers = CHOICES[(i + j) % len(CHOICES)]
            ways = f"{'values' if values else 'latents'}-{'gathered' if gathers else 'replicated'}"
            name = f"{family}-kvp{world}-ep{layout.ep}-{ways}"
            cases.append(pytest.param(family, layout, next(blocks), values, gathers, id=name))
    return cases


@pytest.mark.parametrize("family, layout, block, values, gathers", matrix())
def test_every_group_and_choice(
    monkeypatch: pytest.MonkeyPatch, family: str, layout: HelixLayout, block: int, values: bool, gathers: bool
) -> None:
    choose(monkeypatch, values, gathers)
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    check(loopback(checkpoint(family), layout, block, wanted), wanted)


@pytest.mark.parametrize("family", MLA_FAMILIES)
@pytest.mark.parametrize("mode, kvp, tpa", [("tp", 1, 2), ("tp", 1, 4), ("medha", 3, 1)], ids=lambda x: str(x))
def test_baseline_modes(family: str, mode: str, kvp: int, tpa: int) -> None:
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    check(loopback(checkpoint(family), HelixLayout.create(mode, kvp, tpa), 16, wanted), wanted)


@pytest.mark.parametrize("family", MLA_FAMILIES)
@pytest.mark.parametrize(
    "mode, kvp, tpa, block, gathers",
    [
        ("helix", 1, 1, 16, False),
        ("tp", 1, 2, 16, True),
        ("helix", 2, 1, 16, True),
        ("helix", 3, 1, 5, False),
        ("medha", 2, 1, 16, False),
        ("medha", 3, 1, 16, True),
    ],
)
@pytest.mark.parametrize("piece", [1, 1 << 12, 1 << 28])
def test_expanded_keys(
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    mode: str,
    kvp: int,
    tpa: int,
    block: int,
    gathers: bool,
    piece: int,
) -> None:
    """Every step of prompts, in one piece, in some or in as many as there can be: as many on ranks of few heads."""
    choose(monkeypatch, values=False, gathers=gathers)
    monkeypatch.setattr(model_runner, "expanding_rows", lambda spec: 0.01)
    monkeypatch.setattr(mla, "EXPANDED", piece)
    seen, attend = list[int](), mla.MLA._attend_expanded

    def spy(self: mla.MLA, *args: Any) -> torch.Tensor:
        seen.append(self.index)
        return attend(self, *args)

    monkeypatch.setattr(mla.MLA, "_attend_expanded", spy)
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    check(loopback(checkpoint(family), HelixLayout.create(mode, kvp, tpa), block, wanted), wanted)
    assert seen


@pytest.mark.parametrize("values, gathers", CHOICES)
def test_chunks_of_a_batch(monkeypatch: pytest.MonkeyPatch, values: bool, gathers: bool) -> None:
    choose(monkeypatch, values, gathers)
    wanted = oracle("deepseek-v3-yarn", MOE_LENGTHS, MOE_TOKENS)
    seen = []

    def tamper(engine: Engine) -> None:
        engine.runner.hopb = "2"
        run = engine.runner.model.pipeline.run

        def spy(*args: object, leads: bool) -> None:
            assert not leads
            seen.append(engine.comm.rank)
            run(*args, leads=leads)  # type: ignore[arg-type]

        engine.runner.model.pipeline.run = spy  # type: ignore[method-assign]

    check(loopback(checkpoint("deepseek-v3-yarn"), HelixLayout.create("helix", 3), 16, wanted, tamper), wanted)
    assert {*seen} == {0, 1, 2}


def test_queries_are_gathered_where_the_exchange_is_left_out_of_a_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, values=False, gathers=True)
    wanted = oracle("deepseek-v2-yarn", MOE_LENGTHS, MOE_TOKENS)
    seconds = []

    def tamper(engine: Engine) -> None:
        seconds.append(
            without_exchange(engine.runner, engine.comm, lambda: step_seconds(engine.runner, StepKind(2), 1))
        )

    check(loopback(checkpoint("deepseek-v2-yarn"), HelixLayout.create("helix", 2), 16, wanted, tamper), wanted)
    assert len(seconds) == 2 and min(seconds) > 0


def test_gloo_ranks(gloo_pool: Callable[[int], Pool]) -> None:
    wanted = oracle("deepseek-v2-yarn", MOE_LENGTHS, MOE_TOKENS)
    task = (checkpoint("deepseek-v2-yarn"), HelixLayout.create("helix", 4, ep=2), 16, wanted, "cpu")
    check(gloo_pool(4).run(distributed_rank, *task, timeout_s=240.0), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("family", MLA_FAMILIES)
@pytest.mark.parametrize("values, gathers", CHOICES)
def test_loopback_ranks_on_one_gpu(monkeypatch: pytest.MonkeyPatch, family: str, values: bool, gathers: bool) -> None:
    choose(monkeypatch, values, gathers)
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    for layout in (HelixLayout.create(), HelixLayout.create("helix", 4, ep=4), HelixLayout.create("tp", 1, 4)):
        check(loopback(checkpoint(family), layout, 16, wanted, device="cuda"), wanted)


@pytest.mark.parametrize("kind", [TorchDistCommunicator, SymmMemCommunicator], ids=["nccl", "symm_mem"])
@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 4, 8)])
@pytest.mark.parametrize("family", MLA_FAMILIES)
def test_gpus(family: str, world: int, kind: type[TorchDistCommunicator]) -> None:
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    task = (checkpoint(family), HelixLayout.create("helix", world, ep=2), 16, wanted, "cuda", kind)
    check(pool(world, "nccl").run(distributed_rank, *task, timeout_s=120.0), wanted)


def shifts_lse(engine: Engine) -> None:
    if engine.comm.rank == 1:
        engine.runner.dense = ShiftedLSE(engine.runner.dense)


def forgets_temperature(engine: Engine) -> None:
    for layer in engine.runner.model.layers:
        layer.mixer.scale = layer.mixer.spec.query**-0.5


def takes_the_next_heads_values(engine: Engine) -> None:
    for layer in engine.runner.model.layers:
        layer.mixer.own_w_uv = layer.mixer.w_uv[-layer.mixer.own_w_uv.shape[0] :]


def rotates_neighbours_as_halves(engine: Engine) -> None:
    """The order in which the checkpoint has them, for the keys alone."""
    for layer in engine.runner.model.layers:
        rows = layer.mixer.down.weight[-8:]
        rows.copy_(torch.stack((rows[:4], rows[4:]), 1).flatten(0, 1))


@pytest.mark.parametrize(
    "tamper", [shifts_lse, forgets_temperature, takes_the_next_heads_values, rotates_neighbours_as_halves]
)
def test_mistakes_are_caught(monkeypatch: pytest.MonkeyPatch, tamper: Callable[[Engine], None]) -> None:
    choose(monkeypatch, values=False, gathers=False)
    wanted = oracle("deepseek-v3-yarn", MOE_LENGTHS, MOE_TOKENS)
    results = loopback(checkpoint("deepseek-v3-yarn"), HelixLayout.create("helix", 2), 16, wanted, tamper)
    with pytest.raises(AssertionError, match="prompt"):
        check(results, wanted)
