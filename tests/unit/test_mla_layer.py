"""MLA: shapes, ways to run it, what tokens keep; with indexers, which layers choose, and what a plan counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GlmMoeDsaConfig

from comm.base import Communicator
from comm.loopback import LoopbackWorld
from comm.torch_dist import HOST_RATE
from helix.checks import check_layout
from helix.engine.prefill_time import doubling_depth
from helix.layers import mla
from helix.layout import HelixLayout
from helix.models import DecoderSpec, spec_from_config
from helix.models.checkpoint import read_config
from helix.models.decoder import Decoder
from helix.models.loading import Checkpoint, randomize
from helix.planner.hardware import E4M3, QUANTIZED
from helix.planner.points import Options, Points
from helix.planner.step import predict
from helix.worker.kv_cache_spec import KVCacheSpec, token_bytes
from launch.inputs.hardware import load_hardware
from launch.inputs.shapes import spec_of
from tests.e2e.checkpoints import checkpoint

NVLINK = Communicator.wire_rate
M = 1 << 20
KVP_8 = HelixLayout.create("helix", 8)
R1 = spec_from_config({"architectures": ["DeepseekV3ForCausalLM"]})


def decoder(s: DecoderSpec, layout: HelixLayout, rank: int) -> Decoder:
    comm = LoopbackWorld(layout.world_size).communicator(rank, layout.kvp_group(rank))
    return Decoder(s, layout, comm, torch.float32, torch.device("cpu"))


def test_a_token_stores_one_latent() -> None:
    r1 = spec_of("deepseek-r1")
    for layout in (HelixLayout.create("helix", 8), HelixLayout.create("tp", 1, 8)):
        for rank in range(8):
            cache_specs = r1.kv_cache_specs(layout, rank, "bfloat16")
            assert {kept for layer in cache_specs for kept in layer} == {KVCacheSpec("latents", (576,), "bfloat16")}
            assert sum(token_bytes(layer) for layer in cache_specs) == 61 * 1152
    few = r1.kv_cache_specs(HelixLayout.create("helix", 8), 0, "bfloat16", "fp8")
    assert sum(token_bytes(layer) for layer in few) == 61 * (512 + 4 * 4 + 64 * 2)


@pytest.mark.parametrize(
    "travels, wider", [(mla.exchanges_values, {"value": 512}), (mla.gathers_before_absorption, {"nope": 600})]
)  # fmt: skip
def test_values_travel_from_nine_rows_on(travels: Any, wider: dict[str, int]) -> None:
    """512 x 128 weights at 4.2 TB/s against 384 values a row at 0.2 TB/s; never of heads wider than a latent."""
    r1 = spec_of("deepseek-r1").attention
    assert isinstance(r1, mla.MLASpec)
    assert next(rows for rows in range(1, 20) if travels(r1, rows, NVLINK)) == 9
    assert not travels(replace(r1, **wider), 10_000, NVLINK)


def test_queries_are_gathered_where_their_weights_are_many() -> None:
    r1, lite = spec_of("deepseek-r1").attention, spec_of("deepseek-v2-lite").attention
    assert r1 is not None and lite is not None
    assert mla.gathers_queries(r1, 8, 2, NVLINK) and mla.gathers_queries(r1, 2, 2, NVLINK)
    assert not mla.gathers_queries(lite, 8, 2, NVLINK)
    assert not mla.gathers_queries(r1, 8, 2, HOST_RATE) and mla.exchanges_values(r1, 1, HOST_RATE)


def test_tensor_parallel_heads_are_refused_with_what_fits() -> None:
    with pytest.raises(ValueError, match=r"layout\.tpa=2 .* 128 query and 1 KV heads .*MLA has one.*kvp=8 tpa=1"):
        check_layout(HelixLayout.create("helix", 4, 2), R1)
    check_layout(HelixLayout.create("tp", 1, 8), R1)


def test_a_layer_for_multi_token_prediction_is_left_out(tmp_path: Path) -> None:
    source = checkpoint("deepseek-v3-yarn")
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    s = spec_from_config(read_config(source))
    for rank in range(2):
        slices = decoder(s, HelixLayout.create("helix", 2, ep=2), rank).weights.slices
        Checkpoint(tmp_path).check(slices, s.unused)
    save_file(tensors | {"model.layers.20.eh_proj.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 unexpected: model\.layers\.20\.eh_proj"):
        Checkpoint(tmp_path).check(slices, s.unused)


@pytest.mark.parametrize("family", ["deepseek-v2-lite", "deepseek-v3-yarn"])
def test_ranks_without_heads_know_all_tensors(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr(mla, "gathers_queries", lambda *args: True)
    s = spec_from_config(read_config(checkpoint(family)))
    layout = HelixLayout.create("helix", 12)
    for rank in (0, 11):
        Checkpoint(checkpoint(family)).check(decoder(s, layout, rank).weights.slices, s.unused)
    assert decoder(s, layout, 11).layers[0].mixer.num_computed_heads == 0


def test_random_queries_do_not_depend_on_who_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    s = spec_from_config(read_config(checkpoint("deepseek-v3-yarn")))
    layout = HelixLayout.create("helix", 2)
    rows = []
    for gathers in (False, True):
        monkeypatch.setattr(mla, "gathers_queries", lambda *args, gathers=gathers: gathers)
        models = [decoder(s, layout, rank) for rank in range(2)]
        for model in models:
            randomize(model.weights, 5)
        rows.append([model.layers[1].mixer.q_up.weight for model in models])
    (whole, same), parts = rows
    assert torch.equal(whole, same) and torch.equal(whole, torch.cat(parts))


# ---- models with indexers


def glm(**more: Any) -> DecoderSpec:
    config = GlmMoeDsaConfig(num_hidden_layers=12, **more).to_dict()
    return spec_from_config(config | more | {"architectures": ["GlmMoeDsaForCausalLM"]})


def choosing(s: DecoderSpec) -> list[int]:
    found = [layer.mixer for layer in s.layers]
    return [i for i, mixer in enumerate(found) if isinstance(mixer, mla.MLASpec) and mixer.indexer is not None]


def test_the_published_shapes_with_indexers() -> None:
    glm52, v = spec_of("glm-5.2"), spec_of("deepseek-v3.2")
    assert choosing(glm52) == [0, 1, *range(2, 78, 4)] and len(glm52.indexers) == 21
    assert choosing(v) == [*range(61)]
    glm_attention, v_attention = glm52.attention, v.attention
    assert isinstance(glm_attention, mla.MLASpec) and isinstance(v_attention, mla.MLASpec)
    assert glm_attention.topk == v_attention.topk == 2048 and glm_attention.interleaved and v_attention.interleaved
    assert glm52.indexers[0].interleaved and not v.indexers[0].interleaved
    assert (glm52.indexers[0].heads, v.indexers[0].heads) == (32, 64)
    assert (glm52.nextn_shared_topk, v.nextn_shared_topk) == (2048, 0)


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
    for kv, latent_bytes, index_bytes in (("auto", 1152, 256), ("fp8", few, 256), ("fp8_all", few, 132)):
        cache_specs = glm52.kv_cache_specs(KVP_8, 3, "bfloat16", kv)
        assert sum(map(token_bytes, cache_specs)) == 78 * latent_bytes + 21 * index_bytes


def test_a_plan_counts_what_is_kept_and_read() -> None:
    glm52, hardware = spec_of("glm-5.2"), load_hardware("h200")
    options = Options("bf16", "bf16", "bf16", matrices=dict.fromkeys(QUANTIZED, E4M3))
    found = predict(glm52, hardware, Points.of("helix", 1, kvp=8), M, options)
    kept = sum(map(token_bytes, glm52.kv_cache_specs(KVP_8, 0, "bfloat16"))) * M / 8
    assert found.memory.kv_bytes[0] == pytest.approx(kept, rel=0.001) and found.fits.all()
    assert not predict(glm52, hardware, Points.of("tp", 1, tpa=8), M, options).fits.any()
    phases = {phase.name: phase for phase in found.phases}
    assert phases["index scores"].bytes[0] == 21 * M / 8 * 256
    assert phases["attention"].bytes[0] == 78 * 2048 / 8 * 1152
    few = predict(glm52, hardware, Points.of("helix", 1, kvp=8), M, replace(options, kv="e4m3_all"))
    kept = sum(map(token_bytes, glm52.kv_cache_specs(KVP_8, 0, "bfloat16", "fp8_all"))) * M / 8
    assert few.memory.kv_bytes[0] == pytest.approx(kept, rel=0.001)
    assert {phase.name: phase for phase in few.phases}["index scores"].bytes[0] == 21 * M / 8 * 132
    # Dense attention of the same shape reads all latents.
    dense = [replace(layer, mixer=replace(layer.mixer, topk=None, indexer=None)) for layer in glm52.layers]
    plain = predict(replace(glm52, layers=tuple(dense)), hardware, Points.of("helix", 1, kvp=8), M, options)
    assert np.all(plain.step_s > 1.2 * found.step_s)


def test_a_prompts_depth_costs_scores_alone() -> None:
    glm52 = spec_of("glm-5.2")
    assert doubling_depth(glm52) == pytest.approx(39e9 / (21 * 32 * 128), rel=0.05)
