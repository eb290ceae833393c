"""What the families share in reading a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helix.layers.moe import MoESpec
from helix.layers.rotary import RopeSpec
from helix.models.decoder import DecoderSpec

DTYPES = ("float32", "bfloat16", "float16")


def check_shape(config: Mapping[str, Any]) -> None:
    """Raises ValueError, naming them, where keys are missing that no family can do without."""
    check_sizes(config, "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")


def check_sizes(config: Mapping[str, Any], *needed: str) -> None:
    """Raises ValueError, naming them, unless all these keys have positive integers."""
    missing = [key for key in needed if not isinstance(config.get(key), int) or config[key] < 1]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)} (or they are no positive integers)")


def experts_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Routed experts of a layer, and how many of them a token takes.

    Raises:
        ValueError: one is missing, or a token would take more than there are.
    """
    # Newer versions of transformers write the second name where checkpoints had the first.
    key = "num_experts" if "num_experts" in config else "num_local_experts"
    check_sizes(config, key, "num_experts_per_tok")
    experts, top_k = config[key], config["num_experts_per_tok"]
    if top_k > experts:
        raise ValueError(f"num_experts_per_tok={top_k} is more than {key}={experts}")
    return experts, top_k


def decoder_spec(
    config: Mapping[str, Any],
    *,
    windows: tuple[int | None, ...] | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    sinks: bool = False,
    moe: MoESpec | None = None,
    moe_layers: tuple[bool, ...] | None = None,
    quantised: bool = False,
) -> DecoderSpec:
    """The spec of a Llama-like config that has its shape; the keyword arguments say in what a family differs.

    Args:
        moe_layers: all layers if None and there are experts.
        quantised: the family reads how this checkpoint is quantised.

    Raises:
        ValueError: a feature is not supported.
    """
    method = quantisation(config)
    if method is not None and not quantised:
        raise ValueError(
            f"the checkpoint is quantised ({method}), which is not supported here; supported: weights in "
            f"{', '.join(DTYPES)}, and mxfp4 of gpt-oss"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act={activation!r} is not supported; supported: silu")
    hidden, q_heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    head_dim = config.get("head_dim") or hidden // q_heads
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"checkpoint dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    eos = config.get("eos_token_id")
    return DecoderSpec(
        vocab=config["vocab_size"],
        hidden=hidden,
        ffn=config["intermediate_size"],
        q_heads=q_heads,
        kv_heads=config.get("num_key_value_heads") or q_heads,
        head_dim=head_dim,
        windows=windows or (None,) * layers,
        rope=RopeSpec.from_config(config, head_dim),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        sinks=sinks,
        moe=moe,
        moe_layers=moe_layers or (moe is not None,) * layers,
        tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=int(config.get("max_position_embeddings") or 2048),
        dtype=dtype,
        eos=() if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),),
    )


def quantisation(config: Mapping[str, Any]) -> str | None:
    """The method that a checkpoint's weights are quantised with, None where they are not."""
    found = config.get("quantization_config")
    return str(found.get("quant_method", "unknown")) if found else None


def layer_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Each layer's window from `layer_types`, or where absent from `use_sliding_window` and `max_window_layers`."""
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    if not config.get("use_sliding_window") or window is None:
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        full = config.get("max_window_layers", 28)
        kinds = ["full_attention" if i < full else "sliding_attention" for i in range(layers)]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != layers:
        raise ValueError(f"layer_types of {len(kinds)} entries for {layers} layers, unknown kinds: {unknown or 'none'}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
