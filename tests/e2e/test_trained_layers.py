"""Layers that are trained here draft as in training, and change no token."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from benchmarks.quality import generated_texts, train_attention, train_drafter
from benchmarks.quality.draft_layers import Eagle3, NextToken
from benchmarks.quality.train_drafter import Target
from helix.config import SpeculationConfig
from helix.engine.core import Engine
from helix.engine.request import Request
from helix.layout import HelixLayout
from helix.models import spec_from_config
from helix.models.checkpoint import read_config
from helix.models.loading import Checkpoint, weights_of
from helix.setup.parts import make_eagle3
from tests.e2e import eagle3
from tests.e2e.checkpoints import DEMO, checkpoint
from tests.e2e.parity import LayerDrafts, on_loopback
from tests.e2e.recording_drafters import PartlyAcceptingDrafter, RecordingDrafter, mismatches
from tests.sequences import generated_ids

GENERATOR = torch.Generator().manual_seed(4)
IDS = torch.randint(4096, (2000,), generator=torch.Generator().manual_seed(3))


def test_eagle3_drafts_in_training_as_its_layer_does(tmp_path: Path) -> None:
    """From every token, of the tokens that follow; and what is trained is read back."""
    oracle, places = eagle3.oracle("qwen3", "shared"), 3
    of = AutoConfig.from_pretrained(eagle3.target("qwen3"))
    of.update({"num_attention_heads": eagle3.HEADS, "num_key_value_heads": eagle3.KV_HEADS, "head_dim": eagle3.DIM})
    of.update({"intermediate_size": eagle3.WIDTH, "rms_norm_eps": eagle3.EPS})
    layer = Eagle3(of)
    layer.load_state_dict({name: oracle.tensors[name] for name in layer.state_dict()})
    ids = torch.randint(257, (1, 30), generator=torch.Generator().manual_seed(3))
    embedded, states, _ = Target(oracle.lm).read(ids, oracle.taps)
    with torch.no_grad():
        found = [x[0] for x in layer.drafts(embedded, states, places)]
        for at in (0, 11, 26):
            g = layer.fc(states[0, : at + 1])
            for place in range(places):
                y = oracle.forward(ids[0, 1 : at + place + 2], g)
                g = torch.cat((g, y[-1:]))
                wanted = oracle.norm(y[-1], oracle.tensors["norm.weight"])
                assert (found[place][at] - wanted).abs().max() < 1e-4, (at, place)
    layer.save(eagle3.target("qwen3"), 64, tmp_path)
    given = SpeculationConfig(drafter="eagle3", path=str(tmp_path))
    assert make_eagle3(given, spec_from_config(read_config(eagle3.target("qwen3")))).own_embedding is False


@torch.no_grad()
def with_layer(model: Path, to: Path) -> tuple[Target, NextToken]:
    """A random layer for multi-token prediction behind a model, saved."""
    target = Target(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())
    torch.manual_seed(5)
    layer = NextToken(target.model.config)
    for name, weight in layer.named_parameters():
        weight.copy_((torch.randn_like(weight) * 0.12 + ("norm" in name)).bfloat16())
    layer.save(model, 64, to)
    return target, layer


@pytest.mark.parametrize(
    "family, kvp, tpa, kind",
    [("qwen3", 1, 1, RecordingDrafter), ("qwen3", 2, 2, PartlyAcceptingDrafter), ("demo", 3, 1, RecordingDrafter)],
)
def test_mtp_drafts_as_in_training(
    family: str, kvp: int, tpa: int, kind: type[RecordingDrafter], tmp_path: Path
) -> None:
    """And a model that has become one of GLM-4.5 says what it says."""
    target, layer = with_layer(checkpoint(family), tmp_path)
    layout = HelixLayout.create("helix", kvp, tpa)
    prompts = [tuple((IDS[50 * i : 50 * i + n] % 257).tolist()) for i, n in enumerate((2, 17, 90))]
    drafters: dict[int, Any] = {}

    def said(path: Path, drafts: LayerDrafts | None) -> Any:
        def run(engine: Engine) -> Any:
            drafters[engine.comm.rank] = engine.runner.drafter
            return generated_ids(engine, [Request(i, p, 12) for i, p in enumerate(prompts)])

        return on_loopback(path, layout, 16, run, drafter=drafts, adaptive=False, prefill_chunk=40)[0]

    @torch.no_grad()
    def drafts_of(tokens: list[int], count: int) -> list[int]:
        found: list[int] = []
        for place in range(count):
            embedded, states, _ = target.read(torch.tensor([[*tokens, *found]]), layer.aux_hidden_state_layers)
            *_, last = layer.drafts(embedded, states, place + 1)
            found.append(int(target.model.lm_head(last[0, -1]).argmax()))
        return found

    plain = said(checkpoint(family), None)
    drawn, found = said(tmp_path, LayerDrafts(3, kind=kind)), drafters[0]
    assert kind is PartlyAcceptingDrafter or drawn == plain
    assert len(found.drafted) > 10
    assert mismatches(found, drafts_of) == []


@pytest.mark.parametrize("form", ["eagle3", "mtp"])
def test_a_few_steps_of_training(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the demo model, which then drafts with the layer and says what it says without."""
    monkeypatch.setattr(train_drafter, "corpus", lambda tokenizer, megabytes: IDS)
    monkeypatch.setattr(
        train_drafter, "source_windows", lambda tokenizer, windows, length: IDS[: 2 * length].view(2, length)
    )
    values = {"to": tmp_path, "form": form, "steps": 3, "batch": 2, "length": 48, "drafts": 2}
    found = train_drafter.train(values)
    assert (
        found["steps"] == 3
        and len(found["acceptance_by_position"]) == 2
        and all(0 <= share <= 1 for share in found["acceptance_by_position"])
    )
    requests = [Request(i, tuple(IDS[50 * i : 50 * i + 20].tolist()), 16) for i in range(2)]

    def drawn(path: Path, drafts: LayerDrafts | None) -> Any:
        run = partial(generated_ids, requests=requests)
        return on_loopback(path, HelixLayout.create(), 16, run, drafter=drafts, adaptive=False)[0]

    given = SpeculationConfig(drafter="eagle3", path=str(tmp_path)) if form == "eagle3" else None
    path = DEMO if form == "eagle3" else tmp_path
    assert drawn(path, LayerDrafts(2, eagle3=given)) == drawn(DEMO, None)


def test_texts_that_a_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a prompt and what follows it; padding and what comes behind an end are left out."""

    class Model:
        device = torch.device("cpu")

        def generate(self, ids: Tensor, attention_mask: Tensor, **more: Any) -> Tensor:
            assert attention_mask.sum(1).tolist() == [2, 3] and ids[0].tolist() == [9, 5, 6]
            return torch.cat((ids, torch.tensor([[1, 9, 9], [2, 3, 4]])), 1)

    assert generated_texts.generate(Model(), [[5, 6], [7, 8, 1]], 9).tolist() == [5, 6, 1, 9, 7, 8, 1, 2, 3, 4]
    found = generated_texts.prompts(object(), IDS, 3)
    assert [len(ids) for ids in found] == [generated_texts.BEGIN] * 3


def test_a_model_that_is_no_glm_is_refused() -> None:
    config = AutoConfig.from_pretrained(checkpoint("qwen2"))
    with pytest.raises(ValueError, match="form=mtp needs a model of type llama or qwen3"):
        NextToken(config)


def test_the_demo_models_layer_for_multi_token_prediction_fits_it() -> None:
    path = DEMO.parent / "demo-mtp"
    stored = Checkpoint(path)
    spec = stored.as_stored(spec_from_config(read_config(path))).with_mtp()
    stored.check(weights_of(spec, HelixLayout.create(), 0, torch.float32).slices, spec.unused)
    own = stored.as_stored(spec_from_config(read_config(DEMO)))
    assert spec.layers == own.layers and spec.tied == own.tied


@pytest.mark.parametrize("length", [1, 64, 200])
def test_the_gated_delta_rule_and_its_gradients_are_those_of_transformers(length: int) -> None:
    q, k = (torch.randn(2, length, 4, 32, generator=GENERATOR) for _ in range(2))
    v = torch.randn(2, length, 4, 48, generator=GENERATOR)
    g, beta = (torch.rand(2, length, 4, generator=GENERATOR) for _ in range(2))
    found = []
    for rule in (train_attention.gated_delta_rule, torch_chunk_gated_delta_rule):
        rows = [t.clone().requires_grad_() for t in (q, k, v, -0.02 * g, beta)]
        out = rule(*rows, use_qk_l2norm_in_kernel=True)[0]
        (out * out.detach().cos()).sum().backward()
        found.append([out, *(t.grad for t in rows)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)  # fp32 sums of 200 terms in other orders


@pytest.mark.parametrize("form", ["latents", "states"])
def test_other_attention_begins_as_the_demo_model_without(form: str, tmp_path: Path) -> None:
    """Shared weights are the demo model's; and after two steps Helix reads the result and continues as transformers."""
    demo = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval().requires_grad_(False)
    text = train_attention.Texts(AutoTokenizer.from_pretrained(DEMO), IDS).batch(40, 80)
    found = train_attention.student(form, demo).eval()(text, use_cache=False).logits
    for layer in [layer for i, layer in enumerate(demo.model.layers) if form == "latents" or i % 4 < 3]:
        layer.self_attn.o_proj.weight.zero_()
    assert (found - demo(text, use_cache=False).logits).abs().max() < 1e-3
    values = {"to": tmp_path, "form": form, "steps": 2, "tokens": 128, "length": 64, "megabytes": 0.1}
    assert train_attention.train(values)["steps"] == 2
    trained = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompt = IDS[:50]
    wanted = trained.generate(prompt[None], max_new_tokens=8, do_sample=False, eos_token_id=-1)[0, 50:].tolist()
    requests = [Request(0, tuple(prompt.tolist()), 8)]
    engines = on_loopback(tmp_path, HelixLayout.create("helix", 2), 16, lambda engine: generated_ids(engine, requests))
    assert list(engines[0][0]) == wanted
