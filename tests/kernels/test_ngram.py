"""ngram: kernel and reference against a search in plain Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kernels.tokens.ngram as module
from kernels.reference.ngram import ngram as reference
from kernels.tokens.ngram import ngram


def proposed(tokens: list[int], drafts: int, longest: int) -> list[int]:
    """One sequence, token by token."""
    last = len(tokens) - 1
    found, at = 0, last - 1
    for place in range(last):
        matched = 0
        while matched < min(longest, place + 1) and tokens[place - matched] == tokens[last - matched]:
            matched += 1
        if matched and matched >= found:
            found, at = matched, place
    return [tokens[max(0, min(last, at + 1 + i % max(1, last - at)))] for i in range(drafts)]


@pytest.fixture(params=["kernel", "reference"])
def op(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "BLOCK", 16)
    return ngram if request.param == "kernel" else reference


def batch(rows: list[list[int]], L: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a wider tensor; what lies behind a sequence would match anything."""
    wide = torch.empty(len(rows), 2 * L, dtype=torch.int32)
    for row, tokens in zip(wide, rows, strict=True):
        row[:] = tokens[-1]
        row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    return wide.to(device)[:, :L], torch.tensor([len(tokens) for tokens in rows], device=device)


@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=3),
    drafts=st.integers(1, 9), longest=st.integers(1, 5), spare=st.integers(0, 20),
)  # fmt: skip
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
def test_any_sequence(
    rows: list[list[int]], drafts: int, longest: int, spare: int, op: Any, device: torch.device
) -> None:
    history, lengths = batch(rows, max(map(len, rows)) + spare, device)
    assert op(history, lengths, drafts, longest).tolist() == [proposed(row, drafts, longest) for row in rows]


def test_the_longest_match_wins_over_a_later_one(op: Any, device: torch.device) -> None:
    row = [1, 2, 3, 4, 9, 9, 3, 5, 9, 9, 2, 3]
    history, lengths = batch([row], 16, device)
    assert op(history, lengths, 3, 3).tolist() == [[4, 9, 9]]
    assert op(history, lengths, 3, 1).tolist() == [[5, 9, 9]]
    with pytest.raises(AssertionError):
        assert op(history, lengths - 1, 3, 3).tolist() == [[4, 9, 9]]


def test_a_period_goes_on_past_the_end(op: Any, device: torch.device) -> None:
    history, lengths = batch([[7, 1, 2, 3, 1, 2, 3], [5, 5, 5], [8]], 16, device)
    assert op(history, lengths, 5, 3).tolist() == [[1, 2, 3, 1, 2], [5] * 5, [8] * 5]


@pytest.mark.gpu
def test_a_million_tokens(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    history = torch.randint(0, 50_000, (2, 1 << 20), generator=generator, dtype=torch.int32)
    history[0, 1_000_000:1_000_004] = history[0, 300_000:300_004]
    lengths = torch.tensor([1_000_004, 1 << 20])
    found = ngram(history.to(device), lengths.to(device), 8, 4).cpu()
    assert found.tolist() == reference(history, lengths, 8, 4).tolist()
    assert found[0].tolist() == history[0, 300_004:300_012].tolist()
