"""Loading of a Hugging Face checkpoint: its config, and this rank's slices of its weights."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from comm.loopback import LoopbackWorld
from helix.files import check_file, read_json
from helix.layers.moe import MoESpec
from helix.layers.weights import MXFP4_BLOCK, Formats, Kept, Slice, Weights, unpacked
from helix.layout import HelixLayout
from helix.models import Decoder, DecoderSpec
from helix.models.overrides import overridden
from helix.models.quantized import (
    UNUSED,
    WeightFormat,
    fp8_part,
    keep_fp8,
    keep_mxfp4,
    keep_rounded,
    mxfp4_part,
    read_part,
)
from helix.tokenizer import read_end_token
from kernels.scaled import E4M3_MOST, ScaledMatrix

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MODELOPT = "hf_quant_config.json"  # where ModelOpt states a format that config.json may lack
LISTED = 8  # most names shown per kind of problem

IGNORED = ("rotary_emb.inv_freq",)  # a computed buffer, left over in some checkpoints
HEAD = "lm_head.weight"
# Beginnings of names of a text part's tensors, next to a part that reads images -> in a model of text alone.
TEXT_PARTS = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
TOWERS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
JOINED = ".experts.gate_up_proj"
NUMBERS = ("BF16", "F16", "F32", "F64")  # safetensors' names of plain floating-point types
PACKED = ("U8",)  # safetensors' name of mxfp4's type
SCALES = (*NUMBERS, "F8_E8M0")


def read_config(path: Path) -> dict[str, Any]:
    """Reads `config.json` of a checkpoint directory, with all of its end tokens.

    Its `eos_token_id` is that of `generation_config.json`, or else its own, and the tokenizer's `eos_token` as well:
    fine-tunes of base models name the end of a turn there alone. vLLM, SGLang and mlx-lm do the same.

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


class Checkpoint:
    """Safetensors files of a directory, and the tensors in each.

    Args:
        weight_format: format of quantised weights; None: that of the directory's config.json.

    Raises:
        ValueError: no weights, an unknown quantisation, or a shard that is missing, unreadable, damaged, elsewhere, or
            contradicts the index.
    """

    def __init__(self, path: Path, weight_format: WeightFormat | None = None) -> None:
        self.path = path
        if os.path.lexists(path / INDEX):
            listed = read_json(path / INDEX).get("weight_map")
            if not isinstance(listed, dict) or not listed:
                raise ValueError(f"{path / INDEX} has no weight_map")
            for tensor, file in listed.items():
                if not _is_within(file):
                    raise ValueError(f"{path / INDEX} has {tensor} in {file!r:.80}, which is not a path within {path}")
            files = sorted(set(listed.values()))
            if SINGLE not in files and os.path.lexists(path / SINGLE):  # the one that transformers reads
                listed, files = None, [SINGLE]
        elif os.path.lexists(path / SINGLE):
            listed, files = None, [SINGLE]
        else:
            raise ValueError(f"model.path={path} has no weights: neither {SINGLE} nor {INDEX}")
        missing = [name for name in files if not os.path.lexists(path / name)]
        if missing:
            raise ValueError(f"{INDEX} in {path} names files that are missing: {', '.join(missing)}")
        self.files: dict[str, str] = {}  # tensor name -> file
        self._stored: dict[str, str] = {}  # tensor name -> name in the file
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        for name in files:
            with self._open(name) as shard:
                for within in shard.keys():  # noqa: SIM118 - not a mapping
                    if listed is not None and listed.get(within, name) != name:
                        continue  # a stale copy: the index assigns the tensor to another file
                    tensor = _renamed(within)
                    if tensor in self.files:
                        raise ValueError(
                            f"{path} has {tensor} twice: as {self._stored[tensor]} in {self.files[tensor]}, and as "
                            f"{within} in {name}; remove one of them, or assign it to one file in {INDEX}"
                        )
                    self.files[tensor], self._stored[tensor] = name, within
                    stored = shard.get_slice(within)
                    self.shapes[tensor], self.dtypes[tensor] = tuple(stored.get_shape()), stored.get_dtype()
        held = set(self._stored.values())
        if lost := sorted(f"{tensor} in {file}" for tensor, file in (listed or {}).items() if tensor not in held):
            raise ValueError(f"{INDEX} in {path} names tensors that its files do not hold: {_some(lost)}")
        config = read_config(path) if os.path.lexists(path / "config.json") else {}
        self.format = weight_format or WeightFormat.from_config(config.get("quantization_config"))
        self.scales = self.format.scales_of(self.dtypes) if self.format else {}  # e4m3 tensor -> name of its scales

    def whole(self, name: str) -> torch.Tensor:
        """Reads a whole tensor."""
        with self._open(self.files[name]) as shard:
            tensor: torch.Tensor = shard.get_tensor(self._stored[name])
            return tensor

    def _open(self, name: str, device: str = "cpu") -> Any:
        file = self.path / name
        try:
            check_file(file)
            return safe_open(str(file), framework="pt", device=device)
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error
        except SafetensorError as error:
            with file.open("rb") as opened:
                begins = opened.read(9)[8:]  # eight bytes are the header's length, and then it is JSON
            what = "truncated or damaged" if begins in (b"", b"{") else "not a safetensors file"
            raise ValueError(f"{file} is {what} ({error})") from error

    def as_stored(self, spec: DecoderSpec) -> DecoderSpec:
        """Returns the spec with what the files say and the config does not: an untied head, and joined experts.

        Fine-tuned heads differ from the embedding; transformers compares the two and ties only equal ones.
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

    def check(self, slices: list[Slice], unused: tuple[str, ...] = ()) -> None:
        """Checks the checkpoint's tensors against those that a model needs.

        Args:
            unused: prefixes of tensors that the checkpoint may have besides.

        Raises:
            ValueError: lists every missing, unexpected and misshaped tensor, and those of an unsupported type.
        """
        wanted = {name: shape for s in slices for name, shape in s.stored.items()}
        scales = {name: self.scales[name] for name in wanted if name in self.scales}
        types = (
            dict.fromkeys(wanted, NUMBERS)
            | {name: PACKED for s in slices if s.mxfp4 for name in s.stored}
            | dict.fromkeys(scales, ("F8_E4M3",))
            | dict.fromkeys(scales.values(), SCALES)
        )
        missing = sorted(set(types) - set(self.shapes))
        ignored = IGNORED + (UNUSED if self.scales else ())
        unexpected = sorted(
            n for n in set(self.shapes) - set(types) if not n.endswith(ignored) and not n.startswith(unused + TOWERS)
        )
        misshaped = [
            f"{name} {list(self.shapes[name])}, expected {list(shape)}"
            for name, shape in sorted(wanted.items())
            if name in self.shapes and self.shapes[name] != shape
        ] + [
            f"{scale} {list(self.shapes[scale])} for {list(wanted[name])} in {self._sharing()}"
            for name, scale in sorted(scales.items())
            if scale in self.shapes and self._block(name) is None
        ]
        mistyped = [
            f"{name} {self.dtypes[name]}, expected {' or '.join(types[name])}"
            for name in sorted(set(types) & set(self.dtypes))
            if self.dtypes[name] not in types[name]
        ]
        kinds = {"missing": missing, "unexpected": unexpected, "misshaped": misshaped, "of another type": mistyped}
        problems = [f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds.items() if names]
        if problems:
            raise ValueError(f"the weights in {self.path} do not match config.json; {'; '.join(problems)}")

    def _sharing(self) -> str:
        """Returns what shares a scale, as the config has it."""
        block = self.format.block if self.format else None
        return f"blocks of {list(block)}" if block else "rows or as a whole"

    def _block(self, name: str) -> tuple[int, int] | None:
        """Returns the rows and columns of an e4m3 tensor that share a scale; None if its scales do not fit."""
        return self.format.block_of(self.shapes[name], self.shapes[self.scales[name]]) if self.format else None

    def kept(self, name: str) -> Kept | None:
        """Returns how a tensor is stored; see `helix.layers.weights.Formats`."""
        if f"{name}_blocks" in self.shapes:
            return Kept(MXFP4_BLOCK, packed=True)
        block = self._block(name) if name in self.scales else None
        return None if block is None else Kept(block[1])

    def load(self, weights: Weights, progress: Callable[[int], None] = lambda done: None) -> None:
        """Fills the parameters, one slice at a time, directly from the file: never two copies of a weight.

        Args:
            progress: called with the number of slices done.
        """
        with ExitStack() as stack:
            shards: dict[str, Any] = {}

            def stored(name: str) -> Any:
                file = self.files[name]
                if file not in shards:
                    shards[file] = stack.enter_context(self._open(file))
                return shards[file].get_slice(self._stored[name])

            # Sorted by file, for sequential reads.
            for done, s in enumerate(sorted(weights.slices, key=lambda s: self.files[next(iter(s.stored))]), 1):
                if 0 not in s.target.shape:
                    self._fill(s, stored)
                progress(done)

    def _fill(self, s: Slice, stored: Callable[[str], Any]) -> None:
        """Fills a slice's target, given a way to open a tensor of a file."""
        if s.mxfp4:
            blocks, scales = map(stored, s.stored)
            if isinstance(s.target, ScaledMatrix):
                keep_mxfp4(blocks, scales, s)
            else:
                s.target.copy_(mxfp4_part(blocks, scales, s))
        elif s.name in self.scales:
            block = self._block(s.name)
            assert block is not None, f"check refuses {s.name}"
            given = stored(s.name), stored(self.scales[s.name]), s, block
            if isinstance(s.target, ScaledMatrix):
                keep_fp8(*given)
            else:
                s.target.copy_(fp8_part(*given))
        elif isinstance(s.target, ScaledMatrix):
            keep_rounded(stored(s.name), s)
        else:
            s.target.copy_(read_part(stored(s.name), s.ranges))
            if s.plus:
                s.target.add_(s.plus)


def _renamed(name: str) -> str:
    """Returns a tensor's name in a model of text alone."""
    outer = next((outer for outer in TEXT_PARTS if name.startswith(outer)), "")
    return TEXT_PARTS.get(outer, "") + name.removeprefix(outer)


def _is_within(name: Any) -> bool:
    """Returns whether a file name of an index stays in the directory; the file itself may be a link to elsewhere."""
    return isinstance(name, str) and name[:1] not in ("", "/") and "\0" not in name and ".." not in name.split("/")


def weights_of(
    spec: DecoderSpec, layout: HelixLayout, rank: int, dtype: torch.dtype, formats: Formats = unpacked
) -> Weights:
    """Returns a rank's weight declarations, on the meta device."""
    comm = LoopbackWorld(layout.world_size).communicator(rank, layout.kvp_group(rank))  # a place, nothing is sent
    return Decoder(spec, layout, comm, dtype, torch.device("meta"), formats).weights


def is_untrained(weights: Weights) -> bool:
    """Returns whether all norms have the value with which training begins, as in a model whose weights are random."""
    norms = [s.target for s in weights.slices if s.name.endswith("norm.weight") and isinstance(s.target, torch.Tensor)]
    return bool(norms) and all(bool(norm.eq(1).all()) for norm in norms)


def randomize(weights: Weights, seed: int) -> None:
    """Fills weights with random values; the ranks of a kvp group get the same QKV, as from a checkpoint."""
    for s in weights.slices:
        if 0 in s.target.shape:
            continue
        generator = torch.Generator(device=s.target.device)
        generator.manual_seed(zlib.crc32(f"{seed} {s.name} {s.ranges}".encode()))
        if isinstance(s.target, ScaledMatrix):
            _randomize_scaled(s.target, generator)
        elif s.name.endswith("norm.weight"):
            s.target.fill_(1.0)
        else:
            s.target.normal_(0.0, 0.02, generator=generator)


def _randomize_scaled(target: ScaledMatrix, generator: torch.Generator) -> None:
    """Fills a matrix of few bits with numbers of about 0.02: any bits of e2m1, or normally distributed e4m3."""
    if target.packed:
        target.data.random_(generator=generator)
        target.scales.fill_(127 - 7)
    else:
        numbers = torch.empty(target.data.shape, dtype=torch.bfloat16, device=target.device)
        target.data.copy_(numbers.normal_(0.0, 64.0, generator=generator).clamp_(-E4M3_MOST, E4M3_MOST))
        target.scales.fill_(0.02 / 64)


def load_spec_config(path: Path | None, inline: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the config of a model's text part from a directory; inline keys are merged into it, or are all of it."""
    if path is None and not inline:
        raise ValueError("no model: set model.path=DIR, or a shape with model=NAME and model.load=random")
    return overridden(read_config(path) if path is not None else {}, inline)


def _some(names: list[str]) -> str:
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")
