"""A few cases of the differential fuzzer; `python -m tests.e2e.fuzz` runs as many as one likes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from benchmarks.papers.policies import FULL
from helix.engine.draft_policy import DraftPolicy
from helix.kv_placement import KVPlacement
from helix.sampling_params import SamplingParams
from helix.setup import offload
from helix.speculation import sparse
from tests.e2e.fuzz import Options, quiet, run_case, work
from tests.e2e.fuzz_cases import INVALID, TWO_RANKS, Case, CaseRequest, case_of
from tests.e2e.fuzz_checks import Outcome
from tests.e2e.fuzz_configs import MAKERS
from tests.pool import pool
from tests.triton_interpreter import interpreted

# A small model that drafts for itself, and verifies from token 14 on: the group ends in an append block that is the
# first of its rank, so that the group's first queries read nothing there.
FIRST_BLOCK = TWO_RANKS | {"kv.append_block": 17}
FIRST_BLOCK |= {"kv.page_size": 32, "kv.tokens": 64, "hopb.chunks": "none", "decode.max_batch": "1"}
FIRST_BLOCK |= {"speculation.drafter": "sparse", "speculation.gamma": 3, "speculation.adaptive": False}
SMALL = {"model_type": "llama", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 8}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3}
SMALL |= {"max_position_embeddings": 64, "eos_token_id": None, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}


def found(case: Case) -> Outcome:
    quiet()
    return run_case(case, "cpu", 240.0)


def small(**settings: Any) -> Case:
    """One sequence of a small model, which draws eight tokens greedily."""
    case = case_of("llama", 0)
    return replace(
        case, content=SMALL, generation=None, own_head=False, invalid=None, lossy=False, eos=(), random_pace=False,
        rounds=((CaseRequest("r0", tuple(range(3, 17)), 8, SamplingParams()),),),
        settings=FIRST_BLOCK | {"model.dtype": "float32", "kv.prefix_cache": True} | settings,
    )  # fmt: skip


@pytest.mark.parametrize(
    "family, seed",
    [  # every other one is written plainly
        *((family, i % 2) for i, family in enumerate(MAKERS)),
        *(pytest.param(family, 1 - i % 2, marks=pytest.mark.slow) for i, family in enumerate(MAKERS)),
    ],
)
def test_random_models_are_decoded_as_transformers_decodes_them(family: str, seed: int) -> None:
    outcome = found(case_of(family, seed))
    assert outcome.kind != "otherwise", outcome.reason


def test_a_case_follows_from_its_family_and_seed() -> None:
    cases = [case_of(family, seed) for seed in range(0, 96, 3) for family in MAKERS]
    assert [str(case_of(case.family, case.seed)) for case in cases[:20]] == [str(case) for case in cases[:20]]
    assert str(Options(device="cuda", processes=2).case("qwen3", 5)) != str(Options().case("qwen3", 5))
    feature_counts = Counter(f"{name}={value}" for case in cases for name, value in case.features.items())
    policies = ("any", "c2q", "window", "quest", FULL)
    wanted = [
        f"drafter={name}"
        for name in ("none", "suffix", "mtp", "eagle3", "model", *(f"sparse {policy}" for policy in policies))
    ]
    wanted += ["attention=dense", "attention=blocks, a part", "attention=blocks, all", "offload=host", "hopb=3"]
    wanted += ["layout=dp 1x1x2", "layout=dp 1x1x3"]
    assert not [feature for feature in wanted if not feature_counts[feature]], feature_counts
    assert len({case.invalid for case in cases}) > len(INVALID) // 2


def test_ranks_that_are_processes() -> None:
    outcome = pool(2).run(work, Options(processes=2), "qwen2", 600, timeout_s=120.0)[0]
    assert outcome.kind == "equal", outcome.reason


@pytest.mark.slow
def test_verification_whose_first_queries_read_nothing_of_a_rank() -> None:
    """By the GPU's kernels: a minute under the interpreter."""
    with interpreted():
        outcome = found(small(**{"speculation.policy": "any"}))
    assert outcome.kind == "equal" and outcome.seen, outcome.reason


def test_a_case_leaves_behind_nothing_that_it_changed() -> None:
    before = sparse.LEAST_KEYS, offload.PIECE_TOKENS, DraftPolicy.plan_steps
    case = replace(small(**{"speculation.policy": "any"}), random_pace=True, min_keys=1, piece_tokens=3)
    outcome = found(case)
    assert outcome.kind == "equal" and case.world_size == 2, outcome.reason
    assert (sparse.LEAST_KEYS, offload.PIECE_TOKENS, DraftPolicy.plan_steps) == before


def test_a_key_that_is_left_out_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = KVPlacement.bounds

    def fewer(self: KVPlacement, *args: Any) -> tuple[Tensor, Tensor]:
        lo, hi = bounds(self, *args)
        return lo + (hi - lo > 9).int(), hi

    monkeypatch.setattr(KVPlacement, "bounds", fewer)
    outcome = found(small(**{"speculation.policy": "window"}))
    assert outcome.kind == "otherwise" and "logits off by" in outcome.reason


def test_legal_settings_that_are_refused_show_and_illegal_ones_that_run() -> None:
    legal = found(small(**{"speculation.policy": "any", "kv.page_size": 48}))
    assert legal.kind == "otherwise" and legal.reason.startswith("legal settings are refused: speculation.drafter")
    runs = found(replace(small(**{"speculation.policy": "any"}), invalid="layout.tpa=5"))
    assert runs.kind == "otherwise" and runs.reason == "illegal settings run: layout.tpa=5"
    unnamed = found(replace(small(**{"kv.page_size": 48}), invalid="kv.page_size=48 layout.tpa=5"))
    assert unnamed.kind == "otherwise" and unnamed.reason.startswith("['layout.tpa=5'] not named")
