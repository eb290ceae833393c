"""Allocates host memory and files for prefixes that leave the GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comm.base import Communicator
from helix.config import Config, ModelConfig
from helix.errors import ConfigError
from helix.kv_placement import KVPlacement
from helix.models.decoder import Decoder
from helix.setup.parts import resolved_config
from helix.speculation import Drafter
from helix.worker.host_store import host_store
from helix.worker.kv_cache import KVCache
from helix.worker.slabs import Slabs, slab_bytes
from helix.worker.stripe_files import StripeFiles, record_bytes

FORMAT = 1  # of slabs and hashes
SAMPLE_BYTES, SAMPLES = 4096, 16  # of each file of weights
DESCRIPTION = "identity.json"


def make_slabs(
    config: Config, model: Decoder, cache: KVCache, drafter: Drafter, placement: KVPlacement, comm: Communicator
) -> Slabs:
    """Allocates kv.prefix_host_bytes as slabs, as many as fit on every rank, and kv.prefix_dir; a collective call.

    Raises:
        ConfigError: either holds no stripe, a host cannot pin the memory, or a rank cannot use the directory.
    """
    kv, stripes = config.kv, placement.stripes
    tensors = [*cache.paged_tensors, *drafter.paged_tensors]
    size = slab_bytes(tensors, stripes.pages)
    max_bytes = max(comm.all_gather_object(size))
    slab_count = int(kv.prefix_host_bytes) // max_bytes
    records = int(kv.prefix_disk_bytes) // record_bytes(max_bytes, stripes.tokens)
    for key, value, count in (
        ("kv.prefix_host_bytes", kv.prefix_host_bytes, slab_count),
        ("kv.prefix_disk_bytes", kv.prefix_disk_bytes, records),
    ):
        if value and not count:
            raise ConfigError(
                f"{key}={value:.0f} holds no stripe of {stripes.tokens} tokens, which takes {max_bytes} bytes on a "
                f"rank: set at least {record_bytes(max_bytes, stripes.tokens)}, or leave it out"
            )
    comm.enable_reports()
    store = host_store((slab_count, size), torch.uint8, comm, "kv.prefix_host_bytes")
    slabs = Slabs(tensors, stripes.pages, store, max_bytes, comm.device, comm.report, cache.snapshot_memory)
    snapshot = cache.snapshot_memory(0) if cache.snapshots and drafter.resumes_from_snapshots else []
    slabs.snapshot_slabs = max(comm.all_gather_object(-(-sum(map(len, snapshot)) // size)))
    if kv.prefix_dir is not None:
        description = describe(config, model, placement, comm, tensors, snapshot)
        try:
            open_files(slabs, Path(kv.prefix_dir), description, records, placement, comm)
        except ConfigError:
            slabs.close()
            raise
    return slabs


def open_files(
    slabs: Slabs, folder: Path, description: dict[str, Any], records: int, placement: KVPlacement, comm: Communicator
) -> None:
    """Opens this rank's files below the slabs; a collective call.

    Raises:
        ConfigError: a rank cannot use its directory; raised on every rank.
    """
    content = {key: value for key, value in description.items() if key != "path"}
    slabs.identity = sha256(json.dumps(content, sort_keys=True).encode()).digest()
    layout, reason, of_model = placement.layout, "", folder / slabs.identity.hex()[:16]
    name = f"{layout.mode}-kvp{layout.kvp}-tpa{layout.tpa}-r{comm.rank}"
    own = sha256(slabs.identity + name.encode()).digest()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        of_model.mkdir(mode=0o700, exist_ok=True)
        if comm.rank == 0:
            (of_model / DESCRIPTION).write_text(json.dumps(description, indent=1, sort_keys=True), encoding="utf-8")
        slabs.files = StripeFiles(of_model / name, own, slabs.slabs, records, placement.stripes.tokens, comm.report)
        slabs.num_records = records
    except OSError as error:
        reason = (
            f"rank {comm.rank} cannot use kv.prefix_dir={folder}: {of_model / name}: {error.strerror}: set another "
            "directory, or leave out kv.prefix_dir"
        )
    if reasons := [error for error in comm.all_gather_object(reason) if error]:
        raise ConfigError(reasons[0])


def describe(
    config: Config,
    model: Decoder,
    placement: KVPlacement,
    comm: Communicator,
    tensors: Sequence[Tensor],
    snapshot: Sequence[Tensor] = (),
) -> dict[str, Any]:
    """Returns all that the content of slabs depends on, the same on every rank; a collective call.

    Args:
        tensors, snapshot: whose pages, and parts of which, are in slabs.
    """
    slab_parts = [[str(t.dtype), t.shape[0], *t.shape[2:]] for t in tensors]
    shapes = comm.all_gather_object([slab_parts, [len(layer) for layer in snapshot]])
    if comm.rank > 0:
        return comm.broadcast_object(None)
    drafts = config.speculation
    return comm.broadcast_object(
        {
            "format": FORMAT,
            "path": config.model.path,
            "model": _describe_model(config.model),
            "dtype": str(model.weights.dtype),
            "seed": config.seed if config.model.load == "random" else None,
            "layout": asdict(placement.layout),
            "kv": [config.kv.dtype, placement.append_block, placement.page_size],
            "slabs": shapes,
            "drafter": drafts.drafter if drafts.drafter in ("mtp", "eagle3", "model") else None,
            "draft_layer": _samples(Path(drafts.path)) if drafts.drafter == "eagle3" and drafts.path else None,
            "draft_model": [_describe_model(drafts.model), asdict(drafts.layout)]
            if drafts.drafter == "model"
            else None,
        }
    )


def _describe_model(model: ModelConfig) -> dict[str, Any]:
    return {
        "config": resolved_config(model),
        "weights": [model.weights, model.activations, model.load],
        "files": {} if model.path is None or model.load == "random" else _samples(Path(model.path)),
    }


def _samples(path: Path) -> dict[str, str]:
    """Returns digests of files of weights: of sizes, headers (names, dtypes, shapes) and samples of the tensors."""
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        digest, size = sha256(), file.stat().st_size
        digest.update(str(size).encode())
        with file.open("rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(min(header, size)))
            for i in range(SAMPLES):
                stream.seek(max(size - SAMPLE_BYTES, 0) * i // (SAMPLES - 1))
                digest.update(stream.read(SAMPLE_BYTES))
        found[file.name] = digest.hexdigest()
    return found
