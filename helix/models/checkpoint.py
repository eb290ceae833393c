"""A checkpoint's config, and the names, shapes and formats of its tensors. Free of torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from helix.files import check_file, read_json
from helix.layers.specs import MXFP4_BLOCK, MatrixFormat, MoESpec
from helix.models.spec import DecoderSpec
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
}
JOINED = ".experts.gate_up_proj"
# Quantization methods with e4m3 tensors and scales: the key that names the format, and its supported values.
FP8: dict[str, tuple[str, tuple[str | None, ...]]] = {
    "fp8": ("fmt", (None, "e4m3", "float8_e4m3fn")),
    "fbgemm_fp8": ("fmt", (None,)),
    "modelopt": ("quant_algo", ("FP8",)),
    "compressed-tensors": ("format", ("float-quantized",)),
}
SUFFIXES = ("_scale_inv", "_scale")  # of a tensor's scales; both are multiplied
# Scales of activations and KV caches, which are not used here.
UNUSED = (".input_scale", ".input_scale_ub", ".activation_scale", ".k_scale", ".v_scale")
SUPPORTED = f"FP8 of {', '.join(FP8)} in matrices (e4m3, with scales), and mxfp4 of gpt-oss"
BLOCK = (128, 128)  # rows and columns that share a scale when unquantized weights are rounded to e4m3
# Routers and indexers, whose selections rounding would change, and gates of states, whose errors accumulate.
UNQUANTIZED = (
    ".gate.weight", ".router.weight", ".weights_proj.weight", ".in_proj_a.weight", ".in_proj_b.weight",
    ".in_proj_ba.weight",
)  # fmt: skip


@dataclass(frozen=True)
class WeightFormat:
    """Quantization format of a checkpoint, from its config.

    Attributes:
        method: `quant_method`.
        block: rows and columns that share a scale; None: one scale per matrix or per row.
    """

    method: str
    block: tuple[int, int] | None = None

    @classmethod
    def from_config(cls, section: Any) -> WeightFormat | None:
        """Reads a `quantization_config`; None if there is none.

        Raises:
            ValueError: the format is not supported; the message names it.
        """
        if not section:
            return None
        if not isinstance(section, Mapping):
            raise unsupported_format(f"{section!r:.100}")
        method = str(section.get("quant_method", "unknown"))
        if method == "mxfp4":
            return cls(method)
        if method not in FP8:
            raise unsupported_format(f"{method:.100}")
        key, known = FP8[method]
        if section.get(key) not in known:
            raise unsupported_format(f"{method} with {key}={section.get(key)!r:.100}")
        block = section.get("weight_block_size")
        if method == "compressed-tensors":
            block = _block_of_groups(section.get("config_groups"))
        if block is None:
            return cls(method)
        if not isinstance(block, list | tuple) or [type(n) is int and n > 0 for n in block] != [True, True]:
            raise ValueError(f"quantization_config: blocks of {block!r:.100} must be two positive integers")
        return cls(method, (block[0], block[1]))

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

    def block_of(self, shape: Sequence[int], grid: Sequence[int]) -> tuple[int, int] | None:
        """Returns the rows and columns per scale, from the shapes of a matrix and its scales; None if they mismatch."""
        if len(shape) != 2:
            return None
        (rows, columns), grid = shape, tuple(grid)
        if self.block is not None:
            return self.block if grid == tuple(-(-n // b) for n, b in zip(shape, self.block, strict=True)) else None
        if grid in ((), (1,), (1, 1)):
            return rows, columns
        return (1, columns) if grid in ((rows,), (rows, 1)) else None


def _block_of_groups(groups: Any) -> Any:
    # The common block size of all `config_groups`; None: a scale per matrix or row.
    blocks = []
    for name, group in (groups if isinstance(groups, Mapping) else {}).items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        weights = weights if isinstance(weights, Mapping) else {}
        bits, kind, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
        if (bits, kind) != (8, "float") or strategy not in ("tensor", "channel", "block"):
            raise unsupported_format(
                f"compressed-tensors {name}: num_bits={bits!r}, type={kind!r}, strategy={strategy!r}"
            )
        blocks.append(weights.get("block_structure") if strategy == "block" else None)
    if any(block != blocks[0] for block in blocks):
        raise unsupported_format(f"compressed-tensors with groups of different blocks {blocks}")
    return blocks[0] if blocks else None


def fp8_format(name: str) -> MatrixFormat | None:
    """`helix.layers.specs.Formats` of unquantized weights that are rounded to e4m3."""
    return None if name.endswith(UNQUANTIZED) else MatrixFormat(BLOCK[1])


def unsupported_format(what: str) -> ValueError:
    """Returns the error for an unsupported quantization format."""
    return ValueError(
        f"the checkpoint is quantized ({what}, in quantization_config), which is not supported here; "
        f"supported: {SUPPORTED}, and unquantized weights"
    )


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
    if not config.get("quantization_config") and os.path.lexists(path / MODELOPT):
        section = read_json(path / MODELOPT).get("quantization")
        config["quantization_config"] = {"quant_method": "modelopt"} | (section if isinstance(section, dict) else {})
    return config


class CheckpointFiles:
    """The safetensors files of a directory, and their tensors.

    Args:
        weight_format: format of quantized weights; None: from the directory's config.json.

    Raises:
        ValueError: no weights, an unknown quantization, or a shard that is missing, unreadable, damaged, outside of the
            directory, or contradicts the index.
    """

    def __init__(self, path: Path, weight_format: WeightFormat | None = None) -> None:
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
                    tensor = _text_model_name(within)
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
        self.format = weight_format or WeightFormat.from_config(config.get("quantization_config"))
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
        layers = tuple(
            replace(layer, ffn=replace(ffn, storage="joined"))
            if isinstance(ffn := layer.ffn, MoESpec)
            and ffn.storage == "apart"
            and f"model.layers.{index}.{ffn.block}{JOINED}" in self.files
            else layer
            for index, layer in enumerate(spec.layers)
        )
        return replace(spec, tied=spec.tied and HEAD not in self.files, layers=layers)

    def scale_granularity(self) -> str:
        """Describes what shares a scale, for messages."""
        block = self.format.block if self.format else None
        return f"blocks of {list(block)}" if block else "rows or as a whole"

    def block(self, name: str) -> tuple[int, int] | None:
        """Returns the rows and columns of an e4m3 tensor that share a scale; None if its scales do not fit."""
        return self.format.block_of(self.shapes[name], self.shapes[self.scales[name]]) if self.format else None

    def matrix_format(self, name: str) -> MatrixFormat | None:
        """Returns a tensor's quantized format; see `helix.layers.specs.Formats`."""
        if f"{name}_blocks" in self.shapes:
            return MatrixFormat(MXFP4_BLOCK, packed=True)
        block = self.block(name) if name in self.scales else None
        return None if block is None else MatrixFormat(block[1])


def _text_model_name(name: str) -> str:
    outer = next((outer for outer in TEXT_PARTS if name.startswith(outer)), "")
    return TEXT_PARTS.get(outer, "") + name.removeprefix(outer)


def _is_within(name: Any) -> bool:
    # The file itself may be a symlink to elsewhere.
    return isinstance(name, str) and name[:1] not in ("", "/") and "\0" not in name and ".." not in name.split("/")


def summarize(names: list[str]) -> str:
    """Lists up to MAX_LISTED names, and counts the others."""
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
