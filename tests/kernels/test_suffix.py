"""suffix: kernel and reference against a search in plain Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import kernels.tokens.suffix as module
from kernels.tokens.reference import suffix as reference
from kernels.tokens.suffix import TOKEN_BITS, SuffixPool, suffix

Entry = tuple[int, int] | None  # salt and token


def matched(tokens: list[Any], place: int, final: list[Any], longest: int) -> int:
    """Tokens up to `place` that equal the final ones."""
    n = 0
    while n < min(longest, place + 1, len(final)) and tokens[place - n] == final[-1 - n]:
        n += 1
    return n


def proposed(tokens: list[int], others: list[Entry], cache_salt: int, drafts: int, longest: int) -> list[int]:
    """One sequence; `others` from the oldest on."""
    last = len(tokens) - 1
    own = max(((matched(tokens, i, tokens, longest), i) for i in range(last)), default=(0, -1))
    mine = [(cache_salt, t) for t in tokens]
    more = max(((matched(others, i, mine, longest), i) for i in range(len(others))), default=(0, -1))
    if more[0] > own[0]:
        out = []
        for entry in others[more[1] + 1 : more[1] + 1 + drafts]:
            if entry is None or entry[0] != cache_salt:
                break
            out.append(entry[1])
        return out + [-1] * (drafts - len(out))
    at = own[1] if own[0] else last - 1
    return [tokens[max(0, min(last, at + 1 + i % max(1, last - at)))] for i in range(drafts)]


@pytest.fixture(params=["kernel", "reference"])
def op(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("HISTORY_BLOCK", "POOL_BLOCK"):
        monkeypatch.setattr(module, name, 16)
    return suffix if request.param == "kernel" else reference


def run(
    op: Any, rows: list[list[int]], salts: list[int], ring: list[Entry] | None, cursor: int, drafts: int,
    longest: int, device: torch.device,
) -> list[list[int]]:  # fmt: skip
    """Rows of a wider tensor; what lies behind a sequence would match anything. `ring` None: without others."""
    L = max(map(len, rows)) + 5
    wide = torch.empty(len(rows), 2 * L, dtype=torch.int32)
    for row, tokens in zip(wide, rows, strict=True):
        row[:] = tokens[-1]
        row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    entries = [-1 if e is None else (e[0] << TOKEN_BITS) + e[1] for e in ring or ()]
    lengths, *texts = (torch.tensor(x, device=device) for x in ([len(r) for r in rows], entries, [cursor], salts))
    others = SuffixPool(*texts) if ring else None
    found: list[list[int]] = op(wide.to(device)[:, :L], lengths, others, drafts, longest).tolist()
    return found


SALTS = [0, 3, (1 << 39) - 1]
THEIRS: list[Entry] = [(3, 7), (3, 1), (3, 2), (3, 4), (3, 6), None, (3, 8)]
entries = st.one_of(st.none(), st.tuples(st.sampled_from(SALTS), st.integers(0, 2)))


@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=3),
    ring=st.none() | st.lists(entries, min_size=1, max_size=40), at=st.integers(0, 100),
    cache_salt=st.sampled_from(SALTS), drafts=st.integers(1, 9), longest=st.integers(1, 5),
)  # fmt: skip
# A longer match of the first row's salt wins over its own, one as long does not; the longest wins over a later one; a
# period goes on past the end.
@example(rows=[[5, 1, 2, 9, 7, 1, 2]] * 2, ring=THEIRS, at=0, cache_salt=3, drafts=4, longest=3)
@example(rows=[[5, 1, 2, 9, 7, 1, 2]], ring=THEIRS, at=0, cache_salt=3, drafts=4, longest=2)
@example(rows=[[1, 2, 3, 4, 9, 9, 3, 5, 9, 9, 2, 3]], ring=None, at=0, cache_salt=0, drafts=3, longest=3)
@example(rows=[[7, 1, 2, 3, 1, 2, 3], [5, 5, 5], [8]], ring=None, at=0, cache_salt=0, drafts=5, longest=3)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
def test_any_sequence(
    rows: list[list[int]], ring: list[Entry] | None, at: int, cache_salt: int, drafts: int, longest: int, op: Any,
    device: torch.device,
) -> None:  # fmt: skip
    cursor, salts = at % len(ring or SALTS), [cache_salt, *SALTS][: len(rows)]
    others = ring[cursor:] + ring[:cursor] if ring else []
    wanted = [proposed(row, others, of, drafts, longest) for row, of in zip(rows, salts, strict=True)]
    assert run(op, rows, salts, ring, cursor, drafts, longest, device) == wanted


@pytest.mark.gpu
def test_as_many_tokens_as_are_remembered(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    history = torch.randint(0, 50_000, (3, 1 << 20), generator=generator, dtype=torch.int32)
    others = torch.randint(0, 50_000, (1 << 20,), generator=generator) + (5 << TOKEN_BITS)
    history[0, -4:] = history[0, 300_000:300_004]
    lengths, salts, cursor = torch.tensor([1 << 20, 100_001, 7]), torch.tensor([5, 5, 6]), torch.tensor([777_777])
    others[5_000:5_008] = history[1, 100_001 - 8 : 100_001].long() + (5 << TOKEN_BITS)
    wanted = reference(history, lengths, SuffixPool(others, cursor, salts), 8, 8)
    own, ring = (history.to(device), lengths.to(device)), (others.to(device), cursor.to(device), salts.to(device))
    found = suffix(*own, SuffixPool(*ring), 8, 8).cpu()
    assert found.tolist() == wanted.tolist() and found[0].tolist() == history[0, 300_004:300_012].tolist()
    assert suffix(*own, None, 8, 8).tolist() == reference(history, lengths, None, 8, 8).tolist()
    assert found[1].tolist() == (others[5_008:5_016] & ((1 << TOKEN_BITS) - 1)).tolist()
