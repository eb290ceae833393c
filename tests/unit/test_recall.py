"""What choices keep, against choices made one block at a time; ways to choose for less, against what they promise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.quality import haystacks
from benchmarks.quality.forced import Policy, run
from benchmarks.quality.hits import HitMeter
from benchmarks.quality.prefilled import Subject
from benchmarks.quality.recall import RecallMeter, best_of, block_scores, local_choice
from benchmarks.quality.variants import STORED, SharedChoice, rounded
from helix.attention.base import LayerAttention
from helix.attention.block_sparse import BlockSparseAttention
from helix.layout import HelixLayout
from helix.placement import BlockBudget, Placement
from helix.tokenizer import load_tokenizer
from helix.worker.kv_cache import LayerCache
from helix.worker.step import Step
from kernels.sparse.reference import block_scores as scores_of_pages
from kernels.sparse.reference import fold_blocks
from launch.inputs.compose import ROOT

PAGE, HEADS, DIM = 4, 2, 8


def bounds(rows: int = 50) -> Tensor:
    found = torch.randn(rows, HEADS, 2, DIM, generator=torch.Generator().manual_seed(1)) * 10
    return found.sort(-2, descending=True).values


@pytest.mark.parametrize("stored", STORED)
def test_8_bits_are_rounded_outwards(stored: str) -> None:
    """No maximum falls and no minimum rises; every number is one of 8 bits; the largest stays itself."""
    exact = bounds()
    found = rounded(exact, stored)
    most = exact.abs().amax((-2, -1), keepdim=True)
    grown = (found - exact) / most
    assert (grown[..., 0, :] >= -1e-6).all() and (grown[..., 1, :] <= 1e-6).all()  # less than a bit of fp32
    if stored == "int8":
        whole = found / most * 127
        assert torch.allclose(whole, whole.round(), atol=1e-3) and (found != exact).any()
    else:
        scaled = found / most * 448
        assert torch.allclose(scaled, scaled.to(torch.float8_e4m3fn).float(), rtol=1e-5)
    assert 1e-3 < grown.abs().amax() < (1 / 127 if stored == "int8" else 32 / 448)  # of the coarsest step at most
    assert torch.allclose(found.abs().amax((-2, -1), keepdim=True), most, rtol=1e-5)


@pytest.mark.parametrize("score", ["bounds", "mean", *STORED])
def test_scores_are_those_that_the_product_has(score: str) -> None:
    gen = torch.Generator().manual_seed(2)
    keys = torch.randn(1, 9, PAGE, HEADS, DIM, generator=gen)  # [n, C, page, Hkv, D]
    q = torch.randn(1, HEADS, 3, DIM, generator=gen)
    pages = torch.stack(2 * (keys.mean(2),), 3)  # as benchmarks.papers.policies folds them
    lengths = torch.tensor([0]), torch.tensor([0]), torch.tensor([9 * PAGE])
    table = torch.arange(9, dtype=torch.int32)[None]
    if score != "mean":
        fold_blocks(keys, None, pages, table, *lengths, kvp=1, kvp_rank=0, append_block=PAGE)
    made = rounded(pages[0], score) if score in STORED else pages[0]
    assert torch.allclose(block_scores(q, keys, score)[0], scores_of_pages(q[0].flatten(0, 1), made), atol=1e-5)


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 8))
def test_ranks_choose_for_themselves(count: int, k: int, ranks: int) -> None:
    scores = torch.rand(2, count, generator=torch.Generator().manual_seed(count))
    chosen = local_choice(scores, k, ranks)
    for row, found in zip(scores.tolist(), chosen.tolist(), strict=True):
        wanted = set()
        for rank in range(ranks):
            mine = [c for c in range(count) if c % ranks == rank]
            wanted |= {*sorted(mine, key=lambda c: -row[c])[: -(-k // ranks)]}
        assert {c for c, taken in enumerate(found) if taken} == wanted
    assert torch.equal(best_of(scores, k), local_choice(scores, k, 1))


@pytest.mark.parametrize("page", [128, 16])
def test_what_a_query_would_read(page: int) -> None:
    """One query of two heads, block by block: the sink, the last 512 tokens' blocks, and the best two between."""
    gen = torch.Generator().manual_seed(4)
    length, scale = 1100, 0.3
    q, k = torch.randn(1, 2, DIM, generator=gen), torch.randn(9 * 128, 1, DIM, generator=gen)
    table = torch.arange(9, dtype=torch.int32)[None]
    here = torch.tensor([length - 1]), torch.tensor([0]), torch.tensor([True])
    place = Placement(HelixLayout.create("helix", 1), 0, 128, 128)
    step = Step(place, torch.tensor([0]), *here, torch.tensor([0]), {None: table}, {}, cu_q=None, max_q=1)
    meter = RecallMeter((page,), (2 * page,), (1,))
    meter.prepare(step, {None})
    cache = layer_cache(k.view(9, 128, 1, DIM))
    meter.attend(q, cache, step, LayerAttention(None, scale))

    weights = (q[0] @ k[:length, 0].T * scale).softmax(-1).mean(0)
    last = (length - 1) // page
    mass = {b: float(weights[b * page : (b + 1) * page].sum()) for b in range(last + 1)}
    between = range(1, last - 512 // page + 1)
    bound = {}
    for b in between:
        of_block = k[b * page : (b + 1) * page, 0]
        bound[b] = float(torch.maximum(q[0] * of_block.amax(0), q[0] * of_block.amin(0)).sum(-1).max())
    chosen, best = ({*sorted(between, key=lambda b: -judged[b])[:2]} for judged in (bound, mass))
    anyway = sum(mass[b] for b in mass if b not in between)
    assert meter.mean("fixed", page) == pytest.approx(anyway, abs=1e-5)
    assert meter.mean("kept", page, "bounds", 2 * page) == pytest.approx(
        anyway + sum(mass[b] for b in chosen), abs=1e-5
    )
    assert meter.mean("best", page, 2 * page) == pytest.approx(anyway + sum(mass[b] for b in best), abs=1e-5)
    assert meter.mean("recall", page, "bounds", 2 * page) == len(chosen & best) / 2


def test_hits_are_those_of_a_cache_that_forgets_what_was_chosen_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes of it, and one that does not hold a choice, beside lists of pages in the order of their choice.

    Guesses, every other one of which is right, put what they bring in the places of the first pages of such a list.
    """
    gen = torch.Generator().manual_seed(5)
    pages, few, many = 40, 0.25, 0.5
    tables = torch.stack([torch.randperm(pages - 1, generator=gen)[:6] for _ in range(30)]).int().view(30, 1, 1, 6)
    tables = torch.cat([tables, torch.full_like(tables[..., :1], pages - 1)], -1)  # the unfinished page last
    position = torch.tensor([pages * PAGE - 2])
    place = Placement(HelixLayout.create("helix", 1), 0, PAGE, PAGE)
    here = position, torch.tensor([0]), torch.tensor([True])
    table = torch.arange(pages, dtype=torch.int32)[None]
    cache = layer_cache(torch.zeros(pages, PAGE, 1, DIM))
    meter = HitMeter((0.02, few, many), BlockBudget(1, 1, 5, 0), place, pages * PAGE, torch.device("cpu"))
    meter.width = 7
    held = torch.full((1,), pages, dtype=torch.int32)
    hi = torch.full((1,), 7 * PAGE - 1, dtype=torch.int32)
    first, last = held * 0 + 1, held - 1
    monkeypatch.setattr(meter, "ranges", lambda step, budget: (first, last, held, hi, held))
    guesses = [tables[i // 2 * 2] for i in range(len(tables))]
    for chosen, guess in zip(tables, guesses, strict=True):
        monkeypatch.setattr(BlockSparseAttention, "choose", lambda *args, chosen=chosen: chosen)
        monkeypatch.setattr(BlockSparseAttention, "named", lambda *args, guess=guess: guess)
        step = Step(place, torch.tensor([0]), *here, torch.tensor([0]), {None: table}, {}, cu_q=None, max_q=1)
        meter.guess(lambda: torch.zeros(1, 1, DIM), cache, step)
        assert torch.equal(meter.choose(torch.zeros(1, 1, DIM), cache, step, 1), chosen)
    wanted = {}
    listed, guessed = (([row[0, 0, :-1].tolist() for row in rows]) for rows in (tables, guesses))
    named = sum(len({*a[1:]} & {*b[1:]}) for a, b in zip(listed, guessed, strict=True))
    for share in (few, many):
        counts = []
        for ahead in (False, True):
            known = [
                -1 - i for i in range(int(share * pages))
            ]  # the least recently chosen first; of one choice, the last
            hits = there = 0
            for chosen, guess in zip(listed, guessed, strict=True):
                if ahead:
                    came = [page for page in guess if page not in known]
                    there += len(guess) - len(came)
                    free = [i for i, page in enumerate(known) if page not in guess]
                    for i, page in zip(free, came, strict=False):
                        known[i] = page
                hot = [page for page in known if page in chosen]
                came = [page for page in chosen if page not in known]
                hits += len(hot)
                known = [*[page for page in known if page not in chosen][len(came) :], *hot[::-1], *came[::-1]]
            counts += [hits, 180 - hits]
        wanted[share] = [[*counts, there, 180 - there, named, 150]]
    assert meter.hits() == wanted and wanted[few] < wanted[many] and wanted[few][0][2] > wanted[few][0][0]


def test_what_is_kept_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best keep most, all keep everything, no rank loses by one choice, and the recall is a share."""
    monkeypatch.setattr(haystacks, "SOURCES", [ROOT / "helix" / "layers"])
    demo = ROOT / "assets/demo-model"
    ids = haystacks.texts(load_tokenizer(demo), 2, 1000)
    meter = RecallMeter((128, 16), (128, 4096), (1, 2))
    setting = Subject(demo, HelixLayout.create("helix", 1), torch.float32, "cpu")
    run(setting, [*ids[:, :-2]], 2, [Policy("dense", attends=meter)], ids[:, -2:])
    rows = meter.rows()
    assert meter.measured == 2 * 8  # steps and layers
    for page in (128, 16):
        of_page = {r["score"]: r for r in rows if r["page"] == page and r["kind"] == "recall"}
        best = of_page["best"]
        assert 0 < best["fixed"] < best["kept"][0] < 1 and best["kept"][1] == pytest.approx(1, abs=1e-5)
        for score, r in of_page.items():
            assert best["fixed"] <= r["kept"][0] <= best["kept"][0] + 1e-6, score
            assert 0 < r["recall"][0] <= 1 and r["recall"][1] == 1
            if score != "best":
                assert [sum(layers) / 8 for layers in r["kept_by_layer"]] == pytest.approx(r["kept"])
        assert of_page["bounds"]["kept"] != of_page["mean"]["kept"]
        assert of_page["fours"]["recall"][0] <= of_page["bounds"]["recall"][0]
        one, two = (r for r in rows if r["page"] == page and r["kind"] == "ranks")
        assert one["local"] == one["global"] == of_page["bounds"]["kept"] and one["same"] == [1, 1]
        assert two["same"][0] < 1 or two["share"][0] == 1


def test_one_choice_for_several_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers 0 and 2 of four choose, and a new step begins anew."""
    made: list[Tensor] = []

    def choose(self: object, *args: object) -> Tensor:
        made.append(torch.tensor(len(made)))
        return made[-1]

    monkeypatch.setattr(BlockSparseAttention, "choose", choose)
    monkeypatch.setattr(BlockSparseAttention, "prepare", lambda *args: None)
    place = Placement(HelixLayout.create("helix", 1), 0, PAGE, PAGE)
    policy = SharedChoice(2, BlockBudget(1, 1, 2, 0), place, 64, torch.device("cpu"))
    q, cache = torch.zeros(1), layer_cache(torch.zeros(1))
    for wanted in ([0, 0, 1], [2, 2, 3]):
        policy.prepare(step := empty_step(), {None})
        assert [int(policy.choose(q, cache, step, 1)) for _ in range(3)] == wanted


def empty_step() -> Step:
    nothing = torch.zeros(0)
    place = Placement(HelixLayout.create("helix", 1), 0, PAGE, PAGE)
    return Step(place, *[nothing] * 5, {None: nothing}, {}, cu_q=None, max_q=1)


def layer_cache(keys: torch.Tensor) -> LayerCache:
    """Makes a layer's cache of such keys, and of values like them."""
    return LayerCache(0, {"keys": keys, "values": keys}, torch.zeros(0))
