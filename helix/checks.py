"""Checks of settings against each other and against the model, run once at startup.

Each rule raises ValueError with the key, its value and what to set instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from helix.config import Config, ModelConfig
from helix.layout import HelixLayout
from helix.packages import import_object
from helix.schema import build
from helix.worker.kv_cache_spec import MAX_RING_TOKENS

if TYPE_CHECKING:  # imports all model families
    from helix.models import DecoderSpec


def check(config: Config) -> None:
    """Raises ValueError if a value is out of range or settings exclude each other."""
    build(type(config), asdict(config))  # for configs made in Python: composed ones were checked already
    for rule in CONFIG_RULES:
        rule(config)


def check_model(config: Config, layout: HelixLayout, spec: DecoderSpec) -> None:
    """Raises ValueError if the settings or the layout do not fit the model."""
    check_layout(layout, spec)
    for rule in MODEL_RULES:
        rule(config, layout, spec)


def check_origins(config: Config) -> None:
    """Checks that `serve.cors` lists origins."""
    for origin in config.serve.cors:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#]+", origin):
            raise ValueError(
                f"serve.cors has {origin!r}, which is not an origin: write scheme and host, such as "
                "https://chat.example, or *"
            )


def check_pages(config: Config) -> None:
    """Checks that blocks of sparse attention are pages of the cache."""
    if config.attention.policy != "dense" and config.blocks.page != config.attention.block:
        raise ValueError(
            f"kv.page_size={config.kv.page_size} and attention.block={config.attention.block} must be equal, because "
            f"a block is a page: leave out kv.page_size, or set attention.block={config.kv.page_size}"
        )


def check_imports(config: Config) -> None:
    """Checks that import paths name something."""
    for key, path in (("attention.policy", config.attention.policy), ("speculation.policy", config.speculation.policy)):
        if ":" in path:
            import_object(key, path)


def check_subblocks(config: Config) -> None:
    """Checks that queries can select subblocks."""
    attention = config.attention
    if attention.subblock_size is None:
        return
    if (
        attention.subblock_size & (attention.subblock_size - 1)
        or attention.block % attention.subblock_size
        or attention.block == attention.subblock_size
    ):
        raise ValueError(
            f"attention.subblock_size={attention.subblock_size} must be a power of two that divides "
            f"attention.block={attention.block} and is smaller: set another, or leave it out"
        )
    if attention.choice == "global":
        raise ValueError(
            f"attention.subblock_size={attention.subblock_size} needs attention.choice=local (each rank selects "
            "subblocks of its own blocks): set it, or leave out attention.subblock_size"
        )
    if config.kv.offload == "host" and config.kv.dtype != "auto":
        raise ValueError(
            f"attention.subblock_size={attention.subblock_size} with kv.offload=host needs kv.dtype=auto, but "
            f"kv.dtype={config.kv.dtype}: leave out kv.dtype or attention.subblock_size"
        )


def check_offload(config: Config) -> None:
    """Checks that keys and values can be offloaded to host memory."""
    kv = config.kv
    for key, given in (("offload_host_bytes", kv.offload_host_bytes), ("offload_gpu_bytes", kv.offload_gpu_bytes)):
        if given is not None and kv.offload == "none":
            raise ValueError(
                f"kv.{key}={given:.0f} needs kv.offload=host, but kv.offload=none: set kv.offload=host, or leave "
                f"out kv.{key}"
            )
    if kv.offload == "none":
        if kv.offload_prefetch:
            raise ValueError(
                "kv.offload_prefetch=true needs kv.offload=host (it prefetches blocks from host memory), but "
                "kv.offload=none: set kv.offload=host, or leave out kv.offload_prefetch"
            )
        return
    if config.attention.policy == "block_sparse" and config.speculation.drafter in ("mtp", "eagle3"):
        raise ValueError(
            f"kv.offload=host offloads only the model's own layers, and speculation.drafter="
            f"{config.speculation.drafter} adds a layer to their pages: set speculation=ngram or another drafter, or "
            "kv.offload=none"
        )
    if config.speculation.drafter == "sparse":
        raise ValueError(
            "kv.offload=host with speculation.drafter=sparse would read the whole cache over the link to verify "
            "drafts: set speculation=ngram or another drafter, or kv.offload=none"
        )
    if kv.offload_prefetch and config.attention.num_blocks == 0:
        raise ValueError(
            "kv.offload_prefetch=true prefetches selected blocks, and attention.num_blocks=0 selects none: set "
            "attention.num_blocks to 1 or more, or leave out kv.offload_prefetch"
        )
    if kv.offload_host_bytes is None:
        raise ValueError(
            "kv.offload=host needs kv.offload_host_bytes, the bytes of host memory that each rank may pin: set "
            "kv.offload_host_bytes=BYTES"
        )


def check_snapshots(config: Config) -> None:
    """Checks that host snapshots have GPU snapshots to evict, and regular snapshots have room."""
    if config.kv.snapshot_every and not (config.kv.snapshots and config.kv.prefix_cache):
        raise ValueError(
            f"kv.snapshot_every={config.kv.snapshot_every} takes prefix-cache snapshots, but "
            f"kv.snapshots={config.kv.snapshots} and kv.prefix_cache={str(config.kv.prefix_cache).lower()}: set "
            "kv.snapshots to 1 or more and kv.prefix_cache=true, or leave out kv.snapshot_every"
        )
    if config.kv.host_snapshots and not (config.kv.snapshots and config.kv.prefix_cache):
        raise ValueError(
            f"kv.host_snapshots={config.kv.host_snapshots} holds prefix-cache snapshots that the GPU evicts, but "
            f"kv.snapshots={config.kv.snapshots} and kv.prefix_cache={str(config.kv.prefix_cache).lower()}: set "
            "kv.snapshots to 1 or more and kv.prefix_cache=true, or leave out kv.host_snapshots"
        )


def check_prefix_store(config: Config) -> None:
    """Checks that there is a prefix cache on the GPU that host memory can extend."""
    kv, what = config.kv, f"kv.prefix_host_bytes={config.kv.prefix_host_bytes:.0f}"
    if kv.prefix_dir is not None and not (kv.prefix_host_bytes and kv.prefix_disk_bytes):
        raise ValueError(
            f"kv.prefix_dir={kv.prefix_dir} needs kv.prefix_host_bytes (prefixes go through host memory) and "
            f"kv.prefix_disk_bytes, but they are {kv.prefix_host_bytes:.0f} and {kv.prefix_disk_bytes:.0f}: set both "
            "to bytes per rank, or leave out kv.prefix_dir"
        )
    if kv.prefix_disk_bytes and kv.prefix_dir is None:
        raise ValueError(
            f"kv.prefix_disk_bytes={kv.prefix_disk_bytes:.0f} needs kv.prefix_dir: set it, or leave out "
            "kv.prefix_disk_bytes"
        )
    if not kv.prefix_host_bytes:
        return
    if not kv.prefix_cache:
        raise ValueError(
            f"{what} extends the prefix cache, but kv.prefix_cache=false: set kv.prefix_cache=true, or leave out "
            "kv.prefix_host_bytes"
        )
    if kv.offload == "host":
        raise ValueError(
            f"{what} holds prefixes that leave the GPU, but kv.offload=host keeps all keys and values in host memory: "
            "raise kv.offload_host_bytes instead, or set kv.offload=none"
        )


def check_resume(config: Config) -> None:
    """Checks that there is an output file to continue."""
    if config.decode.resume and config.decode.output is None:
        raise ValueError("decode.resume=true needs decode.output, the file to continue: set decode.output=FILE.jsonl")


def check_weights(config: ModelConfig, key: str) -> None:
    """Checks that a model has a checkpoint or random weights; the error names what to set under `key`."""
    if config.path is None and config.load == "checkpoint":
        place = " instead of model=NAME" if key == "model" else ""
        raise ValueError(
            f"this model is a shape without weights: set {key}.path=DIR{place} (a checkpoint's directory), or "
            f"{key}.load=random for random weights"
        )


def check_layout(layout: HelixLayout, spec: DecoderSpec) -> None:
    """Checks that the layout can shard the model."""
    for heads in spec.heads:
        layout.check_heads(*heads)
    experts = None if spec.experts is None else spec.experts.experts
    if layout.ep > 1 and experts is None:
        raise ValueError(f"layout.ep={layout.ep}, but the model has no experts: set layout.ep=1")
    if experts is not None and layout.ep > experts:
        raise ValueError(
            f"layout.ep={layout.ep}, but the model has only {experts} experts: set layout.ep to at most {experts}; "
            "layout.tpf splits each expert over the other ranks"
        )


def check_offloaded_model(config: Config, layout: HelixLayout, spec: DecoderSpec) -> None:
    """Checks that steps read a small part of a cache in host memory."""
    if config.kv.offload == "none":
        return
    if spec.indexers:
        if config.kv.offload_prefetch:
            raise ValueError(
                "kv.offload_prefetch=true guesses the blocks of attention=block_sparse; this model's indexers say "
                "exactly which tokens its next layers read, and these are fetched ahead in any case: leave it out"
            )
        if layout.mode == "dp":
            raise ValueError("kv.offload=host does not support layout.mode=dp: set layout.mode=helix")
        return
    if spec.attention.latent is not None:
        raise ValueError(
            "kv.offload=host supports latents (MLA) only in models with indexers (DSA); this one would read all of "
            "them over the link in each step: set kv.offload=none"
        )
    if config.attention.policy != "block_sparse":
        raise ValueError(
            f"kv.offload=host with attention.policy={config.attention.policy} would read the whole cache over the "
            "link in each step: set attention=block_sparse, or kv.offload=none"
        )


def check_cache(config: Config, layout: HelixLayout, spec: DecoderSpec) -> None:
    """Checks that `kv.dtype` fits the model's cache."""
    what = f"kv.dtype={config.kv.dtype}"
    if config.kv.dtype == "auto":
        return
    check_latents(config, spec)
    if not spec.full:
        raise ValueError(
            f"{what}: all layers of the model have sliding windows, which stay in model.dtype: set kv.dtype=auto"
        )


def check_length(config: Config, layout: HelixLayout, spec: DecoderSpec) -> None:
    """Checks that `decode.max_length` is within the model's context."""
    length, most = config.decode.max_length, spec.max_positions
    if length is not None and length > most:
        raise ValueError(
            f"decode.max_length={length} exceeds the model's {spec.context}: set at most {most}{spec.stretched(length)}"
        )


def check_latents(config: Config, spec: DecoderSpec) -> None:
    """Checks that the model has the keys, values or index keys that `kv.dtype` quantizes."""
    if spec.attention.latent is not None and config.kv.dtype == "k16v8":
        raise ValueError(
            "kv.dtype=k16v8: with latents (MLA), keys and values are the same data: set kv.dtype=fp8 or kv.dtype=auto"
        )
    if config.kv.dtype == "fp8_all" and not spec.indexers:
        raise ValueError("kv.dtype=fp8_all: the model has no index keys (DSA): set kv.dtype=fp8 or kv.dtype=auto")


def check_attention(config: Config, layout: HelixLayout, spec: DecoderSpec) -> None:
    """Checks that queries can select blocks in this model and layout."""
    attention = config.attention
    if attention.policy == "dense":
        return
    what = f"attention.policy={attention.policy}"
    if spec.attention.latent is not None:
        raise ValueError(f"{what} does not support latents (MLA), which this model has: set attention=dense")
    if not spec.full:
        raise ValueError(f"{what}: every layer of the model already has a sliding window: set attention=dense")
    if spec.full_layers_differ:
        raise ValueError(f"{what} needs the same heads in every layer with full attention: set attention=dense")
    drafts = 0 if config.speculation.drafter == "none" else config.speculation.gamma
    min_blocks = 1 + -(-drafts // attention.block)
    if attention.local_blocks < min_blocks:
        raise ValueError(
            f"attention.local_blocks={attention.local_blocks} is too few for the unfinished block and "
            f"speculation.gamma={drafts} drafts, with attention.block={attention.block}: set attention.local_blocks to "
            f"at least {min_blocks}"
        )
    if attention.choice == "local":
        return
    if attention.block != config.blocks.append:
        raise ValueError(
            f"attention.choice=global compares blocks of all ranks, so attention.block={attention.block} and "
            f"kv.append_block={config.blocks.append} must be equal: change one of them, or set attention.choice=local"
        )
    if config.hopb.may_cut:
        raise ValueError(
            f"attention.choice=global communicates in the middle of attention, so {config.hopb} cannot split it: set "
            "hopb=off or attention.choice=local"
        )
    if layout.tpa > spec.attention.kv_heads:
        raise ValueError(
            f"attention.choice=global needs all query heads of a KV head on one rank, but layout.tpa={layout.tpa} "
            f"exceeds the model's {spec.attention.kv_heads} KV heads: set layout.tpa to at most "
            f"{spec.attention.kv_heads}"
        )


def check_sparse_drafter(config: Config, layout: HelixLayout, spec: DecoderSpec) -> None:
    """Checks that the model can draft for itself over few of its keys."""
    if config.speculation.drafter != "sparse":
        return
    what = "speculation.drafter=sparse"
    policy = config.speculation.policy
    if spec.indexers and policy == "c2q":
        raise ValueError(
            f"speculation.policy={policy} selects by scores, but this model's indexers select (DSA): leave it out"
        )
    if (reach := config.speculation.reach) & (reach - 1):
        raise ValueError(f"speculation.reach={reach} must be 0 or a power of two")
    if spec.attention.latent is not None and policy == "quest":
        raise ValueError(
            f"speculation.policy={policy} does not support latents (MLA), which have no key bounds: leave it out"
        )
    if not spec.full:
        raise ValueError(f"{what}: every layer of the model already has a sliding window: set speculation=ngram")
    if spec.full_layers_differ:
        raise ValueError(f"{what} needs the same heads in every layer with full attention: set speculation=ngram")
    if config.attention.policy != "dense":
        raise ValueError(
            f"{what} verifies drafts with full attention, but attention.policy={config.attention.policy}: set "
            "attention=dense, or speculation=ngram"
        )
    page = config.blocks.page
    if page & (page - 1) or 1 < page < 16:
        raise ValueError(f"{what} needs kv.page_size=1 or a power of two of at least 16, not kv.page_size={page}")


def check_data_parallel(config: Config, layout: HelixLayout, spec: DecoderSpec) -> None:
    """Checks that mode dp (data-parallel attention) supports the settings."""
    if layout.mode != "dp":
        return
    what = f"layout.mode=dp with {layout.dp} ranks"
    if config.speculation.drafter != "none":
        raise ValueError(
            f"{what} does not support speculation, but speculation.drafter={config.speculation.drafter}: set "
            "speculation=none or layout.mode=helix"
        )
    if config.attention.policy != "dense":
        raise ValueError(
            f"{what} supports only dense attention, but attention.policy={config.attention.policy}: set "
            "attention=dense or layout.mode=helix"
        )
    if config.hopb.may_cut:
        raise ValueError(f"{what} has no exchange in attention that {config.hopb} could overlap: set hopb=off")
    if config.kv.prefix_host_bytes:
        raise ValueError(
            f"{what} has a prefix cache on each rank, which kv.prefix_host_bytes={config.kv.prefix_host_bytes:.0f} "
            "does not support: leave it out, or set layout.mode=helix"
        )


def check_states(config: Config, layout: HelixLayout, spec: DecoderSpec) -> None:
    """Checks that layers with recurrent states support the settings."""
    if not spec.has_states:
        return
    why = "is not supported for models with recurrent states (Gated DeltaNet)"
    if layout.mode == "dp":
        raise ValueError(f"layout.mode=dp {why}: set layout.mode=helix")


def check_model_snapshots(config: Config, layout: HelixLayout, spec: DecoderSpec) -> None:
    """Checks that a model has what snapshots keep."""
    limit = math.inf if config.kv.offload == "host" else MAX_RING_TOKENS
    if spec.has_states or any(window is not None and window <= limit for window in spec.windows):
        return
    for key in ("host_snapshots", "snapshot_every"):
        if value := getattr(config.kv, key):
            raise ValueError(
                f"kv.{key}={value} needs a model with recurrent states or with sliding windows of up to "
                f"{MAX_RING_TOKENS} tokens, and this one has neither: leave it out"
            )


CONFIG_RULES: tuple[Callable[[Config], None], ...] = (
    check_origins, check_imports, check_pages, check_subblocks, check_offload, check_snapshots, check_prefix_store,
    check_resume,
)  # fmt: skip
MODEL_RULES: tuple[Callable[[Config, HelixLayout, DecoderSpec], None], ...] = (
    check_cache, check_length, check_attention, check_offloaded_model, check_sparse_drafter, check_states,
    check_data_parallel, check_model_snapshots,
)  # fmt: skip
