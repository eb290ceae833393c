"""Checks of settings against each other and against the model: one list, which a run goes through once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from helix.config import Config, ModelConfig
from helix.layout import HelixLayout
from helix.packages import import_object
from helix.schema import build

if TYPE_CHECKING:  # with the families of models
    from helix.models import DecoderSpec


def check(config: Config) -> None:
    """Raises ValueError, naming key, value and remedy, for a value out of range or settings that exclude each other."""
    build(type(config), asdict(config))  # what was composed was checked so: this is for configs made otherwise
    for rule in CONFIG_RULES:
        rule(config)


def check_model(config: Config, layout: HelixLayout, spec: DecoderSpec) -> None:
    """Raises ValueError, naming key, value and remedy, where settings or the layout do not fit the model."""
    check_layout(layout, spec)
    for rule in MODEL_RULES:
        rule(config, layout, spec)


def check_origins(config: Config) -> None:
    for origin in config.serve.cors:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#]+", origin):
            raise ValueError(
                f"serve.cors has {origin!r}, which is no origin: write scheme and host, as https://chat.example, or *"
            )


def check_pages(config: Config) -> None:
    if config.attention.policy != "dense" and config.blocks.page != config.attention.block:
        raise ValueError(
            f"kv.page_size={config.kv.page_size} and attention.block={config.attention.block} differ, but a block is a "
            f"page: leave out kv.page_size, or set attention.block={config.kv.page_size}"
        )


def check_imports(config: Config) -> None:
    """Raises ValueError where an import path names nothing."""
    for key, path in (("attention.policy", config.attention.policy), ("speculation.policy", config.speculation.policy)):
        if ":" in path:
            import_object(key, path)


def check_subblocks(config: Config) -> None:
    """Raises ValueError where parts of blocks cannot be chosen."""
    attention = config.attention
    if attention.subblock_size is None:
        return
    if (
        attention.subblock_size & (attention.subblock_size - 1)
        or attention.block % attention.subblock_size
        or attention.block == attention.subblock_size
    ):
        raise ValueError(
            f"attention.subblock_size={attention.subblock_size} must be a power of two that cuts "
            f"attention.block={attention.block} into "
            "equal parts: set another, or leave it out"
        )
    if attention.choice == "global":
        raise ValueError(
            f"attention.subblock_size={attention.subblock_size} is chosen by each rank from its own blocks: set "
            "attention.choice=local, or leave out attention.subblock_size"
        )
    if config.kv.offload == "host" and config.kv.dtype != "auto":
        raise ValueError(
            f"attention.subblock_size={attention.subblock_size} with kv.offload=host needs keys and values of "
            "equal size, and kv.dtype is "
            f"{config.kv.dtype}: leave out one of the two"
        )


def check_offload(config: Config) -> None:
    """Raises ValueError where keys and values cannot lie in host memory."""
    kv = config.kv
    for key, given in (("offload_host_bytes", kv.offload_host_bytes), ("offload_gpu_bytes", kv.offload_gpu_bytes)):
        if given is not None and kv.offload == "none":
            raise ValueError(f"kv.{key}={given:.0f} needs kv.offload=host, but kv.offload=none: set kv.offload=host")
    if kv.offload == "none":
        if kv.offload_prefetch:
            raise ValueError(
                "kv.offload_prefetch=true needs kv.offload=host (it prefetches blocks from host memory), but "
                "kv.offload=none"
            )
        return
    if config.attention.policy != "block_sparse":
        raise ValueError(
            f"kv.offload=host with attention.policy={config.attention.policy} would read the whole cache over the "
            "link in "
            "each step: set attention=block_sparse, or kv.offload=none"
        )
    if config.speculation.drafter in ("mtp", "eagle3"):
        raise ValueError(
            f"kv.offload=host moves the model's own layers, and speculation.drafter={config.speculation.drafter} "
            "has one "
            "more in their pages: set speculation=ngram or another drafter, or kv.offload=none"
        )
    if config.speculation.drafter == "sparse":
        raise ValueError(
            "kv.offload=host with speculation.drafter=sparse would verify over the whole cache in each step: set "
            "speculation=ngram or another drafter, or kv.offload=none"
        )
    if kv.offload_prefetch and config.attention.num_blocks == 0:
        raise ValueError(
            "kv.offload_prefetch=true guesses what attention.num_blocks=0 never chooses: set it to 1 or more, or "
            "leave out kv.offload_prefetch"
        )
    if kv.offload_host_bytes is None:
        raise ValueError(
            "kv.offload=host needs kv.offload_host_bytes, the bytes of host memory that each rank pins: a "
            "machine's memory may "
            "grow on demand, so that what is free says nothing"
        )


def check_snapshots(config: Config) -> None:
    if config.kv.host_snapshots and not (config.kv.snapshots and config.kv.prefix_cache):
        raise ValueError(
            f"kv.host_snapshots={config.kv.host_snapshots} takes what kv.snapshots={config.kv.snapshots} has no room "
            f"for, and kv.prefix_cache is {str(config.kv.prefix_cache).lower()}: set kv.snapshots to 1 or more and "
            "kv.prefix_cache=true, or leave out kv.host_snapshots"
        )


def check_resume(config: Config) -> None:
    if config.decode.resume and config.decode.output is None:
        raise ValueError("decode.resume=true continues decode.output, which is not set")


def check_weights(config: ModelConfig, key: str) -> None:
    """Raises ValueError, naming what to set under `key`, if a model has neither a checkpoint nor random weights."""
    if config.path is None and config.load == "checkpoint":
        place = " in place of model=NAME" if key == "model" else ""
        raise ValueError(
            f"a shape has no weights: set {key}.path=DIR{place}, a checkpoint's directory, or {key}.load=random for "
            "random weights"
        )


def check_layout(layout: HelixLayout, spec: DecoderSpec) -> None:
    """Raises ValueError if the model cannot be spread over the layout."""
    layout.check_heads(spec.attention.q_heads, spec.attention.kv_heads)
    experts = None if spec.experts is None else spec.experts.experts
    if layout.ep > 1 and experts is None:
        raise ValueError(f"layout.ep={layout.ep} but the model has no experts: set layout.ep=1")
    if experts is not None and layout.ep > experts:
        raise ValueError(
            f"layout.ep={layout.ep} but the model has {experts} experts, so that some ranks would hold none: "
            f"set layout.ep to {experts} or less, and the rest splits each expert (layout.tpf)"
        )


def check_cache(config: Config, layout: HelixLayout, spec: DecoderSpec) -> None:
    """Raises ValueError if keys and values cannot be kept as kv.dtype has it."""
    what = f"kv.dtype={config.kv.dtype}"
    if config.kv.dtype == "auto":
        return
    check_latents(config, spec)
    if not spec.full:
        raise ValueError(f"{what}: all layers of the model have windows, which stay as they are: set auto")


def check_latents(config: Config, spec: DecoderSpec) -> None:
    """Raises ValueError if kv.dtype is for keys and values, or index keys, that the model does not have."""
    if spec.attention.latent is not None and config.kv.dtype == "k16v8":
        raise ValueError("kv.dtype=k16v8: the model's latents (MLA) are keys and values at once: set fp8 or auto")
    if config.kv.dtype == "fp8_all" and not spec.indexers:
        raise ValueError("kv.dtype=fp8_all: the model has no index keys (DSA): set fp8 or auto")


def check_attention(config: Config, layout: HelixLayout, spec: DecoderSpec) -> None:
    """Raises ValueError if queries cannot choose the blocks that they read."""
    attention = config.attention
    if attention.policy == "dense":
        return
    what = f"attention.policy={attention.policy}"
    if spec.attention.latent is not None:
        raise ValueError(f"{what} chooses by the keys of heads, and the model has latents (MLA): set attention=dense")
    if not spec.full:
        raise ValueError(f"{what}: every layer of the model has a sliding window already: set attention=dense")
    drafts = 0 if config.speculation.drafter == "none" else config.speculation.gamma
    min_blocks = 1 + -(-drafts // attention.block)
    if attention.local_blocks < min_blocks:
        raise ValueError(
            f"attention.local_blocks={attention.local_blocks} blocks of attention.block={attention.block} tokens do "
            f"not hold an unfinished block and speculation.gamma={drafts} drafts: set at least {min_blocks}"
        )
    if attention.choice == "local":
        return
    if attention.block != config.blocks.append:
        raise ValueError(
            f"attention.choice=global compares blocks of all ranks: attention.block={attention.block} must be "
            f"kv.append_block={config.blocks.append} (or set attention.choice=local)"
        )
    if config.hopb.may_cut:
        raise ValueError(
            f"attention.choice=global exchanges in the middle of attention, which {config.hopb} would cut: set "
            "hopb=off or attention.choice=local"
        )
    if layout.tpa > spec.attention.kv_heads:
        raise ValueError(
            f"attention.choice=global needs all query heads of a KV head on one rank; layout.tpa={layout.tpa} splits "
            f"those of the model's {spec.attention.kv_heads} KV heads: set a tpa of at most {spec.attention.kv_heads}"
        )


def check_sparse_drafter(config: Config, layout: HelixLayout, spec: DecoderSpec) -> None:
    """Raises ValueError if a model cannot draft for itself over few of its keys."""
    if config.speculation.drafter != "sparse":
        return
    what = "speculation.drafter=sparse"
    if spec.attention.latent is not None:
        raise ValueError(f"{what} chooses keys of heads, and the model has latents (MLA): set speculation=ngram")
    if not spec.full:
        raise ValueError(f"{what}: every layer of the model has a sliding window already: set speculation=ngram")
    if config.attention.policy != "dense":
        raise ValueError(
            f"{what} is verified over all keys, and attention.policy={config.attention.policy} reads a part of them: "
            "set attention=dense, or speculation=ngram"
        )
    page = config.blocks.page
    if page & (page - 1) or 1 < page < 16:
        raise ValueError(f"{what} takes pages of 1 token or of a power of two from 16 on, not kv.page_size={page}")


def check_data_parallel(config: Config, layout: HelixLayout, spec: DecoderSpec) -> None:
    """Raises ValueError if ranks that attend sequences of their own (mode dp) cannot do what the config wants."""
    if layout.mode != "dp":
        return
    what = f"layout.mode=dp with {layout.dp} ranks"
    if config.speculation.drafter != "none":
        raise ValueError(
            f"{what} draws one token a step, and speculation.drafter={config.speculation.drafter} several: set "
            "speculation=none or layout.mode=helix"
        )
    if config.attention.policy != "dense":
        raise ValueError(
            f"{what} reads all keys, and attention.policy={config.attention.policy} a part of them: set "
            "attention=dense or layout.mode=helix"
        )
    if config.hopb.may_cut:
        raise ValueError(f"{what} exchanges nothing in attention that {config.hopb} could overlap: set hopb=off")


def check_states(config: Config, layout: HelixLayout, spec: DecoderSpec) -> None:
    """Raises ValueError if layers that keep a state of each sequence cannot do what the config wants."""
    if not spec.has_states:
        if config.kv.host_snapshots:
            raise ValueError(
                f"kv.host_snapshots={config.kv.host_snapshots} are copies of states, and the model's layers keep none: "
                "leave it out"
            )
        return
    if config.kv.host_snapshots and config.speculation.drafter in ("mtp", "eagle3"):
        raise ValueError(
            f"kv.host_snapshots={config.kv.host_snapshots} are for prefix hits, which models with states do not have "
            f"with speculation.drafter={config.speculation.drafter}: leave it out, or set speculation=ngram"
        )
    why = "is not supported for models whose layers keep states (Gated DeltaNet)"
    if layout.mode == "dp":
        raise ValueError(f"layout.mode=dp {why}: set layout.mode=helix")
    if config.speculation.drafter == "sparse":
        raise ValueError(f"speculation.drafter=sparse {why}: set speculation=ngram")


CONFIG_RULES: tuple[Callable[[Config], None], ...] = (
    check_origins, check_imports, check_pages, check_subblocks, check_offload, check_snapshots, check_resume,
)  # fmt: skip
MODEL_RULES: tuple[Callable[[Config, HelixLayout, DecoderSpec], None], ...] = (
    check_cache, check_attention, check_sparse_drafter, check_data_parallel, check_states,
)  # fmt: skip
