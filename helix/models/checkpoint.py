"""A checkpoint's config, and the names, shapes and formats of its tensors. Free of torch."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from helix.files import check_file, is_directory, read_json
from helix.layers.specs import MXFP4, NVFP4, MatrixFormat, MoESpec, Storage
from helix.models.quantized_tensors import MXFP8, StoredMatrix, Zeros, find_matrices, rotation_of
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
E4M3 = MatrixFormat(BLOCK[1])
# ModelOpt's algorithms for e4m3 -> rows and columns that share a scale; None: one scale per matrix or per row.
MODELOPT_FP8 = {"FP8": None, "FP8_PER_CHANNEL_PER_TOKEN": None, "FP8_PB_WO": BLOCK}
MODELOPT_MX = {"NVFP4": NVFP4, "W4A16_NVFP4": NVFP4, "MXFP8": MXFP8}
# Quantization methods: the key that names the format, and its supported values.
METHODS: dict[str, tuple[str, tuple[str | None, ...]]] = {
    "fp8": ("fmt", (None, "e4m3", "float8_e4m3fn")),
    "fbgemm_fp8": ("fmt", (None,)),
    "modelopt": ("quant_algo", (*MODELOPT_FP8, *MODELOPT_MX, "MIXED_PRECISION")),
    "compressed-tensors": (
        "format",
        (
            None, "float-quantized", "naive-quantized", "mixed-precision", "dense", "pack-quantized",
            "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
        ),
    ),
    "gptq": ("checkpoint_format", (None, "gptq", "gptq_v2")),
    "awq": ("version", (None, "gemm", "GEMM")),
    "quark": ("quant_method", ("quark",)),
}  # fmt: skip
SUFFIXES = ("_scale_inv", "_scale")  # of a tensor's scales; both are multiplied
UNUSED = (".input_scale", ".input_scale_ub", ".activation_scale", ".input_global_scale")  # scales of activations
# Scales of KV caches and of attention's inputs and outputs: kv.dtype=fp8 computes a scale per token and head instead.
KV_SCALES = (".kv_scale", ".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".prob_output_scale", ".output_scale")
SUPPORTED = (
    f"4-bit matrices (int4, NVFP4, MXFP4) and FP8 ones (e4m3, with scales) of {', '.join(METHODS)}; mxfp4 of gpt-oss"
)
# Routers and indexers, whose selections rounding would change, and gates of states, whose errors accumulate.
UNQUANTIZED = (
    ".gate.weight", ".router.weight", ".weights_proj.weight", ".in_proj_a.weight", ".in_proj_b.weight",
    ".in_proj_ba.weight", ".g_proj.weight", HEAD,
)  # fmt: skip
ONE_GROUP = 1 << 30  # columns of a group that covers any row


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
        groups: layouts of scales that its e4m3 matrices have.
        sizes: of int4's groups.
        zeros: how GPTQ's zero points are stored.
        required: what each int4 matrix must have, see `find_matrices`.
        default: format of a matrix with random weights that no rule names.
        rules: modules -> their formats with random weights; the first one counts. They are regular expressions after
            `re:`, else globs or what names begin with, up to a dot.
    """

    method: str
    groups: tuple[ScaleGroup, ...] = (ScaleGroup(),)
    sizes: frozenset[int] = frozenset()
    zeros: Zeros = "stored"
    required: frozenset[str] = frozenset()
    default: MatrixFormat | None = E4M3
    rules: tuple[tuple[str, MatrixFormat | None], ...] = ()

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
            return cls(method, default=None, rules=(("*.experts.gate_up_proj", MXFP4), ("*.experts.down_proj", MXFP4)))
        if method not in METHODS:
            raise unsupported_format(f"{method:.100}")
        key, known = METHODS[method]
        if method in ("gptq", "awq") and section.get(key) is None:
            key = "format"  # as transformers 5 calls it
        if method == "modelopt" and key in section and section[key] is None:
            return None  # of the KV cache alone
        if section.get(key) not in known:
            raise unsupported_format(f"{method} with {key}={section.get(key)!r:.100}")
        if rotation := rotation_of(section):
            raise unsupported_format(f"{method} with {rotation}, which rotates activations")
        if method in READERS:
            return READERS[method](section)
        if method == "modelopt" or "quantized_layers" in section:
            return _modelopt(method, section)
        return cls(method, (ScaleGroup(None if (of := section.get("weight_block_size")) is None else _block(of)),))

    def matrix_format(self, name: str) -> MatrixFormat | None:
        """Returns the format of a matrix with random weights; see `helix.layers.specs.Formats`."""
        module = name.removesuffix(".weight")
        spelled = [module] + [outer + module.removeprefix(p) for outer, p in TEXT_PARTS.items() if module.startswith(p)]
        for pattern, matrix_format in self.rules:
            if any(_compiled(pattern).match(each) for each in spelled):
                return matrix_format
        return None if name.endswith(UNQUANTIZED) else self.default

    def matrices(
        self, dtypes: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[dict[str, StoredMatrix], dict[str, str]]:
        """Finds the quantized matrices by their tensors: what `find_matrices` finds, and e4m3 with scales."""

        def lacks_zeros(name: str) -> bool:
            return not getattr(self.matrix_format(name) or self.default, "zeros", True)

        found = find_matrices(dtypes, shapes, self.sizes, self.zeros, self.required, lacks_zeros, self.method)
        known = {*found} | {tensor for matrix in found.values() for tensor in matrix.tensors}
        scales = {}
        for name in (name for name, dtype in dtypes.items() if dtype == "F8_E4M3" and name not in known):
            candidates = [f"{name}{suffix}" for suffix in SUFFIXES]
            scales[name] = next((candidate for candidate in candidates if candidate in dtypes), candidates[0])
        return found, {} if self.method == "mxfp4" else scales

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


def _modelopt(method: str, section: Mapping[str, Any]) -> WeightFormat:
    layers, algorithm = section.get("quantized_layers"), section.get("quant_algo")
    known = MODELOPT_FP8 | MODELOPT_MX
    if algorithm in known:
        names, each = [algorithm], {}
    else:
        given = layers if isinstance(layers, Mapping) else {}
        each = {str(n): str(of.get("quant_algo") if isinstance(of, Mapping) else of) for n, of in given.items()}
        names = sorted(set(each.values()))
        if not names or not {*names} <= {*known}:
            found = ", ".join(names) or None
            raise unsupported_format(
                f"{method} with quant_algo={algorithm!r:.100} and quantized_layers of {found!s:.100}"
            )
    blocks = dict.fromkeys(MODELOPT_FP8[name] for name in names if name in MODELOPT_FP8)
    if method == "fp8":  # with NVFP4 in the layers that it lists
        blocks = {None if (block := section.get("weight_block_size")) is None else _block(block): None}
    formats = {name: MODELOPT_MX.get(name, E4M3) for name in names}
    ignored = _names(section.get("exclude_modules") or section.get("ignore"), "ignore")
    return WeightFormat(
        method,
        tuple(map(ScaleGroup, blocks)) or (ScaleGroup(),),
        default=formats[algorithm] if algorithm in known else E4M3 if method == "fp8" else None,
        rules=(
            *((name, formats[of]) for name, of in each.items()),
            *((name, None) for name in ignored if set(formats.values()) != {E4M3}),
        ),
    )


def _compressed_tensors(section: Mapping[str, Any]) -> WeightFormat | None:
    # The groups that quantize weights. Without `config_groups`, shapes decide.
    given = section.get("config_groups")
    if not isinstance(given, Mapping):
        return WeightFormat("compressed-tensors")
    groups: list[ScaleGroup] = []
    rules: list[tuple[str, MatrixFormat | None]] = []
    defaults: list[MatrixFormat | None] = []
    sizes: set[int] = set()
    for name, group in given.items():
        group = group if isinstance(group, Mapping) else {"weights": group}
        weights = group.get("weights")
        if weights is None:
            continue
        weights = weights if isinstance(weights, Mapping) else {}
        keys = ("num_bits", "type", "strategy", "group_size", "actorder")
        bits, kind, strategy, size, order = (weights.get(key) for key in keys)
        # Other orders permute the columns of groups.
        grouped = strategy == "group" and type(size) is int and size > 0 and order in (None, "static", "weight")
        known = bits == 8 and kind == "float" and (grouped or strategy in ("tensor", "channel", "block"))
        matrix_format = E4M3
        if bits == 4 and kind == "int":
            known = grouped or strategy == "channel"
            of = size if type(size) is int and grouped else ONE_GROUP
            matrix_format = MatrixFormat(of, "int4", "bfloat16", zeros=weights.get("symmetric") is False)
            sizes |= {of} if grouped else set()
        elif bits == 4 and kind == "float":
            matrix_format = NVFP4 if size == NVFP4.group else MXFP4
            known = strategy in ("tensor_group", "group") and size in (NVFP4.group, MXFP4.group)
        if not known or group.get("format") not in METHODS["compressed-tensors"][1]:
            more = f", group_size={size!r}, actorder={order!r}" if strategy == "group" else ""
            more += f", format={group['format']!r}" if "format" in group else ""
            raise unsupported_format(
                f"compressed-tensors {name}: num_bits={bits!r}, type={kind!r}, strategy={strategy!r}{more}"
            )
        targets = {*_names(group.get("targets"), name)}
        patterns = {target for target in targets if target.startswith("re:")}
        if bits == 8:
            block = None
            if strategy in ("group", "block"):
                block = _block([1, size] if strategy == "group" else weights.get("block_structure"))
            groups.append(
                ScaleGroup(
                    block,
                    frozenset(_renamed(target, TEXT_PARTS) for target in targets - patterns),
                    frozenset(target.removeprefix("re:") for target in patterns),
                )
            )
        rules += [(target, matrix_format) for target in sorted(targets) if "." in target]
        defaults += [matrix_format] if not targets or any("." not in target for target in targets) else []
    formats = {*defaults, *(of for _, of in rules)}
    if not formats:
        return None
    if formats == {E4M3}:
        return WeightFormat("compressed-tensors", tuple(groups))
    return WeightFormat(
        "compressed-tensors",
        tuple(groups) or (ScaleGroup(),),
        frozenset(sizes),
        required=frozenset({"zeros"} if any(of is not None and of.zeros for of in formats) else ()),
        default=defaults[-1] if defaults else None,
        rules=(*((target, None) for target in _names(section.get("ignore"), "ignore")), *rules),
    )


def _gptq(section: Mapping[str, Any]) -> WeightFormat:
    dynamic = given if isinstance(given := section.get("dynamic"), Mapping) else {}
    overrides = [of for of in dynamic.values() if isinstance(of, Mapping)]
    # Symmetric modules store zero points of 8, so if any module has its own, all are read.
    symmetric = section.get("sym") is True and all(of.get("sym", True) is True for of in overrides)
    version = section.get("checkpoint_format") or section.get("format")
    zeros: Zeros = "stored" if version == "gptq_v2" else "minus_one"
    group = _int4_group("gptq", section.get("bits"), section.get("group_size"))
    required = {"zeros": not symmetric, "group_index": section.get("desc_act")}
    skipped = _names(["re:" + name.removeprefix("-:") for name in map(str, dynamic) if name[:2] == "-:"], "dynamic")
    return WeightFormat(
        "gptq",
        sizes=frozenset({group} - {ONE_GROUP}),
        zeros="unused" if symmetric else zeros,
        required=frozenset(key for key, needed in required.items() if needed),
        default=MatrixFormat(group, "int4", "float16", zeros=not symmetric),
        rules=tuple((target, None) for target in skipped),
    )


def _awq(section: Mapping[str, Any]) -> WeightFormat:
    if section.get("zero_point") is False:
        raise unsupported_format("awq with zero_point=False")
    keys = ("bits", "w_bit"), ("group_size", "q_group_size")
    group = _int4_group("awq", *(section.get(key, section.get(old)) for key, old in keys))
    return WeightFormat(
        "awq",
        sizes=frozenset({group} - {ONE_GROUP}),
        default=MatrixFormat(group, "int4", "float16", zeros=True),
        rules=tuple((f"*{name}*", None) for name in _names(section.get("modules_to_not_convert"), "")),
    )


def _quark(section: Mapping[str, Any]) -> WeightFormat:
    whole = section.get("global_quant_config")
    weight = whole.get("weight") if isinstance(whole, Mapping) else None
    dtype, size = (weight.get(key) if isinstance(weight, Mapping) else None for key in ("dtype", "group_size"))
    if (dtype, size) != ("fp4", MXFP4.group):
        raise unsupported_format(f"quark with weights of dtype={dtype!r:.100}, group_size={size!r:.100}")
    rules = tuple((name, None) for name in _names(section.get("exclude"), "exclude"))
    return WeightFormat("quark", default=MXFP4, rules=rules)


READERS: dict[str, Callable[[Mapping[str, Any]], WeightFormat | None]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "quark": _quark,
}


def _int4_group(method: str, bits: Any, size: Any) -> int:
    if bits != 4 or type(size) is not int or size == 0:
        raise unsupported_format(f"{method} with bits={bits!r:.100}, group_size={size!r:.100}")
    return size if size > 0 else ONE_GROUP


def _names(listed: Any, key: str) -> list[str]:
    # Names and patterns of modules; ValueError, which names the key, if a pattern is none.
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list | tuple) else []
    for name in names:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            raise ValueError(f"quantization_config: {key} has the target {name!r:.100}: {error}") from error
    return names


@cache
def _compiled(rule: str) -> re.Pattern[str]:
    if rule.startswith("re:"):
        return re.compile(rule.removeprefix("re:"))
    return re.compile(f"{translate(rule)}|{re.escape(rule)}\\.")


def fp8_format(name: str) -> MatrixFormat | None:
    """`helix.layers.specs.Formats` of unquantized weights that are rounded to e4m3."""
    return None if name.endswith(UNQUANTIZED) else E4M3


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
    if not is_directory(path):
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
        # By tensor name here: matrices whose tensors a table names, and e4m3 tensors -> names of their scales.
        self.quantized: dict[str, StoredMatrix] = {}
        self.scales: dict[str, str] = {}
        if self.format is not None:
            self.quantized, self.scales = self.format.matrices(self.dtypes, self.shapes)
        elif undeclared := find_matrices(self.dtypes, self.shapes):
            matrix = next(iter(undeclared.values()))
            raise ValueError(
                f"{path} has {len(undeclared)} quantized matrices ({matrix.layout.title}, first {matrix.tensors[0]}), "
                "but config.json has no quantization_config: add the one that the checkpoint was published with"
            )

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

        def stored(name: str, layer: LayerSpec) -> LayerSpec:
            ffn = layer.ffn
            if not isinstance(ffn, MoESpec) or ffn.storage not in ("apart", "joined", "transposed"):
                return layer
            block, width = f"{name}.{ffn.block}.experts", 2 * ffn.width
            shape = self.shapes.get(f"{block}.gate_up_proj")
            if shape is None:  # without any experts, the check of names says what is missing
                apart = self.has(f"{block}.0.{ffn.matrices[0]}.weight")
                return replace(layer, ffn=replace(ffn, storage="apart")) if apart else layer
            shapes: dict[Storage, tuple[int, ...]] = {
                "joined": (ffn.experts, width, spec.hidden),
                "transposed": (ffn.experts, spec.hidden, width),
            }
            if shapes.get(ffn.storage) == shape:
                return layer
            fits: Storage = "joined" if shape != shapes["transposed"] or shape == shapes["joined"] else "transposed"
            return replace(layer, ffn=replace(ffn, storage=fits))

        layers = tuple(stored(f"model.layers.{index}", layer) for index, layer in enumerate(spec.layers))
        nextn = None if spec.nextn is None else stored(spec.nextn_names.layer.format(len(layers)), spec.nextn)
        draft = nextn if spec.draft is spec.nextn else spec.draft
        return replace(spec, tied=spec.tied and not self.has(HEAD), layers=layers, nextn=nextn, draft=draft)

    def has(self, name: str) -> bool:
        """Returns whether there is a tensor of this name, or a quantized matrix in several."""
        return name in self.files or name in self.quantized

    @property
    def skipped(self) -> list[str]:
        """What the directory has and no model here reads: towers, scales of a KV cache, an adapter."""
        towers = Counter(tower for name in self.files for tower in TOWERS if name.startswith(tower))
        found = [f"the {count} tensors of {tower}*: only text is read" for tower, count in towers.items()]
        if any(name.endswith(KV_SCALES) for name in self.files):
            found.append("the KV scales: kv.dtype=fp8 computes a scale per token and head")
        if os.path.lexists(self.path / "adapter_config.json"):
            found.append("the adapter of adapter_config.json: merge it into the weights to apply it")
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
        if (matrix := self.quantized.get(name)) is not None:
            return matrix.format
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
