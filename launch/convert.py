"""Conversion of a GGUF file, as llama.cpp has them, to a checkpoint directory: `helix convert FILE.gguf DIR`.

  helix convert model.gguf DIR                  DIR is new, or empty
  helix serve DIR

  dtype=auto   float32, bfloat16, float16, or auto: the file's own; bfloat16 where its weights are quantised

Quantised weights are read as the numbers that they stand for. The directory holds what Hugging Face checkpoints have:
config.json, generation_config.json, the weights (model.safetensors, or parts of it with an index), tokenizer.json,
tokenizer_config.json and chat_template.jinja. The file needs its architecture and its tokenizer to be among these:

  architectures   llama (without experts), qwen2, qwen3, qwen3moe
  tokenizers      gpt2, that is byte-level BPE, split as gpt-2, smollm, qwen2 or llama-bpe

Sampling defaults (general.sampling.*) go into generation_config.json. Keys that only describe the model are not copied.
Every other key or tensor is refused by name, and so is a file in big-endian byte order, or without the merges of its
tokenizer. Exit code 1: it failed, and DIR is as it was.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from helix.models.checkpoint import INDEX, SINGLE
from helix.models.gguf import GGUFModel, generation_config, read_gguf
from helix.models.gguf_tokenizer import make_tokenizer
from launch.inputs.arguments import helped, one_of, parse

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHARD_BYTES = 4 << 30
REST_BYTES = 64 << 20  # of the files beside the weights, at most


def convert(file: Path, directory: Path, dtype: torch.dtype | None = None) -> None:
    """Writes the checkpoint directory of a GGUF file; leaves it as it was if anything fails.

    Args:
        dtype: dtype of the weights; None: the file's.

    Raises:
        ValueError: the file cannot be converted, or the directory cannot be written.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not an empty directory: name another, or move it away")
    console = Console(stderr=True)
    with console.status(f"reading {file}"):
        model = read_gguf(file)
        tokenizer = _tokenizer(model)
    dtype = dtype or model.dtype
    name = str(dtype).removeprefix("torch.")
    size = sum(torch.Size(shape).numel() for shape in model.shapes.values()) * dtype.itemsize
    new = directory.absolute().with_name(f".helix-{uuid.uuid4().hex}")
    try:
        new.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(new.parent).free) < size + REST_BYTES:
            needed, there = (f"{n / 1e9:.2f} GB" for n in (size + REST_BYTES, free))
            raise ValueError(f"{directory} needs {needed}, and {there} are free on its disk")
        new.mkdir()
        try:
            _write_json(new / "config.json", model.config | {"dtype": name})
            _write_json(new / "generation_config.json", generation_config(model.metadata))
            tokenizer.save_pretrained(new)
            _write_weights(new, model, dtype, console)
            new.rename(directory)  # over an empty one
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{directory} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    console.print(
        f"{directory}: {model.config['architectures'][0]}, {size / 1e9:.2f} GB in {name}",
        highlight=False,
        soft_wrap=True,
    )


def _tokenizer(model: GGUFModel) -> Any:
    try:
        tokenizer = make_tokenizer(model.metadata)
    except ValueError as error:
        raise ValueError(f"{model.path}: {error}") from error
    if (most := max(tokenizer.get_vocab().values(), default=0)) >= model.spec.vocab:
        raise ValueError(f"{model.path} has a token {most}, and rows for {model.spec.vocab} tokens")
    tokenizer.model_max_length = model.spec.max_positions
    return tokenizer


def _write_weights(directory: Path, model: GGUFModel, dtype: torch.dtype, console: Console) -> None:
    """Writes the weights as they are read, with at most one shard in memory."""
    files: dict[str, str] = {}
    read = track(model.weights(dtype), "writing weights", total=model.tensors, console=console)
    for number, shard in enumerate(_shards(read), 1):
        file = f"model-{number:05}.safetensors"
        save_file(shard, directory / file, {"format": "pt"})
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Converts the file that the first argument names; reports an error in one line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if helped(arguments or ["--help"], __doc__):
        return
    try:
        file, directory, *rest = [*arguments[:2], *[""] * (2 - len(arguments)), *arguments[2:]]
        if not file or not directory or directory.startswith("dtype="):
            raise ValueError(f"{' '.join(arguments)}: there have to be a FILE.gguf and a DIR (see --help)")
        dtype = parse(rest, {"dtype": one_of("auto", *DTYPES)}).get("dtype", "auto")
        convert(Path(file), Path(directory), DTYPES.get(dtype))
    except ValueError as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
