"""Mistral-Small-4: DeepSeek's latent attention, queries that grow with their position, experts by softmax scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helix.models.deepseek import experts_of, latent_spec
from helix.models.hf import check_sizes, with_query_scale
from helix.models.spec import DecoderSpec


def spec(config: Any) -> DecoderSpec:
    check_sizes(config, "qk_rope_head_dim", "qk_nope_head_dim")
    rope, nope = config.qk_rope_head_dim, config.qk_nope_head_dim
    if (share := config.rope_parameters.pop("partial_rotary_factor", None)) not in (None, rope / (rope + nope)):
        raise ValueError(
            f"config.json: partial_rotary_factor={share!r} must be the share of qk_rope_head_dim={rope} beside "
            f"qk_nope_head_dim={nope}"
        )
    moe = replace(
        experts_of(config, grouped=True),
        group_score=2,
        normalise=bool(config.norm_topk_prob),
        exact_router=False,
        storage="joined",
    )
    if moe.experts < 2 * moe.groups:
        raise ValueError(f"n_group={moe.groups} leaves a group fewer than two of n_routed_experts={moe.experts}")
    return with_query_scale(latent_spec(config, moe, interleaved=bool(config.rope_interleave), formats=()))
