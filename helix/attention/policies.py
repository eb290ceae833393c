"""Creation of the attention policy that a config names."""

from __future__ import annotations

from comm.base import Communicator
from helix.attention.block_sparse import BlockSparseAttention
from helix.attention.tiered import TieredAttention
from helix.config import AttentionConfig, KVConfig
from helix.errors import ConfigError
from helix.packages import imported
from helix.placement import BlockBudget, Placement
from kernels.sparse.select_blocks import MOST_PAGES


def budget_of(config: AttentionConfig) -> BlockBudget:
    """Returns the budget of a config, over all ranks."""
    read = config.sink_blocks, config.local_blocks, config.topk
    return BlockBudget(*read, config.from_tokens, config.parts, config.candidate_blocks)


def policy_of(config: AttentionConfig) -> type[BlockSparseAttention]:
    """Returns the class of the policy of sparse steps over a cache on the GPU, which the config names."""
    if config.policy == "block_sparse":
        return BlockSparseAttention
    policy: type[BlockSparseAttention] = imported("attention.policy", config.policy)
    return policy


def make_policy(
    config: AttentionConfig, placement: Placement, max_length: int, comm: Communicator, kv: KVConfig
) -> BlockSparseAttention | None:
    """Creates the policy of sparse decode steps for a config and a cache like `kv`; returns None if all are dense.

    Raises:
        ConfigError: sequences of `max_length` tokens have more pages than the selection kernel supports.
    """
    if config.policy == "dense":
        return None
    kvp, page = placement.layout.kvp, placement.page_size
    if max_length > MOST_PAGES * page * kvp:
        raise ConfigError(
            f"attention.policy={config.policy} chooses among {MOST_PAGES} pages of a rank at most: sequences of "
            f"{max_length} tokens have more, in pages of kv.page_size={page} over layout.kvp={kvp} ranks; set "
            f"kv.page_size={-(-max_length // (MOST_PAGES * kvp))} or more, or decode.max_tokens lower"
        )
    over_all = comm if config.choice == "global" else None
    given = budget_of(config), placement, max_length, comm.device, over_all
    if kv.tier != "host":
        return policy_of(config)(*given)
    policy = TieredAttention(*given)
    policy.guesses = kv.ahead
    return policy
