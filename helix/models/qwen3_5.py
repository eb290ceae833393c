"""Qwen3.5, 3.6 and 3.8 (text): Gated DeltaNet in three of four layers, gated attention in the fourth."""

from __future__ import annotations

from typing import Any

from helix.models.qwen3_moe import shared_gated
from helix.models.qwen3_next import hybrid
from helix.models.spec import DecoderSpec


def spec_dense(config: Any) -> DecoderSpec:
    """Reads the config of a dense model."""
    return hybrid(config, "apart")


def spec_moe(config: Any) -> DecoderSpec:
    """Reads the config of a model with experts in every layer."""
    config.intermediate_size = config.moe_intermediate_size  # required, but there are no dense layers
    moe = shared_gated(config)
    return hybrid(config, "apart", moe, moe)
