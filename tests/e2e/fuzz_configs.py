"""Random legal configs of small models of every family, and random ways to write them down."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import CONFIG_MAPPING

from helix.models import FAMILIES
from helix.models.hf import TWO_ROPES

Json = dict[str, Any]
ARCHITECTURES = {model_type: name for name, (model_type, _) in FAMILIES.items()}


@dataclass(frozen=True)
class Shapes:
    """Sizes for which kernels are compiled: cases that share them share what was compiled.

    Attributes:
        rng: draws more of them, the same for all cases of a family that share these.
    """

    head_dim: int
    kv_heads: int
    group: int
    rng: random.Random

    @classmethod
    def draw(cls, model_type: str, number: object) -> Shapes:
        """The `number`-th of these; all families with heads have the same, as far as they have these sizes."""
        rng = random.Random(f"shapes {number}")
        dim = rng.choice((4, 8, 16, 16, 64, 96, 128))
        large = dim > 16
        kv_heads, group = rng.choice((1, 2, 3, 6) if large else (1, 2, 3, 4, 6)), rng.choice((1, 2, 3, 4))
        return cls(
            dim, kv_heads, min(group, 6 // kv_heads) if large else group, random.Random(f"{model_type} {number}")
        )


def config_of(model_type: str, rng: random.Random, shapes: Shapes) -> Json:
    """All keys of a legal config of a small model."""
    return {**_common(rng, shapes), **MAKERS[model_type](rng, shapes)}


def _common(rng: random.Random, shapes: Shapes) -> Json:
    return {
        "vocab_size": rng.randint(40, 300),
        "intermediate_size": rng.randint(3, 90),
        "num_hidden_layers": rng.randint(1, 3),
        "num_key_value_heads": shapes.kv_heads,
        "num_attention_heads": shapes.kv_heads * shapes.group,
        "rms_norm_eps": rng.choice((1e-6, 1e-5, 3e-2)),
        "max_position_embeddings": rng.choice((512, 2048, 4096, 32768, 131072)),
        "hidden_act": rng.choice(("silu", "silu", "silu", "swish")),
        "tie_word_embeddings": rng.random() < 0.3,
        "bos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.15,
    }


def _heads(rng: random.Random, config: Json, dim: int) -> Json:
    """Hidden size and head dim; the one divides the other half of the time."""
    plain = rng.random() < 0.5
    hidden = config["num_attention_heads"] * (dim if plain else rng.choice((4, 8)))
    return {"hidden_size": hidden, "head_dim": dim}


def _llama(rng: random.Random, shapes: Shapes) -> Json:
    config = _common(rng, shapes)
    biases = {"attention_bias": rng.random() < 0.3, "mlp_bias": rng.random() < 0.3}
    return config | _heads(rng, config, shapes.head_dim) | biases


def _mistral(rng: random.Random, shapes: Shapes) -> Json:
    config = _common(rng, shapes)
    window = rng.choice((None, None, 5, 19, 64, 4096))
    return config | _heads(rng, config, shapes.head_dim) | {"sliding_window": window}


def _qwen2(rng: random.Random, shapes: Shapes) -> Json:
    config = _common(rng, shapes)
    hidden = config["num_attention_heads"] * shapes.head_dim
    return config | {"hidden_size": hidden} | _layer_windows(rng, config)


def _qwen3(rng: random.Random, shapes: Shapes) -> Json:
    config = _common(rng, shapes)
    more = {"head_dim": max(shapes.head_dim, 8), "hidden_size": shapes.rng.choice((24, 32, 50))}
    return config | more | {"attention_bias": rng.random() < 0.3} | _layer_windows(rng, config)


def _layer_windows(rng: random.Random, config: Json) -> Json:
    layers, use = config["num_hidden_layers"], rng.random() < 0.5
    full = rng.choice((0, 1, 28))
    window = rng.choice((7, 24, 4096)) if use else None
    kinds = ["sliding_attention" if use and i >= full else "full_attention" for i in range(layers)]
    return {"use_sliding_window": use, "sliding_window": window, "max_window_layers": full, "layer_types": kinds}


def _qwen3_moe(rng: random.Random, shapes: Shapes) -> Json:
    experts, use, layers = shapes.rng.randint(2, 11), rng.random() < 0.3, rng.randint(1, 3)
    dense = rng.choice(([], [], [0], list(range(layers))))
    return {
        "num_hidden_layers": layers,
        "hidden_size": shapes.rng.choice((24, 33)),
        "head_dim": max(shapes.head_dim, 8),
        "rms_norm_eps": rng.choice((1e-6, 1e-5, 3e-2, 0.1)),
        "attention_bias": rng.random() < 0.3,
        "num_experts": experts,
        "num_experts_per_tok": shapes.rng.randint(1, experts),
        "moe_intermediate_size": rng.randint(3, 50),
        "norm_topk_prob": rng.random() < 0.5,
        "decoder_sparse_step": rng.choice((1, 1, 2)),
        "mlp_only_layers": dense,
        "use_sliding_window": use,
        "sliding_window": rng.choice((7, 24, 4096)) if use else None,
    }


def _mixtral(rng: random.Random, shapes: Shapes) -> Json:
    experts = shapes.rng.choice((2, 5, 8, 8))
    config = _common(rng, shapes)
    return (
        config
        | _heads(rng, config, shapes.head_dim)
        | {
            "num_local_experts": experts,
            "num_experts_per_tok": shapes.rng.choice((2, shapes.rng.randint(1, experts))),
            "sliding_window": rng.choice((None, None, 19)),
        }
    )


def _gpt_oss(rng: random.Random, shapes: Shapes) -> Json:
    experts, layers = shapes.rng.randint(4, 10), rng.randint(1, 3)
    alternate = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    return {
        "num_hidden_layers": layers,
        "hidden_size": shapes.rng.choice((24, 32)),
        "intermediate_size": rng.choice((10, 32)),
        "head_dim": max(shapes.head_dim, 8),
        "num_local_experts": experts,
        "num_experts_per_tok": shapes.rng.choice((4, shapes.rng.randint(1, experts))),
        "sliding_window": rng.choice((6, 24, 128)),
        "layer_types": rng.choice((alternate, alternate, ["full_attention"] * layers)),
        "attention_bias": rng.random() < 0.8,
    }


def _deepseek(rng: random.Random, shapes: Shapes) -> Json:
    sizes = shapes.rng
    groups = sizes.choice((1, 2, 4, 8))
    experts, top_groups = groups * sizes.randint(2, 3), sizes.randint(1, groups)
    layers = rng.randint(1, 3)
    return {
        "num_hidden_layers": layers,
        "hidden_size": 4 * sizes.randint(8, 14),
        "num_attention_heads": sizes.choice((2, 4)),
        "kv_lora_rank": sizes.choice((16, 20)),
        "q_lora_rank": rng.choice((None, 12)),
        "qk_rope_head_dim": sizes.choice((4, 8)),
        "qk_nope_head_dim": sizes.choice((6, 8)),
        "v_head_dim": sizes.choice((6, 10)),
        "n_routed_experts": experts,
        "n_shared_experts": rng.choice((1, 2)),
        "num_experts_per_tok": sizes.randint(1, experts // groups * top_groups),
        "moe_intermediate_size": rng.randint(3, 20),
        "first_k_dense_replace": rng.choice((0, 1, layers)),
        "routed_scaling_factor": rng.choice((1.0, 2.5, 1.7)),
        "n_group": groups,
        "topk_group": top_groups,
        "num_key_value_heads": None,
    }


def _deepseek_v2(rng: random.Random, shapes: Shapes) -> Json:
    config = _deepseek(rng, shapes) | {"topk_method": "group_limited_greedy"}
    if rng.random() < 0.5:
        config |= {"topk_method": "greedy", "n_group": None, "topk_group": None, "num_experts_per_tok": 2}
    return config


def _deepseek_v3(rng: random.Random, shapes: Shapes) -> Json:
    flags = {"norm_topk_prob": rng.random() < 0.7, "rope_interleave": rng.random() < 0.7}
    return _deepseek(rng, shapes) | flags | {"num_nextn_predict_layers": rng.choice((0, 1))}


def _indexed(rng: random.Random, shapes: Shapes) -> Json:
    """Indexers that choose few tokens, or all of most sequences."""
    config, sizes = _deepseek(rng, shapes), shapes.rng
    width = config["qk_rope_head_dim"] + sizes.choice((0, 4, 12))
    del config["num_key_value_heads"]
    return config | {
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": 12,
        "norm_topk_prob": rng.random() < 0.7,
        "index_n_heads": sizes.choice((1, 3, 8)),
        "index_head_dim": width,
        "index_topk": sizes.choice((1, 3, 8, 200)),
    }


def _glm_dsa(rng: random.Random, shapes: Shapes) -> Json:
    config = _indexed(rng, shapes)
    kinds = ["full", *(rng.choice(("full", "shared")) for _ in range(config["num_hidden_layers"] - 1))]
    return config | {"indexer_types": kinds, "index_share_for_mtp_iteration": rng.random() < 0.5}


def _seed_oss(rng: random.Random, shapes: Shapes) -> Json:
    return _llama(rng, shapes) | {"attention_out_bias": rng.random() < 0.3}


def _sigmoid_experts(rng: random.Random, shapes: Shapes) -> Json:
    """Experts as DeepSeek-V3 has them, in a model with heads."""
    names = "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group"
    names += "topk_group", "first_k_dense_replace", "routed_scaling_factor", "num_hidden_layers"
    config = _deepseek(rng, shapes)
    return {name: config[name] for name in names} | {"norm_topk_prob": rng.random() < 0.7}


def _partial(rng: random.Random, shapes: Shapes) -> Json:
    """A part of a head that is rotated, of an even number of dimensions."""
    shares = [share for share in (0.25, 0.5, 0.75) if shapes.head_dim * share % 2 == 0]
    return {"head_dim": shapes.head_dim, "partial_rotary_factor": rng.choice((*shares, 1.0))}


def _glm4_moe(rng: random.Random, shapes: Shapes) -> Json:
    flags = {"attention_bias": rng.random() < 0.5, "use_qk_norm": rng.random() < 0.5, "num_nextn_predict_layers": 1}
    hidden = {"hidden_size": shapes.rng.choice((24, 33))}
    return _sigmoid_experts(rng, shapes) | _partial(rng, shapes) | flags | hidden


def _hy_v3(rng: random.Random, shapes: Shapes) -> Json:
    experts, layers = shapes.rng.randint(2, 11), rng.randint(1, 3)
    return {
        "num_hidden_layers": layers,
        "hidden_size": shapes.rng.choice((24, 33)),
        "head_dim": shapes.head_dim,
        "attention_bias": rng.random() < 0.3,
        "num_experts": experts,
        "num_experts_per_tok": shapes.rng.randint(1, experts),
        "num_shared_experts": rng.choice((1, 2)),
        "num_nextn_predict_layers": 1,
        "moe_intermediate_size": rng.randint(3, 50),
        "router_scaling_factor": rng.choice((1.0, 2.826)),
        "mlp_layer_types": [rng.choice(("dense", "sparse", "sparse")) for _ in range(layers)],
    }


def _minimax_m2(rng: random.Random, shapes: Shapes) -> Json:
    experts = shapes.rng.choice((2, 5, 8))
    return _partial(rng, shapes) | {
        "hidden_size": shapes.rng.choice((24, 33)),
        "num_local_experts": experts,
        "num_experts_per_tok": shapes.rng.randint(1, experts),
    }


def _phi3(rng: random.Random, shapes: Shapes) -> Json:
    config = _common(rng, shapes)
    hidden = config["num_attention_heads"] * shapes.head_dim
    share = _partial(rng, shapes)["partial_rotary_factor"]
    window = rng.choice((None, None, 19))
    return config | {"hidden_size": hidden, "partial_rotary_factor": share, "sliding_window": window}


def _qwen2_moe(rng: random.Random, shapes: Shapes) -> Json:
    config = _qwen3_moe(rng, shapes) | {"qkv_bias": rng.random() < 0.8, "attention_bias": False}
    del config["head_dim"]
    heads, layers = _common(rng, shapes)["num_attention_heads"], config["num_hidden_layers"]
    kinds = ["full_attention", *["sliding_attention"] * config["use_sliding_window"]]
    return config | {
        "hidden_size": heads * shapes.head_dim,
        "shared_expert_intermediate_size": rng.randint(3, 60),
        "layer_types": [rng.choice(kinds) for _ in range(layers)],
    }


def _olmo2(rng: random.Random, shapes: Shapes) -> Json:
    config = _common(rng, shapes)
    hidden = config["num_attention_heads"] * shapes.head_dim
    return config | {"hidden_size": hidden, "attention_bias": rng.random() < 0.3}


def _some_windows(rng: random.Random, layers: int) -> Json:
    kinds = [rng.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
    return {"layer_types": kinds, "sliding_window": rng.choice((7, 24, 4096))}


def _olmo3(rng: random.Random, shapes: Shapes) -> Json:
    config = _olmo2(rng, shapes)
    return config | _some_windows(rng, config["num_hidden_layers"])


def _gemma3(rng: random.Random, shapes: Shapes) -> Json:
    config = _common(rng, shapes)
    hidden = config["num_attention_heads"] * rng.choice((4, 8))
    more = {"hidden_size": hidden, "head_dim": shapes.head_dim, "attention_bias": rng.random() < 0.3}
    more |= {"query_pre_attn_scalar": rng.choice((shapes.head_dim, 10))}
    return config | more | _some_windows(rng, config["num_hidden_layers"])


def _granite(rng: random.Random, shapes: Shapes) -> Json:
    config = _common(rng, shapes)
    hidden = config["num_attention_heads"] * shapes.head_dim
    return config | {
        "hidden_size": hidden,
        "attention_bias": rng.random() < 0.3,
        "mlp_bias": rng.random() < 0.3,
        "embedding_multiplier": rng.choice((1.0, 12.0)),
        "attention_multiplier": rng.choice((shapes.head_dim**-0.5, 0.1)),
        "residual_multiplier": rng.choice((0.22, 1.0)),
        "logits_scaling": rng.choice((1.0, 4.0)),
    }


def _mistral4(rng: random.Random, shapes: Shapes) -> Json:
    flags = {"norm_topk_prob": rng.random() < 0.7, "rope_interleave": rng.random() < 0.7}
    return _deepseek(rng, shapes) | flags


def _hybrid(rng: random.Random, shapes: Shapes) -> Json:
    """Layers that keep a state, of heads that few ranks divide, beside layers with attention."""
    sizes = shapes.rng
    keys, layers = sizes.choice((1, 2, 3)), rng.randint(2, 4)
    kinds = ["full_attention", "linear_attention"]
    kinds += [rng.choice(("linear_attention", "linear_attention", "full_attention")) for _ in range(layers - 2)]
    rng.shuffle(kinds)
    return _partial(rng, shapes) | {
        "hidden_size": sizes.choice((24, 33, 40)),
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "attention_bias": rng.random() < 0.3,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * sizes.choice((1, 2, 3)),
        "linear_key_head_dim": sizes.choice((8, 12, 16)),
        "linear_value_head_dim": sizes.choice((6, 10, 16)),
        "linear_conv_kernel_dim": sizes.choice((2, 3, 4)),
    }


def _gated_experts(rng: random.Random, shapes: Shapes) -> Json:
    experts = shapes.rng.randint(2, 11)
    return {
        "num_experts": experts,
        "num_experts_per_tok": shapes.rng.randint(1, experts),
        "moe_intermediate_size": rng.randint(3, 50),
        "shared_expert_intermediate_size": rng.randint(3, 60),
    }


def _qwen3_next(rng: random.Random, shapes: Shapes) -> Json:
    config = _hybrid(rng, shapes) | _gated_experts(rng, shapes) | {"norm_topk_prob": rng.random() < 0.7}
    dense = [i for i in range(config["num_hidden_layers"]) if rng.random() < 0.3]
    return config | {"decoder_sparse_step": rng.choice((1, 1, 2)), "mlp_only_layers": dense}


def _qwen3_5_moe(rng: random.Random, shapes: Shapes) -> Json:
    return _hybrid(rng, shapes) | _gated_experts(rng, shapes)


MAKERS: dict[str, Callable[[random.Random, Shapes], Json]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _indexed,
    "glm_moe_dsa": _glm_dsa,
    "glm4_moe": _glm4_moe,
    "hy_v3": _hy_v3,
    "seed_oss": _seed_oss,
    "minimax_m2": _minimax_m2,
    "ministral3": _mistral,
    "mistral4": _mistral4,
    "phi3": _phi3,
    "qwen2_moe": _qwen2_moe,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "gemma3_text": _gemma3,
    "granite": _granite,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _hybrid,
    "qwen3_5_moe_text": _qwen3_5_moe,
}
LATENTS = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "mistral4")
GROWING = ("ministral3", "mistral4")  # families whose queries grow with their position


def rope_of(model_type: str, rng: random.Random, context: int) -> Json:
    """Parameters of a kind of RoPE; a few of them are kinds that we do not compute."""
    theta = {"rope_theta": rng.choice((10_000.0, 1_000_000.0, 500.0))}
    kind = rng.choice(("default", "default", "linear", "llama3", "yarn", "yarn", "yarn"))
    if model_type in GROWING:
        kind, theta = "yarn", theta | {"llama_4_scaling_beta": rng.choice((0.1, 0.5))}
    if model_type == "phi3":  # transformers knows no other of it that we compute
        kind = "default"
    if rng.random() < 0.03:
        return theta | {"rope_type": "dynamic", "factor": 2.0}
    if kind == "default":
        return theta | {"rope_type": "default"}
    scaled = theta | {"rope_type": kind, "factor": rng.choice((2.0, 8.0, 4, 32.0))}
    if kind == "linear":
        return scaled
    trained = {"original_max_position_embeddings": rng.choice((32, 64, context))}
    if kind == "llama3":
        return scaled | trained | {"low_freq_factor": 1.0, "high_freq_factor": rng.choice((4.0, 2))}
    optional: Json = {
        "beta_fast": rng.choice((32.0, 20)),
        "beta_slow": 1.0,
        "truncate": rng.random() < 0.5,
        "attention_factor": 1.2,
        "mscale": rng.choice((1.0, 0.707)),
        "mscale_all_dim": rng.choice((1.0, 0.8)),
    }
    chosen = {key: value for key, value in optional.items() if rng.random() < 0.4}
    return scaled | trained | chosen


def written(model_type: str, config: Json, rope: Json, plain: bool, rng: random.Random) -> Json:
    """The content of a config.json; `plain` as transformers would write it."""
    content = {**config, "model_type": model_type, "architectures": [ARCHITECTURES[model_type]], "dtype": "float32"}
    if model_type in TWO_ROPES:
        local = {"rope_type": "default", "rope_theta": 10_000.0}
        full = {key: value for key, value in rope.items() if key != "truncate"}  # transformers reads it elsewhere
        return content | {"rope_parameters": {"full_attention": full, "sliding_attention": local}}
    if plain:
        return content | {"rope_parameters": dict(rope), "transformers_version": "5.17.0"}
    if model_type == "mistral4":  # of other spellings transformers rotates too much
        content |= {"rope_parameters": dict(rope)}
    else:
        content |= _written_rope(rope, config["max_position_embeddings"], rng)
    defaults = CONFIG_MAPPING[model_type]()
    for key in list(content):
        default = getattr(defaults, key, "none")
        if key not in ("architectures", "model_type") and content[key] == default and rng.random() < 0.6:
            del content[key]  # the family's default says the same
    if rng.random() < 0.2:
        del content[rng.choice(("architectures", "model_type"))]
    if "dtype" in content and rng.random() < 0.6:
        content["torch_dtype"] = content.pop("dtype")
    derived = {"head_dim": config["hidden_size"] // config["num_attention_heads"]}
    derived |= {"num_key_value_heads": config["num_attention_heads"]}
    nullable = {"llama": ("head_dim", "num_key_value_heads"), "mistral": ("head_dim",)}
    if rope["rope_type"] == "default":  # of the others transformers finds no dimensions
        nullable["mixtral"] = ("head_dim",)
    for key in nullable.get(model_type, ()):
        if content.get(key) == derived[key] and rng.random() < 0.7:
            content[key] = None
            if rng.random() < 0.5:
                del content[key]
    if "layer_types" in content and rng.random() < 0.5 and _derivable_layer_types(model_type, config):
        content["layer_types"] = None
        if rng.random() < 0.5:
            del content["layer_types"]
    if config.get("mlp_only_layers") == [] and rng.random() < 0.5:
        content["mlp_only_layers"] = None
    aliases = {"mixtral": ("num_local_experts", "num_experts"), "gpt_oss": ("num_local_experts", "num_experts")}
    aliases |= {"deepseek_v3": ("n_routed_experts", "num_local_experts")}
    if model_type in aliases and rng.random() < 0.3:
        name, alias = aliases[model_type]
        if name in content:
            content[alias] = content.pop(name)
    extras: Json = {"use_cache": True, "pretraining_tp": 1, "transformers_version": "4.31.0", "comment": {"a": [1]}}
    extras |= {"auto_map": {"AutoConfig": "configuration.X"}, "attention_dropout": 0.0, "torchscript": False}
    return content | {key: value for key, value in extras.items() if rng.random() < 0.3}


def _derivable_layer_types(model_type: str, config: Json) -> bool:
    layers = config["num_hidden_layers"]
    if model_type == "qwen2_moe":
        return "sliding_attention" not in config["layer_types"] and not config["use_sliding_window"]
    if model_type == "gpt_oss":
        return bool(
            config["layer_types"] == ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
        )
    if "linear_num_key_heads" in config:
        derived = ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)]
        return bool(config["layer_types"] == derived)
    return True


def _written_rope(rope: Json, context: int, rng: random.Random) -> Json:
    rest = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
    theta, kind = rope["rope_theta"], rope["rope_type"]
    named = {rng.choice(("rope_type", "type")): kind}
    if rest.get("original_max_position_embeddings") == context and rng.random() < 0.5:
        del rest["original_max_position_embeddings"]  # the context says the same
    outside: Json = {}
    if "original_max_position_embeddings" in rest and rng.random() < 0.2:
        outside["original_max_position_embeddings"] = rest.pop("original_max_position_embeddings")
    scaling: Json | None = {**named, **rest}
    if kind == "default" and rng.random() < 0.7:
        scaling = None
    way = rng.choice(("old", "old", "new", "beside", "theta outside"))
    if way == "old":
        return outside | {"rope_theta": theta, "rope_scaling": scaling}
    if way == "beside":  # as model cards have it
        return outside | {
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "rope_theta": theta,
            "rope_scaling": scaling,
        }
    if way == "theta outside":
        return outside | {"rope_theta": theta, "rope_parameters": scaling or dict(named)}
    return outside | {"rope_parameters": {"rope_theta": theta, **(scaling or {})}}
