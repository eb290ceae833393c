"""DeepSeek-V2, V2-Lite, V3 and R1: multi-head latent attention, with and without a latent for the queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from helix.layers.mla import MLASpec
from helix.models.decoder import DecoderSpec
from helix.models.hf import decoder_spec

LATENT_NORM_EPS = 1e-6  # of the latents' norms, whatever rms_norm_eps says: so the models were released


def spec_v2(config: Mapping[str, Any]) -> DecoderSpec:
    return _spec(config, interleaved=True)


def spec_v3(config: Mapping[str, Any]) -> DecoderSpec:
    return _spec(config, interleaved=bool(config.get("rope_interleave", True)))


def _spec(config: Mapping[str, Any], interleaved: bool) -> DecoderSpec:
    sizes = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    missing = [key for key in sizes if not isinstance(config.get(key), int) or config[key] < 1]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)} (or they are no positive integers)")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ValueError(f"{key}=true is not supported in DeepSeek models; supported: false")
    latent, rope, nope, value = (config[key] for key in sizes)
    # One latent head; what is rotated is the rope part of it alone.
    spec = decoder_spec({**config, "num_key_value_heads": 1, "head_dim": rope})
    scale = (nope + rope) ** -0.5
    weight = spec.rope.scaling.get("mscale_all_dim")
    if weight and spec.rope.kind != "default":
        scale *= spec.rope.mscale(weight) ** 2
    mla = MLASpec(
        hidden=spec.hidden,
        q_heads=spec.q_heads,
        q_rank=config.get("q_lora_rank"),
        latent=latent,
        rope=rope,
        nope=nope,
        value=value,
        norm_eps=LATENT_NORM_EPS,
        scale=scale,
        interleaved=interleaved,
    )
    # A layer for multi-token prediction follows the last one in some checkpoints.
    return replace(spec, mla=mla, unused=(f"model.layers.{spec.layers}.",))
