"""What a KV cache in host memory takes of the GPU, and what it costs to fetch the latents that indexers select."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from helix.layers.specs import MLASpec
from helix.planner.hardware import EXTRAPOLATED, Array
from helix.planner.layer import Layer
from helix.planner.phases import Phase
from helix.setup.buffers import PIECE_TOKENS
from helix.worker.kv_cache_spec import LISTS

NUMBER_BYTES = 4  # of an entry of the resident-block map, and of a table
RUN_EDGE_PAGES = 2  # pages that a run of tokens touches but does not fill
CHUNK_TOKENS = 8192  # of a prompt chunk, besides two pieces of the tokens before it


def blocks_on_gpu(layer: Layer, pages: Array) -> tuple[Array, Array]:
    """Returns the minimum GPU bytes of offloaded keys and values: for prompts, and per sequence of `pages` pages.

    The same formula as `helix.setup.offload.offload_bytes`.
    """
    layers, sparse, item = len(layer.spec.full), layer.options.sparse, layer.item
    assert sparse is not None
    block = 2 * sparse.block * layer.head_dim * item["kv"]  # a page of one head
    page = layers * layer.kv * (2 * layer.head_dim * item["plain_kv"] * sparse.bounds_per_block + NUMBER_BYTES)
    resident_block_bytes = layer.kv * (layers * (block + 4 * NUMBER_BYTES) + LISTS * 2 * NUMBER_BYTES)
    drafts = layer.options.step_tokens - 1
    whole = replace(sparse, topk=sparse.touched_blocks, parts=1)
    resident_blocks = (
        whole.blocks(layer.points.kvp) + RUN_EDGE_PAGES + drafts * -(-sparse.touched_blocks // layer.points.kvp)
    )
    prompts = (2 * PIECE_TOKENS + CHUNK_TOKENS) / sparse.block * layer.kv * block
    return prompts, pages * page + layers * layer.kv * block + resident_blocks * resident_block_bytes


def fetched_bytes(layer: Layer) -> Array:
    """Returns the GPU bytes of the latents that a sequence's queries of a step select, in layers that share them.

    The same formula as `helix.worker.offloaded_latents.FetchBuffer.bytes`: one rank may have all of them.
    """
    mixer = layer.mixer
    assert isinstance(mixer, MLASpec) and mixer.topk is not None
    per_token = layer.spec.most_sharing_layers * layer.token_numbers() * layer.item["kv"] + NUMBER_BYTES
    return layer.options.step_tokens * mixer.topk * per_token


def fetch_latents(layer: Layer, others_s: Array) -> list[Phase]:
    """Lists the phases of a step that fetch latents from host memory.

    A layer with an indexer waits for its own. Those that share its selection are fetched while it runs, so the step
    waits for them if the link takes longer than all other phases; each of them fetches the step's own tokens again.

    Args:
        others_s: seconds of the other phases of all layers.

    Raises:
        ValueError: the rate of the link is unknown.
    """
    spec, mixer, hardware = layer.spec, layer.mixer, layer.hardware
    assert isinstance(mixer, MLASpec) and mixer.topk is not None
    if (rate := hardware.link_bytes_per_s) is None:
        raise ValueError(
            f"hardware {hardware.name} has no link_bytes_per_s, the rate of fetching from host memory: add it to its "
            "description (helix calibrate), or leave out kv.offload=host"
        )
    tokens = min(mixer.topk, layer.length) / layer.points.kvp
    come_s = layer.rows * tokens * layer.token_numbers() * layer.item["kv"] / rate.value
    layers, selecting, launch_s, none = len(spec.layers), len(spec.indexers), hardware.kernel_s.value, layer.zeros
    level = np.full(len(layer.points), EXTRAPOLATED)  # measured for blocks of 64 KB
    fetch = Phase("fetch", layers * launch_s + selecting * come_s, none, none, none, none + layers, level)
    exposed_s = np.maximum(0.0, layers * come_s - others_s - fetch.seconds)
    return [fetch, Phase("wait for the link", exposed_s, none, none, none, none, level)]
