"""Drafts of an EAGLE-3 layer are those of plain torch, and change no token."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from comm.loopback import LoopbackWorld, run_ranks
from helix.config import SpeculationConfig
from helix.engine.draft_policy import DraftPolicy
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.models import spec_from_config
from helix.models.checkpoint import read_config
from helix.setup.parts import make_eagle3
from tests.e2e import eagle3
from tests.e2e.checkpoints import continuations
from tests.e2e.parity import Continuation, LayerDrafts, build_engine, check, generate
from tests.e2e.recorded import Kept, Recorded, unlike
from tests.e2e.test_speculation import whimsical
from tests.sequences import generated

LENGTHS, TOKENS = (1, 17, 90), 12


@functools.cache
def plain(family: str) -> list[Continuation]:
    return continuations(eagle3.target(family), LENGTHS, TOKENS)


def config(family: str, kind: str, window: int = 512) -> SpeculationConfig:
    return SpeculationConfig(drafter="eagle3", path=str(eagle3.layer(family, kind, window)))


@pytest.mark.parametrize(
    "family, kind, kvp, tpa, adaptive",
    [
        ("qwen3", "shared", 1, 1, False),
        ("qwen3", "own", 2, 2, True),
        ("qwen3", "whole", 1, 2, False),
        ("deepseek-v3-halves", "own", 3, 1, False),
        ("deepseek-v3-halves", "own", 3, 1, True),
        ("gpt-oss", "shared", 4, 1, True),
        ("gpt-oss", "whole", 2, 2, False),
    ],
)
def test_greedy_tokens_and_logits(
    family: str, kind: str, kvp: int, tpa: int, adaptive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the same prompts, the second time behind cached prefixes."""
    if adaptive:
        monkeypatch.setattr(DraftPolicy, "pace", whimsical())
    wanted, layout = plain(family), HelixLayout.create("helix", kvp, tpa)

    def body(world: LoopbackWorld, rank: int) -> Any:
        comm = world.communicator(rank, layout.kvp_group(rank))
        path, drafts = eagle3.target(family), LayerDrafts(3, eagle3=config(family, kind))
        engine = build_engine(path, layout, comm, 16, drafter=drafts, adaptive=adaptive, prefill_chunk=40)
        return [generate(engine, wanted) for _ in range(2)]

    for results in zip(*run_ranks(layout.world_size, body, timeout_s=120.0), strict=True):
        check(results, wanted)


@pytest.mark.parametrize(
    "family, kind, window, kvp, tpa, drafter",
    [
        ("qwen3", "shared", 512, 1, 1, Kept),
        ("qwen3", "whole", 21, 3, 1, Recorded),
        ("qwen3", "own", 9, 2, 1, Kept),
        ("deepseek-v3-halves", "own", 512, 2, 1, Recorded),
        ("deepseek-v3-halves", "own", 512, 2, 1, Kept),
        ("gpt-oss", "shared", 30, 2, 2, Recorded),
        ("gpt-oss", "shared", 30, 2, 1, Kept),
    ],
)
def test_drafts_are_those_of_the_layer(
    family: str, kind: str, window: int, kvp: int, tpa: int, drafter: type[Recorded]
) -> None:
    layout = HelixLayout.create("helix", kvp, tpa)
    prompts, drafters = [c.prompt for c in plain(family)], dict[int, Any]()

    def body(world: LoopbackWorld, rank: int) -> None:
        comm = world.communicator(rank, layout.kvp_group(rank))
        drafts = LayerDrafts(3, kind=drafter, eagle3=config(family, kind, window))
        engine = build_engine(eagle3.target(family), layout, comm, 16, drafter=drafts, adaptive=False, prefill_chunk=40)
        drafters[rank] = engine.runner.drafter
        generated(engine, [Request(i, p, 12) for i, p in enumerate(prompts)])
        generated(engine, [Request(i, (*p, 9, i), 12) for i, p in enumerate(prompts)])

    run_ranks(layout.world_size, body, timeout_s=120.0)
    found, oracle = drafters[0], eagle3.oracle(family, kind, window)
    assert len(found.drafted) > 20
    assert unlike(found, oracle.drafts) == []


def test_who_hits_a_prefix_spoils_no_row_of_it() -> None:
    """The states computed again lack their windows, and the rows lie in pages that sequences share."""
    prompt = torch.randint(90, (300,), generator=torch.Generator().manual_seed(3)).tolist()
    drafters = list[Any]()

    def body(world: LoopbackWorld, rank: int) -> None:
        drafts = LayerDrafts(3, kind=Recorded, eagle3=config("gpt-oss", "shared", 120))
        comm = world.communicator(rank, [0])
        engine = build_engine(eagle3.target("gpt-oss"), HelixLayout.create(), comm, 16, drafter=drafts, adaptive=False)
        assert 1 < engine.runner.lacking < len(prompt) / 2
        drafters.append(engine.runner.drafter)
        for i in range(3):
            generated(engine, [Request(i, (*prompt, *range(9, 9 + i)), 12)])

    run_ranks(1, body, timeout_s=120.0)
    assert len(drafters[0].drafted) > 20
    assert unlike(drafters[0], eagle3.oracle("gpt-oss", "shared", 120).drafts) == []


def changed(tmp_path: Path, **keys: Any) -> SpeculationConfig:
    directory = tmp_path / "layer"
    shutil.copytree(eagle3.layer("qwen3", "shared"), directory)
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(content | keys))
    return SpeculationConfig(drafter="eagle3", path=str(directory))


@pytest.mark.parametrize(
    "ids, taps",
    [(None, (2, 2, 2)), ([1, 1, 1], (2, 2, 2)), ([2, 2, 2], (2, 2, 2)), ([0, 1, 4], (1, 2, 5))],
)
def test_states_are_named_in_two_ways(ids: list[int] | None, taps: tuple[int, ...], tmp_path: Path) -> None:
    target = spec_from_config(read_config(eagle3.target("qwen3")))
    given = changed(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": ids} if ids else None)
    assert make_eagle3(given, target).taps == taps


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures=.* must name one of LlamaForCausalLMEagle3"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2 must be 1"),
        ({"vocab_size": 300}, "vocab_size=300, and the target has 257"),
        ({"target_hidden_size": 73}, "target_hidden_size=73"),
        ({"norm_output": True}, "norm_output=True is not supported"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}, r"\[1, 2, 9\] must be 3 of .* 5 layers"),
    ],
)
def test_another_layer_is_refused(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    target = spec_from_config(read_config(eagle3.target("qwen3")))
    with pytest.raises(ValueError, match=said):
        make_eagle3(changed(tmp_path, **keys), target)


def test_the_demo_models_layer_is_for_it() -> None:
    given = SpeculationConfig(drafter="eagle3", path="assets/demo-eagle3")
    spec = spec_from_config(read_config(Path("assets/demo-model")))
    layer = make_eagle3(given, spec)
    assert layer.taps == (2, 4, 5) and layer.hidden == spec.hidden and layer.vocab is None
