"""How many drafts hold: counts against closed formulas, ways to draft against what they must keep and the engine."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.acceptance import OPTIONS, measure
from benchmarks.quality import continuations, copy_prompts, haystacks, neighbors
from benchmarks.quality.acceptance_rows import count_drafts, draft_configs
from benchmarks.quality.agreement import mean_range
from benchmarks.quality.continuations import FACTS, TASKS, Continuation
from benchmarks.quality.drafting import DRAFTERS, DraftConfig, Outcome, run
from benchmarks.quality.prefill import EvalSetup
from comm.loopback import LoopbackWorld, run_ranks
from helix.config import SpeculationConfig
from helix.engine.core import Engine
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.speculation import Draft, DraftBudget, Drafter
from helix.tokenizer import load_tokenizer
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.step import DecodeState
from launch.inputs.compose import ROOT
from tests.e2e.checkpoints import checkpoint
from tests.e2e.parity import LayerDrafts, SelfDrafts, build_engine
from tests.sequences import generated_ids

DEMO = ROOT / "assets/demo-model"
LENGTH, NEW_TOKENS = 560, 16


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few sources, short files to copy, and sequences of hundreds of tokens that leave keys out."""
    monkeypatch.setattr(haystacks, "SOURCES", [ROOT / "helix" / "layers"])
    for module, name, count in (
        (copy_prompts, "LINES", 16), (continuations, "LINES", 16), (copy_prompts, "GIVEN", 4)
    ):  # fmt: skip
        monkeypatch.setattr(module, name, count)
    monkeypatch.setattr("helix.speculation.sparse.LEAST_KEYS", 16)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(DEMO)


def rows(**more: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """What is found, by policy and task."""
    values = {
        "model": "demo",
        "length": [LENGTH],
        "prompts": 2,
        "new_tokens": NEW_TOKENS,
        "gamma": [3],
        "task": ["code"],
    }
    return {(row["policy"], row.get("task", "")): row for found in measure(values | more) for row in found}


def test_the_range_of_a_mean() -> None:
    """Student's quantiles, of tables."""
    for n, quantile in ((4, 3.182), (10, 2.262), (30, 2.045)):
        values = [float(i * i % 7) for i in range(n)]
        mean = sum(values) / n
        deviation = math.sqrt(sum((x - mean) ** 2 for x in values) / (n - 1))
        low, high = mean_range(values)
        assert (low + high) / 2 == pytest.approx(mean)
        assert (high - low) / 2 == pytest.approx(quantile * deviation / math.sqrt(n), rel=0.01)


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=9), min_size=2, max_size=5))
def test_counts(held: list[list[int]]) -> None:
    """Each iteration's drafts, one by one, until the first that is refused."""
    found = count_drafts([Outcome([], x) for x in held], 5)
    tried, accepted = [0] * 5, [0] * 5
    for n in (n for x in held for n in x):
        for place in range(5):
            tried[place] += 1
            if place >= n:
                break
            accepted[place] += 1
    assert (found["tried"], found["accepted"]) == (tried, accepted)
    assert sum(accepted) == sum(map(sum, held)) and found["iterations"] == tried[0] == found["drafts"] // 5
    assert found["tokens"] == pytest.approx(sum(1 + sum(x) / len(x) for x in held) / len(held))


def test_ways_are_those_that_differ() -> None:
    options = OPTIONS | {"reach": [0, 8], "recent": [0.0, 0.5]}
    found = [config for config in draft_configs(["any", "window", "quest", "full", "ngram"], options) if config.gamma]
    counts = {policy: sum(config.policy == policy for config in found) for policy in DRAFTERS}
    assert counts == dict.fromkeys(DRAFTERS, 0) | {
        "any": 2 * 2, "window": 1, "quest": 2, "full": 1, "ngram": 1
    }  # fmt: skip
    options_sampled = draft_configs(["any", "ngram"], OPTIONS | {"temperature": [0.0, 0.6], "noise": ["shared", "own"]})
    assert [(w.policy, w.temperature, w.noise) for w in options_sampled if w.gamma] == [
        ("any", 0.0, "shared"), ("ngram", 0.0, "shared"),
        ("any", 0.6, "shared"), ("any", 0.6, "own"), ("ngram", 0.6, "shared"),
    ]  # fmt: skip


def test_refused_drafts_are_counted_by_how_probable_they_were() -> None:
    """Greedy: none is the likeliest token, so none has more than half of the weight."""
    window = rows(policies=["window"], gamma=[3], sparsity=[0.05])["window", "code"]
    assert 0 < window["rejected"] == sum(window["rejected_tenths"]) == window["iterations"] - window["accepted"][-1]
    assert sum(window["rejected_tenths"][5:]) == 0 and window["as_plain"] == 2 and window["tokens"] < 4


def test_what_reads_everything_keeps_everything() -> None:
    """On two ranks too, and with the target's own noise."""
    found = rows(policies=["full", "any"], sparsity=[1.0], kvp=[2], temperature=[0.6])
    assert all(row["accepted"] == row["tried"] and row["tokens"] == 4 for row in found.values())
    assert all(row["as_plain"] == row["prompts"] == 2 for row in found.values()) and len(found) == 2


class Planted(Drafter):
    """Proposes what no text has here; `forced_tokens` declares it right."""

    def __init__(self, limit: int, holds: bool) -> None:
        super().__init__(limit)
        self.holds = holds

    def propose(self, state: DecodeState, kind: DecodeGraphKey) -> Draft:
        tokens = torch.zeros(kind.rows, kind.drafts, dtype=torch.int64, device=state.tokens.device)
        return Draft(tokens, forced_tokens=tokens if self.holds else None)


def test_drafts_that_change_tokens_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS, "ngram", lambda config, runner: Planted(config.gamma, True))
    with pytest.raises(RuntimeError, match="ngram with gamma=3 changed the output of 2 of 2 prompts"):
        rows(policies=["ngram"])


def setting() -> EvalSetup:
    return EvalSetup.create("demo", 1, "float32")


def prompt(tokenizer: Any, length: int) -> Tensor:
    return TASKS["code"](tokenizer, length, 2)[1].prompt


def test_steps_are_those_of_the_engine(tokenizer: Any) -> None:
    """The engine draws a prompt's first token with the prefill; from there on its iterations are the same."""
    ids, budget = prompt(tokenizer, 200).tolist(), DraftBudget("any", 0.1)

    def body(world: LoopbackWorld, rank: int, count: int, drafts: SelfDrafts | None) -> tuple[tuple[int, ...], Engine]:
        comm = world.communicator(rank, (0,))
        sizes: dict[str, Any] = {"page_size": 64, "max_length": 460, "max_batch": 1, "prefill_chunk": 1024}
        engine = build_engine(DEMO, HelixLayout.create(), comm, 64, drafter=drafts, adaptive=False, **sizes)
        return generated_ids(engine, [Request(0, ids, count)])[0], engine

    (((first, *_), _),) = run_ranks(1, lambda world, rank: body(world, rank, 1, None), timeout_s=60.0)
    given_text = Continuation("code", torch.tensor([*ids, first]), (torch.empty(0).long(),))
    (outcome,) = run(setting(), [given_text], 16, [config := DraftConfig("any", 3, budget)])[config]
    count = 1 + sum(1 + n for n in outcome.accepted)
    ((tokens, engine),) = run_ranks(
        1, lambda world, rank: body(world, rank, count, SelfDrafts(3, budget)), timeout_s=60.0
    )
    assert list(tokens[1:17]) == outcome.tokens
    assert engine.timings.sequence_steps == len(outcome.accepted)
    assert engine.timings.acceptance.accepted == [sum(n > place for n in outcome.accepted) for place in range(3)]
    assert 0 < sum(outcome.accepted) < 3 * len(outcome.accepted)


def test_turns_are_what_plain_prompts_say(tokenizer: Any) -> None:
    """What is told between turns is read as if it had stood in the prompt, whatever its length."""
    text = prompt(tokenizer, 400)
    excerpts = [text[200:209], text[230:233], text[250:251]]
    several = Continuation("facts", text[:200], tuple(excerpts))
    single = Continuation("code", text[:200], (torch.empty(0).long(),))
    plain, drafted = DraftConfig("none"), DraftConfig("any", 3, DraftBudget("any", 0.1))
    for config, found in run(setting(), [several, single], 12, [plain, drafted]).items():
        tokens = found[0].tokens
        assert len(tokens) == 12
        for turn in range(3):
            before = [x for i in range(turn) for x in (*excerpts[i].tolist(), *tokens[4 * i : 4 * i + 4])]
            alone = Continuation(
                "code", torch.tensor([*text[:200].tolist(), *before, *excerpts[turn].tolist()]), single.turns
            )
            (same,) = run(setting(), [alone], 4, [plain])[plain]
            assert same.tokens == tokens[4 * turn : 4 * turn + 4], (config.policy, turn)


def test_states_begin_as_after_the_prompt() -> None:
    """Whatever was decoded before."""
    ids = torch.randint(257, (2, 90), generator=torch.Generator().manual_seed(3))
    given_texts = [Continuation("code", x, (torch.empty(0).long(),)) for x in ids]
    ways = [DraftConfig("none"), DraftConfig("window", 3), DraftConfig("ngram", 3)]
    found = run(EvalSetup.create(str(checkpoint("qwen3.5-tied")), 1, "float32"), given_texts, 24, ways)
    plain = [x.tokens for x in found[ways[0]]]
    assert len({*plain[0]}) > 8 and all([x.tokens for x in found[way]] == plain for way in ways)


def test_prompts(tokenizer: Any) -> None:
    for task, make in TASKS.items():
        for found in make(tokenizer, 520, 3):
            assert 400 < len(found.prompt) + sum(map(len, found.turns)) <= 520 and found.task == task
            text = tokenizer.decode(found.prompt)
            if task == "copy":
                name = text.rpartition("The same file with ")[2].partition(" ")[0]
                before, _, after = text.rpartition("\n\n\n# The same file with ")
                copied = after.partition("\n")[2].replace(f"new_{name}", name)
                assert before.count(copied) >= 1 and f"new_{name}" not in before
            if task == "facts":
                questions = [tokenizer.decode(turn) for turn in found.turns]
                assert len({*questions}) == FACTS and all(text.count(q + " ") == 1 for q in questions)
    begins = [c.prompt[:20].tolist() for c in TASKS["code"](tokenizer, 520, 4)]
    assert all(a != b for a, b in pairwise(begins))


@pytest.mark.parametrize(
    "more, words",
    [
        ({"policies": ["alle"]}, "policies: alle is unknown; known: any, c2q, window, "),
        ({"task": ["text"]}, "task: text is unknown"),
        ({"reach": [3]}, "reach: 3 is unknown; known: 0, 1, 2"),
        ({"sparsity": [0.0]}, "sparsity=0 is out of range"),
        ({"gamma": [32]}, "gamma=32 is out of range"),
        ({"prompts": 1}, "prompts=1 must be at least 2"),
        ({"new_tokens": 8}, "new_tokens=8 from 16"),
        ({"length": [40000]}, "length=40000 must be within"),
        ({"policies": ["quest"], "sparsity": [0.3], "length": [32768]}, "more than the 128 that a query can select"),
        ({"prompts": 50, "task": ["copy"]}, "50 files of 16 lines to copy are more than"),
        ({"policies": ["eagle3"]}, "policies=eagle3 needs layer=DIR"),
        ({"policies": ["mtp", "any"]}, "mtp can only be combined with ngram and suffix"),
    ],
)
def test_what_cannot_be_measured(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rows(**more)


def test_drafts_of_a_layer_are_those_of_the_engine(tokenizer: Any) -> None:
    """The demo model's EAGLE-3 layer on two prompts at once: with fewer drafts and beside lookups, no token changes."""
    layer = SpeculationConfig(drafter="eagle3", path=str(ROOT / "assets" / "demo-eagle3"))
    prompts = [prompt(tokenizer, n) for n in (100, 160)]
    given = [Continuation("code", ids, (torch.empty(0).long(),)) for ids in prompts]
    draft_configs = [DraftConfig("eagle3", 3), DraftConfig("suffix", 3), DraftConfig("eagle3", 2), DraftConfig("none")]
    found = run(EvalSetup.create("demo", 2, "float32", layer), given, 24, draft_configs)
    layout = HelixLayout.create("helix", 2)

    def body(world: LoopbackWorld, rank: int) -> Any:
        comm = world.communicator(rank, layout.kvp_group(rank))
        engine = build_engine(
            DEMO, layout, comm, 64, drafter=LayerDrafts(3, eagle3=layer), adaptive=False, page_size=64,
            max_length=460, max_batch=2, prefill_chunk=1024,
        )  # fmt: skip
        requests = [Request(i, tuple(ids.tolist()), 24) for i, ids in enumerate(prompts)]
        tokens = generated_ids(engine, requests)
        return tokens, engine.timings.accepted

    tokens, accepted = run_ranks(layout.world_size, body, timeout_s=120.0)[0]
    for config in draft_configs:
        assert [x.tokens for x in found[config]] == [list(tokens[i]) for i in range(2)], config
    held = [n for x in found[draft_configs[0]] for n in x.accepted]
    assert sum(held) > 8, "the layer is trained"
    # The engine's first token comes with the prefill, so that its iterations begin a token later.
    assert abs(sum(held) / len(held) - sum(n * k for n, k in accepted.items()) / sum(accepted.values())) < 0.5
    assert sum(sum(x.accepted) for x in found[draft_configs[2]]) <= sum(held)


def test_tokens_near_each_other_select_what_one_pass_over_all_of_them_says() -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    prompt, tokens, keys = torch.arange(97).mul(31).remainder(4096), 4, 12
    found = neighbors.read(model, prompt, tokens)
    written = model.generate(prompt[None], max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    weights = model(written, output_attentions=True).attentions
    for layer, logits in zip(weights, found, strict=True):
        rows = layer[0, :, len(prompt) :, : len(prompt)].double().log().sum(0)
        sets = [set(row.topk(keys).indices.tolist()) for row in rows]
        for apart, share in enumerate(neighbors.overlaps(logits, keys), 1):
            pairs = [len(a & b) / keys for a, b in zip(sets, sets[apart:], strict=False)]
            assert share == pytest.approx(sum(pairs) / len(pairs), abs=1e-6)  # float32's mean
