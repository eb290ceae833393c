"""Tuning: what is refused before anything starts, the file of what was measured, and what is written in the end."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given as drawn
from hypothesis import strategies as st

from benchmarks import tune
from benchmarks.papers.policies import FULL
from benchmarks.ranks.tuning_file import MeasuredFile, read_measured
from benchmarks.ranks.tuning_steps import DraftSource, Measurement, TuningGrid, TuningResult, plateau_index, run
from benchmarks.records.tuned import OPTIONS
from helix.config import Config
from launch.inputs.job_kinds import Program
from launch.inputs.prompt_files import PromptFile
from tests.benchmark_config import compose_config, preflight
from tests.e2e.checkpoints import DEMO

ABOUT = {"device": "CPU", "commit": "abc"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files go to a directory of this test."""
    (tmp_path / "conf" / "speculation").mkdir(parents=True)
    monkeypatch.setattr(tune, "CONF", tmp_path / "conf")
    monkeypatch.setattr(tune, "DIRECTORY", tmp_path / "tuned")
    (tmp_path / "p.jsonl").write_text('{"prompt_ids": [1, 2, 3]}\n{"prompt_ids": [4, 5, 6]}\n')


def given(tmp_path: Path, *more: str) -> list[str]:
    return ["model=demo", f"decode.prompts={tmp_path / 'p.jsonl'}", "bench.sparsities=[0.1,0.2]", "bench.gammas=[2,4]",
            "speculation.gamma=4", *more]  # fmt: skip


def config_of(tmp_path: Path, *more: str) -> Config:
    _, overrides = tune.overrides(["name=mine", *given(tmp_path, *more)])
    return compose_config(*overrides)


@pytest.mark.parametrize(
    "more, error",
    [
        ([f"speculation.policy={FULL}"], "has no sparsity to tune"),
        (["bench.gammas=[]"], "bench.gammas=[] must be an ascending list"),
        (["bench.gammas=[4,2]"], "bench.gammas=[4, 2] must be an ascending list"),
        (["bench.gammas=[0,2]"], "bench.gammas=[0, 2] must be an ascending list of at least one positive number"),
        (["bench.gammas=[8]"], "bench.gammas has 8, more than speculation.gamma=4"),
        (["bench.sparsities=[0.5,2]"], "bench.sparsities=[0.5, 2.0] must be shares of the keys, at most 1"),
        (["bench.sparsities=[0.1,0.1]"], "bench.sparsities=[0.1, 0.1] must be an ascending list"),
        (["decode.output=o.jsonl"], "decode.output=o.jsonl: bench=tune writes no texts"),
        (["bench.acceptance=0.9"], "leave out bench.acceptance, model.load=random and comm.backend=emulated"),
        (["decode.max_tokens=1"], "max_tokens of at least 2"),
        (["decode.prompts=null"], "nothing to tune on: set decode.prompts=FILE.jsonl, or set bench.acceptance=0.9"),
        (["decode.prompts=null", "bench.acceptance=0.9", "bench.points=[1x8,2x8]"], "bench=tune takes one point"),
        (["speculation=ngram"], "bench=tune tunes speculation=sparse, not speculation.drafter=suffix"),
        (["attention=block_sparse"], "speculation.drafter=sparse verifies drafts with full attention"),
    ],
)
def test_what_cannot_be_tuned_is_refused(tmp_path: Path, more: list[str], error: str) -> None:
    with pytest.raises(ValueError) as refused:
        preflight(config_of(tmp_path, *more), 1)
    assert error in str(refused.value) and "\n" not in str(refused.value)


def test_a_name_is_needed_and_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in (
        (["model=demo"], "error: name missing: add name=NAME, and the result is conf/speculation/NAME.yaml\n"),
        (["name=sparse", "layout.kpv=2"], "error: layout.kpv is unknown; known: layout.mode, "),
    ):
        assert tune.main(arguments) == 1
        heard = capsys.readouterr().err
        assert heard.startswith(told) and heard.count("\n") == 1


# ---- the file


def test_the_file_goes_on_after_an_interruption(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    prompts = PromptFile(tmp_path / "p.jsonl")
    first, second = (Measurement(DraftSource("sparse", 4, s), (2.0, 2.5), 1e-3).row() for s in (0.1, 0.2))
    file = MeasuredFile(config, prompts, ABOUT)
    file.add(first)
    file.add(second)
    file.close()
    path = Path(str(config.bench.output))
    path.write_bytes(path.read_bytes()[:-20])  # torn in the middle of the second
    again = MeasuredFile(config, prompts, ABOUT)
    assert again.rows == [first]
    again.add(second)
    again.close()
    head, rows = read_measured(config, prompts)
    assert rows == [first, second] and head["device"] == "CPU"
    with pytest.raises(ValueError, match="was measured on CPU, and this is H200: use another file"):
        MeasuredFile(config, prompts, ABOUT | {"device": "H200"})
    # What the search tries may change; what figures depend on may not.
    read_measured(config_of(tmp_path, "bench.gammas=[1]", "speculation.gamma=9", "bench.grid=true"), prompts)
    with pytest.raises(ValueError, match=r"mine.jsonl was measured with speculation.policy=any, not c2q: use another"):
        preflight(config_of(tmp_path, "speculation.policy=c2q"), 1)
    (tmp_path / "p.jsonl").write_text('{"prompt_ids": [1, 2, 9]}\n')
    with pytest.raises(ValueError, match="was measured with prompts="):
        preflight(config, 1)


# ---- what is written


def rows(sparse_us: float, ngram_us: float) -> list[dict[str, Any]]:
    """All that the search can ask for: plain steps of 1 ms."""
    ways = [(DraftSource("none"), 1.0, 1000.0), *((DraftSource("ngram", g), 1.5, ngram_us) for g in (2, 4))]
    ways += [(DraftSource("sparse", g, s), 1.0 + 0.5 * g, sparse_us) for g in (2, 4) for s in (0.1, 0.2)]
    return [Measurement(way, (tokens, tokens), us / 1e6).row() for way, tokens, us in ways]


@pytest.mark.parametrize(
    "sparse_us, ngram_us, written, told",
    [
        (
            2000,
            1400,
            {"drafter": "sparse", "gamma": 4, "sparsity": 0.1, "policy": "c2q"},
            "4 drafts over 10% of the keys, 1.5",
        ),
        (
            9000,
            1000,
            {"drafter": "suffix", "gamma": 2, "suffix_pool_tokens": 0},
            "Drafts by prompt lookup are the fastest here",
        ),
        (9000, 9000, {"drafter": "none"}, "Plain decoding is the fastest here: drafts do not pay off."),
    ],
)
def test_the_fastest_is_written_and_runs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sparse_us: float,
    ngram_us: float,
    written: dict[str, Any],
    told: str,
) -> None:
    """From what was measured, without any rank."""
    settings = given(tmp_path, "speculation.policy=c2q")
    config = config_of(tmp_path, "speculation.policy=c2q")
    file = MeasuredFile(config, PromptFile(tmp_path / "p.jsonl"), ABOUT)
    for row in rows(sparse_us, ngram_us):
        file.add(row)
    file.close()
    for _ in range(2):  # what it wrote itself, it overwrites
        assert tune.main(["name=mine", *settings]) == 0
    shown = capsys.readouterr().out
    assert told in shown and "Accepted tokens level off at 10% of the keys." in shown
    text = (tmp_path / "conf" / "speculation" / "mine.yaml").read_text()
    found = yaml.safe_load(text)["speculation"]
    assert written.items() <= found.items() and set(found) == {"drafter", *OPTIONS[found["drafter"]]}
    assert text.startswith(
        f"# @package _global_\n# Written by benchmarks.tune for {DEMO}, helix kvp=1 tpa=1, 2 prompts: "
    )
    assert compose_config(*(f"speculation.{key}={str(value).lower()}" for key, value in found.items()))
    assert (tmp_path / "tuned" / "mine.png").stat().st_size > 1000
    assert not [m for m in (tmp_path / "tuned").iterdir() if m.suffix not in (".png", ".jsonl")]


def test_what_is_missing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def ran(overrides: list[str], program: Program) -> int:
        started.append(overrides)
        return 130

    monkeypatch.setattr("launch.run.main", ran)
    assert tune.main(["name=mine", *given(tmp_path)]) == 130, "its exit code is the run's"
    assert len(started) == 1 and "bench=tune" in started[0]
    assert not (tmp_path / "conf" / "speculation" / "mine.yaml").exists()


# ---- the search, on planted curves

SPARSITIES = (0.01, 0.02, 0.05, 0.1, 0.2)
GAMMAS = (1, 2, 3, 4, 6, 8, 11)
CANDIDATES = TuningGrid(SPARSITIES, GAMMAS, 11)


def curve(*tokens: float, noise: float = 0.0, prompts: int = 8) -> list[Measurement]:
    """Tokens an iteration at one sparsity after the other, prompts apart by far more than sparsities are."""
    rng = random.Random(0)
    prompt_effects = [rng.uniform(-1, 1) for _ in range(prompts)]
    return [
        Measurement(DraftSource("sparse", 11, s), tuple(t + p + rng.gauss(0, noise) for p in prompt_effects), 1.0)
        for s, t in zip(SPARSITIES, tokens, strict=False)
    ]


@pytest.mark.parametrize(
    "tokens, at",
    [
        ((3.0, 5.0, 6.0, 6.05, 6.1), 2),  # less than 2% more, twice
        ((3.0, 5.0, 6.0, 6.1, 6.2), 3),  # 3% in two parts count
        ((6.0, 6.0, 6.0), 0),
        ((3.0, 4.0, 5.0, 6.0, 7.0), 4),
        ((5.0, 4.0, 6.0, 6.0), 2),  # a dip does not end it
        ((5.0,), 0),
    ],
)
def test_tokens_level_off_where_nothing_behind_is_better(tokens: tuple[float, ...], at: int) -> None:
    assert plateau_index(curve(*tokens)) == at


def test_what_lies_within_the_interval_is_no_gain() -> None:
    gains = (0.9, -0.5, 0.6, -0.2, 0.4, 0.0)  # 0.2 more on average, 4%, and as likely none
    few = Measurement(DraftSource("sparse", 11, 0.01), (5.0,) * 6, 1.0)
    many = Measurement(DraftSource("sparse", 11, 0.02), tuple(5 + norm_weight for norm_weight in gains), 1.0)
    sure = Measurement(DraftSource("sparse", 11, 0.02), (5.2,) * 6, 1.0)
    assert plateau_index([few, many]) == 0 and plateau_index([few, sure]) == 1
    # Prompts may differ as they like: what counts is what each one gains.
    assert plateau_index(curve(4.0, 4.5, 4.5)) == 1


def world(keys_us: float = 100.0, draft_us: float = 800.0, level: float = 0.05) -> Callable[[DraftSource], Measurement]:
    """A machine: a plain step of 3 ms; drafts kept at 0.9 from `plateau` on, at less below."""

    def measure(way: DraftSource) -> Measurement:
        if way.drafter == "none":
            return Measurement(way, (1.0,) * 4, 3e-3)
        if way.drafter == "ngram":
            kept, draft_s = 0.3, 0.0
        else:
            assert way.sparsity is not None
            kept = 0.9 * min(1.0, (way.sparsity / level) ** 0.2)
            draft_s = 1e-6 * (draft_us + 100 * keys_us * way.sparsity)
        tokens = sum(kept**i for i in range(way.gamma + 1))
        return Measurement(way, tuple(tokens * spread for spread in (0.9, 1.0, 1.0, 1.1)), 3.2e-3 + way.gamma * draft_s)

    return measure


def asked(
    candidates: TuningGrid, measure: Callable[[DraftSource], Measurement]
) -> tuple[TuningResult, list[DraftSource]]:
    ways: list[DraftSource] = []

    def noted(way: DraftSource) -> Measurement:
        ways.append(way)
        return measure(way)

    return run(candidates, noted), ways


def test_the_three_steps() -> None:
    measure = world()
    found, ways = asked(CANDIDATES, measure)
    assert found.plateau == 0.05 and found.reached_plateau
    assert ways[0] == DraftSource("none") and ways[1:6] == [DraftSource("sparse", 11, s) for s in SPARSITIES]
    best = max((measure(DraftSource("sparse", g, s)) for g in GAMMAS for s in SPARSITIES), key=lambda m: m.rate)
    assert found.sparse.rate >= 0.98 * best.rate and found.fastest == found.sparse
    assert len(ways) == len(set(ways)), "nothing is measured twice"
    assert len([way for way in ways if way.drafter == "sparse"]) < len(GAMMAS) * len(SPARSITIES) / 2


def test_plain_decoding_and_ngram_may_be_faster() -> None:
    slow, _ = asked(CANDIDATES, world(draft_us=3000.0))
    assert slow.fastest == slow.ngram and slow.fastest.source.drafter == "ngram"

    def useless(way: DraftSource) -> Measurement:
        found = world(draft_us=3000.0)(way)
        return Measurement(way, (1.0,) * 4, found.seconds) if way.drafter == "ngram" else found

    plain, _ = asked(CANDIDATES, useless)
    assert plain.fastest == plain.plain and plain.sparse.rate < plain.plain.rate


@drawn(st.integers(0, 30))
def test_a_second_start_goes_on_and_finds_the_same(interrupted: int) -> None:
    whole, ways = asked(CANDIDATES, world())
    lines = [world()(way).row() for way in ways[:interrupted]]
    known = {found.source: found for found in map(Measurement.of, lines)}
    measured: list[DraftSource] = []

    def measure(way: DraftSource) -> Measurement:
        if way in known:
            return known[way]
        measured.append(way)
        return world()(way)

    again = run(CANDIDATES, measure)
    assert measured == ways[interrupted:]
    assert again.fastest.source == whole.fastest.source and math.isclose(again.fastest.rate, whole.fastest.rate)
