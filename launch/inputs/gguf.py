"""Reads config and weights of GGUF files, in the form of a Hugging Face checkpoint."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helix.files import check_file
from helix.layers.rotary import frequencies
from helix.layers.specs import RopeSpec
from helix.layout import HelixLayout
from helix.models import FAMILIES, DecoderSpec, spec_from_config
from helix.models.loading import weights_of
from launch.inputs.gguf_tokenizer import KEYS as TOKENIZER_KEYS

# Architectures that both this converter and the runtime support, by llama.cpp's names.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
# Types of the keys after the architecture's name; other keys are refused, since they may change the computation.
KEYS: dict[str, type] = dict.fromkeys(
    ["attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length", "block_count",
     "context_length", "embedding_length", "expert_count", "expert_feed_forward_length", "expert_used_count",
     "feed_forward_length", "rope.dimension_count", "rope.scaling.original_context_length", "vocab_size"], int
) | dict.fromkeys(["attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor"], float) | {
    "rope.scaling.finetuned": bool, "rope.scaling.type": str
}  # fmt: skip
# Keys after `general.sampling.`, and their names in `generation_config.json`.
SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"
}  # fmt: skip
# Keys that would change answers if they had another value.
OFF = {
    "general.sampling.mirostat": 0,
    "general.sampling.penalty_last_n": -1,  # repetition_penalty counts all tokens
    "general.sampling.xtc_probability": 0.0,
    "tokenizer.ggml.add_sep_token": False,
    "tokenizer.ggml.add_space_prefix": False,
    "tokenizer.ggml.remove_extra_whitespaces": False,
}
# Keys that do not change answers: credits, how the file was made, and parameters of samplers that OFF disables.
HARMLESS = re.compile(
    r"GGUF\..*|general\.\w+|general\.(source|base_model|dataset|license)\..*|quantize\.imatrix\..*|mradermacher\..*"
    r"|split\.(no|tensors\.count)|general\.sampling\.(mirostat_tau|mirostat_eta|xtc_threshold)"
)
# Parts of tensor names. Experts are stacked in one tensor [E, out, in].
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1: divisors of the RoPE frequencies
EXACT = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MISSING_PACKAGE = "reading GGUF needs the package gguf: pip install 'gguf>=0.17' (the extra helix-runtime[gguf])"


@dataclass(frozen=True)
class GGUFModel:
    """A GGUF file whose weights are read on demand.

    Attributes:
        metadata: values by key.
        config: content of `config.json`.
        spec: the runtime's spec for this config.
        shapes: shapes of the weights by Hugging Face name.
        dtype: dtype of the matrices; bfloat16 if they are quantized.
    """

    path: Path
    metadata: dict[str, Any]
    config: dict[str, Any]
    spec: DecoderSpec
    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype
    _tensors: dict[str, Any] = field(repr=False)

    @property
    def tensors(self) -> int:
        return len(self._tensors)

    @property
    def kinds(self) -> list[str]:
        """Types of the matrices in the file, most of them first."""
        return [kind for kind, _ in Counter(_matrix_kinds(self._tensors)).most_common()]

    def weights(self, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
        """Yields the weights tensor by tensor, under the names in `shapes`.

        Raises:
            ValueError: a value is NaN, infinite or beyond the dtype's range, or the quantization is not supported.
        """
        attention = self.spec.attention
        for name, tensor in self._tensors.items():
            values = torch.tensor(_values(tensor, self.path))
            if self.metadata["general.architecture"] == "llama" and re.search(r"\.attn_[qk]\.", name):
                values = _unpermute(values, attention.q_heads if ".attn_q." in name else attention.kv_heads)
            if not values.isfinite().all():
                raise ValueError(f"{name} in {self.path} has NaN or infinite values: the file is damaged")
            values = values.to(dtype)
            if not values.isfinite().all():
                raise ValueError(f"{name} in {self.path} has values beyond {dtype}: set dtype=bfloat16")
            names = _names(name, tensor)
            parts = [values] if values.dim() < 3 else [expert.clone() for expert in values]
            yield dict(zip(names, parts, strict=True))


def read_gguf(path: Path) -> GGUFModel:
    """Reads a file's metadata and checks that everything in it is supported.

    Raises:
        ValueError: the file is not a GGUF model, or not a supported one.
    """
    metadata, tensors = _read(path)
    architecture = str(metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"{path} has the architecture {architecture}, which is not supported; supported: {known}")
    if metadata.get("general.type", "model") != "model":
        raise ValueError(f"{path} is not a model: it has general.type={metadata['general.type']}")
    if (parts := metadata.get("split.count", 1)) not in (0, 1):
        raise ValueError(f"{path} is one of {parts} parts: join them with `llama-gguf-split --merge` first")
    factors = tensors.pop(ROPE_FACTORS, None)
    rope_factors = None if factors is None else _values(factors, path)
    try:
        _check_keys(metadata, architecture)
        config = _config(metadata, architecture, tensors, rope_factors)
        spec = spec_from_config(config)
        shapes = {name: shape for tensor in tensors.values() for name, shape in _shapes(tensor).items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    stored = weights_of(spec, HelixLayout.create(), 0, torch.float32).slices
    wanted = {s.name: s.shape for s in stored}
    if differing := sorted(name for name in wanted.keys() | shapes.keys() if wanted.get(name) != shapes.get(name)):
        first, more = differing[0], f", and {len(differing) - 1} more" if len(differing) > 1 else ""
        what = f"{first} is {_shape(shapes.get(first))} and should be {_shape(wanted.get(first))}{more}"
        raise ValueError(f"{path} does not have the tensors of a {ARCHITECTURES[architecture]}: {what}")
    kinds = {*_matrix_kinds(tensors)}
    dtype = EXACT.get(kinds.pop(), torch.bfloat16) if len(kinds) == 1 else torch.bfloat16
    return GGUFModel(path, metadata, config, spec, shapes, dtype, tensors)


def _matrix_kinds(tensors: Mapping[str, Any]) -> list[str]:
    return [tensor.tensor_type.name for tensor in tensors.values() if len(tensor.shape) > 1]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads metadata and tensors; raises ValueError if the file is unreadable, big-endian or has gaps."""
    try:
        check_file(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path} is not a GGUF file: it does not begin with GGUF")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    try:
        from gguf import GGUFReader  # an optional dependency
    except ModuleNotFoundError as error:
        raise ValueError(MISSING_PACKAGE) from error
    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # of any type: the library does not validate the file
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{path} is truncated or damaged ({what:.200})") from error
    if reader.byte_order == "S":  # gguf's dequantize ignores the byte order
        raise ValueError(
            f"{path} is in big-endian byte order: convert it first with `gguf-convert-endian {path} little`"
        )
    begin, alignment = reader.data_offset, int(reader.alignment)
    for tensor in reader.tensors:  # contiguous, as llama.cpp requires
        if tensor.data_offset != begin:
            raise ValueError(
                f"{path} is damaged: {tensor.name} is at byte {tensor.data_offset} and should be at {begin}"
            )
        begin += math.ceil(tensor.n_bytes / alignment) * alignment
    if size > begin:
        raise ValueError(f"{path} is damaged: {size - begin} bytes follow its last tensor")
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _check_keys(metadata: dict[str, Any], architecture: str) -> None:
    """Raises ValueError if a key is unknown or has the wrong type: it might change answers."""
    types: dict[str, type] = {"split.count": int, "tokenizer.chat_template": str, "tokenizer.chat_templates": list}
    types |= {f"{architecture}.{key}": kind for key, kind in KEYS.items()}
    types |= {f"tokenizer.ggml.{key}": kind for key, kind in TOKENIZER_KEYS.items()}
    types |= {f"general.sampling.{key}": int if key == "top_k" else float for key in SAMPLING}
    types |= {key: type(value) for key, value in OFF.items()}
    for key, value in metadata.items():
        if HARMLESS.fullmatch(key):
            continue
        kind = str if key.startswith("tokenizer.chat_template.") else types.get(key)
        if kind is None or value != OFF.get(key, value):
            what = f"{key}={value!s:.80} is not supported"
            if not key.startswith(f"{architecture}."):
                what += f"; if it does not matter, `gguf-new-metadata --remove-metadata {key} FILE NEW` removes it"
            raise ValueError(what)
        if key.startswith(f"{architecture}.") and isinstance(value, list):
            raise ValueError(f"{key} differs between layers, which is not supported")
        if type(value) is not kind:
            raise ValueError(f"{key}={value!s:.80} should have the type {kind.__name__}")


def _config(
    metadata: dict[str, Any], architecture: str, tensors: dict[str, Any], rope_factors: np.ndarray | None
) -> dict[str, Any]:
    hparams = {k.removeprefix(f"{architecture}."): v for k, v in metadata.items() if k.startswith(f"{architecture}.")}

    def value(key: str, default: Any = None) -> Any:
        if (found := hparams.get(key, default)) is None:
            raise ValueError(f"{architecture}.{key} is missing")
        return _short(found) if isinstance(found, float) else found

    heads, hidden = value("attention.head_count"), value("embedding_length")
    head_dim = value("attention.key_length", value("rope.dimension_count", hidden // max(heads, 1)))
    for key in ("attention.value_length", "rope.dimension_count"):
        if value(key, head_dim) != head_dim:
            raise ValueError(f"{architecture}.{key}={hparams[key]} differs from head_dim={head_dim}: not supported")
    if "token_embd.weight" not in tensors:
        raise ValueError("the tensor token_embd.weight is missing")
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": FAMILIES[ARCHITECTURES[architecture]][0],
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(value, head_dim, rope_factors),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
    } | special_ids(metadata)
    if architecture == "qwen3moe":
        config |= {
            "num_experts": value("expert_count"),
            "num_experts_per_tok": value("expert_used_count"),
            "moe_intermediate_size": value("expert_feed_forward_length"),
            "norm_topk_prob": True,  # fixed in llama.cpp's qwen3moe
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    elif experts := [key for key in hparams if key.startswith("expert_") and hparams[key]]:
        raise ValueError(f"{architecture}.{experts[0]}={hparams[experts[0]]} is not supported")
    return config


def generation_config(metadata: dict[str, Any], sampling: Mapping[str, float]) -> dict[str, Any]:
    """Returns the content of `generation_config.json`: special tokens, and sampling defaults if there are any.

    Args:
        sampling: defaults that replace the file's.
    """
    found: dict[str, Any] = {
        name: _short(value) if isinstance(value, float) else value
        for key, name in SAMPLING.items()
        if (value := metadata.get(f"general.sampling.{key}")) is not None
    } | dict(sampling)
    # transformers samples only with do_sample, and then refuses temperature=0.
    return special_ids(metadata) | ({"do_sample": found.get("temperature", 1.0) > 0} | found if found else {})


def special_ids(metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns the ids of BOS, padding and EOS (a list if there are several), as in `generation_config.json`."""

    def token(name: str) -> int | None:
        return metadata.get(f"tokenizer.ggml.{name}_token_id")

    ends = list(dict.fromkeys(end for name in ("eos", "eot", "eom") if (end := token(name)) is not None))
    several = ends if len(ends) > 1 else None
    one = ends[0] if ends else None
    return {"bos_token_id": token("bos"), "pad_token_id": token("padding"), "eos_token_id": several or one}


def _rope(value: Any, head_dim: int, rope_factors: np.ndarray | None) -> dict[str, Any]:
    scaled_by = value("rope.scaling.factor", 0.0)
    # Like llama.cpp, treat a factor without a type as linear scaling.
    kind, theta = value("rope.scaling.type", "linear" if scaled_by else "none"), value("rope.freq_base", 10000.0)
    if rope_factors is not None and kind != "none":
        raise ValueError(f"rope.scaling.type={kind} together with {ROPE_FACTORS} is not supported")
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": value("rope.scaling.factor")}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": value("rope.scaling.factor"),
            "original_max_position_embeddings": value("rope.scaling.original_context_length"),
        }
    if kind != "none":
        raise ValueError(f"rope.scaling.type={kind} is not supported; supported: none, linear, yarn")
    if rope_factors is None:
        return {"rope_type": "default", "rope_theta": theta}
    # The file has only the resulting factors of Llama 3.1's scaling; all these models differ only in `factor`.
    factor = _short(float(rope_factors.max()))
    scaling = {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain, _ = frequencies(RopeSpec("default", theta, head_dim))
    scaled, _ = frequencies(RopeSpec("llama3", theta, head_dim, scaling))
    if rope_factors.shape != plain.shape or not np.allclose(plain / scaled, rope_factors, rtol=1e-4):
        raise ValueError(f"the factors in {ROPE_FACTORS} do not match Llama 3.1's scaling, so they are not supported")
    return {"rope_type": "llama3", "rope_theta": theta, **scaling}


def _short(value: float) -> float:
    """Returns the shortest decimal with the same fp32 value, as stored in GGUF: 1e-05 instead of 9.999999747e-06."""
    return float(str(np.float32(value)))


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))


def _names(name: str, tensor: Any) -> list[str]:
    stem, _, kind = name.rpartition(".")
    layer, _, inner = stem.removeprefix("blk.").partition(".")
    template = OUTER.get(stem) if not stem.startswith("blk.") else INNER.get(inner)
    if template is None:
        raise ValueError(f"the tensor {name} is not supported")
    template = template if stem in OUTER else f"model.layers.{layer}.{template}"
    count = int(tensor.shape[-1]) if "{}" in template else 1
    return [f"{template.format(expert)}.{kind}" for expert in range(count)]


def _shapes(tensor: Any) -> dict[str, tuple[int, ...]]:
    names, shape = _names(tensor.name, tensor), tuple(int(n) for n in reversed(tensor.shape))
    return dict.fromkeys(names, shape[1:] if len(shape) > 2 else shape)


def _values(tensor: Any, path: Path) -> np.ndarray:
    """Converts a tensor to fp32, [out, in]."""
    from gguf import dequantize  # imported before, by `_read`

    try:
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ValueError(f"{tensor.name} in {path} is quantized as {kind}, which is not supported") from error


def _unpermute(weight: Tensor, heads: int) -> Tensor:
    """Undoes llama.cpp's interleaving of rotated pairs, for rows [heads x D, ...]: the halves of pairs move apart."""
    pairs = math.prod(weight.shape[:1]) // heads // 2
    return weight.unflatten(0, (heads, pairs, 2)).transpose(1, 2).flatten(0, 2).contiguous()
