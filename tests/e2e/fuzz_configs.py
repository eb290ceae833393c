"""Random valid configs of small models of every family, written in random ways."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers import CONFIG_MAPPING

from helix.models import FAMILIES, WRAPPERS
from helix.models.hf import TWO_ROPES

Json = dict[str, Any]
DRAWN: Json = yaml.safe_load((Path(__file__).parent / "fuzz_configs.yaml").read_text())
MAKERS: Json = DRAWN["families"]
ARCHITECTURES = {model_type: name for name, (model_type, _) in reversed(FAMILIES.items())}
OUTER = {FAMILIES[inner][0]: outer for outer, parts in WRAPPERS.items() for inner in parts}  # by a text part's type


@dataclass(frozen=True)
class Shapes:
    """Sizes that kernels are compiled for; cases that share them share compiled kernels.

    Attributes:
        rng: for further sizes, the same for all cases of a family that share these.
    """

    head_dim: int
    kv_heads: int
    group: int
    rng: random.Random

    @classmethod
    def draw(cls, model_type: str, number: object) -> Shapes:
        """Returns the `number`-th sizes; the same for all families with heads, as far as they have these sizes."""
        rng = random.Random(f"shapes {number}")
        dim = rng.choice((4, 8, 16, 16, 64, 96, 128))
        large = dim > 16
        kv_heads, group = rng.choice((1, 2, 3, 6) if large else (1, 2, 3, 4, 6)), rng.choice((1, 2, 3, 4))
        return cls(
            dim, kv_heads, min(group, 6 // kv_heads) if large else group, random.Random(f"{model_type} {number}")
        )


def config_of(model_type: str, rng: random.Random, shapes: Shapes) -> Json:
    """Returns all keys of a valid config of a small model."""
    heads = {"num_key_value_heads": shapes.kv_heads, "num_attention_heads": shapes.kv_heads * shapes.group}
    family = dict(MAKERS[model_type])
    shared, uses = family.pop("shared", {}), family.pop("uses")
    config = _drawn(DRAWN["common"], rng) | heads | _drawn(shared, shapes.rng) | _drawn(family, rng)
    for name in uses:
        config |= USES[name](rng, shapes, config)
    return config


def _drawn(values: Json, rng: random.Random) -> Json:
    def value(of: Any) -> Any:
        if isinstance(of, list):
            return rng.choice(of)
        if isinstance(of, str) and of.endswith("%"):
            return rng.random() < int(of[:-1]) / 100
        if isinstance(of, str) and ".." in of:
            return rng.randint(*map(int, of.split("..")))
        return of

    return {key: value(of) for key, of in values.items()}


def heads(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets hidden size and head dim; half of the time the one divides the other."""
    plain = rng.random() < 0.5
    hidden = config["num_attention_heads"] * (shapes.head_dim if plain else rng.choice((4, 8)))
    return {"hidden_size": hidden, "head_dim": shapes.head_dim}


def whole_heads(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets the hidden size to all heads' dims."""
    return {"hidden_size": config["num_attention_heads"] * shapes.head_dim}


def plain_heads(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets the head dim."""
    return {"head_dim": shapes.head_dim}


def wide_heads(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets a head dim of at least 8."""
    return {"head_dim": max(shapes.head_dim, 8)}


def narrow_hidden(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets a hidden size below all heads' dims."""
    hidden = config["num_attention_heads"] * rng.choice((4, 8))
    return plain_heads(rng, shapes, config) | {
        "hidden_size": hidden,
        "query_pre_attn_scalar": rng.choice((shapes.head_dim, 10)),
    }


def rotated_part(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets partial RoPE over an even number of dimensions."""
    shares = [share for share in (0.25, 0.5, 0.75) if shapes.head_dim * share % 2 == 0]
    return {"head_dim": shapes.head_dim, "partial_rotary_factor": rng.choice((*shares, 1.0))}


def windows_of_layers(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets sliding windows from some layer on."""
    use, full = rng.random() < 0.5, rng.choice((0, 1, 28))
    kinds = ["sliding_attention" if use and i >= full else "full_attention" for i in range(config["num_hidden_layers"])]
    window = rng.choice((7, 24, 4096)) if use else None
    return {"use_sliding_window": use, "sliding_window": window, "max_window_layers": full, "layer_types": kinds}


def one_window(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets one sliding window for all layers, or none."""
    use = rng.random() < 0.3
    return {"use_sliding_window": use, "sliding_window": rng.choice((7, 24, 4096)) if use else None}


def windows_where_used(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets layer types for an optional sliding window."""
    kinds = ["full_attention", *["sliding_attention"] * config["use_sliding_window"]]
    return {"layer_types": [rng.choice(kinds) for _ in range(config["num_hidden_layers"])]}


def some_windows(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets random layer types with a sliding window."""
    kinds = [rng.choice(("full_attention", "sliding_attention")) for _ in range(config["num_hidden_layers"])]
    return {"layer_types": kinds, "sliding_window": rng.choice((7, 24, 4096))}


def alternate_windows(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets alternating layer types, or full attention."""
    layers = config["num_hidden_layers"]
    alternate = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    return {"layer_types": rng.choice((alternate, alternate, ["full_attention"] * layers))}


def heads_of_layers(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets each layer's query heads: as drawn in full layers, twice as many or others in layers with windows."""
    full, windowed = config["num_attention_heads"], shapes.kv_heads * shapes.rng.choice((shapes.group * 2, 1, 3))
    kinds = config["layer_types"]
    return {"num_attention_heads_per_layer": [full if kind == "full_attention" else windowed for kind in kinds]}


def published_lists(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets Step-3.5's keys by layer, with or without entries for MTP layers."""
    layers, mtp = config["num_hidden_layers"], config["num_nextn_predict_layers"]
    more = mtp if rng.random() < 0.5 else 0
    limits = [rng.choice((0.0, 0.3, 1.5)) for _ in range(layers + more)]
    windowed = shapes.kv_heads * shapes.rng.choice((shapes.group * 2, 1, 3))
    return {
        "layer_types": config["layer_types"] + ["sliding_attention"] * more,
        "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": windowed},
        "moe_layers_enum": ",".join(str(i) for i in range(layers) if rng.random() < 0.7),
        "swiglu_limits": rng.choice((limits, None)),
        "swiglu_limits_shared": rng.choice((limits[::-1], None)),
    }


def experts(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets the experts per token."""
    count = config.get("num_experts") or config.get("moe_num_experts") or config["num_local_experts"]
    key = "moe_top_k" if "moe_num_experts" in config else "num_experts_per_tok"
    return {key: shapes.rng.choice((min(4, count), shapes.rng.randint(1, count)))}


def dense_layers(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets which layers have a dense MLP."""
    return {"mlp_only_layers": rng.choice(([], [], [0], list(range(config["num_hidden_layers"]))))}


def kinds_of_ffn(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets random dense and sparse FFNs."""
    kinds = [rng.choice(("dense", "sparse", "sparse")) for _ in range(config["num_hidden_layers"])]
    return {"mlp_layer_types": kinds}


def latents(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets MLA's sizes."""
    sizes = shapes.rng
    return {
        "hidden_size": 4 * sizes.randint(8, 14),
        "num_attention_heads": sizes.choice((2, 4)),
        "kv_lora_rank": sizes.choice((16, 20)),
        "q_lora_rank": rng.choice((None, 12)),
        "qk_rope_head_dim": sizes.choice((4, 8)),
        "qk_nope_head_dim": sizes.choice((6, 8)),
        "v_head_dim": sizes.choice((6, 10)),
        "num_key_value_heads": None,
    }


def heads_of_latents(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets a number of KV heads, which has no meaning."""
    return {"num_key_value_heads": config["num_attention_heads"]}


def expert_groups(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets DeepSeek-V3's expert groups."""
    sizes = shapes.rng
    groups = sizes.choice((1, 2, 4, 8))
    count, top_groups = groups * sizes.randint(2, 3), sizes.randint(1, groups)
    return {
        "n_routed_experts": count,
        "n_shared_experts": rng.choice((1, 2)),
        "num_experts_per_tok": sizes.randint(1, count // groups * top_groups),
        "moe_intermediate_size": rng.randint(3, 20),
        "first_k_dense_replace": rng.choice((0, 1, config["num_hidden_layers"])),
        "routed_scaling_factor": rng.choice((1.0, 2.5, 1.7)),
        "n_group": groups,
        "topk_group": top_groups,
    }


def groups_or_none(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets greedy or group-limited expert selection."""
    if rng.random() < 0.5:
        return {"topk_method": "greedy", "n_group": None, "topk_group": None, "num_experts_per_tok": 2}
    return {"topk_method": "group_limited_greedy"}


def indexers(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets indexers that select few tokens, or all of most sequences."""
    width = config["qk_rope_head_dim"] + shapes.rng.choice((0, 4, 12))
    return {"num_key_value_heads": config["num_attention_heads"], "q_lora_rank": 12, "index_head_dim": width}


def shared_indexers(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets which layers share an indexer."""
    return {"indexer_types": ["full", *rng.choices(("full", "shared"), k=config["num_hidden_layers"] - 1)]}


def scales(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets Granite's multipliers."""
    return {
        "embedding_multiplier": rng.choice((1.0, 12.0)),
        "attention_multiplier": rng.choice((shapes.head_dim**-0.5, 0.1)),
        "residual_multiplier": rng.choice((0.22, 1.0)),
        "logits_scaling": rng.choice((1.0, 4.0)),
    }


def states(rng: random.Random, shapes: Shapes, config: Json) -> Json:
    """Sets layers with states, whose heads few ranks divide, and layers with attention."""
    keys = shapes.rng.choice((1, 2, 3))
    kinds = ["full_attention", "linear_attention"]
    kinds += rng.choices(("linear_attention", "linear_attention", "full_attention"), k=rng.randint(0, 2))
    rng.shuffle(kinds)
    return {
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * shapes.rng.choice((1, 2, 3)),
    }


USES: dict[str, Callable[[random.Random, Shapes, Json], Json]] = {
    use.__name__: use
    for use in (
        *(heads, whole_heads, plain_heads, wide_heads, narrow_hidden, rotated_part),
        *(windows_of_layers, one_window, windows_where_used, some_windows, alternate_windows),
        *(experts, dense_layers, kinds_of_ffn, expert_groups, groups_or_none, heads_of_layers, published_lists),
        *(latents, heads_of_latents, indexers, shared_indexers, scales, states),
    )
}
LATENTS = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "mistral4")
GROWING = ("ministral3", "mistral4")  # families that scale queries by position


def rope_of(model_type: str, rng: random.Random, context: int) -> Json:
    """Returns parameters of a kind of RoPE, rarely of one that we do not support."""
    theta = {"rope_theta": rng.choice((10_000.0, 1_000_000.0, 500.0))}
    kind = rng.choice(("default", "default", "linear", "llama3", "yarn", "yarn", "yarn"))
    if model_type in GROWING:
        kind, theta = "yarn", theta | {"llama_4_scaling_beta": rng.choice((0.1, 0.5))}
    if model_type == "phi3":  # transformers knows no other of its kinds that we support
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
    """Returns the content of a config.json; `plain` as transformers would write it."""
    content = {**config, "model_type": model_type, "architectures": [ARCHITECTURES[model_type]], "dtype": "float32"}
    if model_type in TWO_ROPES:
        local = {"rope_type": "default", "rope_theta": 10_000.0}
        full = {key: value for key, value in rope.items() if key != "truncate"}  # transformers reads it from elsewhere
        if "partial_rotary_factor" in content:  # of full layers
            full |= {"partial_rotary_factor": content.pop("partial_rotary_factor")}
        return content | {"rope_parameters": {"full_attention": full, "sliding_attention": local}}
    if plain:
        return content | {"rope_parameters": dict(rope), "transformers_version": "5.17.0"}
    if model_type == "mistral4":  # with other spellings transformers rotates too much
        content |= {"rope_parameters": dict(rope)}
    else:
        content |= _written_rope(rope, config["max_position_embeddings"], rng)
    defaults = CONFIG_MAPPING[model_type]()
    for key in list(content):
        default = getattr(defaults, key, "none")
        if key not in ("architectures", "model_type") and content[key] == default and rng.random() < 0.6:
            del content[key]  # equals the family's default
    if rng.random() < 0.2:
        del content[rng.choice(("architectures", "model_type"))]
    if "dtype" in content and rng.random() < 0.6:
        content["torch_dtype"] = content.pop("dtype")
    derived = {"head_dim": config["hidden_size"] // config["num_attention_heads"]}
    derived |= {"num_key_value_heads": config["num_attention_heads"]}
    nullable = {"llama": ("head_dim", "num_key_value_heads"), "mistral": ("head_dim",)}
    if rope["rope_type"] == "default":  # for other kinds transformers finds no dimensions
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
        del rest["original_max_position_embeddings"]  # equals the context
    outside: Json = {}
    if "original_max_position_embeddings" in rest and rng.random() < 0.2:
        outside["original_max_position_embeddings"] = rest.pop("original_max_position_embeddings")
    scaling: Json | None = {**named, **rest}
    if kind == "default" and rng.random() < 0.7:
        scaling = None
    way = rng.choice(("old", "old", "new", "beside", "theta outside"))
    if way == "old":
        return outside | {"rope_theta": theta, "rope_scaling": scaling}
    if way == "beside":  # as in model cards
        return outside | {
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "rope_theta": theta,
            "rope_scaling": scaling,
        }
    if way == "theta outside":
        return outside | {"rope_theta": theta, "rope_parameters": scaling or dict(named)}
    return outside | {"rope_parameters": {"rope_theta": theta, **(scaling or {})}}
