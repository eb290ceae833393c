"""A cache in host memory as large as two memories allow, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comm.loopback import LoopbackWorld, run_ranks
from helix.config import AttentionConfig, Config, KVConfig
from helix.errors import ConfigError
from helix.kv_placement import BlockBudget, KVPlacement
from helix.layout import HelixLayout
from helix.models import spec_from_config
from helix.models.checkpoint import read_config
from helix.setup.offload import OffloadBytes, make_offloaded_cache, offload_bytes, short_chunk_warning
from helix.worker.kv_cache import with_bounds
from helix.worker.kv_cache_spec import EngineSizes, page_bytes
from helix.worker.offloaded_cache import OffloadedCache
from launch.inputs.compose import ROOT
from launch.inputs.shapes import load_spec

SPEC = replace(spec_from_config(read_config(ROOT / "assets" / "demo-model")), max_positions=1 << 20)
LAYOUT = HelixLayout.create("helix", 2)
TOKENS, SIZES = 40_000, EngineSizes(2, chunk=256)
GPU = 120e6  # bytes for the cache


def config(host: float | None, gpu: float | None, tokens: int | None = None, kv: str = "auto") -> Config:
    return Config(
        kv=KVConfig(
            append_block=16,
            page_size=16,
            dtype=kv,
            tokens=tokens,
            offload="host",
            offload_host_bytes=host,
            offload_gpu_bytes=gpu,
        ),
        attention=AttentionConfig("block_sparse", 16, num_blocks=4, from_tokens=0),
    )


def made(given: Config) -> list[OffloadedCache]:
    def body(world: LoopbackWorld, rank: int) -> OffloadedCache:
        comm = world.communicator(rank, LAYOUT.kvp_group(rank))
        placement = KVPlacement(LAYOUT, LAYOUT.kvp_rank(rank), 16, 16)
        tokens = given.kv.tokens or TOKENS
        pages = placement.stripes.pages_for_all(tokens, SIZES.slots)
        sizes = replace(SIZES, length=min(tokens, SPEC.max_positions), pages=pages)
        model: Any = SimpleNamespace(spec=SPEC, comm=comm, weights=SimpleNamespace(dtype=torch.float32))
        return make_offloaded_cache(given, model, placement, sizes, 0)

    return run_ranks(2, body, timeout_s=60.0)


def bytes_per_page(kv: str = "auto") -> int:
    return sum(page_bytes(kept, 16) for kept in SPEC.kv_cache_specs(LAYOUT, 0, "float32", kv))


def size_of(kv: str = "auto") -> OffloadBytes:
    where = KVPlacement(LAYOUT, 0, 16, 16)
    return offload_bytes(with_bounds(SPEC.kv_cache_specs(LAYOUT, 0, "float32", kv), "float32"), where, SIZES)


@pytest.mark.parametrize("kv, gpu", [("auto", GPU), ("fp8", GPU / 2), ("k16v8", GPU)])
def test_the_host_says_how_many_pages_there_are(kv: str, gpu: float) -> None:
    """And the GPU's share how many blocks are hot: all of it is used, none beyond it."""
    caches = made(config(300.5 * bytes_per_page(kv), gpu, kv=kv))
    assert [cache.pages for cache in caches] == [300, 300]
    for cache in caches:
        assert cache.host.numel() * 4 == 300 * bytes_per_page(kv)
        held = [*cache.on_gpu, cache.bounds, *vars(cache.resident).values()]
        size = sum(x.numel() * x.itemsize for x in held if isinstance(x, torch.Tensor))
        block_bytes = size_of(kv).resident_block
        assert gpu - block_bytes <= size <= gpu or cache.resident.num_blocks == cache.pages


def test_the_gpu_can_be_what_limits_it() -> None:
    """Bounds of all pages have to fit beside what sequences choose in a step."""
    size = size_of()
    max_memory = made(config(1000 * bytes_per_page(), GPU))[0]
    min_memory = made(
        config(
            1000 * bytes_per_page(),
            GPU - max_memory.resident.num_blocks * size.resident_block + 40 * size.resident_block,
        )
    )[0]
    assert max_memory.pages == min_memory.pages == 1000 and min_memory.resident.num_blocks == 40


def test_too_little_is_refused_with_what_would_do() -> None:
    with pytest.raises(ConfigError, match=f"holds no page of {bytes_per_page()} bytes"):
        made(config(bytes_per_page() - 1, GPU))
    with pytest.raises(ConfigError, match=r"kv.tokens=5000 needs .* set at least"):
        made(config(10 * bytes_per_page(), GPU, tokens=5000))
    with pytest.raises(
        ConfigError, match=r"kv.offload_gpu_bytes gives 1000000 bytes .* take (\d+): set at least"
    ) as error:
        made(config(300 * bytes_per_page(), 1e6))
    enough = int(str(error.value).partition(" take ")[2].partition(":")[0])
    assert made(config(300 * bytes_per_page(), enough))[0].pages >= 1
    with pytest.raises(ConfigError, match=r"kv.offload_gpu_bytes gives"):
        made(config(300 * bytes_per_page(), enough - 1))


def test_what_more_would_take_is_said_of_both_memories() -> None:
    """In tokens over all ranks: a request that fits neither is refused with them."""
    size = size_of()
    min_memory = made(config(300 * bytes_per_page(), GPU))[0]
    cache = made(config(300.5 * bytes_per_page(), GPU - (min_memory.resident.num_blocks - 200) * size.resident_block))[
        0
    ]
    assert (
        f"has room for {300 * 32} tokens, and the GPU's share of" in cache.remedy
        and "raise the smaller" in cache.remedy
    )
    gpu_bytes = int(cache.remedy.partition(" bytes for ")[2].partition(":")[0])
    assert gpu_bytes % 32 == 0 and gpu_bytes > 300 * 32


def test_cards_hold_what_the_documentation_says() -> None:
    """One rank of Qwen2.5-7B with a sequence of 1M tokens, and with as many as its GPU allows."""
    spec, placement = load_spec("qwen2.5-7b"), KVPlacement(HelixLayout.create(), 0, 128, 128)
    cache_specs = with_bounds(spec.kv_cache_specs(placement.layout, 0, "bfloat16"), "bfloat16")
    size = offload_bytes(cache_specs, placement, EngineSizes(1, chunk=8192))
    pages, min_memory = (
        placement.stripes.pages_for((1 << 20) + 1),
        placement.max_blocks(BlockBudget(1, 4, 32, 0), 1 << 20),
    )
    text = (ROOT / "docs" / "tiering.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ GB \| (\S+) \| (\d+) \| (\S+) \| (\d+)% \|$", text, re.MULTILINE)
    assert len(rows) == 3
    for room, sequences, hot, share in rows:
        places = int((float(room) - size.fixed - pages * size.page) / size.resident_block)
        assert int(float(room) / (pages * size.page + min_memory * size.resident_block)) == int(sequences)
        assert f"{places:,}" == hot and round(100 * places / (pages - 1)) == int(share)


def test_tokens_from_which_steps_are_sparse_need_places_too() -> None:
    short = config(3000 * bytes_per_page(), GPU)
    long = replace(short, attention=replace(short.attention, from_tokens=30_000))
    assert made(short)
    with pytest.raises(ConfigError, match=r"lower .* attention.from_tokens"):
        made(long)


@pytest.mark.parametrize(
    "chunk, dtype, kv, min_memory",
    [
        (4096, "bfloat16", "auto", 0), (1024, "bfloat16", "auto", 1715), (2048, "float32", "auto", 3429),
        (1024, "bfloat16", "fp8", 0), (512, "bfloat16", "fp8", 884), (1024, "bfloat16", "k16v8", 1300),
    ],
)  # fmt: skip
def test_short_chunks_wait_for_the_link(chunk: int, dtype: str, kv: str, min_memory: int) -> None:
    """Seven query heads read each KV head: 1,715 tokens are computed in the time that their prefix takes in bf16."""
    message = short_chunk_warning(load_spec("qwen2.5-7b"), dtype, kv, chunk)
    assert (message is not None) == (min_memory > 0)
    if message is not None:
        assert f"chunks of {chunk:,} tokens" in message and f"decode.prefill_chunk={min_memory}" in message
