"""Layout invariants: every item has exactly one owner, and the closed formulas agree with counting."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helix.layout import HelixLayout, feasible_layouts, share

widths = st.integers(1, 8)


@given(st.integers(0, 300), widths)
def test_shares_cover_everything_once_and_differ_by_at_most_one(total: int, parts: int) -> None:
    shares = [share(total, parts, i) for i in range(parts)]
    assert [x for s in shares for x in s] == list(range(total))
    sizes = [len(s) for s in shares]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


tokens = dict(kvp=widths, block=st.integers(1, 40), start=st.integers(0, 7), length=st.integers(0, 700))


@given(**tokens)
def test_tokens_have_one_owner_and_consecutive_slots_in_global_order(
    kvp: int, block: int, start: int, length: int
) -> None:
    start %= kvp
    layout = HelixLayout.create(kvp=kvp)
    for rank in range(kvp):
        mine = [t for t in range(length) if layout.token_owner(t, block, start) == rank]
        assert [layout.token_slot(t, block) for t in mine] == list(range(len(mine)))
        assert [layout.token_at(s, rank, block, start) for s in range(len(mine))] == mine
        assert layout.local_length(length, rank, block, start) == len(mine)
    assert sum(layout.local_length(length, r, block, start) for r in range(kvp)) == length


@given(**tokens, window=st.integers(1, 80))
def test_local_bounds_select_exactly_the_visible_keys(
    kvp: int, block: int, start: int, length: int, window: int
) -> None:
    start %= kvp
    layout = HelixLayout.create(kvp=kvp)
    for rank in range(kvp):
        lo, hi = layout.local_bounds(length, rank, block, start, window)
        visible = {t for t in range(length + 1) if t > length - window}
        assert {layout.token_at(s, rank, block, start) for s in range(lo, hi)} == {
            t for t in visible if layout.token_owner(t, block, start) == rank
        }
        whole = 0, layout.local_length(length + 1, rank, block, start)
        assert layout.local_bounds(length, rank, block, start) == whole


@given(**tokens)
def test_one_formula_for_int_numpy_and_torch(kvp: int, block: int, start: int, length: int) -> None:
    start %= kvp
    layout = HelixLayout.create(kvp=kvp)
    span = range(length, length + 50)
    for rank in range(kvp):
        expected = [layout.local_bounds(t, rank, block, start, 33) for t in span]
        for array in (np.arange(length, length + 50), torch.arange(length, length + 50)):
            lo, hi = layout.local_bounds(array, rank, block, start, 33)
            assert list(zip(lo.tolist(), hi.tolist(), strict=True)) == expected


heads = st.tuples(st.sampled_from([1, 2, 3, 4, 5, 6, 8]), st.integers(1, 8))


@settings(max_examples=150)
@given(heads, st.sampled_from(["helix", "tp", "medha"]), widths, widths, st.integers(1, 300))
def test_every_head_column_and_row_has_one_owner(
    kv_group: tuple[int, int], mode: str, kvp: int, tpa: int, total: int
) -> None:
    kv_heads, group = kv_group
    q_heads = kv_heads * group
    if mode == "tp":
        tpa, kvp = kvp * tpa, 1
    layout = HelixLayout.create(mode, kvp, tpa)
    try:
        layout.check_heads(q_heads, kv_heads)
    except ValueError:
        return
    ranks = range(layout.world_size)
    assert sorted(h for r in ranks for h in layout.o_heads(r, q_heads, kv_heads)) == list(range(q_heads))
    for partition in (layout.vocab_rows, layout.ffn_columns):
        assert sorted(x for r in ranks for x in partition(r, total)) == list(range(total))
    columns = [c for r in ranks for c in layout.hidden_columns(r, q_heads, kv_heads, 2)]
    assert sorted(columns) == list(range(q_heads * 2))
    for r in ranks:
        group_heads = {
            (layout.kv_heads(g, kv_heads), layout.q_heads(g, q_heads, kv_heads)) for g in layout.kvp_group(r)
        }
        assert len(group_heads) == 1
        assert r in layout.kvp_group(r) and layout.kvp_group(r)[layout.kvp_rank(r)] == r
        # A rank's queries all read KV heads that it holds, in equal groups: what the kernels rely on.
        q, kv = layout.q_heads(r, q_heads, kv_heads), layout.kv_heads(r, kv_heads)
        assert len(q) % len(kv) == 0
        assert all(kv.start + i // (len(q) // len(kv)) == h // group for i, h in enumerate(q))
        assert sum(layout.head_shares(r, q_heads, kv_heads)) == len(q)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 20), st.integers(1, 40))
def test_every_expert_column_has_one_owner(tpf: int, ep: int, experts: int, width: int) -> None:
    layout = HelixLayout("helix", tpf * ep, 1, tpf, ep)
    owned = [
        (e, c) for r in range(tpf * ep) for e in layout.experts(r, experts) for c in layout.expert_columns(r, width)
    ]
    assert sorted(owned) == [(e, c) for e in range(experts) for c in range(width)]


def test_known_shapes_that_do_not_divide() -> None:
    qwen = HelixLayout.create(kvp=2, tpa=4)  # Qwen2.5-7B, 28/4 heads on 8 ranks: 7 query heads over 2 ranks
    assert qwen.head_shares(0, 28, 4) == [4, 3]
    assert [len(qwen.o_heads(r, 28, 4)) for r in range(8)] == [4, 3] * 4
    tp = HelixLayout.create("tp", tpa=8)
    assert [len(tp.q_heads(r, 28, 4)) for r in range(8)] == [4, 3] * 4
    assert [tp.kv_heads(r, 4).start for r in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert HelixLayout.create(kvp=4).head_shares(0, 2, 1) == [1, 1, 0, 0]
    assert [len(HelixLayout.create(kvp=6).ffn_columns(r, 18_944)) for r in range(6)] == 2 * [3158] + 4 * [3157]
    assert sum(len(HelixLayout.create(kvp=8).vocab_rows(r, 50_257)) for r in range(8)) == 50_257


def test_medha_keeps_the_ffn_on_the_first_kvp_rank() -> None:
    medha = HelixLayout.create("medha", kvp=4, tpa=2)
    assert (medha.tpf, medha.ffn_ranks) == (2, 2)
    assert [len(medha.ffn_columns(r, 10)) for r in range(8)] == [5, 0, 0, 0, 5, 0, 0, 0]
    assert [len(medha.o_heads(r, 8, 2)) for r in range(8)] == [4, 0, 0, 0, 4, 0, 0, 0]


def test_dp_attends_with_all_heads_and_spreads_the_ffn() -> None:
    dp = HelixLayout.create("dp", dp=4, ep=2)
    assert (dp.world_size, dp.tpf, dp.ffn_ranks, str(dp)) == (4, 2, 4, "dp dp=4 -> tpf=2 ep=2")
    for rank in range(4):
        assert dp.kvp_group(rank) == (rank,) and dp.dp_rank(rank) == rank
        assert dp.q_heads(rank, 28, 4) == dp.o_heads(rank, 28, 4) == range(28) and dp.kv_heads(rank, 4) == range(4)
        assert dp.vocab_rows(rank, 100) == range(100)
    assert dp.kvp_groups() == [(0,), (1,), (2,), (3,)]
    assert [dp.ffn_columns(r, 8) for r in range(4)] == [range(2 * r, 2 * r + 2) for r in range(4)]
    assert [(dp.experts(r, 6), dp.expert_columns(r, 4)) for r in range(4)] == [
        (range(3), range(2)), (range(3), range(2, 4)), (range(3, 6), range(2)), (range(3, 6), range(2, 4)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("helix", 2, 2, 3, 1), ["tpf*ep = 3*1", "= 4 ranks"]),
        (("tp", 2, 2, 4, 1), ["kvp=2", "layout.kvp=1"]),
        (("medha", 2, 2, 4, 1), ["tpa = 2"]),
        (("ring", 2, 2, 4, 1), ["ring", "helix, tp, medha, dp"]),
        (("dp", 2, 1, 2, 1), ["layout.kvp=2", "layout.tpa=1"]),
        (("dp", 1, 1, 1, 2, 4), ["tpf*ep = 1*2 = 2", "dp = 4"]),
        (("helix", 1, 1, 2, 1, 2), ["layout.dp=2", "mode=dp"]),
        (("helix", 0, 2, 2, 1), ["kvp=0"]),
        (("helix", True, 2, 2, 1), ["kvp=True"]),
    ],
)
def test_what_is_no_layout_is_refused_with_its_values(arguments: tuple, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        HelixLayout(*arguments)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_heads_that_cannot_be_split_list_the_layouts_that_can() -> None:
    with pytest.raises(ValueError, match=r"tpa=4 .* 15 query and 5 KV heads .*\[mode=helix kvp=4 tpa=1\]"):
        HelixLayout.create(kvp=1, tpa=4).check_heads(15, 5)
    with pytest.raises(ValueError, match="ep=3 does not divide the 4 ranks"):
        HelixLayout.create(kvp=4, ep=3)
    assert feasible_layouts(8, 28, 4) == [
        "[mode=helix kvp=8 tpa=1]", "[mode=helix kvp=4 tpa=2]", "[mode=helix kvp=2 tpa=4]", "[mode=tp kvp=1 tpa=8]",
        "[mode=medha kvp=8 tpa=1]", "[mode=medha kvp=4 tpa=2]", "[mode=medha kvp=2 tpa=4]",
        "[mode=dp dp=8]",
    ]  # fmt: skip
