"""The engine gives what transformers gives: every row of parity.yaml, and every pair of features in some row."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from helix.attention import dense
from helix.layout import HelixLayout
from tests.e2e.checkpoints import checkpoint, oracle
from tests.e2e.fuzz import quiet, run_case, run_here
from tests.e2e.fuzz_checks import Outcome
from tests.e2e.parity import check, loopback
from tests.e2e.parity_cases import PAIRS, ROWS, backends_of, case_of, pairs_of
from tests.pool import pool

# Of other tests: more prompts than slots, the longest over five chunks of 64 and the end of a block of 64; and fewer.
LENGTHS, NEW_TOKENS = (7, 1, 15, 16, 17, 310), 14
MOE_LENGTHS, MOE_TOKENS = (1, 17, 90), 12


def params() -> list[object]:
    found = []
    for name in ROWS:
        ranks = case_of(name).world_size
        for backend in backends_of(name):
            gpus = {"gpu": [pytest.mark.gpu], "nccl": [pytest.mark.gpu(ranks)], "symm_mem": [pytest.mark.gpu(ranks)]}
            slow = [pytest.mark.slow] if ROWS[name].get("slow") else []
            found.append(pytest.param(name, backend, id=f"{name}-{backend}", marks=[*gpus.get(backend, []), *slow]))
    return found


def outcome_of(name: str, backend: str) -> Outcome:
    case = case_of(name)
    quiet()
    if backend in ("threads", "gpu"):
        return run_case(case, "cpu" if backend == "threads" else "cuda", 240.0)
    device, dist_backend = ("cpu", "gloo") if backend == "gloo" else ("cuda", "nccl")
    task = run_here, case, "symm_mem" if backend == "symm_mem" else "torch", device
    found: Outcome = pool(case.world_size, dist_backend).run(*task, timeout_s=240.0)[0]
    return found


@pytest.mark.parametrize("name, backend", params())
def test_tokens_and_logits(name: str, backend: str) -> None:
    outcome = outcome_of(name, backend)
    assert outcome.kind == "equal", outcome.reason
    missing = [event for event in ROWS[name].get("expects", ()) if not outcome.seen.get(event)]
    assert not missing, f"the row is to see {missing}: {outcome.seen}"
    assert not outcome.seen.get(ROWS[name].get("forbids", "")), outcome.seen


def test_every_pair_that_was_tested_is_in_some_row() -> None:
    wanted = {tuple(sorted(pair)) for each in PAIRS for pair in product(each["these"], each["those"])}
    there = set().union(*map(pairs_of, ROWS))
    assert not [pair for pair in sorted(wanted - there) if pair[0] != pair[1]]


def test_prefill_has_its_own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt goes through the prefill kernel in chunks; decode steps see new tokens only."""
    calls: dict[str, list[int]] = {"prefill": [], "decode": []}
    prefill, decode = dense.flash_prefill, dense.decode_parts

    def spy_prefill(q: torch.Tensor, *args: object, **options: object) -> object:
        calls["prefill"].append(len(q))
        return prefill(q, *args, **options)  # type: ignore[arg-type]

    def spy_decode(q: torch.Tensor, *args: object, **options: object) -> object:
        calls["decode"].append(q.shape[1])
        return decode(q, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(dense, "flash_prefill", spy_prefill)
    monkeypatch.setattr(dense, "decode_parts", spy_decode)
    wanted = oracle("qwen3", LENGTHS, NEW_TOKENS)[-1:]
    check(loopback(checkpoint("qwen3"), HelixLayout.create(), 16, wanted), wanted)
    # The last of two layers attends for the last token alone.
    assert calls["prefill"] == [64, 1] * 4 + [LENGTHS[-1] - 4 * 64, 1]
    assert calls["decode"] == [1] * (NEW_TOKENS - 1) * 2
