"""Shapes of models with indexers: which layers choose, what is kept, what is refused, and what a plan counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers import DeepseekV32Config, GlmMoeDsaConfig

from helix.engine.prefill_time import doubling_depth
from helix.layers.specs import MLASpec
from helix.layout import HelixLayout
from helix.models import DecoderSpec, spec_from_config
from helix.planner.points import Options, Points
from helix.planner.step import predict
from helix.worker.keeps import token_bytes
from launch.inputs.hardware import load_hardware
from launch.inputs.shapes import spec_of

M = 1 << 20
KVP_8 = HelixLayout.create("helix", 8)


def spec(config: Any, architecture: str, **more: Any) -> DecoderSpec:
    return spec_from_config({**config.to_dict(), "architectures": [architecture], **more})


def glm(**more: Any) -> DecoderSpec:
    given = {"num_hidden_layers": 12, **more}
    return spec(GlmMoeDsaConfig(**given), "GlmMoeDsaForCausalLM", **{k: v for k, v in more.items() if "index" in k})


def v32(**more: Any) -> DecoderSpec:
    return spec(DeepseekV32Config(), "DeepseekV32ForCausalLM", **more)


def choosing(s: DecoderSpec) -> list[int]:
    found = [layer.mixer for layer in s.layers]
    return [i for i, mixer in enumerate(found) if isinstance(mixer, MLASpec) and mixer.indexer is not None]


def test_the_published_shapes() -> None:
    glm52, v = spec_of("glm-5.2"), spec_of("deepseek-v3.2")
    assert choosing(glm52) == [0, 1, *range(2, 78, 4)] and len(glm52.indexers) == 21
    assert choosing(v) == [*range(61)]
    of_glm, of_v = glm52.attention, v.attention
    assert isinstance(of_glm, MLASpec) and isinstance(of_v, MLASpec)
    assert of_glm.topk == of_v.topk == 2048 and of_glm.interleaved and of_v.interleaved
    assert glm52.indexers[0].interleaved and not v.indexers[0].interleaved
    assert (glm52.indexers[0].heads, v.indexers[0].heads) == (32, 64)
    assert (glm52.brought_choice, v.brought_choice) == (2048, 0)
    # As said: 743B and 671B, with their layers for multi-token prediction, which are not read.
    for s, numbers in ((glm52, 743e9), (v, 671e9)):
        total = 2 * s.vocab * s.hidden + sum(layer.mixer.weights for layer in s.layers)
        for layer in s.layers:
            ffn = layer.ffn
            experts = getattr(ffn, "experts", 0)
            total += 3 * s.hidden * (ffn.width * max(experts, 1) + getattr(ffn, "shared_width", 0))
        assert total == pytest.approx(numbers, rel=0.02)


@pytest.mark.parametrize(
    "more, full",
    [
        ({}, [*range(12)]),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [0, 1, 2, 6, 10]),
        ({"index_topk_freq": 4}, [0, 1, 5, 9]),
        ({"index_topk_pattern": "FSSFFSSSFSSS"}, [0, 3, 4, 8]),
        ({"indexer_types": ["full"] + ["shared"] * 11}, [0]),
    ],
)
def test_layers_that_choose(more: dict[str, Any], full: list[int]) -> None:
    assert choosing(glm(**more)) == full


def test_a_token_keeps_index_keys_where_layers_choose() -> None:
    glm52 = spec_of("glm-5.2")
    few = 512 + 4 * 4 + 128
    for kv, of_latent, of_index in (("auto", 1152, 256), ("fp8", few, 256), ("fp8_all", few, 132)):
        keeps = glm52.keeps(KVP_8, 3, "bfloat16", kv)
        assert sum(map(token_bytes, keeps)) == 78 * of_latent + 21 * of_index


def test_a_plan_counts_what_is_kept_and_read() -> None:
    glm52, hardware = spec_of("glm-5.2"), load_hardware("h200")
    options = Options(weights="e4m3", experts="e4m3", other="bf16", messages="bf16", kv="bf16", arithmetic="bf16")
    found = predict(glm52, hardware, Points.of("helix", 1, kvp=8), M, options)
    kept = sum(map(token_bytes, glm52.keeps(KVP_8, 0, "bfloat16"))) * M / 8
    assert found.memory.kv_bytes[0] == pytest.approx(kept, rel=0.001) and found.fits.all()
    assert not predict(glm52, hardware, Points.of("tp", 1, tpa=8), M, options).fits.any()
    phases = {phase.name: phase for phase in found.phases}
    assert phases["index scores"].bytes[0] == 21 * M / 8 * 256
    assert phases["attention"].bytes[0] == 78 * 2048 / 8 * 1152
    few = predict(glm52, hardware, Points.of("helix", 1, kvp=8), M, replace(options, kv="e4m3_all"))
    kept = sum(map(token_bytes, glm52.keeps(KVP_8, 0, "bfloat16", "fp8_all"))) * M / 8
    assert few.memory.kv_bytes[0] == pytest.approx(kept, rel=0.001)
    assert {phase.name: phase for phase in few.phases}["index scores"].bytes[0] == 21 * M / 8 * 132
    # Dense attention of the same shape reads all latents.
    dense = [replace(layer, mixer=replace(layer.mixer, topk=None, indexer=None)) for layer in glm52.layers]
    plain = predict(replace(glm52, layers=tuple(dense)), hardware, Points.of("helix", 1, kvp=8), M, options)
    assert np.all(plain.step_s > 1.2 * found.step_s)


def test_a_prompts_depth_costs_scores_alone() -> None:
    glm52 = spec_of("glm-5.2")
    assert doubling_depth(glm52) == pytest.approx(39e9 / (21 * 32 * 128), rel=0.05)
