"""Tuning measures what the engine does, from one prefill; the command goes on where it stopped."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.ranks import tuning
from benchmarks.ranks.tuning import to_request
from benchmarks.ranks.tuning_steps import DraftSource, Measurement
from comm.loopback import LoopbackWorld, run_ranks
from helix.config import Config
from helix.layout import HelixLayout
from helix.models.decoder import Decoder
from helix.models.loading import Checkpoint
from helix.setup.engine import build_engine
from launch.client.chat_tokenizer import ChatTokenizer
from launch.inputs.prompt_files import PromptFile
from launch.job.report import Phases
from launch.job.task import Task
from tests.benchmark_config import compose_config, preflight
from tests.e2e.checkpoints import checkpoint
from tests.sequences import generated

NEW = 8


@pytest.fixture(autouse=True)
def few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of hundreds of tokens are long enough to leave keys out."""
    monkeypatch.setattr("helix.speculation.sparse.LEAST_KEYS", 16)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three, of which two are decoded at a time; one repeats itself, as ngram likes it."""
    rng = random.Random(1)
    lines = [[rng.randrange(257) for _ in range(n)] for n in (90, 131)] + [[5, 6, 7, 8] * 30]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt_ids": ids, "max_tokens": NEW}) + "\n" for ids in lines))
    return path


def settings(prompts: Path, *more: str) -> list[str]:
    return [
        "bench=tune", "speculation=sparse", "speculation.gamma=4", f"model.path={checkpoint('qwen2')}", "layout.kvp=2",
        f"decode.prompts={prompts}", "decode.max_batch=2", "kv.page_size=16", "speculation.adaptive=false",
        "bench.sparsities=[0.1,0.4]", "bench.gammas=[1,3]", f"bench.output={prompts.parent / 'tuned.jsonl'}", *more,
    ]  # fmt: skip


class Silent:
    """The console of ranks that are threads."""

    def note(self, text: str) -> None:
        return

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Any]:
        yield lambda done: None


def task(config: Config, world: LoopbackWorld, rank: int) -> Task:
    plan = preflight(config, 2, writes=rank == 0)
    comm: Any = world.communicator(rank, plan.layout.kvp_group(rank))

    def load() -> tuple[Decoder, None]:
        return model(plan.layout, comm), None

    console: Any = Silent()
    return Task(plan, comm, "loopback", load, console, Phases())


def model(layout: HelixLayout, comm: Any) -> Decoder:
    weights = Checkpoint(checkpoint("qwen2"))
    from_config = preflight(compose_config(f"model.path={weights.path}", "bench=decode"), 1).spec
    made = Decoder(from_config, layout, comm, torch.float32, comm.device)
    weights.load(made.weights)
    return made


def points(config: Config) -> list[Any]:
    """What each of two ranks has measured."""
    return run_ranks(2, lambda world, rank: tuning.run(task(config, world, rank))[0]["points"], timeout_s=300.0)


def served(config: Config, layout: HelixLayout, path: Path) -> tuple[float, list[float], list[float]]:
    """Tokens of an iteration, and what was kept and tried by place, in the engine."""

    def body(world: LoopbackWorld, rank: int) -> Any:
        comm = world.communicator(rank, layout.kvp_group(rank))
        engine = build_engine(layout, model(layout, comm), config, 2, 1024)
        requests: Any = [to_request(prompt, config, ChatTokenizer(None)) for prompt in PromptFile(path)]
        generated(engine, requests)
        return engine.timings

    timings = run_ranks(2, body, timeout_s=120.0)[0]
    return timings.decode_tokens / timings.sequence_steps, timings.acceptance.accepted, timings.acceptance.verified


def test_what_is_measured_is_what_the_engine_does(prompts: Path) -> None:
    """Tokens and acceptance by place, for prompts that take turns, whatever was measured before."""
    config = compose_config(*settings(prompts))
    rows, others = points(config)
    assert rows == others, "ranks agree on what was measured"
    lines = Path(str(config.bench.output)).read_text().splitlines()
    assert [json.loads(line) for line in lines[1:]] == rows
    found = {Measurement.of(row).source: row for row in rows}
    layout = HelixLayout.create("helix", 2)
    for way in (DraftSource("sparse", 4, 0.1), DraftSource("ngram", 3)):
        own = [f"speculation={way.drafter}", f"speculation.gamma={way.gamma}", "speculation.adaptive=false"]
        own += [f"speculation.sparsity={way.sparsity}"] if way.sparsity else []
        again = compose_config(
            f"model.path={checkpoint('qwen2')}", "kv.page_size=16", "decode.max_batch=2", "layout.kvp=2", *own
        )
        tokens, accepted, tried = served(again, layout, prompts)
        row = found[way]
        assert sum(row["tokens_by_prompt"]) / 3 == pytest.approx(tokens, rel=0.25), "means over prompts and over steps"
        assert (len(row["tokens_by_prompt"]), row["sequence_steps"]) == (3, round(3 * (NEW - 1) / tokens))
        by_position = [k / n if n else None for k, n in zip(accepted, tried, strict=True)][: way.gamma]
        assert row["acceptance_by_position"] == by_position
    assert found[DraftSource("none")]["tokens_by_prompt"] == [1.0, 1.0, 1.0]


def test_forced_drafts_are_timed_over_random_keys(prompts: Path) -> None:
    given = settings(prompts, "bench.acceptance=0.9", "bench.points=[2x96]", "bench.steps=3", "decode.prompts=null")
    rows = points(compose_config(*given))[0]
    assert [(row["drafter"], row["gamma"], row["sparsity"]) for row in rows] == [
        ("none", 0, None), ("sparse", 1, 0.07), ("sparse", 3, 0.07)
    ]  # fmt: skip
    assert [row["tokens_by_prompt"][0] for row in rows] == pytest.approx([1.0, 1.9, 1 + 0.9 + 0.81 + 0.729])
    assert all(row["steps"] == 3 and row["step_us"] > 0 for row in rows)
