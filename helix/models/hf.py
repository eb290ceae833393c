"""Reads a Hugging Face `config.json`, for all families.

transformers' config classes read the file, so defaults, old spellings and types are theirs. Each value of the config
object then goes into a `DecoderSpec`, or is refused by name.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from helix.layers.specs import AttentionSpec, FFNSpec, MLASpec, MLPSpec, MoESpec, RopeSpec
from helix.models.checkpoint import METHODS, WeightFormat, unsupported_format
from helix.models.spec import DecoderSpec, LayerSpec
from helix.transformers_import import import_transformers
from helix.worker.kv_cache_spec import dtype_name

DTYPES = ("float32", "bfloat16", "float16")
# Labels of classifiers, of which transformers would create any number, and what `load_hf_config` gets as argument.
IGNORED_KEYS = ("num_labels", "id2label", "label2id", "model_type")
MAX_SIZE = 1 << 30  # of a dimension: the bytes of a matrix fit 64 bits
MAX_HEAD_DIM = 1 << 16
MAX_LAYERS = 1 << 16  # configs have lists with an entry per layer
LAYER_TYPES = {"indexed_attention": "deepseek_sparse_attention"}  # newer names -> names in transformers 5.17
TWO_ROPES = ("gemma3_text", "laguna", "olmo3", "step3p5")  # families whose RoPE differs by layer type


def config_classes() -> Mapping[str, Any]:
    """Returns transformers' config classes by model type.

    If this process has not imported torch, imports them without it, which saves seconds: enough for planning.
    """
    if "torch" not in sys.modules:
        import_transformers()
        # transformers has just listed its models' classes; importing this package would do it again, in 0.3 s.
        name = "transformers.models"
        package = importlib.util.find_spec(name)
        assert package is not None
        sys.modules.setdefault(name, importlib.util.module_from_spec(package))
    from transformers import CONFIG_MAPPING  # takes 1 s

    found: Mapping[str, Any] = CONFIG_MAPPING
    return found


def load_hf_config(model_type: str, config: Mapping[str, Any]) -> Any:
    """Creates the transformers config object of a family from the content of a `config.json`.

    Raises:
        ValueError: transformers cannot read it; the message names the key.
    """
    classes = config_classes()
    if isinstance(kinds := config.get("layer_types"), list):  # as newer versions of transformers save them
        config = {**config, "layer_types": [LAYER_TYPES.get(str(kind), kind) for kind in kinds]}
    if model_type in TWO_ROPES and isinstance(rope := config.get("rope_parameters"), Mapping):
        config = {**config, "rope_parameters": by_layer_type(rope)}
    _check_before(config, model_type)
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.CRITICAL)  # its warnings would appear once per rank; the checks here cover them
    try:
        read = classes[model_type](**copy.deepcopy({k: v for k, v in config.items() if k not in IGNORED_KEYS}))
        read.standardize_rope_params()  # as transformers does before each use: outer keys override nested ones
        return read
    except Exception as error:  # of any type: AttributeError, KeyError, TypeError and more
        why = str(error.__cause__) if error.__cause__ is not None else f"{type(error).__name__}: {error}"
        why = " ".join(why.split()).partition(" Errors: ")[0]
        raise ValueError(f"config.json cannot be read as {model_type}: {why}") from error
    finally:
        log.setLevel(level)


def by_layer_type(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Copies RoPE parameters outside the layer types, which Laguna's config has, into every layer type."""
    types = {key: value for key, value in parameters.items() if isinstance(value, Mapping | None)}
    if not any(types.values()):
        return dict(parameters)  # the same for all layers
    beside = {key: value for key, value in parameters.items() if key not in types}
    return {key: value and {**beside, **value} for key, value in types.items()}


def check_sizes(config: Any, *needed: str) -> None:
    """Raises ValueError unless these attributes are positive integers within the limits."""
    sizes = {key: getattr(config, key, None) for key in needed}
    if wrong := [f"{key}={size!r}" for key, size in sizes.items() if not _is_size(size)]:
        expected = "a positive integer" if len(wrong) == 1 else "positive integers"
        raise ValueError(f"config.json: {', '.join(wrong)} must be {expected}")
    for key, size in sizes.items():
        if key != "max_position_embeddings" and size is not None and size > MAX_SIZE:
            raise ValueError(f"config.json: {key}={size} must be at most {MAX_SIZE}")


def check_supported(config: Any, **supported: tuple[Any, ...]) -> None:
    """Raises ValueError if an attribute is set to a value that is not supported."""
    for key, values in supported.items():
        value = getattr(config, key, None)
        if value is not None and value not in values:
            allowed = ", ".join(map(str, values))
            raise ValueError(
                f"config.json: {key}={value!r} is not supported in {config.model_type} models; supported: {allowed}"
            )


def experts_of(config: Any) -> tuple[int, int]:
    """Returns the number of routed experts, and the number per token; ValueError if the latter is larger."""
    check_sizes(config, "num_experts", "num_experts_per_tok")
    experts, top_k = config.num_experts, config.num_experts_per_tok
    if top_k > experts:
        raise ValueError(f"config.json: num_experts_per_tok={top_k} is more than num_experts={experts}")
    return experts, top_k


def attention_of(config: Any) -> AttentionSpec:
    """Reads the attention of a Llama-like config without biases; families `replace` what differs.

    Raises:
        ValueError: a feature is not supported, or a size is not positive.
    """
    check_common(config)
    hidden, q_heads, origin = config.hidden_size, config.num_attention_heads, ""
    if (head_dim := getattr(config, "head_dim", None)) is None:
        head_dim, origin = hidden // q_heads, f" (hidden_size={hidden} over num_attention_heads={q_heads})"
    check_sizes(config, "num_key_value_heads")
    check_head_dim(head_dim, origin)
    return AttentionSpec(hidden, q_heads, config.num_key_value_heads, head_dim, norm_eps=float(config.rms_norm_eps))


def decoder_spec(
    config: Any,
    attention: AttentionSpec | MLASpec | Sequence[AttentionSpec | MLASpec],
    ffn: FFNSpec | Sequence[FFNSpec] | None = None,
    *,
    windows: Sequence[int | None] | None = None,
    partial_rotary: bool = False,
    formats: Iterable[str] = METHODS,
) -> DecoderSpec:
    """Creates the spec of a config.

    Args:
        config: result of `load_hf_config`.
        attention: of all layers, or of each.
        ffn: FFN of all layers, or of each; None: a dense one without biases.
        windows: each layer's sliding window; None: full attention in all.
        partial_rotary: whether the family supports partial rotary embedding.
        formats: supported quantization methods.

    Raises:
        ValueError: a feature is not supported, or a size is not positive.
    """
    if (method := quantization(config)) not in (None, *formats):
        raise unsupported_format(f"{method} in {config.model_type} models")
    layers = config.num_hidden_layers
    ffn = MLPSpec(config.intermediate_size) if ffn is None else ffn
    ffns = [ffn] * layers if isinstance(ffn, FFNSpec) else ffn
    if all(isinstance(each, MoESpec) or each.activation == "silu" for each in ffns):
        check_supported(config, hidden_act=("silu", "swish"))
    for moe in {each for each in ffns if isinstance(each, MoESpec) and each.scoring != "top_softmax"}:
        # Published files also name what a family's class takes for granted.
        check_supported(config, scoring_func=(moe.scoring,), norm_topk_prob=(moe.normalize,))
    _check_kinds(config, windows)
    if bad := [w for w in windows or () if w is not None and not _is_size(w)]:
        raise ValueError(f"config.json: sliding_window={bad[0]!r} must be a positive integer or null")
    if not config.rms_norm_eps >= 0:
        raise ValueError(f"config.json: rms_norm_eps={config.rms_norm_eps!r} must not be negative")
    dtype = dtype_name(config.dtype or "float32")
    if dtype not in DTYPES:
        raise ValueError(f"config.json: dtype={dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    attentions = [attention] * layers if isinstance(attention, AttentionSpec | MLASpec) else attention
    windows, eos = windows or [None] * layers, getattr(config, "eos_token_id", None)

    def rope_of(mixer: AttentionSpec | MLASpec, window: int | None) -> RopeSpec:
        kind = "full_attention" if window is None else "sliding_attention"
        width = mixer.rope if isinstance(mixer, MLASpec) else mixer.head_dim
        return RopeSpec.from_config(config, width, partial_rotary, kind if config.model_type in TWO_ROPES else None)

    ropes = [rope_of(*each) for each in zip(attentions, windows, strict=True)]
    rope = next((each for each, window in zip(ropes, windows, strict=True) if window is None), ropes[0])
    positions, limited_by = _context(config, rope)
    mixers = [
        replace(mixer, window=window, rotated=each.head_dim) if isinstance(mixer, AttentionSpec) else mixer
        for mixer, window, each in zip(attentions, windows, ropes, strict=True)
    ]
    return DecoderSpec(
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        layers=tuple(
            LayerSpec(mixer, each, None if own == rope else own)
            for mixer, each, own, _ in zip(mixers, ffns, ropes, range(layers), strict=True)
        ),
        rope=rope,
        norm_eps=float(config.rms_norm_eps),
        tied=bool(getattr(config, "tie_word_embeddings", True)),
        max_positions=positions,
        limited_by=limited_by,
        dtype=dtype,
        eos=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    )


def with_nextn(spec: DecoderSpec, ffn: FFNSpec, count: int | None) -> DecoderSpec:
    """Adds the first of a checkpoint's `count` MTP layers, which follow the last one; ignores tensors of the others."""
    nextn, layers = LayerSpec(spec.layers[-1].mixer, ffn) if count else None, len(spec.layers)
    unused = tuple(f"model.layers.{i}." for i in range(layers, layers + (count or 1)))
    return replace(spec, unused=unused, nextn=nextn)


def with_query_heads(attention: AttentionSpec, heads: Sequence[Any], key: str) -> list[AttentionSpec]:
    """Returns each layer's attention, with `heads` query heads; ValueError, which names `key`, if one is not a size."""
    if wrong := [n for n in heads if not _is_size(n)]:
        raise ValueError(f"config.json: {key} has {wrong[0]!r:.80}: positive integers are expected")
    return [replace(attention, q_heads=n) for n in heads]


def sparse_layers(config: Any) -> list[bool]:
    """Returns per layer whether it has experts, from `mlp_layer_types`; ValueError if an entry is unknown."""
    kinds, layers = config.mlp_layer_types, config.num_hidden_layers
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in ("dense", "sparse") for kind in kinds):
        raise ValueError(
            f"config.json: mlp_layer_types={kinds!r:.80} must be dense or sparse for each of num_hidden_layers={layers}"
        )
    return [kind == "sparse" for kind in kinds]


def layer_ffns(config: Any, moe: MoESpec, sparse: Iterable[bool]) -> list[FFNSpec]:
    """Lists the FFN of each layer: experts where `sparse`, else dense."""
    return [moe if has_experts else MLPSpec(config.intermediate_size) for has_experts in sparse]


def check_common(config: Any) -> None:
    """Raises ValueError for features and sizes that no family supports."""
    if config.is_heterogeneous:
        raise ValueError("config.json: per_layer_config (layers that differ) is not supported")
    check_supported(config, is_causal=(True,), is_encoder_decoder=(False,))
    sizes = "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"
    check_sizes(config, *sizes, "max_position_embeddings")


def check_head_dim(head_dim: Any, origin: str = "") -> None:
    """Raises ValueError unless the head size supports RoPE; `origin` says where it comes from."""
    if not _is_size(head_dim) or head_dim % 2 or head_dim > MAX_HEAD_DIM:
        known = f"must be a positive even integer of at most {MAX_HEAD_DIM}"
        raise ValueError(f"config.json: head_dim={head_dim!r}{origin} {known}")


def check_positive(config: Any, *keys: str) -> None:
    """Raises ValueError unless these attributes are numbers from 1e-9 to 1e9."""
    for key in keys:
        value = getattr(config, key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-9 <= value <= 1e9:
            raise ValueError(f"config.json: {key}={value!r} must be a number from 1e-9 to 1e9")


def quantization(config: Any) -> str | None:
    """Returns the quantization method of a checkpoint's weights; None if they are not quantized.

    Raises:
        ValueError: no family supports it.
    """
    found = WeightFormat.from_config(getattr(config, "quantization_config", None))
    return found.method if found else None


def with_query_scale(spec: DecoderSpec) -> DecoderSpec:
    """Adds `llama_4_scaling_beta`, which scales queries by position; ValueError if RoPE's parameters lack it."""
    given = spec.rope.scaling
    beta, trained = given.get("llama_4_scaling_beta"), given.get("original_max_position_embeddings")
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta < math.inf:
        raise ValueError(f"config.json: RoPE's llama_4_scaling_beta={beta!r} must be a number, and not negative")
    if not _is_size(trained) or trained is None:
        raise ValueError(f"config.json: RoPE's original_max_position_embeddings={trained!r} must be a positive integer")
    return replace(spec, rope=replace(spec.rope, query_scale=(float(beta), trained)))


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Returns each layer's sliding window, from `layer_types` and `sliding_window`.

    Raises:
        ValueError: a layer type is unknown, or layers slide without a window.
    """
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    kinds = set(types)
    if unknown := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise ValueError(
            f"config.json: layer_types has {', '.join(unknown)}; supported: full_attention, sliding_attention"
        )
    if "sliding_attention" in kinds and config.sliding_window is None:
        raise ValueError(
            "config.json: layer_types has sliding_attention, but there is no sliding_window (or use_sliding_window is "
            "false)"
        )
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in types)


def _check_kinds(config: Any, windows: Sequence[int | None] | None) -> None:
    # `layer_types` must agree with the attention that the family implements.
    layers = config.num_hidden_layers
    slides = {"sliding_attention": True, "full_attention": False, "chunked_attention": None}
    for kind, window in zip(getattr(config, "layer_types", None) or (), windows or (None,) * layers, strict=False):
        if slides.get(kind, window is not None) != (window is not None):
            what = "none" if window is None else f"sliding_window={window}"
            raise ValueError(
                f"config.json: layer_types has {kind}, and in {config.model_type} models this layer's window is {what}"
            )


def _context(config: Any, rope: RopeSpec) -> tuple[int, str]:
    # Supported positions, and the config key that limits them. Dual chunk attention (Qwen2.5-1M,
    # https://arxiv.org/abs/2501.15383) is plain attention within its first chunk.
    limits = {"max_position_embeddings": config.max_position_embeddings}
    if rope.kind == "yarn":  # Qwen's model cards add YaRN to a config and leave its max_position_embeddings
        stretched = int(rope.scaling["factor"] * rope.scaling["original_max_position_embeddings"])
        if stretched > config.max_position_embeddings:
            limits = {"RoPE's factor * original_max_position_embeddings": stretched}
    chunked = getattr(config, "dual_chunk_attention_config", None)
    if chunked:
        if not isinstance(chunked, Mapping):
            raise ValueError(f"config.json: dual_chunk_attention_config={chunked!r} must be an object")
        for key in [key for key in ("chunk_size", "original_max_position_embeddings") if key in chunked]:
            value = chunked[key]
            if not _is_size(value):
                raise ValueError(f"config.json: dual_chunk_attention_config.{key}={value!r} must be a positive integer")
            limits[f"dual_chunk_attention_config.{key}"] = value
    name = min(limits, key=limits.__getitem__)
    return limits[name], name


def _check_before(config: Mapping[str, Any], model_type: str) -> None:
    # Values on which transformers fails without naming the key.
    for key in ("dtype", "torch_dtype"):
        name = config.get(key)
        if isinstance(name, str) and name not in DTYPES:
            raise ValueError(f"config.json: {key}={name!r} is not supported; supported: {', '.join(DTYPES)}")
    for key in ("num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers"):
        layers = config.get(key)
        if layers is not None and not (isinstance(layers, int) and 0 <= layers <= MAX_LAYERS):
            raise ValueError(f"config.json: {key}={layers!r:.80} must be an integer from 0 to {MAX_LAYERS}")
    for key, kind, what in (
        ("rope_parameters", Mapping, "an object"),
        ("rope_scaling", Mapping, "an object"),
        ("layer_types", list, "a list"),
    ):
        if not isinstance(config.get(key), kind | None):
            raise ValueError(f"config.json: {key}={config[key]!r:.80} must be {what}, or null")
    rope = [config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key) is not None]
    for part in rope:
        if model_type in TWO_ROPES:
            break
        if nested := [key for key, value in part.items() if isinstance(value, Mapping)]:
            raise ValueError(
                f"config.json: RoPE's parameters differ by layer type ({', '.join(nested)}), which is not supported"
            )
    for part in (config, *rope):
        for key in ("num_attention_heads", "original_max_position_embeddings"):
            if isinstance(part.get(key), int) and not _is_size(part[key]):
                raise ValueError(f"config.json: {key}={part[key]} must be a positive integer")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 63
