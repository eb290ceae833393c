"""A checkpoint's config, and the names, shapes and formats of its tensors. Free of torch."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from helix.files import check_file, read_json
from helix.layers.specs import MXFP4_BLOCK, MatrixFormat, MoESpec, Storage
from helix.models.spec import DecoderSpec, LayerSpec
from helix.tokenizer import read_end_token

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MODELOPT = "hf_quant_config.json"  # ModelOpt's format, which config.json may lack
MAX_LISTED = 8  # names shown per kind of problem
HEAD = "lm_head.weight"
# Prefixes of the text part's tensors in multimodal models -> in text models.
TEXT_PARTS = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.",
}
# Parts of multimodal models that are not read: towers and what connects them to the text part.
TOWERS = tuple(
    f"{outer}{part}."
    for part in (
        "vision_tower", "visual", "multi_modal_projector", "mm_projector", "patch_merge_mlp", "embed_vision",
        "embed_audio", "audio_tower", "vision_model", "vit_large_projector",
    )
    for outer in ("", "model.")
)  # fmt: skip
BLOCK = (128, 128)  # rows and columns that share a scale when unquantized weights are rounded to e4m3
# ModelOpt's algorithms for e4m3 -> rows and columns that share a scale; None: one scale per matrix or per row.
MODELOPT_FP8 = {"FP8": None, "FP8_PER_CHANNEL_PER_TOKEN": None, "FP8_PB_WO": BLOCK}
# Quantization methods with e4m3 tensors and scales: the key that names the format, and its supported values.
FP8: dict[str, tuple[str, tuple[str | None, ...]]] = {
    "fp8": ("fmt", (None, "e4m3", "float8_e4m3fn")),
    "fbgemm_fp8": ("fmt", (None,)),
    "modelopt": ("quant_algo", (*MODELOPT_FP8, "MIXED_PRECISION")),
    "compressed-tensors": ("format", (None, "float-quantized", "naive-quantized", "mixed-precision", "dense")),
}
SUFFIXES = ("_scale_inv", "_scale")  # of a tensor's scales; both are multiplied
UNUSED = (".input_scale", ".input_scale_ub", ".activation_scale")  # scales of activations
# Scales of KV caches and of attention's inputs and outputs: kv.dtype=fp8 computes a scale per token and head instead.
KV_SCALES = (
    ".kv_scale", ".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".prob_output_scale", ".output_scale",
)  # fmt: skip
SUPPORTED = f"FP8 of {', '.join(FP8)} in matrices (e4m3, with scales), and mxfp4 of gpt-oss"
# Routers and indexers, whose selections rounding would change, and gates of states, whose errors accumulate.
UNQUANTIZED = (
    ".gate.weight", ".router.weight", ".weights_proj.weight", ".in_proj_a.weight", ".in_proj_b.weight",
    ".in_proj_ba.weight", ".g_proj.weight",
)  # fmt: skip


@dataclass(frozen=True)
class ScaleGroup:
    """Matrices whose scales have the same layout.

    Attributes:
        block: rows and columns that share a scale; None: one scale per matrix or per row.
        modules: names of its modules; classes such as Linear are no module's name.
        patterns: regular expressions of such names.
    """

    block: tuple[int, int] | None = None
    modules: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()

    def block_of(self, shape: Sequence[int], grid: Sequence[int]) -> tuple[int, int] | None:
        if self.block is not None:
            fits = tuple(grid) == tuple(-(-n // b) for n, b in zip(shape, self.block, strict=True))
            return self.block if fits else None
        rows, columns = shape
        if tuple(grid) in ((), (1,), (1, 1)):
            return rows, columns
        return (1, columns) if tuple(grid) in ((rows,), (rows, 1)) else None

    def __str__(self) -> str:
        return f"blocks of {list(self.block)}" if self.block else "rows or as a whole"


@dataclass(frozen=True)
class WeightFormat:
    """Quantization format of a checkpoint, from its config.

    A tensor's type tells whether it is quantized, so lists of modules matter only where scales fit several blocks.

    Attributes:
        method: `quant_method`.
        groups: layouts of scales that its matrices have.
    """

    method: str
    groups: tuple[ScaleGroup, ...] = (ScaleGroup(),)

    @classmethod
    def from_config(cls, section: Any) -> WeightFormat | None:
        """Reads a `quantization_config`; None if there is none, or if it quantizes no weights.

        Raises:
            ValueError: the format is not supported; the message names it.
        """
        if not section:
            return None
        if not isinstance(section, Mapping):
            raise unsupported_format(f"{section!r:.100}")
        # ModelOpt's own files lack a quant_method.
        modelopt = "quant_algo" in section or "producer" in section
        method = str(section.get("quant_method") or ("modelopt" if modelopt else "unknown"))
        if method == "mxfp4":
            return cls(method)
        if method not in FP8:
            raise unsupported_format(f"{method:.100}")
        key, known = FP8[method]
        if method == "modelopt" and key in section and section[key] is None:
            return None  # of the KV cache alone
        if section.get(key) not in known:
            raise unsupported_format(f"{method} with {key}={section.get(key)!r:.100}")
        if method == "compressed-tensors":
            groups = _compressed_tensors_groups(section)
            return cls(method, groups) if groups else None
        if method == "modelopt" or "quantized_layers" in section:
            return cls(method, _modelopt_groups(method, section))
        block = section.get("weight_block_size")
        return cls(method, (ScaleGroup(None if block is None else _block(block)),))

    def matrix_format(self, name: str) -> MatrixFormat | None:
        """Returns the format of a matrix with random weights; see `helix.layers.specs.Formats`."""
        if self.method != "mxfp4":
            return fp8_format(name)
        return MatrixFormat(MXFP4_BLOCK, packed=True) if ".experts." in name and not name.endswith(".weight") else None

    def scales_of(self, dtypes: Mapping[str, str]) -> dict[str, str]:
        found = {}
        for name in (name for name, dtype in dtypes.items() if dtype == "F8_E4M3" and self.method in FP8):
            candidates = [f"{name}{suffix}" for suffix in SUFFIXES]
            found[name] = next((candidate for candidate in candidates if candidate in dtypes), candidates[0])
        return found

    def groups_of(self, *names: str) -> Sequence[ScaleGroup]:
        """Lists the groups that a matrix may belong to: those that name its module, else those that match it, else all.

        Args:
            names: the tensor's name; also the one with the prefix of a multimodal model.
        """
        modules = [name.removesuffix(".weight") for name in names]
        named = [group for group in self.groups if not group.modules.isdisjoint(modules)]
        return (
            named
            or [group for group in self.groups if any(re.match(p, m) for p in group.patterns for m in modules)]
            or self.groups
        )

    def block_of(self, shape: Sequence[int], grid: Sequence[int], *names: str) -> tuple[int, int] | None:
        """Returns the rows and columns per scale, from the shapes of a matrix and its scales.

        None if they mismatch, or if groups of different blocks fit and none is for this matrix.
        """
        if len(shape) == 3 and len(grid) == 3 and shape[0] == grid[0]:  # a stack of matrices has a stack of scales
            shape, grid = shape[1:], grid[1:]
        if len(shape) != 2:
            return None
        if len(grid) == 4 and grid[1] == grid[3] == 1:  # as ModelOpt stores blocks
            grid = grid[::2]
        fitting = [block for group in self.groups_of(*names) if (block := group.block_of(shape, grid)) is not None]
        sizes = {tuple(min(n, b) for n, b in zip(shape, block, strict=True)) for block in fitting}
        return fitting[0] if len(sizes) == 1 else None


def _block(block: Any) -> tuple[int, int]:
    if not isinstance(block, list | tuple) or [type(n) is int and n > 0 for n in block] != [True, True]:
        raise ValueError(f"quantization_config: blocks of {block!r:.100} must be two positive integers")
    return block[0], block[1]


def _modelopt_groups(method: str, section: Mapping[str, Any]) -> tuple[ScaleGroup, ...]:
    layers, algorithm = section.get("quantized_layers"), section.get("quant_algo")
    if algorithm in MODELOPT_FP8:
        return (ScaleGroup(MODELOPT_FP8[algorithm]),)
    each = layers.values() if isinstance(layers, Mapping) else ()
    algorithms = {str(layer.get("quant_algo") if isinstance(layer, Mapping) else layer) for layer in each}
    if not algorithms or not algorithms <= {*MODELOPT_FP8}:
        found = ", ".join(sorted(algorithms)) or None
        raise unsupported_format(f"{method} with quant_algo={algorithm!r:.100} and quantized_layers of {found!s:.100}")
    return tuple(ScaleGroup(block) for block in dict.fromkeys(MODELOPT_FP8[name] for name in sorted(algorithms)))


def _compressed_tensors_groups(section: Mapping[str, Any]) -> tuple[ScaleGroup, ...]:
    # The groups that quantize weights. Without `config_groups`, shapes decide.
    if section.get("transform_config"):
        raise unsupported_format("compressed-tensors with transform_config, which rotates activations")
    given = section.get("config_groups")
    if not isinstance(given, Mapping):
        return (ScaleGroup(),)
    groups = []
    for name, group in given.items():
        group = group if isinstance(group, Mapping) else {"weights": group}
        weights = group.get("weights")
        if weights is None:
            continue
        weights = weights if isinstance(weights, Mapping) else {}
        keys = ("num_bits", "type", "strategy", "group_size", "actorder")
        bits, kind, strategy, size, order = (weights.get(key) for key in keys)
        known = strategy in ("tensor", "channel", "block") or (
            # Other orders permute the columns of groups.
            strategy == "group" and type(size) is int and size > 0 and order in (None, "static", "weight")
        )
        if (bits, kind) != (8, "float") or not known or group.get("format") not in FP8["compressed-tensors"][1]:
            more = f", group_size={size!r}, actorder={order!r}" if strategy == "group" else ""
            more += f", format={group['format']!r}" if "format" in group else ""
            raise unsupported_format(
                f"compressed-tensors {name}: num_bits={bits!r}, type={kind!r}, strategy={strategy!r}{more}"
            )
        block = None
        if strategy in ("group", "block"):
            block = _block([1, size] if strategy == "group" else weights.get("block_structure"))
        targets = {target for target in group.get("targets") or () if isinstance(target, str)}
        patterns = {target for target in targets if target.startswith("re:")}
        groups.append(
            ScaleGroup(
                block,
                frozenset(_renamed(target, TEXT_PARTS) for target in targets - patterns),
                frozenset(_pattern(name, target) for target in patterns),
            )
        )
    return tuple(groups)


def _pattern(group: str, target: str) -> str:
    try:
        re.compile(target.removeprefix("re:"))
    except re.error as error:
        raise ValueError(f"quantization_config: {group} has the target {target!r:.100}: {error}") from error
    return target.removeprefix("re:")


def fp8_format(name: str) -> MatrixFormat | None:
    """`helix.layers.specs.Formats` of unquantized weights that are rounded to e4m3."""
    return None if name.endswith(UNQUANTIZED) else MatrixFormat(BLOCK[1])


def unsupported_format(what: str) -> ValueError:
    """Returns the error for an unsupported quantization format."""
    return ValueError(
        f"the checkpoint is quantized ({what}, in quantization_config), which is not supported here; "
        f"supported: {SUPPORTED}, and unquantized weights"
    )


def quantization_section(config: Mapping[str, Any]) -> Any:
    """Returns the `quantization_config` of a config.json: the outer one, else that of its text part."""
    text = config.get("text_config")
    return config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, Mapping) else None)


def read_config(path: Path) -> dict[str, Any]:
    """Reads `config.json` of a checkpoint directory, with all end tokens.

    `eos_token_id` comes from `generation_config.json`, else from config.json, plus the tokenizer's `eos_token`:
    fine-tunes of base models name the end-of-turn token only there. vLLM, SGLang and mlx-lm do the same.

    Raises:
        ValueError: not a checkpoint directory, or unreadable.
    """
    if not path.is_dir():
        raise ValueError(f"model.path={path} is not a directory; it must hold a Hugging Face checkpoint (config.json)")
    if not os.path.lexists(path / "config.json"):
        raise ValueError(f"model.path={path} is not a checkpoint: it has no config.json")
    config = read_json(path / "config.json")
    if os.path.lexists(path / "generation_config.json"):
        eos = read_json(path / "generation_config.json").get("eos_token_id")
        config["eos_token_id"] = config.get("eos_token_id") if eos is None else eos
    if (end := read_end_token(path)) is not None:
        text = config.get("text_config")
        eos = config.get("eos_token_id")
        eos = text.get("eos_token_id") if eos is None and isinstance(text, dict) else eos
        ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
        config["eos_token_id"] = eos if end in ends else [*ends, end]
    if not quantization_section(config) and os.path.lexists(path / MODELOPT):
        section = read_json(path / MODELOPT).get("quantization")
        config["quantization_config"] = {"quant_method": "modelopt"} | (section if isinstance(section, dict) else {})
    return config


class CheckpointFiles:
    """The safetensors files of a directory, and their tensors.

    Args:
        weight_format: format of quantized weights; None: from the directory's config.json.
        prefixes: of tensors in the files -> of their names here.

    Raises:
        ValueError: no weights, an unknown quantization, or a shard that is missing, unreadable, damaged, outside of the
            directory, or contradicts the index.
    """

    def __init__(
        self, path: Path, weight_format: WeightFormat | None = None, prefixes: Mapping[str, str] = TEXT_PARTS
    ) -> None:
        self.path = path
        if os.path.lexists(path / INDEX):
            listed = read_json(path / INDEX).get("weight_map")
            if not isinstance(listed, dict) or not listed:
                raise ValueError(f"{path / INDEX} has no weight_map: download it again")
            for tensor, file in listed.items():
                if not _is_within(file):
                    raise ValueError(f"{path / INDEX} has {tensor} in {file!r:.80}, which is not a path within {path}")
            files = sorted(set(listed.values()))
            if SINGLE not in files and os.path.lexists(path / SINGLE):  # transformers prefers it
                listed, files = None, [SINGLE]
        elif os.path.lexists(path / SINGLE):
            listed, files = None, [SINGLE]
        else:
            raise ValueError(f"model.path={path} has no weights: neither {SINGLE} nor {INDEX}")
        missing = [name for name in files if not os.path.lexists(path / name)]
        if missing:
            raise ValueError(f"{INDEX} in {path} names files that are missing: {', '.join(missing)}")
        self.files: dict[str, str] = {}  # tensor name -> file
        self.stored: dict[str, str] = {}  # tensor name -> name in the file
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        for name in files:
            with self.open(name) as shard:
                for within in shard.keys():  # noqa: SIM118 - not a mapping
                    if listed is not None and listed.get(within, name) != name:
                        continue  # a stale copy: the index assigns the tensor to another file
                    tensor = _renamed(within, prefixes)
                    if tensor in self.files:
                        raise ValueError(
                            f"{path} has {tensor} twice: as {self.stored[tensor]} in {self.files[tensor]}, and as "
                            f"{within} in {name}; remove one of them, or assign it to one file in {INDEX}"
                        )
                    self.files[tensor], self.stored[tensor] = name, within
                    stored = shard.get_slice(within)
                    self.shapes[tensor], self.dtypes[tensor] = tuple(stored.get_shape()), stored.get_dtype()
        held = set(self.stored.values())
        if lost := sorted(f"{tensor} in {file}" for tensor, file in (listed or {}).items() if tensor not in held):
            raise ValueError(f"{INDEX} in {path} names tensors that its files do not hold: {summarize(lost)}")
        config = read_config(path) if os.path.lexists(path / "config.json") else {}
        self.format = weight_format or WeightFormat.from_config(quantization_section(config))
        self.scales = self.format.scales_of(self.dtypes) if self.format else {}  # e4m3 tensor -> name of its scales

    def open(self, name: str, framework: str = "np") -> Any:
        file = self.path / name
        try:
            check_file(file)
            return safe_open(str(file), framework=framework)
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error
        except SafetensorError as error:
            with file.open("rb") as opened:
                begins = opened.read(9)[8:]  # eight bytes of header length, then JSON
            what = "truncated or damaged" if begins in (b"", b"{") else "not a safetensors file"
            raise ValueError(f"{file} is {what} ({error})") from error

    def as_stored(self, spec: DecoderSpec) -> DecoderSpec:
        """Adds to the spec what only the tensors tell: an untied head, and joined experts.

        Fine-tuned heads may differ from the embedding; transformers compares the two and ties only equal ones.
        """

        def stored(index: int, layer: LayerSpec) -> LayerSpec:
            ffn = layer.ffn
            if not isinstance(ffn, MoESpec) or ffn.storage not in ("apart", "joined", "transposed"):
                return layer
            block, width = f"model.layers.{index}.{ffn.block}.experts", 2 * ffn.width
            shape = self.shapes.get(f"{block}.gate_up_proj")
            if shape is None:  # without any experts, the check of names says what is missing
                apart = f"{block}.0.{ffn.matrices[0]}.weight" in self.files
                return replace(layer, ffn=replace(ffn, storage="apart")) if apart else layer
            shapes: dict[Storage, tuple[int, ...]] = {
                "joined": (ffn.experts, width, spec.hidden),
                "transposed": (ffn.experts, spec.hidden, width),
            }
            if shapes.get(ffn.storage) == shape:
                return layer
            fits: Storage = "joined" if shape != shapes["transposed"] or shape == shapes["joined"] else "transposed"
            return replace(layer, ffn=replace(ffn, storage=fits))

        layers = tuple(stored(index, layer) for index, layer in enumerate(spec.layers))
        return replace(spec, tied=spec.tied and HEAD not in self.files, layers=layers)

    @property
    def skipped(self) -> list[str]:
        """What the files have and no model here reads: towers and scales of a KV cache."""
        named = (next((tower for tower in TOWERS if name.startswith(tower)), None) for name in self.files)
        towers = Counter(tower for tower in named if tower is not None)
        found = [f"the {count} tensors of {tower}*: only text is read" for tower, count in towers.items()]
        if any(name.endswith(KV_SCALES) for name in self.files):
            found.append("the KV scales: kv.dtype=fp8 computes a scale per token and head")
        return found

    def scale_granularity(self, name: str) -> str:
        """Describes what may share a scale of a tensor, for messages."""
        groups = self.format.groups_of(name, self.stored[name]) if self.format else []
        return " or ".join(dict.fromkeys(map(str, groups)))

    def block(self, name: str) -> tuple[int, int] | None:
        """Returns the rows and columns of an e4m3 tensor that share a scale; None if its scales do not fit."""
        if self.format is None:
            return None
        return self.format.block_of(self.shapes[name], self.shapes[self.scales[name]], name, self.stored[name])

    def matrix_format(self, name: str) -> MatrixFormat | None:
        """Returns a tensor's quantized format; see `helix.layers.specs.Formats`."""
        if f"{name}_blocks" in self.shapes:
            return MatrixFormat(MXFP4_BLOCK, packed=True)
        block = self.block(name) if name in self.scales else None
        return None if block is None else MatrixFormat(block[1])


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    outer = next((outer for outer in prefixes if name.startswith(outer)), "")
    return prefixes.get(outer, "") + name.removeprefix(outer)


def _is_within(name: Any) -> bool:
    # The file itself may be a symlink to elsewhere.
    return isinstance(name, str) and name[:1] not in ("", "/") and "\0" not in name and ".." not in name.split("/")


def summarize(names: list[str]) -> str:
    """Lists up to MAX_LISTED names, and counts the others."""
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
