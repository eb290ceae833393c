"""index_topk: kernel and reference against one sorted list of all ranks' tokens; ties to the earlier token."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from helix.layout import HelixLayout
from kernels.indexer import select_topk, select_topk_many_rows
from kernels.indexer.reference import Shard, ordered
from kernels.indexer.reference import index_topk as reference
from kernels.indexer.select_topk import PLANES, index_topk
from tests.kernels.peers import ThreadRendezvous
from tests.pairwise import params

OPS = pytest.mark.parametrize("op", [index_topk, reference], ids=["kernel", "reference"])


def selected(
    op: Any, scores: Tensor, lengths: list[int], starts: list[int], topk: int, layout: HelixLayout, block: int,
    page: int, device: torch.device, each: int = 1, counted: bool = False,
) -> list[list[int]]:  # fmt: skip
    """Global positions that all ranks choose for each row of global scores [N, S]; checks the order of each rank's."""
    N, S = scores.shape
    sequences, kvp = N // each, layout.kvp
    columns = layout.local_length(S, 0, block) // page + 1
    gen = torch.Generator().manual_seed(S)
    tables = torch.randperm(sequences * columns, generator=gen).view(sequences, columns).int().to(device)
    rendezvous, found = ThreadRendezvous(kvp), [[] for _ in range(N)]
    results: list[Any] = [None] * kvp

    def run_rank(rank: int) -> None:
        local = torch.full((N, columns * page + 3 + kvp % 2), torch.nan)  # no tokens beyond a row's
        hi, mine = torch.zeros(N, dtype=torch.int32), []
        for n in range(N):
            at = torch.arange(lengths[n])
            owned = at[layout.token_owner(at, block, starts[n]) == rank]
            local[n, : len(owned)], hi[n] = scores[n, owned], len(owned)
            mine.append(owned)
        shard = Shard(kvp, rank, block, page, None if kvp == 1 else rendezvous.gather(rank))
        positions = torch.tensor(lengths) - 1
        tensors = (x.to(device) for x in (local, positions, torch.tensor(starts), hi))
        rows = None if each > 1 else torch.arange(N, device=device)
        numbers = []
        if counted:
            numbers.append(torch.zeros(PLANES, N, 256, dtype=torch.int32, device=device))
            for n in range(N):
                numbers[0][0, n] = (ordered(local[n, : hi[n]]) >> 24).bincount(minlength=256)
        with rendezvous.lock:
            results[rank] = mine, op(*tensors, tables, rows, topk, (columns * page + block) * kvp, shard, *numbers)

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(kvp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, (slots, counts) in results:
        for n in range(N):
            pages = tables[n // each].tolist()
            place = {pages[j // page] * page + j % page: j for j in range(len(pages) * page)}
            local = [place[slot] for slot in slots[n, : int(counts[n])].tolist()]
            assert local == sorted(local), "not in local order"
            found[n] += mine[n][local].tolist()
    return [sorted(row) for row in found]


def wanted(scores: Tensor, length: int, topk: int) -> list[int]:
    row = scores[:length].tolist()
    return sorted(
        sorted(range(length), key=lambda j: (row[j] == row[j], -row[j] if row[j] == row[j] else 0.0, j))[:topk]
    )


def check(
    op: Any, scores: Tensor, lengths: list[int], starts: list[int], topk: int, kvp: int, block: int, page: int,
    device: torch.device, **how: Any,
) -> None:  # fmt: skip
    found = selected(op, scores, lengths, starts, topk, HelixLayout.create("helix", kvp), block, page, device, **how)
    assert found == [wanted(row, length, topk) for row, length in zip(scores, lengths, strict=True)]


@pytest.fixture
def short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of some hundred tokens have many tiles, and groups of several scores."""
    monkeypatch.setattr(select_topk, "LISTED", 32)
    monkeypatch.setattr(select_topk, "TILE", 64)
    monkeypatch.setattr(select_topk, "PROGRAMS", 9)
    for name, value in {"GROUPS": 64, "TILE": 32, "LISTED": 16}.items():
        monkeypatch.setattr(select_topk_many_rows, name, value)


WAYS = {(index_topk, 32): "few", (index_topk, 0): "many", (reference, 0): "reference"}  # rows


@pytest.mark.usefixtures("short_tiles")
@pytest.mark.parametrize(
    "algorithm, shape, kind",
    params(
        [
            *product(
                WAYS,
                [(1, 16, 16, 8), (2, 1, 16, 5), (3, 16, 7, 40), (8, 16, 16, 33), (4, 64, 16, 1)],
                ["apart", "near", "steps", "tied", "zeros", "equal"],
            )
        ],
        lambda algorithm, shape, kind: f"{'-'.join(map(str, (kind, *shape)))}-{WAYS[algorithm]}",
    ),
)
def test_the_best_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, algorithm: tuple[Any, int], shape: tuple[int, ...], kind: str, device: torch.device
) -> None:
    """Rows shorter than topk, empty shards, negative scores, and ties over blocks and ranks; few rows and many.

    Near scores have the same first digits, so that lists of keys between are long; of tied ones, too long. Steps of the
    last bits are both. The first digit may have been counted.
    """
    (op, few_rows), (kvp, block, page, topk) = algorithm, shape
    monkeypatch.setattr(select_topk, "FEW_ROWS", few_rows)
    gen = torch.Generator().manual_seed(kvp)
    lengths, starts = [300, 1, topk, topk + 1, 150], [0, kvp - 1, 1 % kvp, 0, kvp // 2]
    scores = torch.randn(5, 300, generator=gen) * 10
    if kind == "near":
        scores = 1 + scores / 1e5
    elif kind == "steps":
        scores = 1 + scores.round() * 2**-23
    elif kind == "tied":
        scores = scores.round() / 4
    elif kind == "equal":
        scores = torch.full_like(scores, -0.5)
    elif kind == "zeros":
        scores = torch.where(scores > 14, scores, scores * 0)  # of either sign
    for counted in (False, op is index_topk):
        check(op, scores, lengths, starts, topk, kvp, block, page, device, counted=counted)


@pytest.mark.usefixtures("short_tiles")
@pytest.mark.parametrize("kvp", [1, 2])
@pytest.mark.parametrize("few_rows", [32, 0])
def test_blocks_of_many_tokens(monkeypatch: pytest.MonkeyPatch, few_rows: int, kvp: int, device: torch.device) -> None:
    """A position may take 25 bits, and a key all 64."""
    monkeypatch.setattr(select_topk, "FEW_ROWS", few_rows)
    gen = torch.Generator().manual_seed(0)
    scores, lengths = torch.randn(3, 300, generator=gen).round(decimals=1), [300, 7, 150]
    for counted in (False, True):
        check(index_topk, scores, lengths, [0, kvp - 1, 0], 33, kvp, 1 << 24, 16, device, counted=counted)


@pytest.mark.parametrize("few_rows", [32, 0])
def test_a_full_list_lacks_keys_of_the_same_digits(
    monkeypatch: pytest.MonkeyPatch, few_rows: int, device: torch.device
) -> None:
    """One rank has all tokens, more than its list takes with the same first digits."""
    monkeypatch.setattr(select_topk, "FEW_ROWS", few_rows)
    gen = torch.Generator().manual_seed(0)
    steps = (torch.randn(4, 40, generator=gen) * 10).round() * torch.tensor([[1.0], [2.0], [16.0], [300.0]])
    scores = 1 + steps * 2**-23
    check(index_topk, scores, [40] * 4, [0, 3, 1, 2], 2, 4, 64, 16, device)


@OPS
def test_rows_of_a_verified_group(op: Any, device: torch.device) -> None:
    """Each row has tokens of its own; NaN and infinity are scores as well."""
    gen = torch.Generator().manual_seed(0)
    scores = torch.randn(6, 90, generator=gen)
    scores[1, 3], scores[2, 5], scores[4, 70], scores[5, :60] = torch.nan, torch.inf, -torch.inf, -torch.inf
    lengths, starts = [70, 71, 72, 80, 81, 82], [1, 1, 1, 0, 0, 0]
    check(op, scores, lengths, starts, 9, 2, 16, 16, device, each=3)


Rows = Callable[[Tensor, Tensor], Tensor]
# What becomes of random scores [N, S], and of the places [S].
KINDS: dict[str, Rows] = {
    "apart": lambda x, at: x,
    "equal": lambda x, at: torch.full_like(x, -0.5),
    "zeros": lambda x, at: torch.where(x > 1.5, x, x * 0),  # of either sign
    "below zero": lambda x, at: torch.where(x < -1.5, x, x * 0),
    "infinite": lambda x, at: torch.where(x > 0.5, torch.inf, torch.where(x < 0, -torch.inf, x)),
    "least": lambda x, at: torch.full_like(x, -torch.inf),
    "nan": lambda x, at: torch.where(at == 1, torch.inf, torch.where(at % 3 == 0, torch.nan, x)),
    "some nan": lambda x, at: torch.where(at % 97 == 7, torch.nan, x),
}
PLACES: dict[str, Rows] = {
    "one group": lambda x, at: torch.where(at // 2 % 64 < 6, x + 100, x),  # which has several of the best
    "last": lambda x, at: x + 100 * (at > len(at) - 20),  # no other tile has any
    "falling": lambda x, at: (-at).float().expand_as(x),
    "rising": lambda x, at: at.float().expand_as(x),
}


def rows_of_a_kind(kind: str, N: int, S: int) -> Tensor:
    scores = torch.randn(N, S, generator=torch.Generator().manual_seed(S))
    return (KINDS | PLACES)[kind](scores, torch.arange(S))


MANY = [(1, 16, 16, 24), (2, 16, 16, 12), (3, 5, 7, 33), (4, 16, 32, 7)]  # ranks, block, page, tokens of a row


@pytest.mark.usefixtures("short_tiles")
@pytest.mark.parametrize(
    "kind, shape",
    params(
        [  # each kind in two shapes, every other one in the same
            *((kind, MANY[(i + j) % 4]) for i, kind in enumerate(KINDS) for j in (0, 2)),
            *product(PLACES, [(1, 16, 16, 24), (2, 16, 16, 12), (2, 16, 16, 70)]),
        ],
        lambda kind, shape: f"{kind}-{'-'.join(map(str, shape))}".replace(" ", "-"),
    ),
)
def test_many_rows(monkeypatch: pytest.MonkeyPatch, kind: str, shape: tuple[int, ...], device: torch.device) -> None:
    """Rows without tokens, with as many as are chosen, as a list takes, as there are groups, around ends of tiles.

    A list takes half as many again as are chosen; of 70, more than there are groups.
    """
    kvp, block, page, topk = shape
    monkeypatch.setattr(select_topk, "FEW_ROWS", 0)
    lengths = [0, 1, topk, topk + 1, topk + topk // 2, topk + topk // 2 + 1, 63, 64, 65, 95, 96, 97, 128, 129, 400, 401]
    starts = [n % kvp for n in range(16)]
    check(index_topk, rows_of_a_kind(kind, 16, 401), lengths, starts, topk, kvp, block, page, device)


@pytest.mark.parametrize("kind", ["apart", "equal"])
def test_many_rows_of_many_tokens(monkeypatch: pytest.MonkeyPatch, kind: str, device: torch.device) -> None:
    """A model's tiles and its 2,048 tokens."""
    monkeypatch.setattr(select_topk, "FEW_ROWS", 0)
    lengths, starts = [40001, 2500, 3073, 20000], [0, 1, 1, 0]
    scores = rows_of_a_kind(kind, 4, 40001)
    check(index_topk, scores, lengths, starts, 2048, 2, 16, 64, device)


@pytest.mark.parametrize("length", [3072, 3073, 8192, 8193, 16000, 40003])
def test_a_list_is_short_and_has_the_best(length: int, device: torch.device) -> None:
    """A row is read twice, not more; groups have one of the best each, mostly."""
    scores = rows_of_a_kind("apart", 1, length)
    scores = torch.cat([scores, torch.full((1, 4 - length % 4), torch.nan)], 1).to(device)
    lists = select_topk_many_rows.list_local_topk(
        scores, torch.tensor([length], dtype=torch.int32, device=device), 2048
    )
    number, entries = int(lists[0, 0]), lists[0, 1:]
    tokens = (entries[:number] & 0xFFFFFFFF).cpu()
    assert number == 3072 if length == 3072 else 2048 <= number < 2600
    assert tokens.tolist() == sorted(tokens.tolist())
    best = scores[0, :length].cpu().topk(number)
    assert sorted(best.indices.tolist()) == tokens.tolist()
    assert torch.equal((entries[:number] >> 32).int().cpu(), scores[0].cpu()[tokens].view(torch.int32))


def test_codes_have_the_order_of_scores() -> None:
    scores = torch.tensor([-torch.inf, -3e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3e38, torch.inf, torch.nan])
    codes = ordered(scores)
    assert codes.tolist() == sorted(codes.tolist()) and codes.min() >= 0 and codes.max() < 1 << 32
    assert codes[4] == codes[5] and len(codes.unique()) == 10
