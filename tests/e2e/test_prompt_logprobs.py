"""Log-probabilities of prompts' tokens: those of transformers, whatever else runs and wherever the prompt is cut."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from comm.loopback import LoopbackWorld, run_ranks
from helix.config import ScheduleConfig
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.sampling_params import SamplingParams
from helix.speculation import SuffixDrafter
from tests.e2e.checkpoints import checkpoint
from tests.e2e.parity import Sparse, build_engine
from tests.e2e.test_kv_offload import SHORT_WINDOW
from tests.e2e.test_layer_drafts import KINDS, drafts, target
from tests.sequences import Generated, generated, resize

LENGTHS = {"one": 1, "short": 20, "long": 90, "same": 90, "drawn": 40}
CLOSE = dict(
    max_batch=3, max_length=192, pages=13, schedule=ScheduleConfig(lookahead_tokens=2, max_prefill_stall_ms=2.0)
)


def prompt(length: int) -> list[int]:
    return [(5 * i + i * i) % 250 for i in range(length)]


def path_of(family: str) -> Path:
    return target(family) if family in KINDS else checkpoint(family)


@cache
def oracle(family: str) -> torch.Tensor:
    """Log-probabilities [n, V] behind each token of the longest prompt."""
    model = AutoModelForCausalLM.from_pretrained(path_of(family), dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([prompt(max(LENGTHS.values()))])).logits[0].double().log_softmax(-1)


@pytest.mark.parametrize(
    "family, layout, options, device",
    [
        ("qwen2", HelixLayout.create(), {}, "cpu"),
        ("qwen2", HelixLayout.create(), dict(prefill_chunk=96, drafter=SuffixDrafter(4, 2)), "cpu"),
        ("qwen2", HelixLayout.create("helix", 2, 2), dict(max_batch=3), "cpu"),
        ("qwen2", HelixLayout.create("helix", 2), CLOSE, "cpu"),
        ("qwen2", HelixLayout.create("medha", 2, 2), {}, "cpu"),
        ("qwen2", HelixLayout.create("dp", dp=3), dict(max_batch=2), "cpu"),
        ("qwen3-next", HelixLayout.create("helix", 2), dict(snapshots=4), "cpu"),
        ("gpt-oss", HelixLayout.create("helix", 1, 2), dict(pads=True), "cpu"),
        ("granite", HelixLayout.create("tp", tpa=2), dict(pads=True), "cpu"),
        ("eagle3", HelixLayout.create("helix", 2), dict(pads=True, drafter=drafts("eagle3")), "cpu"),
        ("qwen2", HelixLayout.create("helix", 2), dict(sparse=Sparse(SHORT_WINDOW, resident=20), page_size=16), "cpu"),
        pytest.param("qwen2", HelixLayout.create(), dict(pads=True), "cuda", marks=pytest.mark.gpu),
        pytest.param("qwen2", HelixLayout.create("helix", 2, 2), dict(max_batch=3), "cuda", marks=pytest.mark.gpu),
    ],
    ids=[
        "alone", "drafts", "grid", "preempted", "medha", "dp", "states", "windows", "scaled logits", "draft layer",
        "host memory", "on a GPU", "grid on a GPU",
    ],
)  # fmt: skip
def test_they_are_those_of_transformers(
    family: str, layout: HelixLayout, options: dict[str, Any], device: str
) -> None:  # fmt: skip
    def wanted(name: str) -> SamplingParams:
        return SamplingParams(logprobs=0, prompt_logprobs=5 if name != "short" else 0)

    requests = [Request(f"plain {i}", prompt(70), 20, SamplingParams()) for i in range(2)]
    requests += [Request(name, prompt(n), 6, wanted(name)) for name, n in LENGTHS.items()]
    requests[-1] = Request("drawn", prompt(40), 6, wanted("drawn"), num_prior_output_tokens=10)

    def body(world: LoopbackWorld, rank: int) -> tuple[dict[Any, Generated], int]:
        comm = world.communicator(rank, layout.kvp_group(rank))
        given = {"max_batch": 8, "prefill_chunk": 24, "page_size": 4} | options
        pads = given.pop("pads", False)
        engine = build_engine(path_of(family), layout, comm, 4, **given)
        engine.runner.pads_chunks = pads
        resize(engine, run_steps=2 if "pages" in options else 8)
        generated(engine, requests[:1])  # its prefix is in the cache
        return generated(engine, requests), engine.timings.preemptions

    (outputs, preempted), *_ = run_ranks(layout.world_size, body, timeout_s=120.0, device=device)
    assert (preempted > 0) == ("pages" in options)
    expected = oracle(family)
    for name, length in LENGTHS.items():
        ids, k = prompt(length), wanted(name).prompt_logprobs
        found: dict[int, tuple[list[int], list[float]]] = {}
        for part in outputs[name].scored:
            assert part.ids.shape == part.values.shape == (len(part.ids), 1 + k)
            for at, row in enumerate(zip(part.ids.tolist(), part.values.tolist(), strict=True)):
                found[part.begin + at] = row
        assert sorted(found) == list(range(1, 30 if name == "drawn" else length))
        for position, (tokens, values) in found.items():
            assert tokens[0] == ids[position]
            of_all = expected[position - 1]
            torch.testing.assert_close(torch.tensor(values), of_all[tokens].float(), rtol=0, atol=1e-4)
            best = of_all.topk(k).values.float()
            torch.testing.assert_close(torch.tensor(values[1:]), best, rtol=0, atol=1e-4)
    assert all(not output.scored for name, output in outputs.items() if name not in LENGTHS)
    assert np.array_equal(outputs["long"].token_ids, outputs["same"].token_ids)
