"""Qwen3-Next: Gated DeltaNet in three of four layers, gated attention in the fourth, routed experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from helix.layers.specs import FFNSpec, GatedDeltaSpec, GateSpec, MoESpec
from helix.models.hf import attention_of, check_sizes, check_supported, decoder_spec, layer_ffns
from helix.models.qwen3_moe import shared_gated, sparse_layers
from helix.models.spec import DecoderSpec, NextTokenNames

MTP = NextTokenNames(
    "mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"
)  # fmt: skip
KINDS = ("linear_attention", "full_attention")


def spec(config: Any) -> DecoderSpec:
    """Reads a config of this family."""
    moe = shared_gated(config)
    return hybrid(config, "fused", layer_ffns(config, moe, sparse_layers(config)), moe)


def hybrid(
    config: Any,
    storage: Literal["fused", "apart"],
    ffn: FFNSpec | Sequence[FFNSpec] | None = None,
    moe: MoESpec | None = None,
) -> DecoderSpec:
    """Creates the spec of a hybrid of Gated DeltaNet (stored as `storage`) and gated attention.

    Args:
        ffn: see `decoder_spec`.
        moe: experts of the MTP layer; None: it has the FFN of the other layers.

    Raises:
        ValueError: `layer_types` has another type or no attention, or heads do not divide.
    """
    check_supported(config, attn_output_gate=(True,), output_gate_type=("swish", "silu"))
    if unknown := sorted({*config.layer_types} - {*KINDS}):
        raise ValueError(f"config.json: layer_types has {', '.join(unknown)}; supported: {', '.join(KINDS)}")
    if "full_attention" not in config.layer_types:
        raise ValueError(
            "config.json: layer_types has no full_attention: a model without any attention is not supported"
        )
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    check_sizes(config, *(f"linear_{name}" for name in names))
    keys, values, key_dim, value_dim, conv = (getattr(config, f"linear_{name}") for name in names)
    if values % keys:
        raise ValueError(
            f"config.json: linear_num_value_heads={values} must be a multiple of linear_num_key_heads={keys}"
        )
    bias = config.attention_bias
    attention = replace(attention_of(config), qkv_bias=bias, output_bias=bias, qk_norm=True, gate=GateSpec())
    spec = decoder_spec(config, attention, ffn, partial_rotary=True)
    delta = GatedDeltaSpec(spec.hidden, keys, values, key_dim, value_dim, conv, spec.norm_eps, storage)
    attending = spec.layers[config.layer_types.index("full_attention")]
    return replace(
        spec,
        weight_offset=1.0,
        nextn=replace(attending, ffn=moe or attending.ffn) if _has_mtp(config) else None,
        nextn_names=MTP,
        unused=("mtp.", "model.visual."),
        layers=tuple(
            replace(layer, mixer=delta) if kind == "linear_attention" else layer
            for layer, kind in zip(spec.layers, config.layer_types, strict=True)
        ),
    )


def _has_mtp(config: Any) -> bool:
    # Qwen3-Next has an MTP layer without a key that says so.
    return bool(getattr(config, "mtp_num_hidden_layers", 1))
