"""Converts a GGUF file to a checkpoint directory."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from helix.models.checkpoint import INDEX, SINGLE
from launch.client.chat_tokenizer import sampling_defaults
from launch.inputs.gguf import GGUFModel, generation_config, read_gguf
from launch.inputs.gguf_tokenizer import make_tokenizer

SHARD_BYTES = 4 << 30
REST_BYTES = 64 << 20  # upper bound for all files but the weights


def convert(file: Path, directory: Path, dtype: str, sampling: Mapping[str, float]) -> None:
    """Writes the checkpoint directory of a GGUF file; leaves the directory unchanged if anything fails.

    Args:
        dtype: name of the weights' dtype; auto: the file's.
        sampling: sampling defaults that replace the file's.

    Raises:
        ValueError: the file cannot be converted, or the directory cannot be written.
    """
    if os.path.exists(directory) and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not an empty directory: name another, or move it away")
    console = Console(stderr=True)
    with console.status(f"reading {file}"):
        model = read_gguf(file)
        tokenizer = _tokenizer(model)
    generation = generation_config(model.metadata, sampling)
    sampling_defaults(generation, f"{file}: sampling defaults")
    stored = model.dtype if dtype == "auto" else getattr(torch, dtype)
    name = str(stored).removeprefix("torch.")
    size = sum(torch.Size(shape).numel() for shape in model.shapes.values()) * stored.itemsize
    target = Path(os.path.realpath(directory))
    fills = os.path.exists(target)  # a mount point cannot be replaced, and the caller's own directory must not be
    new = (target if fills else target.parent) / f".helix-{uuid.uuid4().hex}"
    try:
        new.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(new.parent).free) < size + REST_BYTES:
            needed, there = (f"{n / 1e9:.2f} GB" for n in (size + REST_BYTES, free))
            raise ValueError(f"{directory} needs {needed}, but only {there} is free on its disk")
        new.mkdir()
        try:
            _write_json(new / "config.json", model.config | {"dtype": name})
            _write_json(new / "generation_config.json", generation)
            tokenizer.save_pretrained(new)
            _write_weights(new, model, stored, console)
            if fills:
                for path in new.iterdir():
                    path.rename(target / path.name)
                new.rmdir()
            else:
                new.rename(target)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{directory} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    kinds = ", ".join(model.kinds)
    console.print(
        f"{directory}: {model.config['architectures'][0]}, {size / 1e9:.2f} GB in {name}, from {kinds}",
        highlight=False,
        soft_wrap=True,
    )


def _tokenizer(model: GGUFModel) -> Any:
    try:
        tokenizer = make_tokenizer(model.metadata)
    except ValueError as error:
        raise ValueError(f"{model.path}: {error}") from error
    if (most := max(tokenizer.get_vocab().values(), default=0)) >= model.spec.vocab:
        raise ValueError(f"{model.path} has token id {most}, but embeddings for only {model.spec.vocab} tokens")
    tokenizer.model_max_length = model.spec.max_positions
    return tokenizer


def _write_weights(directory: Path, model: GGUFModel, dtype: torch.dtype, console: Console) -> None:
    """Writes the weights while reading them, with at most one shard in memory."""
    files: dict[str, str] = {}
    read = track(model.weights(dtype), "writing weights", total=model.tensors, console=console)
    for number, shard in enumerate(_shards(read), 1):
        file = f"model-{number:05}.safetensors"
        save_file(shard, directory / file, {"format": "pt"})
        shutil.copymode(directory / "config.json", directory / file)  # safetensors creates files for their owner alone
        files |= dict.fromkeys(shard, file)
    if number == 1:
        (directory / file).rename(directory / SINGLE)
    else:
        _write_json(directory / INDEX, {"metadata": {}, "weight_map": files})


def _shards(weights: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for some in weights:
        shard |= some
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
