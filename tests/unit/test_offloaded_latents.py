"""Latents in host memory: which layers share a fetch, and as many pages as two memories allow."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comm.loopback import LoopbackWorld, run_ranks
from helix.config import Config, KVConfig
from helix.errors import ConfigError
from helix.kv_placement import KVPlacement
from helix.layout import HelixLayout
from helix.models import spec_from_config
from helix.models.checkpoint import read_config
from helix.setup.offload import make_offloaded_latents
from helix.worker.kv_cache_spec import EngineSizes, page_bytes
from helix.worker.offloaded_latents import (
    FetchBuffer,
    OffloadedLatents,
    OffloadedLatentsLayer,
    host_page_bytes,
    latents_of,
    with_latents_on_host,
)
from launch.inputs.shapes import load_spec
from tests.e2e.checkpoints import checkpoint

SPEC = replace(spec_from_config(read_config(checkpoint("glm-5-shared"))), max_positions=1 << 20)
LAYOUT, SIZES = HelixLayout.create("helix", 2), EngineSizes(2, chunk=64, drafts=1)
SPECS = with_latents_on_host(SPEC.kv_cache_specs(LAYOUT, 0, "float32"), len(SPEC.layers))
HOST_PAGE, GPU_PAGE = host_page_bytes(SPECS, 16), sum(page_bytes(kept, 16) for kept in SPECS)
assert SPEC.attention.topk is not None
BUFFER = FetchBuffer.bytes(latents_of(SPECS), SPEC.most_sharing_layers, 4, SPEC.attention.topk)


def made(host_bytes: float, gpu_bytes: float, tokens: int | None = None) -> list[OffloadedLatents]:
    kv = KVConfig(offload="host", offload_host_bytes=host_bytes, offload_gpu_bytes=gpu_bytes, tokens=tokens)

    def body(world: LoopbackWorld, rank: int) -> OffloadedLatents:
        comm = world.communicator(rank, LAYOUT.kvp_group(rank))
        placement = KVPlacement(LAYOUT, rank, 16, 16)
        sizes = replace(SIZES, length=4000, pages=placement.stripes.pages_for_all(tokens or 40_000, SIZES.slots))
        model: Any = SimpleNamespace(spec=SPEC, comm=comm, weights=SimpleNamespace(dtype=torch.float32))
        return make_offloaded_latents(Config(kv=kv), model, placement, sizes, 0)

    return run_ranks(2, body, timeout_s=60.0)


def test_layers_share_the_selection_of_the_last_indexer() -> None:
    """GLM-5.2 has indexers in layers 0, 1, 2, 6, 10, ..; a draft layer's latents stay on the GPU."""
    spec = load_spec("glm-5.2").with_mtp()
    specs = with_latents_on_host(spec.kv_cache_specs(HelixLayout.create("helix", 8), 0, "bfloat16"), len(spec.layers))
    found = [*spec.selecting_layers.values()]
    assert found[:12] == [0, 1, 2, 2, 2, 2, 6, 6, 6, 6, 10, 10] and found[-1] == 74 and len(found) == 78
    assert spec.most_sharing_layers == 4
    assert [k.name for kept in specs for k in kept if k.on_host] == ["latents"] * 78
    packed = with_latents_on_host(load_spec("deepseek-v3.2").kv_cache_specs(LAYOUT, 0, "bfloat16", "fp8"), 61)
    assert {k.name for kept in packed for k in kept if k.on_host} == {"latents", "ropes"}


@pytest.mark.parametrize("host_pages, gpu_pages, pages", [(300.5, 900, 300), (900, 300.5, 300)])
def test_the_smaller_memory_says_how_many_pages_there_are(host_pages: float, gpu_pages: float, pages: int) -> None:
    caches = made(host_pages * HOST_PAGE, gpu_pages * GPU_PAGE + BUFFER)
    for cache in caches:
        assert cache.pages == pages and cache.store.bytes == pages * HOST_PAGE
        on_gpu = [g.tensors[k.name] for g in cache.groups for k in g.kv_cache_specs if not k.on_host]
        on_gpu += [*cache.buffer.tensors.values(), cache.buffer.table]
        assert sum(t.nbytes for t in on_gpu) == pages * GPU_PAGE + BUFFER
        places = [layer.tensors["latents"] for layer in map(cache.layer, range(len(SPEC.layers)))]
        begins = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in places)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(begins)), "layers overlap"
        layer = cache.layer(2)
        assert isinstance(layer, OffloadedLatentsLayer) and layer.over_link
        assert layer.sharing[layer.position]["latents"].data_ptr() == layer.tensors["latents"].data_ptr()
    host, gpu = (int(limit) * 32 for limit in (host_pages, gpu_pages))
    assert f"has room for {host} tokens" in caches[0].remedy and f"bytes for {gpu}: raise" in caches[0].remedy


def test_too_little_is_refused_with_what_would_do() -> None:
    with pytest.raises(ConfigError, match=rf"latents of 0 pages of {HOST_PAGE} bytes: set at least {HOST_PAGE}"):
        made(HOST_PAGE - 1, 1e9)
    with pytest.raises(ConfigError, match=rf"take {BUFFER + GPU_PAGE}: set at least that, or lower decode.max_batch"):
        made(1e9, BUFFER + GPU_PAGE - 1)
    assert made(HOST_PAGE, BUFFER + GPU_PAGE)[0].pages == 1
    with pytest.raises(ConfigError, match=r"holds the latents of 9 pages of .*: set at least"):
        made(9 * HOST_PAGE, 1e9, tokens=4000)
