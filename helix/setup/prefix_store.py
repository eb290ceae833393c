"""Allocates host memory for prefixes that leave the GPU."""

from __future__ import annotations

import torch

from comm.base import Communicator
from helix.config import KVConfig
from helix.errors import ConfigError
from helix.kv_placement import Stripes
from helix.speculation import Drafter
from helix.worker.host_store import host_store
from helix.worker.kv_cache import KVCache
from helix.worker.slabs import Slabs, slab_bytes


def make_slabs(config: KVConfig, cache: KVCache, drafter: Drafter, stripes: Stripes, comm: Communicator) -> Slabs:
    """Allocates kv.prefix_host_bytes as slabs, as many as fit on every rank; a collective call.

    Raises:
        ConfigError: it holds no stripe, or a host cannot pin it.
    """
    tensors = [*cache.paged_tensors, *drafter.paged_tensors]
    size = slab_bytes(tensors, stripes.pages)
    max_bytes = max(comm.all_gather_object(size))
    count = int(config.prefix_host_bytes) // max_bytes
    if count == 0:
        raise ConfigError(
            f"kv.prefix_host_bytes={config.prefix_host_bytes:.0f} holds no stripe of {stripes.tokens} tokens, which "
            f"takes {max_bytes} bytes on a rank: set at least that, or 0"
        )
    comm.enable_reports()
    store = host_store((count, size), torch.uint8, comm, "kv.prefix_host_bytes")
    return Slabs(tensors, stripes.pages, store, max_bytes, comm.device, comm.report)
