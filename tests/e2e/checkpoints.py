"""Tiny random checkpoints of every family, written by transformers, and what transformers makes of them."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    HYV3Config,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
)
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

from helix.models import FAMILIES as KNOWN
from tests.e2e.deepseek import DSA_FAMILIES, MLA_FAMILIES
from tests.e2e.parity import Continuation
from tests.ending import folder

# Transformers would take kernels of these packages where they are installed, and runs here on a CPU, which they cannot.
sys.modules["fla"] = sys.modules["causal_conv1d"] = None  # type: ignore[assignment]

DEMO = Path(__file__).parents[2] / "assets" / "demo-model"

FIRST_TOKENS = 6

# Odd where a share should not come out even: vocabulary, FFN width, heads over ranks.
_COMMON: dict[str, Any] = dict(
    vocab_size=257,
    intermediate_size=97,
    num_hidden_layers=2,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
    initializer_range=0.12,  # wide enough for logits that tell tokens apart
)

# Small contexts, so that a prompt of 300 tokens is far in the stretched part.
_LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10_000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_YARN = dict(rope_type="yarn", rope_theta=10_000.0, factor=8.0, original_max_position_embeddings=64)

FAMILIES: dict[str, Any] = {
    "llama-llama3": lambda: LlamaConfig(
        hidden_size=64, num_attention_heads=8, num_key_value_heads=8, head_dim=16, rope_parameters=_LLAMA3, **_COMMON
    ),
    "llama-yarn-biased-tied": lambda: LlamaConfig(
        hidden_size=60,
        num_attention_heads=15,
        num_key_value_heads=3,
        head_dim=8,
        rope_parameters=_YARN,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        **_COMMON,
    ),
    "qwen2": lambda: Qwen2Config(hidden_size=112, num_attention_heads=28, num_key_value_heads=4, **_COMMON),
    "qwen2-windowed-tied": lambda: Qwen2Config(
        hidden_size=48,
        num_attention_heads=6,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=1,
        tie_word_embeddings=True,
        **_COMMON,
    ),
    "qwen3": lambda: Qwen3Config(hidden_size=72, num_attention_heads=12, num_key_value_heads=6, head_dim=16, **_COMMON),
    "ministral3": lambda: Ministral3Config(
        hidden_size=48,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        rope_parameters=_YARN | dict(llama_4_scaling_beta=0.4, mscale=1.0, mscale_all_dim=1.0),
        **_COMMON,
    ),
    "phi3": lambda: Phi3Config(
        hidden_size=96,
        num_attention_heads=8,
        num_key_value_heads=4,
        rope_parameters=dict(rope_type="default", rope_theta=10_000.0, partial_rotary_factor=0.5),
        sliding_window=24,
        **_COMMON,
    ),
    "olmo2": lambda: Olmo2Config(hidden_size=96, num_attention_heads=12, num_key_value_heads=4, **_COMMON),
    "olmo3": lambda: Olmo3Config(
        hidden_size=96,
        num_attention_heads=12,
        num_key_value_heads=2,
        sliding_window=24,
        rope_parameters=dict(full_attention=_YARN, sliding_attention=dict(rope_type="default", rope_theta=5_000.0)),
        **_COMMON | dict(num_hidden_layers=4),
    ),
    "gemma3": lambda: Gemma3TextConfig(
        hidden_size=48,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        query_pre_attn_scalar=12,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
            sliding_attention=dict(rope_type="default", rope_theta=10_000.0),
        ),
        **_COMMON | dict(num_hidden_layers=3),
    ),
    "granite": lambda: GraniteConfig(
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.4,
        logits_scaling=0.5,
        **_COMMON,
    ),
    "seed-oss": lambda: SeedOssConfig(
        hidden_size=56, num_attention_heads=10, num_key_value_heads=2, head_dim=8, mlp_bias=True, **_COMMON
    ),
    "mistral-windowed": lambda: MistralConfig(
        hidden_size=64, num_attention_heads=8, num_key_value_heads=4, head_dim=16, sliding_window=19, **_COMMON
    ),
}

# Of the same kind, with experts; a grid of their own in the tests. Counts and widths that few ranks divide.
MOE_FAMILIES: dict[str, Any] = {
    "qwen3-moe": lambda: Qwen3MoeConfig(
        hidden_size=48,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        moe_intermediate_size=52,
        num_experts=11,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        **_COMMON | dict(num_hidden_layers=3),
    ),
    "qwen2-moe": lambda: Qwen2MoeConfig(
        hidden_size=40,
        num_attention_heads=10,
        num_key_value_heads=2,
        moe_intermediate_size=26,
        shared_expert_intermediate_size=52,
        num_experts=6,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
        **_COMMON | dict(num_hidden_layers=3),
    ),
    "mixtral": lambda: MixtralConfig(
        hidden_size=40,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=19,
        **_COMMON,
    ),
    "glm4-moe": lambda: Glm4MoeConfig(
        hidden_size=48,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=12,
        partial_rotary_factor=0.5,
        attention_bias=True,
        use_qk_norm=True,
        moe_intermediate_size=26,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=3,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        num_mtp_layers=0,
        **_COMMON,
    ),
    "hy-v3": lambda: HYV3Config(
        hidden_size=44,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=26,
        num_experts=7,
        num_experts_per_tok=3,
        num_shared_experts=1,
        **_COMMON | dict(num_hidden_layers=3),
    ),
    "minimax-m2": lambda: MiniMaxM2Config(
        hidden_size=40,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=2,
        rope_parameters=dict(rope_type="default", rope_theta=10_000.0, partial_rotary_factor=0.5),
        **_COMMON | dict(intermediate_size=26),
    ),
    # The widths are multiples of 32, MXFP4's block, but a rank's share is none.
    "gpt-oss": lambda: GptOssConfig(
        hidden_size=64,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=8,
        num_local_experts=10,
        num_experts_per_tok=4,
        sliding_window=24,
        rope_parameters=_YARN | dict(truncate=False, beta_fast=32.0, beta_slow=1.0),
        **_COMMON | dict(intermediate_size=64),
    ),
}
_PARTIAL = dict(rope_type="default", rope_theta=10_000.0, partial_rotary_factor=0.25)
_MROPE = _PARTIAL | dict(mrope_section=[1, 1, 0], mrope_interleaved=True)

# Layers that keep a state. Value heads that few ranks divide, beside groups of them that a rank has a part of.
HYBRID_FAMILIES: dict[str, Any] = {
    "qwen3-next": lambda: Qwen3NextConfig(
        hidden_size=48,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        linear_num_key_heads=3,
        linear_num_value_heads=9,
        linear_key_head_dim=12,
        linear_value_head_dim=10,
        moe_intermediate_size=28,
        shared_expert_intermediate_size=23,
        num_experts=7,
        num_experts_per_tok=3,
        mlp_only_layers=[1],
        rope_parameters=_PARTIAL,
        **_COMMON | dict(num_hidden_layers=4),
    ),
    "qwen3.5-tied": lambda: Qwen3_5TextConfig(
        hidden_size=48,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=24,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        rope_parameters=_MROPE | dict(partial_rotary_factor=0.5),
        tie_word_embeddings=True,
        **_COMMON | dict(num_hidden_layers=3),
    ),
    "qwen3.5-moe": lambda: Qwen3_5MoeTextConfig(
        hidden_size=40,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        linear_num_key_heads=3,
        linear_num_value_heads=6,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=3,
        layer_types=["linear_attention", "full_attention"],
        moe_intermediate_size=20,
        shared_expert_intermediate_size=20,
        num_experts=6,
        num_experts_per_tok=2,
        rope_parameters=_MROPE,
        **_COMMON,
    ),
}
# Widths over 128, the columns of a scale, which ranks cut elsewhere.
WIDE_FAMILIES: dict[str, Any] = {
    "wide-qwen3.5-moe": lambda: Qwen3_5MoeTextConfig(
        hidden_size=192,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=48,
        linear_value_head_dim=40,
        layer_types=["linear_attention", "full_attention"],
        moe_intermediate_size=72,
        shared_expert_intermediate_size=150,
        num_experts=6,
        num_experts_per_tok=2,
        rope_parameters=_MROPE,
        **_COMMON | dict(initializer_range=0.07),
    ),
    "wide-llama": lambda: LlamaConfig(
        hidden_size=192,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        **_COMMON | dict(intermediate_size=328, initializer_range=0.07),
    ),
    "wide-qwen3-moe": lambda: Qwen3MoeConfig(
        hidden_size=160,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        moe_intermediate_size=200,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        **_COMMON | dict(intermediate_size=328, initializer_range=0.07),
    ),
    "wide-deepseek-v3": lambda: DeepseekV3Config(
        hidden_size=160,
        num_attention_heads=6,
        num_key_value_heads=6,
        q_lora_rank=72,
        kv_lora_rank=48,
        qk_nope_head_dim=24,
        qk_rope_head_dim=16,
        v_head_dim=32,
        moe_intermediate_size=136,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        rope_parameters=dict(rope_type="default", rope_theta=10_000.0),
        **_COMMON | dict(intermediate_size=328, initializer_range=0.07),
    ),
}
MXFP4 = "-mxfp4"  # a checkpoint of the same weights, packed


@functools.cache
def checkpoint(family: str) -> Path:
    """Directory of the family's random checkpoint (or of the demo model), the same for the whole test session."""
    if family == "demo":
        return DEMO
    directory = folder(f"helix-{family}-")
    if family.endswith(MXFP4):
        pack(checkpoint(family.removesuffix(MXFP4)), directory)
        return directory
    torch.manual_seed(7)
    config = config_of(family)
    model = class_of(config)._from_config(config)
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            # transformers starts them at 0 and 1, where mistakes hide
            if name.endswith(("bias", "norm.weight", "sinks", "conv1d.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            if family == "gpt-oss" and name.endswith(("gate_up_proj", "down_proj")):
                parameter.copy_(convert_moe_packed_tensors(*to_mxfp4(parameter.mT), dtype=torch.float32))
    model.save_pretrained(directory)
    return directory


def to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest MXFP4 of [E, out, in]: blocks [E, out, in / 32, 16] and scales [E, out, in / 32], uint8."""
    groups = weight.unflatten(-1, (-1, 32))
    # The largest of a block lands in [4, 8), of which the format reaches 6.
    exponents = groups.abs().amax(-1).clamp(min=2.0**-40).log2().floor() - 2
    scaled = torch.ldexp(groups, -exponents[..., None])
    nearest = (scaled[..., None] - torch.tensor(FP4_VALUES)).abs().argmin(-1).to(torch.uint8)
    return nearest[..., ::2] | nearest[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def pack(plain: Path, directory: Path) -> None:
    """The checkpoint of gpt-oss in `plain`, whose experts are MXFP4 numbers, in their packed form."""
    weights = load_file(plain / "model.safetensors")
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        weight = weights.pop(name)
        weights[f"{name}_blocks"], weights[f"{name}_scales"] = to_mxfp4(weight.mT)
        again = convert_moe_packed_tensors(weights[f"{name}_blocks"], weights[f"{name}_scales"], dtype=torch.float32)
        assert torch.equal(again, weight), "packing is exact"
    save_file(weights, directory / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (directory / "config.json").write_text(json.dumps(config))


def spread(scales: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Scales of blocks as a matrix of the shape of the values."""
    rows = scales.repeat_interleave(block[0], 0)[: shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]


# Routers, and what makes gates of states: FP8 checkpoints keep them as they are.
IN_FULL = ("gate.weight", "weights_proj.weight", "in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight")


def write_fp8(
    plain: Path,
    directory: Path,
    section: dict[str, Any],
    block: tuple[int | None, int | None],
    *,
    scaled_in: torch.dtype = torch.float32,
    decades: bool = False,
) -> dict[str, torch.Tensor]:
    """Writes a checkpoint whose layers' matrices, except IN_FULL, are e4m3; returns what all tensors hold, in fp32.

    Args:
        block: rows and columns of a scale; None: all.
        decades: scales are random from 1e-6 to 1e2, instead of those that fit.
    """
    generator = torch.Generator().manual_seed(3)
    stored, whole = {}, load_file(plain / "model.safetensors")
    for name, weight in list(whole.items()):
        stored[name] = weight
        if weight.dim() != 2 or "layers" not in name or name.endswith(IN_FULL):
            continue
        size = block[0] or weight.shape[0], block[1] or weight.shape[1]
        parts = [[p.abs().max() / 448 for p in rows.split(size[1], 1)] for rows in weight.split(size[0])]
        scales = torch.tensor(parts).log2().ceil().exp2()  # powers of two: exact in every type of scales
        stored[name] = (weight / spread(scales, size, weight.shape)).to(torch.float8_e4m3fn)
        if decades:
            scales = 10 ** (torch.rand(scales.shape, generator=generator) * 8 - 6)
        scales = scales.to(scaled_in)
        whole[name] = stored[name].float() * spread(scales.float(), size, weight.shape)
        fine = section["quant_method"] == "fp8"
        stored[f"{name}{'_scale_inv' if fine else '_scale'}"] = scales.reshape(()) if block == (None, None) else scales
        if not fine or section.get("activation_scheme") == "static":
            of_inputs = "activation_scale" if fine else "input_scale"
            stored[f"{name.removesuffix('.weight')}.{of_inputs}"] = torch.ones(())
    save_file(stored, directory / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return whole


def config_of(family: str) -> Any:
    return {**FAMILIES, **MOE_FAMILIES, **HYBRID_FAMILIES, **WIDE_FAMILIES, **MLA_FAMILIES, **DSA_FAMILIES}[
        family.removesuffix(MXFP4)
    ]()


def class_of(config: Any) -> Any:
    """Returns transformers' class of a text model; AutoModelForCausalLM knows not all of them."""
    return getattr(transformers, next(name for name, (kind, _) in KNOWN.items() if kind == config.model_type))


def kv_heads(family: str) -> int:
    """Returns the number of KV heads, which limits the layouts; the demo model has 2."""
    return 2 if family == "demo" else config_of(family).num_key_value_heads


@functools.cache
def oracle(family: str, lengths: tuple[int, ...], new_tokens: int) -> list[Continuation]:
    """Continuations of a family's checkpoint, unpacked."""
    return continuations(checkpoint(family.removesuffix(MXFP4)), lengths, new_tokens)


def earliest_topk(x: torch.Tensor, k: int, dim: int) -> Any:
    """`Tensor.topk` of indexers, with ties to the earlier token: scores of tiny models are often 0."""
    values, indices = x.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values[..., :k], indices[..., :k]))  # type: ignore[call-arg]


def continuations(directory: Path, lengths: tuple[int, ...], new_tokens: int) -> list[Continuation]:
    """Greedy continuations of random prompts by transformers, fp32, eager attention, no stop at EOS.

    Args:
        lengths: of the prompts; the first one is continued by FIRST_TOKENS alone.
    """
    model = (
        class_of(AutoConfig.from_pretrained(directory))
        .from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        .eval()
    )
    generator = torch.Generator().manual_seed(11)
    found = []
    for number, length in enumerate(lengths):
        prompt = torch.randint(1, model.config.vocab_size, (1, length), generator=generator)
        with patch.object(torch.Tensor, "topk", earliest_topk):
            done = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=new_tokens if number else FIRST_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        logits = torch.cat(done.logits).float()  # [new_tokens, V]
        found.append(Continuation(tuple(prompt[0].tolist()), tuple(done.sequences[0, length:].tolist()), logits))
    return found
