"""Layers that draft, however requests come, wait and leave, and whatever is drawn; on GPUs too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comm.base import Communicator
from comm.loopback import LoopbackWorld, run_ranks
from comm.symm_mem import SymmMemCommunicator
from comm.torch_dist import TorchDistCommunicator
from helix.config import SpeculationConfig
from helix.engine.decision import Decision
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.sampling_params import SamplingParams
from helix.speculation import Draft, LayerDrafter, SuffixDrafter
from helix.worker.graph_keys import StepKind
from helix.worker.step import DecodeState
from helix.worker.step_tokens import StepTokens
from tests.e2e import eagle3, mtp, test_draft_model
from tests.e2e.checkpoints import continuations
from tests.e2e.parity import Continuation, LayerDrafts, build_engine, check, generate
from tests.e2e.recorded import Kept, unlike
from tests.e2e.test_serve import CLOSE, Served, left_behind, serve, turns
from tests.pool import pool
from tests.sequences import generated, generated_ids, resize

MTP, EAGLE = "deepseek-v3-halves", "qwen3"
LENGTHS, TOKENS = (1, 17, 90), 12
KINDS = ["mtp", "eagle3"]


def target(kind: str) -> Path:
    return mtp.with_layer(MTP) if kind == "mtp" else eagle3.target(EAGLE)


def drafts(of: str, count: int = 3, **more: Any) -> LayerDrafts:
    layer = SpeculationConfig(drafter="eagle3", path=str(eagle3.layer(EAGLE, "shared"))) if of == "eagle3" else None
    return LayerDrafts(count, eagle3=layer, **more)


def drafts_of(kind: str) -> Callable[[list[int], int], list[int]]:
    return mtp.oracle(MTP).drafts if kind == "mtp" else eagle3.oracle(EAGLE, "shared").drafts


@functools.cache
def plain(kind: str, lengths: tuple[int, ...] = LENGTHS, tokens: int = TOKENS) -> list[Continuation]:
    return continuations(target(kind), lengths, tokens)


@pytest.mark.parametrize("kind", [*KINDS, "suffix"])
@pytest.mark.parametrize("kvp", [1, 2])
def test_prefix_hits_preemptions_and_aborts(kvp: int, kind: str) -> None:
    model = "mtp" if kind == "suffix" else kind
    layout, wanted = HelixLayout.create("helix", kvp), plain(model, (7, 1, 15, 16, 17, 80), 24)
    first, second = turns(wanted)

    def body(world: LoopbackWorld, rank: int) -> Served:
        comm = world.communicator(rank, layout.kvp_group(rank))
        sizes = dict(page_size=4, pages=32 // kvp, **CLOSE)
        given = SuffixDrafter(3, 4, 100, 3, comm.device) if kind == "suffix" else drafts(kind)
        e = build_engine(target(model), layout, comm, 4, drafter=given, adaptive=False, **sizes)
        resize(e, run_steps=1)
        found = serve(e, [*reversed(first), Request("gone", wanted[1].prompt, 30)], second, aborts={"gone": 2})
        assert left_behind(e)[1:] == (0, 0)
        assert rank or e.timings.preemptions > 0, "pages are too many for this test"
        return found

    found = run_ranks(kvp, body, timeout_s=120.0)[0]
    for i, c in enumerate(wanted):
        assert tuple(found.tokens[i]) == c.tokens, f"prompt {i}"
        assert tuple(found.tokens[f"next {i}"]) == c.tokens[-3:], f"prompt {i}, continued"
    assert found.ends["gone"] == "abort" and any(found.cached.values())


SAMPLED = [
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=9),
    SamplingParams(temperature=0.7, top_k=20, seed=2),
    SamplingParams(temperature=0.9, min_p=0.05, top_p=0.95, seed=4),
]


def sampled(kind: str) -> list[Request]:
    prompt = plain(kind)[1].prompt
    return [Request(i, (*prompt, i), 24, p) for i, p in enumerate(SAMPLED)]


@functools.cache
def drawn(kind: str, kvp: int, noise: str | None) -> dict[Any, tuple[int, ...]]:
    layout = HelixLayout.create("helix", kvp)

    def body(world: LoopbackWorld, rank: int) -> dict[Any, tuple[int, ...]]:
        comm = world.communicator(rank, layout.kvp_group(rank))
        drafter = None if noise is None else drafts(kind, noise=noise)
        engine = build_engine(target(kind), layout, comm, 16, drafter=drafter, adaptive=False)
        return generated_ids(engine, sampled(kind))

    return run_ranks(kvp, body, timeout_s=120.0)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_shared_noise_changes_no_sampled_token(kind: str) -> None:
    assert drawn(kind, 2, "shared") == drawn(kind, 1, None)
    own = drawn(kind, 2, "own")
    assert own[0] == drawn(kind, 1, None)[0], "a greedy one"
    assert own == drawn(kind, 1, "own")


class TestDistribution(test_draft_model.TestDistribution):
    """Draws with drafts of a layer whose head has but some of the tokens."""

    def tables(self) -> tuple[Tensor, Tensor]:
        of_target, of_layer = super().tables()
        of_layer[:, self.IDS[2]] = -torch.inf
        return of_target, of_layer

    def drawn(self, tamper: Callable[[Draft], Draft] = lambda draft: draft) -> Tensor:
        layout = HelixLayout.create("helix", 2)
        requests = [Request(i, (7, 8), self.TOKENS, replace(self.PARAMS, seed=i)) for i in range(self.SEQUENCES)]

        class Tampered(LayerDrafter):
            def propose(self, state: DecodeState, kind: StepKind) -> Draft:
                return tamper(super().propose(state, kind))

        def body(world: LoopbackWorld, rank: int) -> Tensor:
            comm = world.communicator(rank, layout.kvp_group(rank))
            drafter = drafts("mtp", noise="own", kind=Tampered)
            sizes = dict(max_batch=self.SEQUENCES, max_length=128)
            engine = build_engine(target("mtp"), layout, comm, 16, drafter=drafter, adaptive=False, **sizes)
            model, layer, rows = engine.runner.model, engine.runner.model.next_token, engine.runner.model.embedding.rows
            assert layer is not None
            of_target, of_layer = (table[:, rows.start : rows.stop] for table in self.tables())

            def states(step: Any) -> Tensor:
                return step.tokens[:, None].expand(-1, model.spec.hidden).float()

            model.states = lambda cache, step, policy: (states(step), states(step))  # type: ignore[method-assign]
            model.logits = lambda x: of_target[x[:, 0].long()]  # type: ignore[method-assign]
            layer.append = lambda cache, step, x, own: (states(step), states(step))  # type: ignore[assignment]
            layer.attend = lambda queries, x, *of_step: x  # type: ignore[method-assign]
            layer.logits = lambda x: of_layer[x[:, 0].long()]  # type: ignore[assignment]
            found = generated_ids(engine, requests)
            kept = engine.timings.decode_tokens / max(engine.timings.sequence_steps, 1)
            assert rank or 1.5 < kept < 3.5, f"{kept} tokens a step: some drafts should be kept, and some not"
            return torch.tensor([found[i] for i in range(len(found))])

        return run_ranks(2, body, timeout_s=120.0)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_loopback_ranks_on_one_gpu(kind: str) -> None:
    for kvp in (1, 3):
        layout, drafters = HelixLayout.create("helix", kvp), dict[int, Any]()

        def body(
            world: LoopbackWorld, rank: int, layout: HelixLayout = layout, drafters: dict[int, Any] = drafters
        ) -> Any:
            comm = world.communicator(rank, layout.kvp_group(rank))
            e = build_engine(target(kind), layout, comm, 16, drafter=drafts(kind), adaptive=False, prefill_chunk=40)
            found = [generate(e, plain(kind)) for _ in range(2)]
            e = build_engine(target(kind), layout, comm, 16, drafter=drafts(kind, kind=Kept), adaptive=False)
            drafters[rank] = e.runner.drafter
            generated(e, [Request(i, c.prompt, 12) for i, c in enumerate(plain(kind))])
            return found

        for results in zip(*run_ranks(kvp, body, timeout_s=240.0, device="cuda"), strict=True):
            check(results, plain(kind))
        assert unlike(drafters[0], drafts_of(kind)) == []


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*KINDS, "suffix"])
def test_what_a_decision_says_is_launched_without_a_wait(kind: str) -> None:
    """The device never drains for a step, a chunk, an admission or a retirement. The first time compiles."""
    model = "mtp" if kind == "suffix" else kind
    first, second = turns(plain(model))

    def body(world: LoopbackWorld, rank: int) -> tuple[Served, Served]:
        comm = world.communicator(0, [0])
        given = SuffixDrafter(2, 4, 1000, 3, comm.device) if kind == "suffix" else drafts(kind, 2)
        e = build_engine(target(model), HelixLayout.create(), comm, 16, drafter=given, **CLOSE)
        execute = e.runner.execute

        def watched(decision: Decision) -> list[StepTokens]:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return execute(decision)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        with closing(e):
            before = serve(e, first, second)
            e.runner.execute = watched  # type: ignore[method-assign]
            return before, serve(e, first, second)

    before, after = run_ranks(1, body, timeout_s=240.0, device="cuda")[0]
    assert after.tokens == before.tokens


def captured_rank(
    rank: int,
    world_size: int,
    path: Path,
    kind: type[TorchDistCommunicator],
    drafter: LayerDrafts | None,
    wanted: list[Request],
) -> list[dict[Any, tuple[int, ...]]]:
    """Tokens of a run whose steps are captured as they come, and of two that replay them."""
    layout = HelixLayout.create("helix", world_size)
    comm: Communicator = kind(layout.kvp_groups(), torch.device("cuda", rank), timedelta(seconds=60))
    given = drafter or SuffixDrafter(3, 4, 1000, 5, comm.device)
    engine = build_engine(path, layout, comm, 16, drafter=given, adaptive=False)
    assert engine.runner.graphs is not None
    found = [generated_ids(engine, wanted) for _ in range(3)]
    engine.close()
    comm.close()  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    "kind, world",
    [
        pytest.param(TorchDistCommunicator, 1, marks=pytest.mark.gpu, id="nccl-1"),
        *(pytest.param(kind, 2, marks=pytest.mark.gpu(2)) for kind in (TorchDistCommunicator, SymmMemCommunicator)),
    ],
)
@pytest.mark.parametrize("drafter", [*KINDS, "suffix"])
def test_captured(drafter: str, kind: type[TorchDistCommunicator], world: int) -> None:
    """One graph holds the drafts, their verification and the rows that are written anew."""
    model = "mtp" if drafter == "suffix" else drafter
    given = None if drafter == "suffix" else drafts(drafter)
    task = captured_rank, target(model), kind, given, sampled(model)
    assert pool(world, "nccl").run(*task, timeout_s=240.0)[0] == [drawn(model, 1, None)] * 3
