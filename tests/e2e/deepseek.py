"""Tiny models with latents, of DeepSeek and Mistral: what families differ in, and sizes that ranks do not divide."""

from __future__ import annotations

from typing import Any

from transformers import DeepseekV2Config, DeepseekV3Config, DeepseekV32Config, GlmMoeDsaConfig, Mistral4Config

_COMMON: dict[str, Any] = dict(
    vocab_size=257,
    intermediate_size=97,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    moe_intermediate_size=26,
    kv_lora_rank=32,
    qk_rope_head_dim=8,
    qk_nope_head_dim=12,
    v_head_dim=10,
    max_position_embeddings=512,
    rms_norm_eps=1e-2,  # far from what the norms of the latents take
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
    initializer_range=0.12,
)
# Far in the stretched part, with a factor on the angles (mscale) and one on the scores (mscale_all_dim).
_YARN = dict(
    rope_type="yarn",
    rope_theta=10_000.0,
    factor=8.0,
    original_max_position_embeddings=64,
    mscale=1.2,
    mscale_all_dim=0.7,
    beta_fast=32.0,
    beta_slow=1.0,
)

MLA_FAMILIES: dict[str, Any] = {
    "deepseek-v2-lite": lambda: DeepseekV2Config(
        hidden_size=60,
        num_attention_heads=10,
        q_lora_rank=None,
        n_routed_experts=6,
        num_experts_per_tok=3,
        n_shared_experts=2,
        **_COMMON,
    ),
    "deepseek-v2-yarn": lambda: DeepseekV2Config(
        hidden_size=64,
        num_attention_heads=8,
        q_lora_rank=20,
        n_routed_experts=12,
        num_experts_per_tok=3,
        n_shared_experts=1,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.0,
        rope_parameters=_YARN,
        **_COMMON,
    ),
    "deepseek-v3-yarn": lambda: DeepseekV3Config(
        hidden_size=55,
        num_attention_heads=11,
        num_key_value_heads=11,
        q_lora_rank=24,
        n_routed_experts=12,
        num_experts_per_tok=4,
        n_shared_experts=1,
        n_group=3,
        topk_group=2,
        rope_parameters=_YARN,
        num_mtp_layers=0,
        **_COMMON,
    ),
    "mistral4": lambda: Mistral4Config(
        hidden_size=48,
        num_attention_heads=6,
        num_key_value_heads=6,
        q_lora_rank=24,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=3,
        topk_group=2,
        rope_parameters=_YARN | dict(llama_4_scaling_beta=0.4, partial_rotary_factor=8 / 20),
        **_COMMON,
    ),
    "deepseek-v3-halves": lambda: DeepseekV3Config(
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=24,
        n_routed_experts=5,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        rope_interleave=False,
        num_mtp_layers=0,
        **_COMMON,
    ),
}

_INDEXED: dict[str, Any] = _COMMON | dict(
    num_hidden_layers=4,
    first_k_dense_replace=2,
    n_routed_experts=6,
    num_experts_per_tok=2,
    n_shared_experts=1,
)
# Far fewer tokens are read than the prompts have: mistakes in the choice of tokens show.
DSA_FAMILIES: dict[str, Any] = {
    "deepseek-v32": lambda: DeepseekV32Config(
        hidden_size=55,
        num_attention_heads=11,
        num_key_value_heads=11,
        q_lora_rank=24,
        n_group=3,
        topk_group=2,
        index_n_heads=5,
        index_head_dim=24,
        index_topk=5,
        rope_parameters=_YARN,
        **_INDEXED,
    ),
    "glm-5": lambda: GlmMoeDsaConfig(
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=24,
        index_n_heads=4,
        index_head_dim=16,
        index_topk=8,
        **_INDEXED,
    ),
    # All tokens of most prompts are read.
    "glm-5-all": lambda: GlmMoeDsaConfig(
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=24,
        index_n_heads=4,
        index_head_dim=16,
        index_topk=128,
        **_INDEXED,
    ),
    # Layers 0, 1 and 3 have indexers; with a layer that drafts, only its first draft chooses.
    "glm-5-shared": lambda: GlmMoeDsaConfig(
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=20,
        index_n_heads=6,
        index_head_dim=8,
        index_topk=2,
        index_topk_freq=2,
        index_skip_topk_offset=2,
        index_share_for_mtp_iteration=True,
        **_INDEXED,
    ),
}
