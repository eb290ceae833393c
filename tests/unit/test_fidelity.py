"""What a policy changes: statistics against closed formulas, and forced steps against what they must be."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import fidelity
from benchmarks.fidelity import measure
from benchmarks.quality import fidelity_tasks, haystacks, prefill
from benchmarks.quality.agreement import common_prefix, compare, mcnemar, wilson
from benchmarks.quality.haystacks import Haystack, source_windows
from benchmarks.quality.hit_meter import HitMeter
from benchmarks.quality.prefill import EvalSetup
from benchmarks.quality.teacher_forcing import Policy, run
from helix.attention.block_sparse import BlockSparseAttention
from helix.attention.dense import DenseAttention
from helix.kv_placement import BlockBudget, KVPlacement
from helix.layout import HelixLayout
from helix.tokenizer import load_tokenizer
from helix.worker.kv_cache import LayerCache
from helix.worker.step import Step
from kernels.attention.split_kv import PartialAttention
from launch.inputs.compose import ROOT

DEMO = ROOT / "assets/demo-model"
BUDGETS = {topk: BlockBudget(1, 2, topk, 0) for topk in (0, 3, 40)}
FEW = Policy("few", BUDGETS[3], 16)


@given(st.integers(0, 500), st.integers(1, 500))
def test_the_range_of_a_share(hits: int, count: int) -> None:
    """Its ends are the shares from which the one that was seen is 1.96 standard deviations away."""
    hits = min(hits, count)
    low, high = wilson(hits, count)
    seen = hits / count
    assert 0 <= low <= seen + 1e-12 and seen - 1e-12 <= high <= 1
    for end in (low, high):
        if 1e-9 < end < 1 - 1e-9:
            assert abs(seen - end) == pytest.approx(1.96 * math.sqrt(end * (1 - end) / count), rel=1e-6)


@given(st.integers(0, 12), st.integers(0, 12))
def test_the_exact_test_of_pairs(lost: int, won: int) -> None:
    """Counted over all splits of so many fair coins: those at most as probable as the one that was seen."""
    n = lost + won
    seen = math.comb(n, lost)
    wanted = sum(math.comb(n, i) for i in range(n + 1) if math.comb(n, i) <= seen) / 2**n
    assert mcnemar(lost, won) == pytest.approx(wanted)


def test_comparison() -> None:
    """Two steps of two tokens: one agrees, one does not though dense attention was sure."""
    dense = torch.tensor([[[2.0, 0.0], [0.0, 1.5]]])
    ours = torch.tensor([[[3.0, 0.0], [1.0, 0.0]]])
    found = compare(ours, dense, torch.tensor([[0, 1]]))

    def p(x: float) -> float:
        return 1 / (1 + math.exp(-x))  # of the first of two tokens whose logits differ by x

    def kl(a: float, b: float) -> float:
        return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))

    assert found["agrees"] == 0.5 and found["sure_steps"] == 2 and found["sure"] == 0.5
    assert found["margins_of_misses"] == [1.5] and found["agrees_by_window"] == [0.5]
    assert found["kl"] == pytest.approx((kl(p(2), p(3)) + kl(p(-1.5), p(1))) / 2)
    assert found["tv"] == pytest.approx((abs(p(2) - p(3)) + abs(p(-1.5) - p(1))) / 2)
    assert found["perplexity"] == pytest.approx(math.exp(-(math.log(p(3)) + math.log(1 - p(1))) / 2))
    equals = torch.randn(40, 50, 64, generator=torch.Generator().manual_seed(1)).round()
    assert compare(equals, equals, torch.zeros(40, 50, dtype=torch.int64))["agrees"] == 1
    assert common_prefix(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[1, 9, 3], [4, 5, 6]])) == [1, 3]


@pytest.fixture(autouse=True)
def few_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haystacks, "SOURCES", [ROOT / "helix" / "layers"])


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(DEMO)


def setting(kvp: int = 1) -> EvalSetup:
    return EvalSetup(DEMO, HelixLayout.create("helix", kvp), torch.float32, "cpu")


def known(monkeypatch: pytest.MonkeyPatch, *others: Policy) -> None:
    monkeypatch.setattr(fidelity, "policies", lambda: [Policy("dense", page=16), *others])


def rows(**more: Any) -> dict[str, dict[str, Any]]:
    """What a task finds, by policy."""
    values = {"model": "demo", "length": [260], "steps": 3, "count": 2} | more
    if values.get("task") in ("needles", "facts", "hops"):
        del values["steps"]
    return {row["policy"]: row for cell in measure(values) for row in cell}


def test_policies_over_one_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """One choice is the same on one rank and on two, and a window loses."""
    more = Policy("fp8", page=16, kv="fp8"), replace(FEW, name="frozen", frozen=True)
    known(
        monkeypatch,
        FEW,
        Policy("window", BUDGETS[0], 16),
        *(Policy(score, BUDGETS[3], 16, score) for score in ("mean", "mean_query")),
        *more,
    )
    found = rows(steps=12)
    assert 0 < found["fp8"]["kl"] < 0.1 and found["fp8"]["kv"] == "fp8"
    assert found["frozen"]["kl"] == found["few"]["kl"], "no page of new text has left the window"
    few, window = found["few"], found["window"]
    assert 0 < few["kl"] < window["kl"] and len({of["kl"] for of in (few, found["mean"], found["mean_query"])}) == 3
    assert found["dense"]["blocks_read"] is None and few["blocks_read"] == 6 and window["blocks_read"] == 3
    over_two = rows(steps=12, policies=["few"], choice="global", kvp=2)["few"]
    assert over_two["blocks_read"] == 6 and over_two["kl"] == pytest.approx(few["kl"], abs=1e-4)


def test_prompts_of_any_length_stand_for_themselves(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of prompts of several lengths gives what each of them gives alone, forced and free."""
    ids = source_windows(tokenizer, 2, 200)
    prompts = [ids[0, :180], ids[1, :101]]
    monkeypatch.setattr(prefill, "CHUNK", 64)
    selected = [Policy("dense", page=16), FEW]
    for given_tokens in (ids[:, -3:], None):
        both = run(setting(), prompts, 3, selected, given_tokens)
        for i, prompt in enumerate(prompts):
            alone = run(setting(), [prompt], 3, selected, None if given_tokens is None else given_tokens[i : i + 1])
            for name in both:
                assert torch.allclose(both[name].logits[i], alone[name].logits[0], atol=1e-3), name
    monkeypatch.setattr(EvalSetup, "fitting", lambda self, length: 1)
    batches = run(setting(), prompts, 3, selected)
    assert torch.allclose(batches["few"].logits, both["few"].logits, atol=1e-3)
    assert batches["few"].blocks_read == pytest.approx(both["few"].blocks_read)


@pytest.mark.parametrize("task, prompts, distant", [("needles", 4, 3), ("hops", 1, 2)])
def test_a_window_never_retrieves(monkeypatch: pytest.MonkeyPatch, task: str, prompts: int, distant: int) -> None:
    """Unless what it is to retrieve lies in it: the last line does, in either task."""
    known(monkeypatch, FEW, Policy("window", BlockBudget(1, 5, 0, 0), 16))
    found = rows(task=task, haystack=["loop"], count=prompts, length=[420])
    dense, window, answers = found["dense"], found["window"], distant + 1
    assert dense["hits"] == dense["count"] == dense["distant"] == answers
    assert (window["distant_hits"], window["distant"]) == (0, distant)
    assert (window["hits"], window["lost"], window["won"]) == (1, distant, 0)
    assert window["p"] == mcnemar(distant, 0) and found["few"]["hits"] > 0
    assert sum(count for _, count in window["by_depth"]) == answers


def test_hits_and_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer has no guess; behind the others' a cache that holds little has more, and more comes."""
    monkeypatch.setattr(fidelity_tasks, "RESIDENT_SHARES", (0.8,))
    known(monkeypatch, FEW)
    few = rows(task="hits", steps=8)["few"]
    first, *others = few["predicted_by_layer"]
    assert first == 0 < few["predicted"] < 1 and all(0 < share < 1 for share in others)
    assert (
        few["hits_by_layer"][0] == few["hits_with_prefetch_by_layer"][0] and few["hits"] < few["hits_with_prefetch"] < 1
    )
    assert few["fetched_with_prefetch"] > 1 == few["fetched_with_prefetch_by_layer"][0]


class Wrong(DenseAttention):
    """Attention that errs in every decode step."""

    def attend(self, q: Tensor, *args: Any, **more: Any) -> PartialAttention:
        found = super().attend(q, *args, **more)
        return PartialAttention(-found.merge_states()[0], found.merge_states()[1]) if args[1].cu_q is None else found


def test_a_policy_that_errs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, Policy("wrong", page=16, attends=Wrong()))
    assert rows(task="needles")["wrong"]["hits"] == 0
    text = rows()["wrong"]
    assert text["agrees"] < 0.5 and text["kl"] > 1


def test_hidden_lines(tokenizer: Any) -> None:
    """Prompts are as long as whole lines allow, hold each line once, at its depth, and the answers follow."""
    for kind in haystacks.KINDS:
        found = Haystack(tokenizer, kind, 900).hide([0.1, 0.6, 0.9], 900, seed=4)
        prompt, follows = tokenizer.decode(found.prompt), tokenizer.decode(found.target_ids)
        assert 850 < len(found.prompt) + len(found.target_ids) <= 900
        asks = [prompt.rsplit("\n", 1)[1], *follows.split("\n")[1:]]
        for ask, answer, depth in zip(asks, found.answers, found.depths, strict=True):
            line = "\n" + ask.partition(" is")[0] + " is" + tokenizer.decode(found.target_ids[answer]) + "."
            assert prompt.count(line + "\n") == 1
            assert len(tokenizer.encode(prompt[: prompt.index(line)])) / 850 == pytest.approx(depth, abs=0.08)


@pytest.mark.parametrize(
    "more, words",
    [
        ({"policies": ["bounds"]}, "policies: bounds is unknown"),
        ({"length": [8192, 40000]}, "length=40000 must be"),
        ({"length": [32768], "count": 99}, "99 texts of 32768 tokens are more than"),
        ({"policies": ["bounds-32"], "length": [4000]}, "bounds-32 reads the whole text at length=4000"),
        ({"model": "/nowhere"}, "nowhere"),
        ({"haystack": ["code"]}, "task=text does not read haystack"),
        ({"task": "needles", "haystack": ["hay"]}, "haystack: hay is unknown"),
        ({"task": "generated", "length": [8192], "steps": 500}, "steps=500 must be more than"),
    ],
)
def test_what_cannot_be_compared(more: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, OSError), match=words):
        rows(**more)


def test_hits_are_those_of_a_cache_that_forgets_what_was_chosen_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes of it, and one that does not hold a choice, beside lists of pages in the order of their choice.

    Guesses, every other one of which is right, put what they bring in the places of the first pages of such a list.
    """
    gen = torch.Generator().manual_seed(5)
    pages, few, many = 40, 0.25, 0.5
    tables = torch.stack([torch.randperm(pages - 1, generator=gen)[:6] for _ in range(30)]).int().view(30, 1, 1, 6)
    tables = torch.cat([tables, torch.full_like(tables[..., :1], pages - 1)], -1)  # the unfinished page last
    position = torch.tensor([pages * 4 - 2])
    place = KVPlacement(HelixLayout.create("helix", 1), 0, 4, 4)
    here = position, torch.tensor([0]), torch.tensor([True])
    table = torch.arange(pages, dtype=torch.int32)[None]
    cache = layer_cache(torch.zeros(pages, 4, 1, 8))
    meter = HitMeter((0.02, few, many), BlockBudget(1, 1, 5, 0), place, pages * 4, torch.device("cpu"))
    meter.width = 7
    held = torch.full((1,), pages, dtype=torch.int32)
    hi = torch.full((1,), 7 * 4 - 1, dtype=torch.int32)
    first, last = held * 0 + 1, held - 1
    monkeypatch.setattr(meter, "ranges", lambda step, budget: (first, last, held, hi, held))
    guesses = [tables[i // 2 * 2] for i in range(len(tables))]
    for selected, guess in zip(tables, guesses, strict=True):
        monkeypatch.setattr(BlockSparseAttention, "select", lambda *args, selected=selected: selected)
        monkeypatch.setattr(BlockSparseAttention, "select_for_prefetch", lambda *args, guess=guess: guess)
        step = Step(place, torch.tensor([0]), *here, torch.tensor([0]), {None: table}, {}, cu_q=None, max_q=1)
        meter.prefetch(lambda: torch.zeros(1, 1, 8), cache, step)
        assert torch.equal(meter.select(torch.zeros(1, 1, 8), cache, step, 1), selected)
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
            for selected, guess in zip(listed, guessed, strict=True):
                if ahead:
                    came = [page for page in guess if page not in known]
                    there += len(guess) - len(came)
                    free = [i for i, page in enumerate(known) if page not in guess]
                    for i, page in zip(free, came, strict=False):
                        known[i] = page
                hot = [page for page in known if page in selected]
                came = [page for page in selected if page not in known]
                hits += len(hot)
                known = [*[page for page in known if page not in selected][len(came) :], *hot[::-1], *came[::-1]]
            counts += [hits, 180 - hits]
        wanted[share] = [[*counts, there, 180 - there, named, 150]]
    assert meter.hits() == wanted and wanted[few] < wanted[many] and wanted[few][0][2] > wanted[few][0][0]


def layer_cache(keys: torch.Tensor) -> LayerCache:
    """Makes a layer's cache of such keys, and of values like them."""
    return LayerCache(0, {"keys": keys, "values": keys}, torch.zeros(0))
