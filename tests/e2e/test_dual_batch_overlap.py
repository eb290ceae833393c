"""Long prompt chunks go through the layers in two halves, on two streams; rows of parity.yaml say so of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from comm import dual_batch_overlap
from comm.loopback import run_ranks
from helix.engine.core import Engine
from helix.kv_placement import PromptChunk
from helix.layout import HelixLayout
from helix.worker.step import Step
from tests.e2e.checkpoints import checkpoint
from tests.e2e.parity import build_engine
from tests.sequences import new_request


@pytest.mark.gpu
def test_halves_on_two_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second half reads what the first has appended, and memory of neither is given to the other too soon."""

    def body(world: object, rank: int) -> None:
        engine: Engine = build_engine(
            checkpoint("qwen2"), HelixLayout.create(), world.communicator(0, [0]), 16, max_batch=1, max_length=8192
        )  # type: ignore[attr-defined]
        runner, model = engine.runner, engine.runner.model
        tokens = torch.randint(0, model.spec.vocab, (8000,))
        pages = np.arange(runner.placement.stripes.pages_for(8000), dtype=np.int32)
        runner.state.admit(new_request(0, 0, pages, 8000, tokens.int().numpy()))
        step = runner.state.prefill_step([PromptChunk(0, 0, tokens)])
        whole = model.hidden(runner.cache, step, runner.dense).clone()
        several: Any = SimpleNamespace(
            world_size=2, device=torch.device("cuda"), capturable=True, micro_batch=0, fuses_all_reduce_norm=False
        )
        model.attn_group, model.overlap = several, dual_batch_overlap.DualBatchOverlap(several)
        cut = Step.micro_batches
        counts: list[int] = []
        monkeypatch.setattr(Step, "micro_batches", lambda step: counts.append(len(step.tokens)) or cut(step))
        for _ in range(10):
            for tensor in runner.cache.tensors:
                tensor.fill_(torch.nan)
            torch.testing.assert_close(model.hidden(runner.cache, step, runner.dense), whole, atol=1e-4, rtol=1e-4)
        assert counts == 10 * [8000]

    run_ranks(1, body, timeout_s=120.0, device="cuda")
