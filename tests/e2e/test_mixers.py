"""A layer that keeps a state in place of tokens (`tests.mixers`), beside layers with attention, through a whole engine.

The oracle computes each token anew, from a prompt of all tokens before it in one chunk.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from comm.base import Communicator
from comm.loopback import LoopbackWorld, run_ranks
from helix.engine.core import Engine
from helix.engine.request import Request
from helix.engine.scheduler_output import NewRequest
from helix.kv_placement import PromptChunk
from helix.layout import HelixLayout
from helix.models import DecoderSpec, spec_from_config
from helix.models.checkpoint import read_config
from helix.models.decoder import Decoder
from helix.speculation import Draft, Drafter
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.step import DecodeState
from tests.e2e.checkpoints import checkpoint
from tests.e2e.parity import Continuation, build_engine
from tests.e2e.test_serve import CLOSE, ServeResult, resources_in_use, serve, turns
from tests.mixers import Decay, DecaySpec
from tests.sequences import new_request, resize

LENGTHS, NEW = (21, 58, 40), 12
LAYOUTS = [HelixLayout.create("helix", 1), HelixLayout.create("helix", 2), HelixLayout.create("helix", 2, 2)]
WIDTH = 13  # channels: they do not divide evenly


def spec_of(path: Path) -> DecoderSpec:
    """A model whose every other layer has a state in place of attention."""
    spec = spec_from_config(read_config(path))
    layers = [
        replace(layer, mixer=DecaySpec(spec.hidden, WIDTH, 0.9)) if index % 2 == 0 else layer
        for index, layer in enumerate(spec.layers)
    ]
    return replace(spec, layers=tuple(layers), eos=(), tied=False)


def build(path: Path, layout: HelixLayout, comm: Communicator, dtype: torch.dtype) -> Decoder:
    """Makes a rank's part; a tensor has the same numbers in every layout."""
    model = Decoder(spec_of(path), layout, comm, dtype, comm.device)
    for s in model.weights.slices:
        generator = torch.Generator().manual_seed(zlib.crc32(s.name.encode()))
        scale = 1.0 if s.name.endswith("norm.weight") else 0.3
        whole = torch.randn(s.shape, generator=generator) * scale
        for dim, part in enumerate(s.ranges):
            whole = whole.index_select(dim, torch.tensor([*part], dtype=torch.int64))
        s.target.copy_(whole)
    return model


def engine(layout: HelixLayout, world: LoopbackWorld, rank: int, **more: Any) -> Engine:
    comm = world.communicator(rank, layout.kvp_group(rank))
    return build_engine(checkpoint("qwen3"), layout, comm, 4, page_size=4, build=build, **more)


@pytest.fixture(scope="module")
def wanted() -> list[Continuation]:
    """Prompts, and what follows them: each token from a prefill step of all before it."""

    def body(world: LoopbackWorld, rank: int) -> list[Continuation]:
        e = engine(HelixLayout.create(), world, rank, max_batch=1, max_length=128, prefill_chunk=128)
        runner, generator, found = e.runner, torch.Generator().manual_seed(5), []
        for length in LENGTHS:
            prompt = torch.randint(1, 200, (length,), generator=generator).tolist()
            tokens: list[int] = []
            for _ in range(NEW):
                token_ids = np.array(prompt + tokens, dtype=np.int32)
                pages = np.arange(runner.placement.stripes.pages_for(len(token_ids)), dtype=np.int32)
                runner.admit(new_request(0, 0, pages, len(token_ids), token_ids))
                step = runner.state.prefill_step([PromptChunk(0, 0, torch.from_numpy(token_ids).long())])
                hidden = runner.model.hidden(runner.cache, step, runner.dense)
                tokens.append(int(runner.model.logits(hidden[-1:]).argmax()))
            found.append(Continuation(tuple(prompt), tuple(tokens), torch.empty(0)))
        return found

    with torch.inference_mode():
        return run_ranks(1, body, timeout_s=120.0)[0]


class OracleDrafter(Drafter):
    """Proposes what the oracle says, but for every third token."""

    def __init__(self, limit: int, wanted: list[Continuation]) -> None:
        super().__init__(limit)
        self.sequences = [(*c.prompt, *c.tokens) for c in wanted]
        self.of: dict[int, tuple[int, ...]] = {}

    def admit(self, *admissions: NewRequest) -> None:
        for a in admissions:
            token_ids = tuple(a.token_ids.tolist())
            self.of[a.slot] = next(t for t in self.sequences if t[: min(len(token_ids), len(t))] == token_ids[: len(t)])

    def propose(self, state: DecodeState, kind: DecodeGraphKey) -> Draft:
        tokens = torch.zeros(kind.rows, kind.drafts, dtype=torch.int64)
        for row in state.active[: kind.rows].nonzero()[:, 0].tolist():
            for i in range(kind.drafts):
                at = int(state.lengths[row]) + 1 + i
                token_ids = self.of[row]
                tokens[row, i] = token_ids[at] if at < len(token_ids) and at % 3 else 0
        return Draft(tokens)


@pytest.mark.parametrize("drafts", [0, 1, 4])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_states_follow_prefix_hits_preemptions_drafts_and_aborts(
    layout: HelixLayout, drafts: int, wanted: list[Continuation]
) -> None:
    first, second = turns(wanted)

    def body(world: LoopbackWorld, rank: int) -> ServeResult:
        drafter, pages = OracleDrafter(drafts, wanted) if drafts else None, 32 if drafts > 2 else 28
        e = engine(layout, world, rank, pages=pages // layout.kvp, drafter=drafter, adaptive=False, **CLOSE)
        resize(e, run_steps=1)  # or a lease of its own would be as long as a run
        found = serve(e, [*reversed(first), Request("gone", wanted[1].prompt, 30)], second, aborts={"gone": 2})
        assert resources_in_use(e)[1:] == (0, 0)
        assert rank or e.timings.preemptions > 0, "pages are too many for this test"
        assert rank or not drafts or len(e.timings.accepted) > 1, "no draft was kept"
        return found

    found = run_ranks(layout.world_size, body, timeout_s=120.0)[0]
    for i, c in enumerate(wanted):
        assert (tuple(found.tokens[i]), tuple(found.tokens[f"next {i}"])) == (c.tokens, c.tokens[-3:])
    assert found.ends["gone"] == "abort"
    assert not any(found.cached.values()), "a state is right from the first token on, which is computed again"


def test_a_state_is_the_sum_of_all_that_decays() -> None:
    """By the closed formula, in chunks of any size."""

    def body(world: LoopbackWorld, rank: int) -> None:
        e = engine(HelixLayout.create(), world, rank, max_batch=2, max_length=64)
        runner = e.runner
        layer = runner.model.layers[0].mixer
        assert isinstance(layer, Decay)
        tokens, x = torch.arange(30), torch.randn(30, runner.model.spec.hidden)
        runner.admit(new_request(1, 0, np.arange(8, dtype=np.int32), 30, tokens.int().numpy()))
        for begin, end in ((0, 7), (7, 8), (8, 30)):
            step = runner.state.prefill_step([PromptChunk(1, begin, tokens[begin:end])])
            q = layer.project(x[begin:end], (x, x), runner.cache, step)
            layer.finish(q, runner.cache, step, runner.dense)
        k = layer.kq(x).double()[:, :WIDTH]
        expected = (0.9 ** torch.arange(29, -1, -1).double()[:, None] * k).sum(0)
        # 30 roundings of fp32 at numbers of a few units.
        torch.testing.assert_close(runner.cache.layer(0).tensors["state"][1].double(), expected, atol=1e-5, rtol=1e-5)

    with torch.inference_mode():
        run_ranks(1, body, timeout_s=60.0)
