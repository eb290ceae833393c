"""Merges overrides into a model's `config.json`, and checks them against the keys that its readers know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from helix.models import SHARED_KEYS, family_of, get_text_config, multimodal_architecture, spec_from_config
from helix.models.checkpoint import WeightFormat, read_config
from helix.models.hf import TWO_ROPES, by_layer_type, config_classes

# Spellings of RoPE. transformers reads one and drops the others, so overrides of any become rope_parameters.
ROPE = (
    "rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor",
    "partial_rotary_factors",
)  # fmt: skip
KEPT = ("rope_theta", "partial_rotary_factor")  # parameters of RoPE without scaling
TRAINED = "original_max_position_embeddings"
LAYERS = ("full_attention", "sliding_attention")  # layer types with different RoPE (TWO_ROPES)
# Keys within objects that some reader knows.
WITHIN = {
    "rope_parameters": (
        "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", TRAINED, "attention_factor", "beta_fast",
        "beta_slow", "mscale", "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor", "short_factor",
        "long_factor", "llama_4_scaling_beta", "mrope_section", "mrope_interleaved",
    ),
    "quantization_config": (
        "quant_method", "fmt", "quant_algo", "quantized_layers", "format", "weight_block_size", "config_groups",
        "ignore", "exclude_modules", "modules_to_not_convert", "dynamic", "bits", "w_bit", "group_size", "q_group_size",
        "sym", "zero_point", "desc_act", "checkpoint_format", "version", "global_quant_config", "exclude",
    ),
    "dual_chunk_attention_config": ("chunk_size", TRAINED, "local_size"),
}  # fmt: skip
# Further keys that transformers' classes, or families here, read.
BESIDES = (
    "model_type", *ROPE[:3], *ROPE[4:], TRAINED, "quantization_config", "dual_chunk_attention_config",
    "att_impl_type", "attention_other_setting", "attn_output_gate", "first_k_dense_replace", "full_attention_interval",
    "gating", "head_dim", "index_share_for_mtp_iteration", "index_skip_topk_offset", "index_topk_freq",
    "index_topk_pattern", "indexer_rope_interleave", "is_causal", "layer_types", "mlp_layer_types", "moe_layer_freq",
    "moe_layers_enum", "moe_router_activation", "moe_router_enable_expert_bias", "moe_router_use_sigmoid",
    "mtp_num_hidden_layers", "norm_expert_weight", "norm_topk_prob", "num_experts", "num_mtp_layers",
    "num_nextn_predict_layers", "output_gate_type", "rope_interleave", "rotary_dim", "route_norm",
    "routed_scaling_factor", "scoring_func", "sink", "sliding_window_pattern", "swiglu_limit", "topk_method",
    "use_head_wise_attn_gate", "use_moe_router_bias", "use_qk_norm", "use_rope_layers", "use_routing_bias",
    "yarn_only_types", "zero_centered",
)  # fmt: skip


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merges overrides into the config of a model's text part.

    Objects merge; lists and single values replace; null deletes a key. Either name of a key with two names, such as
    `torch_dtype`, and either spelling of RoPE works.

    Args:
        config: content of `config.json`; empty if the overrides are a whole config.

    Raises:
        ValueError: the family is unknown, or a required object is missing.
    """
    base, over = _flat(config, overrides)
    result = dict(base)
    if not over:
        return result
    family = family_of({**base, **over})
    defaults, names = _defaults(family), _names(family)
    for given, value in over.items():
        if given in ROPE:
            continue
        key = names.get(given, given)
        for other in [name for name in result if name != key and names.get(name) == key]:
            result[key] = result.pop(other)
        if isinstance(value, Mapping):
            result[key] = _merged(result.get(key), value)
        elif value is None and defaults.get(key) in (None, MISSING):
            result.pop(key, None)
        else:  # keep null where transformers would default to a number, such as a window
            result[key] = value
    _override_rope(result, {key: over[key] for key in over if key in ROPE}, family, TRAINED in defaults)
    return result


def load_spec_config(path: Path | None, inline: Mapping[str, Any]) -> dict[str, Any]:
    """Reads a model's text config from a directory and merges inline keys; without a directory, they are the config."""
    if path is None and not inline:
        raise ValueError("no model: set model.path=DIR, or a shape with model=NAME and model.load=random")
    return overridden(read_config(path) if path is not None else {}, inline)


def check_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any], name: str) -> None:
    """Raises ValueError for an override that no reader of this model's config knows, and names the closest known key.

    Args:
        name: setting of the overrides, such as `model.config`.
    """
    if not overrides:
        return
    whole = {**config, **overrides}
    base, over = _flat(config, overrides)
    family, outer = family_of({**base, **over}), multimodal_architecture(whole)
    inside = "text_config." if outer else ""
    known = {*_known(family, base)}
    top = {inside + key for key in known} | ({*SHARED_KEYS, "architectures", "model_type"} if outer else set())
    if outer:
        top |= {*_defaults(whole.get("model_type"))} - {"text_config"}
    if over.get("rope_parameters", 0) is None:
        raise ValueError(
            f"{name}.{inside}rope_parameters=null would delete rope_theta, too: set {name}.{inside}rope_scaling=null "
            "to turn scaling off, or set single keys of rope_parameters"
        )
    for path, value in _leaves(overrides):
        text = ".".join(map(str, path))
        levels = {".".join(map(str, path[:n])) for n in range(1, len(path) + 1)}
        if top & levels and not _is_strange_within(text.removeprefix(inside), known):
            continue
        nearest = _nearest(text, top)
        named = f" ({name}.architectures={whole.get('architectures')})" if not config else ""
        raise ValueError(
            f"{name}.{text}={value!r:.100}: {family} models{named} have no such key (did you mean {name}.{nearest}?)"
        )


def ignored_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any], name: str) -> list[str]:
    """Lists, a line each, the overrides that transformers accepts but that have no effect here."""
    found = []
    wanted = _meaning(config, overrides) if overrides else None
    for path, value in _leaves(overrides):
        if not config and value is None:  # a shape leaves out what the one that it extends has
            continue
        # The key is not read if the model is the same without it and with other values.
        if all(_meaning(config, _replaced(overrides, path, new)) == wanted for new in (MISSING, *_others(value))):
            resolved = overridden(config, overrides)
            rope, text = resolved.get("rope_parameters"), ".".join(map(str, path))
            kind = ""
            if path[-1] in WITHIN["rope_parameters"] and isinstance(rope, Mapping):
                kind = f" with rope_type={rope.get('rope_type', 'default')}"
            found.append(
                f"{name}.{text}={value!r:.100} changes nothing: {family_of(resolved)} models ignore it here{kind}"
            )
    return found


def _flat(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    # Text parts of a config and its overrides.
    if not config:
        return {}, {**get_text_config(overrides)}
    if multimodal_architecture(config) is None:
        return config, {**overrides}
    inner = overrides.get("text_config", {})
    if not isinstance(inner, Mapping):
        raise ValueError(
            f"config.json: text_config={inner!r:.100} must be an object in {multimodal_architecture(config)}"
        )
    return get_text_config(config), {**inner, **{key: value for key, value in overrides.items() if key in SHARED_KEYS}}


def _merged(old: Any, new: Mapping[str, Any]) -> dict[str, Any]:
    # Null deletes.
    result = dict(old) if isinstance(old, Mapping) else {}
    for key, value in new.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value) if isinstance(value, Mapping) else value
    return result


def _override_rope(config: dict[str, Any], over: Mapping[str, Any], family: str, outside: bool) -> None:
    # Merges overrides of RoPE, in order, into a config that may use another spelling. `outside`: the family's config
    # has the trained context outside of rope_parameters, too, and that one counts.
    objects = [part.get(key) for part in (config, over) for key in ROPE[:2]]
    own = {key: config[key] for key in ROPE if config.get(key) is not None}
    if not over or not all(isinstance(part, Mapping | None) for part in objects) or (not own and len(over) == 1):
        for key, value in over.items():  # one spelling, or something that the reader refuses
            if value is None:
                config.pop(key, None)
            else:
                config[key] = value
        return
    layers = LAYERS if family in TWO_ROPES else ()
    types = config.get("layer_types") if layers else None
    own, over = ({key: _by_type(key, value, types) for key, value in part.items()} for part in (own, over))
    rope: dict[str, Any] = {}
    scaled = own.get("rope_scaling") and not layers  # transformers then takes no other object
    for key in sorted(own, key=lambda key: key in ROPE[:2]):  # objects come last: they take precedence
        if not (scaled and key == "rope_parameters"):
            _put(rope, key, own[key], layers, LAYERS[:1])
    for key, value in over.items():
        _put(rope, key, value, layers, LAYERS if family == "olmo3" else LAYERS[:1])
        if (outside or TRAINED in config) and isinstance(value, Mapping) and TRAINED in value:
            config[TRAINED] = value[TRAINED]
    for key in ROPE:
        config.pop(key, None)
    config["rope_parameters"] = rope


def _by_type(key: str, value: Any, types: Any) -> Any:
    # A list with an entry per layer, as RoPE's parameters by layer type; other values as they are.
    if not isinstance(value, list) or not isinstance(types, list):
        return value
    if len(value) < len(types):
        raise ValueError(f"config.json: {key}={value!r:.80} must have an entry for each of layer_types")
    return {kind: {key.removesuffix("s"): value[types.index(kind)]} for kind in LAYERS if kind in types}


def _put(rope: dict[str, Any], key: str, value: Any, layers: tuple[str, ...], full: tuple[str, ...]) -> None:
    # Puts one key into RoPE's parameters, per layer type if they differ; `full`: layer types of `rope_theta`.
    if key in ROPE[:2]:
        if value is None:
            parts: list[Any] = [rope.get(layer) for layer in layers] or [rope]
            for part in (part for part in parts if isinstance(part, dict)):
                for name in {*part} - {*KEPT}:
                    del part[name]
            return
        given = by_layer_type(_spelled(value)) if layers else _spelled(value)
        new = {LAYERS[0]: given} if layers and not {*given} <= {*layers} else given
    elif isinstance(value, Mapping):
        new = dict(value)
    elif key == "rope_local_base_freq":
        new = {LAYERS[1]: {"rope_theta": value}}
    else:
        kinds = full if key == "rope_theta" else layers
        new = {layer: {key: value} for layer in kinds} if layers else {key: value}
    merged = _merged(rope, new)
    rope.clear()
    rope.update(merged)


def _spelled(parameters: Mapping[str, Any]) -> dict[str, Any]:
    # Older files call `rope_type` `type`.
    found = {key: _spelled(value) if isinstance(value, Mapping) else value for key, value in parameters.items()}
    if (kind := found.pop("type", None)) is not None:
        found.setdefault("rope_type", kind)
    return found


def _defaults(model_type: Any) -> dict[str, Any]:
    # Keys and defaults of a config class of transformers; empty if there is none.
    classes = config_classes()
    known = isinstance(model_type, str) and model_type in classes
    return {field.name: field.default for field in fields(classes[model_type])} if known else {}


def _names(family: str) -> dict[str, str]:
    # Keys with another name in transformers' config objects.
    return {"torch_dtype": "dtype", **config_classes()[family].attribute_map}


def _known(family: str, base: Mapping[str, Any]) -> Iterator[str]:
    # Keys of a family that some reader knows, dotted within objects.
    yield from {**_defaults(family), **_names(family)}
    yield from BESIDES
    if family == "gemma3_text":
        yield "rope_local_base_freq"
    for key in ROPE[:2]:
        parts = [f"{key}.{layer}" for layer in LAYERS] if family in TWO_ROPES else [key]
        parts += [key] if family in TWO_ROPES and key == "rope_scaling" else []
        yield from (f"{part}.{name}" for part in parts for name in WITHIN["rope_parameters"])
    for key in ("quantization_config", "dual_chunk_attention_config"):
        there = base.get(key)
        yield from (f"{key}.{name}" for name in {*WITHIN[key], *(there if isinstance(there, Mapping) else ())})


def _is_strange_within(text: str, known: set[str]) -> bool:
    # An unknown key of an object whose keys are known.
    return (
        text.partition(".")[0] in (*ROPE[:2], *WITHIN)
        and "." in text
        and not any(text == one or text.startswith(f"{one}.") for one in known if "." in one)
    )


def _nearest(text: str, known: set[str]) -> str:
    # The same last component elsewhere, else the closest spelling.
    elsewhere = sorted(
        (k for k in known if k.rpartition(".")[2] == text.rpartition(".")[2]), key=lambda k: k.count(".")
    )
    return elsewhere[0] if elsewhere else get_close_matches(text, sorted(known), 1, 0.0)[0]


def _leaves(overrides: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in overrides.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _replaced(overrides: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    # MISSING deletes the key, and objects that become empty.
    key, *rest = path
    inner = _replaced(overrides[key], tuple(rest), value) if rest else value
    return {
        name: old
        for name, old in {**overrides, key: inner}.items()
        if old is not MISSING and (old != {} or name != key)
    }


def _others(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, type(value)(0)]
    return [[*value, *(value[:1] or [0])] if isinstance(value, list) else f"{value}?"]


def _meaning(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    # All that is read from the config; None if it is refused.
    try:
        resolved = overridden(config, overrides)
        return spec_from_config(resolved), WeightFormat.from_config(resolved.get("quantization_config"))
    except ValueError:
        return None
