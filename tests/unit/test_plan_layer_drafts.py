"""A layer that drafts, priced: its time and memory, beside what was measured, and the planner's words about it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.records.recorded_steps import RECORDED
from helix.models import eagle3
from helix.planner.plan import Question, plan
from helix.planner.points import LayerDrafts, Points, Speculation
from helix.planner.step import StepCost, memory_of, predict
from helix.setup.parts import make_spec
from launch.inputs import auto_layout
from launch.inputs.auto_layout import layer_drafts
from launch.inputs.hardware import load_hardware
from launch.inputs.shapes import load_spec
from launch.plan import main
from tests.laboratory import composed

K, M = 1 << 10, 1 << 20
H200 = load_hardware("h200")
# Of Qwen2.5-7B, with a head of 32,000 tokens and a window of 2,048.
LAYER = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 3584, "intermediate_size": 18944, "head_dim": 128,
    "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 1, "vocab_size": 152064,
    "draft_vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> LayerDrafts:
    """The layer, without its weights."""
    target = load_spec("qwen2.5-7b")
    own = eagle3.read(LAYER, {"lm_head.weight": (32000, 3584), "midlayer.x": ()}, target)
    monkeypatch.setattr(auto_layout, "make_eagle3", lambda config, spec: own)
    config = composed("model=qwen2.5-7b", "speculation=eagle3", "speculation.path=DIR")
    found = layer_drafts(config.speculation, eagle3.drafted_by(target, own))
    assert found is not None
    return found


def step(layer: LayerDrafts | None, batch: int, length: int, gamma: int, kvp: int) -> StepCost:
    drafts = Speculation(gamma, 1.0, layer=layer) if gamma else None
    points = Points.of("helix", batch, kvp=kvp)
    return predict(load_spec("qwen2.5-7b"), H200, points, length, replace(RECORDED, speculation=drafts))


# Iterations on one H200, of one rank and of eight that it emulated. It is off by the error of a plain step, mostly.
@pytest.mark.parametrize(
    "kvp, batch, length, gamma, measured_us",
    [
        (1, 1, 128 * K, 1, 5861), (1, 1, 128 * K, 3, 6349), (1, 1, 128 * K, 7, 7197),
        (1, 4, 96 * K, 1, 9349), (1, 4, 96 * K, 3, 9971), (1, 4, 96 * K, 7, 11168),
        (8, 1, M, 1, 3176), (8, 1, M, 3, 3355), (8, 1, M, 7, 3892),
        (8, 8, 128 * K, 1, 3371), (8, 8, 128 * K, 3, 3785), (8, 8, 128 * K, 7, 4614),
    ],
)  # fmt: skip
def test_measured_iterations(
    trained: LayerDrafts, kvp: int, batch: int, length: int, gamma: int, measured_us: float
) -> None:
    assert 1e6 * step(trained, batch, length, gamma, kvp).step_s[0] == pytest.approx(measured_us, rel=0.08)


def test_a_draft_is_a_run_of_the_layer(trained: LayerDrafts) -> None:
    times = [step(trained, 8, 128 * K, gamma, 8) for gamma in (1, 2, 3)]
    drafts = [next(phase.seconds[0] for phase in of.phases if phase.name == "drafts") for of in times]
    assert drafts[2] - drafts[1] == pytest.approx(drafts[1] - drafts[0]) and drafts[0] > drafts[1] - drafts[0]
    whole = replace(trained.spec.layers[0], mixer=replace(trained.spec.layers[0].mixer, window=None))
    unbounded = replace(trained, spec=replace(trained.spec, layers=(whole,)))
    assert step(unbounded, 8, 128 * K, 2, 8).step_s[0] > 1.02 * times[1].step_s[0], "its window costs nothing"


def test_memory(trained: LayerDrafts) -> None:
    """Keys of 29 layers instead of 28, and the layer's weights."""
    spec, points = load_spec("qwen2.5-7b"), Points.of("helix", 2, kvp=2)
    plain, drafted = (
        memory_of(spec, H200, points, 64 * K, replace(RECORDED, speculation=Speculation(3, 0.8, layer=layer)))
        for layer in (None, trained)
    )
    assert drafted.kv_bytes[0] == pytest.approx(29 / 28 * plain.kv_bytes[0])
    hidden, width = 3584, 18944
    # Queries, keys and values on both ranks; half of the rest.
    weights = (28 + 8) * 128 * 2 * hidden + (28 * 128 * hidden + 3 * hidden * width + (3 * hidden + 32000) * hidden) / 2
    assert drafted.weight_bytes[0] - plain.weight_bytes[0] == pytest.approx(2 * weights)


def test_the_planner_names_gain_and_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "deepseek-r1",
        "gpus=8",
        "context=128K",
        "batch=8",
        "hardware=h200",
        "speculation=mtp",
        "acceptance=0.8",
    ]
    main(arguments)
    shown = " ".join(capsys.readouterr().out.split())
    assert "Drafting pays here, 1." in shown and "drafts by the layer" in shown and "speculation=mtp" in shown
    assert "counted as free" not in shown and "below" not in shown.split("Drafting pays here")[1].split("To serve")[0]
    main([*arguments, "--json", "-"])
    first = json.loads(capsys.readouterr().out)["choices"][0]
    assert first["gamma"] in (2, 3) and first["phases"]["drafts"] > 0


def test_a_layer_by_its_spec_is_the_model_s_own_last_one() -> None:
    config = composed("model=deepseek-r1", "speculation=mtp")
    spec = make_spec(config)
    layer = layer_drafts(config.speculation, spec)
    assert layer is not None and layer.spec.layers == (spec.layers[-1],) and layer.shared_head
    with pytest.raises(ValueError, match="a layer that drafts needs acceptance"):
        plan(Question(spec, H200, 8, K, layer=layer))


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("qwen2.5-7b speculation=mtp acceptance=0.8", "config.json names no layer for multi-token prediction"),
        ("deepseek-r1 speculation=mtp", "speculation.drafter=mtp needs acceptance"),
        ("qwen2.5-7b speculation=eagle3 acceptance=0.8", "speculation.drafter=eagle3 needs speculation.path=DIR"),
        ("qwen2.5-7b speculation=eagle3 speculation.path=/nowhere acceptance=0.8", "/nowhere"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: str, said: str) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["gpus=8", "context=131072", "hardware=h200", *arguments.split()])
    assert said in str(refused.value) and "\n" not in str(refused.value)
