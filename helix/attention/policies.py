"""Creates the attention policy that a config names."""

from __future__ import annotations

from comm.base import Communicator
from helix.attention.block_sparse import BlockSparseAttention
from helix.attention.offloaded import OffloadedAttention
from helix.config import AttentionConfig, KVConfig
from helix.errors import ConfigError
from helix.kv_placement import BlockBudget, KVPlacement
from helix.packages import import_object
from kernels.sparse.select_blocks import MAX_PAGES


def budget_of(config: AttentionConfig) -> BlockBudget:
    """Returns the block budget of a config, over all ranks."""
    read = config.sink_blocks, config.local_blocks, config.num_blocks
    return BlockBudget(*read, config.from_tokens, config.parts, config.candidate_blocks)


def policy_of(config: AttentionConfig) -> type[BlockSparseAttention]:
    """Returns the policy class for sparse steps over a cache on the GPU."""
    if config.policy == "block_sparse":
        return BlockSparseAttention
    policy: type[BlockSparseAttention] = import_object("attention.policy", config.policy)
    return policy


def make_policy(
    config: AttentionConfig, placement: KVPlacement, max_length: int, comm: Communicator, kv: KVConfig
) -> BlockSparseAttention | None:
    """Creates the policy of sparse decode steps; returns None if all steps are dense.

    Raises:
        ConfigError: sequences of `max_length` tokens have more pages than the selection kernel supports.
    """
    if config.policy == "dense":
        return None
    kvp, page = placement.layout.kvp, placement.page_size
    if max_length > MAX_PAGES * page * kvp:
        raise ConfigError(
            f"attention.policy={config.policy} supports at most {MAX_PAGES} pages per sequence and rank, but sequences "
            f"of {max_length} tokens have more with kv.page_size={page} and layout.kvp={kvp}: set "
            f"kv.page_size={-(-max_length // (MAX_PAGES * kvp))} or more, or a lower decode.max_tokens"
        )
    global_comm = comm if config.choice == "global" else None
    given = budget_of(config), placement, max_length, comm.device, global_comm
    if kv.offload != "host":
        return policy_of(config)(*given)
    policy = OffloadedAttention(*given)
    policy.prefetches = kv.offload_prefetch
    return policy
