"""Mode dp gives what transformers gives: attention of whole sequences by rank, the FFN over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from comm.base import Communicator
from comm.loopback import LoopbackWorld, run_ranks
from comm.symm_mem import SymmMemCommunicator
from comm.torch_dist import TorchDistCommunicator
from helix.engine.core import Engine
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.models import layer
from tests.e2e.checkpoints import FAMILIES, MOE_FAMILIES, checkpoint, oracle
from tests.e2e.deepseek import MLA_FAMILIES
from tests.e2e.parity import build_engine, check, distributed_rank, loopback
from tests.e2e.test_parity import LENGTHS, MOE_LENGTHS, MOE_TOKENS, NEW_TOKENS, sampled
from tests.e2e.test_serve import CLOSE, Served, left_behind, serve, turns
from tests.pool import Pool, pool
from tests.sequences import resize


def layout_of(dp: int, ep: int = 1) -> HelixLayout:
    return HelixLayout.create("dp", dp=dp, ep=ep)


@pytest.mark.parametrize("dp", [1, 2, 3, 8])
def test_ranks_with_sequences_and_without(dp: int) -> None:
    wanted = oracle("qwen2", LENGTHS, NEW_TOKENS)
    check(loopback(checkpoint("qwen2"), layout_of(dp), 16, wanted), wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_families(family: str) -> None:
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    check(loopback(checkpoint(family), layout_of(2), 4, wanted), wanted)


@pytest.mark.parametrize("dp, ep", [(2, 2), (4, 2), (3, 3)])
@pytest.mark.parametrize("family", [*MOE_FAMILIES, "gpt-oss-mxfp4", *MLA_FAMILIES])
def test_experts_over_all_ranks(family: str, dp: int, ep: int) -> None:
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    check(loopback(checkpoint(family), layout_of(dp, ep), 16, wanted), wanted)


@pytest.mark.parametrize("family, dp, ep", [("qwen2", 2, 1), ("mixtral", 4, 4), ("deepseek-v3-yarn", 3, 3)])
def test_gloo_ranks(gloo_pool: Callable[[int], Pool], family: str, dp: int, ep: int) -> None:
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    task = (checkpoint(family), layout_of(dp, ep), 16, wanted, "cpu")
    check(gloo_pool(dp).run(distributed_rank, *task, timeout_s=240.0), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("family, dp, ep", [("qwen3", 2, 1), ("gpt-oss", 3, 3), ("deepseek-v3-yarn", 4, 2)])
def test_loopback_ranks_on_one_gpu(family: str, dp: int, ep: int) -> None:
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    check(loopback(checkpoint(family), layout_of(dp, ep), 16, wanted, device="cuda"), wanted)


@pytest.mark.parametrize("kind", [TorchDistCommunicator, SymmMemCommunicator], ids=["nccl", "symm_mem"])
@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 4, 8)])
@pytest.mark.parametrize("family", ["qwen2", "mixtral", "gpt-oss", "deepseek-v3-yarn"])
def test_over_gpus(family: str, world: int, kind: type[TorchDistCommunicator]) -> None:
    """Observed step by step, then captured."""
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    task = (checkpoint(family), layout_of(world, 1 if family == "qwen2" else 2), 16, wanted, "cuda", kind)
    check(pool(world, "nccl").run(distributed_rank, *task, timeout_s=120.0), wanted)


def test_sampling_is_that_of_other_layouts() -> None:
    assert sampled(layout_of(3), [2, 0, 5, 4, 1, 3]) == sampled(HelixLayout.create(), [0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize("family", ["qwen3", "mistral-windowed", "gpt-oss", "deepseek-v3-yarn"])
def test_serving_with_hits_preemptions_and_an_abort(family: str) -> None:
    wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
    first, second = turns(wanted)
    crowd = [Request(f"beside {i}", c.prompt, 40) for i, c in enumerate(wanted)]
    gone = Request("gone", wanted[2].prompt, 30)

    def body(world: LoopbackWorld, rank: int) -> tuple[Served, tuple[int, int, int], int]:
        comm = world.communicator(rank, (rank,))
        e = build_engine(checkpoint(family), layout_of(2), comm, 4, page_size=4, pages=38, **CLOSE)
        resize(e, run_steps=2)
        served = serve(e, [*reversed(first), *crowd, gone], second, aborts={"gone": 2})
        return served, left_behind(e), e.timings.preemptions

    (served, held, preemptions), (_, elsewhere, _) = run_ranks(2, body, timeout_s=120.0)
    assert held == elsewhere == (0, 0, 0)
    for i, c in enumerate(wanted):
        assert tuple(served.tokens[i]) == c.tokens and served.ends[i] == "length"
        assert tuple(served.tokens[f"next {i}"]) == c.tokens[-3:], f"prompt {i}, continued"
        assert tuple(served.tokens[f"beside {i}"][: len(c.tokens)]) == c.tokens
    assert served.ends["gone"] == "abort" and served.cached["next 2"] > 0 and preemptions > 0


def test_sequences_are_spread_and_a_prefix_decides_where() -> None:
    """Three of six sequences on each of two ranks; one that begins as another goes to its rank, if half of it does."""

    def body(world: LoopbackWorld, rank: int) -> tuple[int, Served]:
        e = build_engine(checkpoint("qwen2"), layout_of(2), world.communicator(rank, (rank,)), 4, page_size=4)
        prompts = [tuple(range(40 * i, 40 * i + 40)) for i in range(6)]
        most: list[int] = []

        def count(*_: Any) -> None:
            most.append(len(e.runner.admitted))

        e.runner.observer = count
        first = [Request(i, prompt, 8) for i, prompt in enumerate(prompts)]
        more = [Request(f"like {i}", (*prompts[i], 7), 2) for i in range(6)]
        crowd = [Request(f"begins {i}", (*prompts[0], *range(100 + 9 * i, 148 + 9 * i)), 2) for i in range(6)]
        served = serve(e, first, more, crowd)
        return max(most), served

    (ours, served), (theirs, _) = run_ranks(2, body, timeout_s=60.0)
    assert ours == theirs == 3
    assert all(served.cached[f"like {i}"] >= 40 for i in range(6))


def test_rows_that_go_to_another_rank_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted error: rank 1's prompts get the sums of rank 0's."""
    wanted = oracle("mixtral", MOE_LENGTHS, MOE_TOKENS)
    right = layer.over_all_ranks

    def wrong(ffn: Any, x: torch.Tensor, counts: Any, comm: Communicator) -> torch.Tensor:
        return right(ffn, x, counts[::-1], comm)

    monkeypatch.setattr(layer, "over_all_ranks", wrong)
    results = loopback(checkpoint("mixtral"), layout_of(2, 2), 16, wanted)
    with pytest.raises(AssertionError, match="prompt"):
        check(results, wanted)


def test_an_expert_that_adds_up_twice_is_caught() -> None:
    wanted = oracle("mixtral", MOE_LENGTHS, MOE_TOKENS)

    def tamper(engine: Engine) -> None:
        if engine.comm.rank == 1:
            engine.runner.model.layers[0].ffn.down[0] *= 2

    results = loopback(checkpoint("mixtral"), layout_of(2, 2), 16, wanted, tamper)
    with pytest.raises(AssertionError, match="prompt"):
        check(results, wanted)
