"""DeepSeek's configs become specs, the ways to run MLA are chosen by time, and what is not supported is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config, DeepseekV3Config

from comm.base import Communicator
from comm.loopback import LoopbackWorld
from comm.torch_dist import HOST_RATE
from helix.checks import check_layout
from helix.layers import mla
from helix.layers.rotary import frequencies
from helix.layers.specs import MLPSpec
from helix.layout import HelixLayout
from helix.models import DecoderSpec, spec_from_config
from helix.models.checkpoint import read_config
from helix.models.decoder import Decoder
from helix.models.loading import Checkpoint, randomize
from helix.worker.keeps import Keeps, token_bytes
from launch.inputs.shapes import spec_of
from tests.e2e.checkpoints import checkpoint

NVLINK = Communicator.wire_rate


def spec(config: Any, architecture: str, **more: Any) -> DecoderSpec:
    return spec_from_config({**config.to_dict(), "architectures": [architecture], **more})


def v2(**more: Any) -> DecoderSpec:
    return spec(DeepseekV2Config(num_experts_per_tok=6), "DeepseekV2ForCausalLM", **more)


def v3(**more: Any) -> DecoderSpec:
    return spec(DeepseekV3Config(), "DeepseekV3ForCausalLM", **more)


def decoder(s: DecoderSpec, layout: HelixLayout, rank: int) -> Decoder:
    comm = LoopbackWorld(layout.world_size).communicator(rank, layout.kvp_group(rank))
    return Decoder(s, layout, comm, torch.float32, torch.device("cpu"))


def test_the_published_shapes() -> None:
    r1, lite = spec_of("deepseek-r1"), spec_of("deepseek-v2-lite")
    assert isinstance(r1.attention, mla.MLASpec) and isinstance(lite.attention, mla.MLASpec)
    of_r1, of_lite = r1.experts, lite.experts
    assert of_r1 is not None and of_lite is not None
    dense = [[isinstance(layer.ffn, MLPSpec) for layer in spec.layers] for spec in (r1, lite)]
    assert dense == [[True] * 3 + [False] * 58, [True] + [False] * 26] and lite.attention.q_rank is None
    assert (of_r1.scoring, of_r1.groups, of_r1.top_groups, of_r1.scale) == ("sigmoid", 8, 4, 2.5)
    assert (of_lite.scoring, of_lite.groups, of_lite.shared_width, of_lite.normalise) == ("softmax", 1, 2816, False)
    # As the releases write it: 192^-0.5 times (0.1 mscale ln 40 + 1)^2; on the angles the two factors cancel.
    assert r1.attention.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert lite.attention.scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    assert frequencies(r1.rope)[1] == frequencies(lite.rope)[1] == 1.0
    assert r1.attention.norm_eps == 1e-6 and r1.attention.kv_heads == 1


def test_a_token_stores_one_latent() -> None:
    r1 = spec_of("deepseek-r1")
    for layout in (HelixLayout.create("helix", 8), HelixLayout.create("tp", 1, 8)):
        for rank in range(8):
            keeps = r1.keeps(layout, rank, "bfloat16")
            assert {kept for layer in keeps for kept in layer} == {Keeps("latents", (576,), "bfloat16")}
            assert sum(token_bytes(layer) for layer in keeps) == 61 * 1152
    few = r1.keeps(HelixLayout.create("helix", 8), 0, "bfloat16", "fp8")
    assert sum(token_bytes(layer) for layer in few) == 61 * (512 + 4 * 4 + 64 * 2)


def test_values_travel_from_nine_rows_on() -> None:
    """512 x 128 weights at 4.2 TB/s against 384 values a row at 0.2 TB/s."""
    r1 = spec_of("deepseek-r1").attention
    assert isinstance(r1, mla.MLASpec)
    assert next(rows for rows in range(1, 20) if mla.exchanges_values(r1, rows, NVLINK)) == 9
    assert not mla.exchanges_values(replace(r1, value=512), 10_000, NVLINK)  # nothing to save


def test_queries_are_gathered_where_their_weights_are_many() -> None:
    r1, lite = spec_of("deepseek-r1").attention, spec_of("deepseek-v2-lite").attention
    assert r1 is not None and lite is not None
    assert mla.gathers_queries(r1, 8, 2, NVLINK) and mla.gathers_queries(r1, 2, 2, NVLINK)
    assert not mla.gathers_queries(lite, 8, 2, NVLINK)
    assert not mla.gathers_queries(r1, 8, 2, HOST_RATE) and mla.exchanges_values(r1, 1, HOST_RATE)


def test_prompts_gather_queries_before_they_grow() -> None:
    """512 x 128 weights a head at 4.2 TB/s against 384 values a row at 0.2 TB/s; never of heads wider than a latent."""
    r1 = spec_of("deepseek-r1").attention
    assert isinstance(r1, mla.MLASpec)
    assert next(rows for rows in range(1, 20) if mla.gathers_first(r1, rows, NVLINK)) == 9
    assert not mla.gathers_first(replace(r1, nope=600), 10_000, NVLINK)


def test_tensor_parallel_heads_are_refused_with_what_fits() -> None:
    with pytest.raises(ValueError, match=r"layout\.tpa=2 .* 128 query and 1 KV heads .*MLA has one.*kvp=8 tpa=1"):
        check_layout(HelixLayout.create("helix", 4, 2), v3())
    check_layout(HelixLayout.create("tp", 1, 8), v3())


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
    assert decoder(s, layout, 11).layers[0].mixer.makes == 0


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
