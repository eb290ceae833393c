"""A rehearsal meets every kernel of what follows, launches none, and changes nobody's tokens."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from comm.loopback import LoopbackWorld
from comm.solo import SoloCommunicator
from helix.engine.request import Request
from helix.kv_placement import BlockBudget
from helix.layout import HelixLayout
from helix.sampling_params import SamplingParams
from helix.speculation import DraftBudget, SuffixDrafter
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.warmup import chunk_shapes, fill, precompile_kernels, prefix_steps
from kernels import dispatch
from kernels.precompile import on_compilation, precompile
from tests.e2e.checkpoints import DEMO, checkpoint, oracle
from tests.e2e.parity import ModelDrafts, SelfDrafts, Sparse, build_engine
from tests.e2e.test_parity import MOE_LENGTHS, MOE_TOKENS
from tests.sequences import generated, generated_ids


def test_prompts_that_share_no_page_are_rehearsed_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Key scores are a sequence's own: four deep prompts would want more pages of them than there are."""
    monkeypatch.setattr("helix.worker.warmup.DEEP", 64)
    own, shared = SelfDrafts(2, DraftBudget(sparsity=0.2)), SuffixDrafter(3, 2)
    for drafter, wanted in ((own, {0: [2, 4, 8], 64: [2]}), (shared, {0: [2, 4, 8], 64: [2, 4, 8]})):
        layout, comm = HelixLayout.create(), LoopbackWorld(1).communicator(0, [0])
        e = build_engine(checkpoint("qwen2"), layout, comm, 16, max_length=192, pages=19, drafter=drafter, max_batch=8)
        met: dict[int, list[int]] = {}
        for prompts, _, depth in chunk_shapes(e.runner):
            if prompts > 1:
                met.setdefault(depth, []).append(prompts)
        assert met == wanted
        e.close()


@pytest.mark.parametrize(
    "family, options",
    [
        ("gpt-oss", {}),
        ("deepseek-v3-yarn", dict(drafter=SuffixDrafter(3, 2))),
        ("qwen2", dict(drafter="model")),
        ("qwen2", dict(drafter=SelfDrafts(2, DraftBudget(sparsity=0.2)))),
        ("qwen2", dict(sparse=Sparse(BlockBudget(1, 2, 4, 16), "local"))),
    ],
)
def test_nothing_is_launched_and_nothing_remains(
    family: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, alone = HelixLayout.create(), LoopbackWorld(1).communicator(0, [0])
    if options.get("drafter") == "model":
        options = dict(drafter=ModelDrafts(checkpoint("qwen2-windowed-tied"), layout, alone, 2))
    e = build_engine(checkpoint(family), layout, alone, 16, max_length=192, prefill_chunk=24, **options)
    met, launched = set[str](), set[str]()

    def run(kernel: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        (met if warmup else launched).add(kernel.__name__)

    draws = DecodeGraphKey(), DecodeGraphKey(stochastic=True), DecodeGraphKey(stochastic=True, filtered=True)
    sparse = [False] if e.runner.policy.from_tokens is None else [False, True]
    steps = [
        replace(draw, rows=rows, drafts=drafts, sparse=sparsely, process_logits=shaped)
        for rows, drafts, draw, sparsely, shaped in product((1, 4), e.draft_sizes, draws, sparse, (False, True))
    ]
    e.runner.shared_prefix = "always"
    steps += prefix_steps(e.runner, (1, 2, 4), e.draft_sizes)
    assert {kind.shared_prefixes for kind in steps} == {0, 1, 2, 4}
    sampling = SamplingParams(temperature=1.0, top_k=3, presence_penalty=1.0)
    short = [Request("plain", (1, 2), 3), Request("shaped", (1, 2), 3, sampling)]
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "on_gpu", lambda t: True)
        patch.setattr(InterpretedFunction, "run", run)
        patch.setattr("kernels.precompile.JITFunction", InterpretedFunction)
        precompile_kernels(e.runner, [(1, 2, 0), (1, 24, 0), (1, 1, 100), (3, 1, 0)], steps)
        assert InterpretedFunction.run is run
        rehearsed = set(met)
        with precompile():  # or what is not computed would be tokens
            assert [one.finish_reason for one in generated(e, short).values()] == ["length"] * 2
    assert launched == set() and met == rehearsed and len(met) > 12, (met, rehearsed, launched)
    if "sparse" not in options:  # it reads a part: transformers says something else
        wanted = oracle(family, MOE_LENGTHS, MOE_TOKENS)
        requests = [Request(i, c.prompt, len(c.tokens)) for i, c in enumerate(wanted)]
        tokens = generated_ids(e, requests)
        assert [tokens[i] for i in range(len(wanted))] == [c.tokens for c in wanted]


def test_sequences_that_are_timed_share_no_page() -> None:
    """Or what one reads, the next would find in the GPU's cache: 8 x 32K took 6.0 ms in place of 7.1."""
    comm = LoopbackWorld(1).communicator(0, [0])
    # As where one sequence may have all of the memory: its table has as many columns as there are pages.
    e = build_engine(checkpoint("qwen2"), HelixLayout.create(), comm, 16, max_length=192, pages=12)
    for rows in (1, 3, 4):
        fill(e.runner, rows, 40)
        held = e.runner.state.block_tables[:rows, :3].flatten().tolist()
        assert len(set(held)) == len(held) == 3 * rows, rows


@pytest.mark.timeout(400)
def test_what_is_served_later_needs_no_other_kernel() -> None:
    """Chunks of random sizes, prompts and depths, and steps: what they need follows from arguments."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    cases = (
        "qwen2 1", "demo 1 pads", "qwen3-moe 1 pads", "gpt-oss 1", "deepseek-v3-yarn 1 pads", "glm-5 1 pads",
        "qwen3-next 1", "qwen3-next 1 pads", "qwen2 1 pads drafts",
    )  # fmt: skip
    command = [sys.executable, "-m", "tests.e2e.warmup_program", *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [line.split() for line in done.stdout.splitlines()]  # what is met later, has lines of its own
    assert len(found) == len(cases) and all(int(met) > 30 and later == "0" for met, later in found), done.stdout


@pytest.mark.gpu
def test_nothing_is_compiled_while_300_requests_are_served() -> None:
    """Random lengths, sampling and arrivals, prompts of up to 12K tokens, beginnings that are known."""
    device = torch.device("cuda", 0)
    e = build_engine(
        DEMO, HelixLayout.create(), SoloCommunicator(device), 16, page_size=64, max_batch=32, max_length=30_000,
        prefill_chunk=8192, dtype=torch.bfloat16, pages=6000,
    )  # fmt: skip
    draws = [DecodeGraphKey(), DecodeGraphKey(stochastic=True), DecodeGraphKey(stochastic=True, filtered=True)]
    e.warmup(draws, chunks=True)
    made: list[str] = []
    on_compilation(made.append)
    rng = random.Random(0)
    text = [rng.randrange(4000) for _ in range(29_000)]
    requests = []
    for i in range(300):
        known = rng.choice([0, 0, rng.randrange(16_000)])
        own = rng.choice([rng.randrange(1, 200), rng.randrange(1, 12_000)])
        prompt = (*text[:known], *(rng.randrange(4000) for _ in range(own)))
        sampling = rng.choice(
            [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=0.8, top_k=9)]
        )
        requests.append(Request(i, prompt, rng.randrange(1, 40), sampling))
    try:
        ended = generated(e, requests)
    finally:
        on_compilation(None)
    assert len(ended) == 300 and made == [], made
    e.close()
