"""Needles over a KV cache in host memory: `helix bench offload-needles`.

The demo model looks for a numbered line in 32K tokens of code: with the cache on the GPU, then in host memory, with
resident blocks for a third of the cache, and for no more than the sequences select in one step. Prompts are prefilled
over the same cache, in chunks. All on one rank, then on eight that are threads of this process and share one GPU.
`found` counts right answers, `same` answers whose tokens all equal those with the cache on the GPU.
"""

from __future__ import annotations

from functools import cache
from itertools import chain

import torch

from benchmarks.quality.needles import SOURCES, make
from benchmarks.runner import BenchContext, Row
from comm.loopback import LoopbackWorld, run_ranks
from helix.attention.offloaded import OffloadedAttention
from helix.attention.policies import make_policy
from helix.config import AttentionConfig, Config, DecodeConfig, KVConfig, ModelConfig
from helix.engine.inbox import Inbox
from helix.engine.request import Request
from helix.kv_placement import KVPlacement
from helix.layout import HelixLayout
from helix.models.decoder import Decoder
from helix.models.loading import Checkpoint
from helix.setup.engine import build_engine
from helix.setup.offload import offload_bytes
from helix.setup.parts import make_spec
from helix.tokenizer import load_tokenizer
from helix.worker.kv_cache import with_bounds
from helix.worker.kv_cache_spec import EngineSizes, dtype_name
from helix.worker.offloaded_cache import OffloadedCache
from launch.inputs.compose import ROOT

DEMO = ROOT / "assets" / "demo-model"
PAGE, BATCH, CHUNK = 128, 4, 8192
THIRD, MIN_SHARE = 1 / 3, 0.0  # shares of the blocks that can be resident; at least one selection always can
Answers = list[tuple[int, ...]]


@cache
def prompts(length: int, count: int) -> tuple[list[list[int]], list[str]]:
    """Returns the prompts' token ids, and the number that each hides."""
    tokenizer = load_tokenizer(str(DEMO))
    assert tokenizer is not None
    lines = make(DEMO / "tokenizer.json", SOURCES, length, count)
    return [tokenizer.encode(str(x["prompt"])) for x in lines], [str(x["id"]).split("-")[1] for x in lines]


def config(kvp: int, share: float | None, length: int, dtype: torch.dtype) -> Config:
    """Returns a run's config with resident blocks for a share of the cache; None: the cache is on the GPU."""
    found = Config(
        model=ModelConfig(path=str(DEMO)),
        kv=KVConfig(append_block=PAGE, page_size=PAGE, tokens=BATCH * length, memory_fraction=0.5),
        attention=AttentionConfig("block_sparse", num_blocks=32 if length > 8192 else 4, from_tokens=0),
        decode=DecodeConfig(prefill_chunk=CHUNK),
    )
    if share is None:
        return found
    spec, placement = make_spec(found), KVPlacement(HelixLayout.create("helix", kvp), 0, PAGE, PAGE)
    cache_specs = with_bounds(spec.kv_cache_specs(placement.layout, 0, dtype_name(dtype)), dtype_name(dtype))
    size = offload_bytes(cache_specs, placement, EngineSizes(BATCH, length, CHUNK))
    found.kv.offload, found.kv.offload_host_bytes = "host", 8e9
    world = LoopbackWorld(1)
    policy = make_policy(found.attention, placement, length, world.communicator(0, [0]), found.kv)
    assert isinstance(policy, OffloadedAttention)
    pages = placement.stripes.pages_for_all(BATCH * length, BATCH)
    resident_blocks = max(int(share * pages), BATCH * policy.min_resident_blocks(0))
    found.kv.offload_gpu_bytes = float(size.fixed + pages * size.page + resident_blocks * size.resident_block)
    return found


@cache
def answers(kvp: int, share: float | None, length: int, count: int, device: str) -> tuple[Answers, float, float]:
    """Returns the answers' tokens, the hit rate of selected blocks, and the share of blocks that could be resident."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layout, run_config = HelixLayout.create("helix", kvp), config(kvp, share, length, dtype)
    requests = [Request(i, tuple(ids), 8) for i, ids in enumerate(prompts(length, count)[0])]

    def body(world: LoopbackWorld, rank: int) -> tuple[Answers, list[int], float]:
        comm = world.communicator(rank, layout.kvp_group(rank))
        model = Decoder(make_spec(run_config), layout, comm, dtype, comm.device)
        Checkpoint(DEMO).load(model.weights)
        engine = build_engine(layout, model, run_config, BATCH, BATCH * length)
        outputs: Answers = [()] * count
        for update in chain.from_iterable(engine.serve(Inbox.of(requests))):
            outputs[int(update.id)] += update.new_token_ids
        engine.close()
        cache, counts, resident_share = engine.runner.cache, [0, 0], 1.0
        if isinstance(cache, OffloadedCache):
            counts, resident_share = cache.fetch_counts.tolist(), cache.resident.num_blocks / cache.pages
        return outputs, counts, resident_share

    ranks = run_ranks(kvp, body, timeout_s=600.0, device=device)
    hits, misses = (sum(counts[i] for _, counts, _ in ranks) for i in range(2))
    return ranks[0][0], hits / max(hits + misses, 1), ranks[0][2]


def measure(ctx: BenchContext, kvp: int, share: float | None) -> list[Row]:
    """Measures one run, compared with the run whose cache is on the GPU."""
    length, count = (32768, 24 if kvp == 1 else 8) if ctx.gpu else (2048, 2)
    tokenizer, numbers = load_tokenizer(str(DEMO)), prompts(length, count)[1]
    assert tokenizer is not None
    whole = answers(kvp, None, length, count, ctx.device.type)[0]
    found, hits, resident_share = answers(kvp, share, length, count, ctx.device.type)
    texts = [tokenizer.decode(ids) for ids in found]
    row: Row = {
        "kind": "offload-needles",
        "ranks": kvp,
        "length": length,
        "offload": "none" if share is None else "host",
    }
    row |= {
        "resident_blocks": resident_share,
        "prompts": count,
        "same": sum(a == b for a, b in zip(found, whole, strict=True)),
    }
    right = sum(text.startswith(f" {number}.") for text, number in zip(texts, numbers, strict=True))
    return [row | {"found": right, "hits": None if share is None else hits}]


def cases(ctx: BenchContext) -> list[tuple[int, float | None]]:
    """Returns ranks and resident shares."""
    return [(kvp, share) for kvp in ((1, 8) if ctx.gpu else (1, 2)) for share in (None, THIRD, MIN_SHARE)]
