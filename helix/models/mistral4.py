"""Mistral-Small-4: DeepSeek's MLA, position-dependent query scaling, experts with softmax routing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helix.models.deepseek import latent_spec, pairs_of
from helix.models.hf import check_sizes, with_query_scale
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    """Reads a config of this family."""
    check_sizes(config, "qk_rope_head_dim", "qk_nope_head_dim")
    rope, nope = config.qk_rope_head_dim, config.qk_nope_head_dim
    if (share := config.rope_parameters.pop("partial_rotary_factor", None)) not in (None, rope / (rope + nope)):
        raise ValueError(
            f"config.json: partial_rotary_factor={share!r} must be qk_rope_head_dim={rope} divided by its sum with "
            f"qk_nope_head_dim={nope}"
        )
    moe = replace(pairs_of(config), exact_router=False, storage="joined")
    return with_query_scale(latent_spec(config, moe, interleaved=bool(config.rope_interleave), formats=()))
