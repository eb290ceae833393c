"""Conversion of a GGUF file, as llama.cpp has them, to a checkpoint directory: `helix convert FILE.gguf DIR`.

  helix convert model.gguf DIR                  DIR is new, or empty
  helix serve DIR

  dtype=auto   float32, bfloat16, float16, or auto: the file's own; bfloat16 where its weights are quantised
  temperature, top_k, top_p, min_p, repetition_penalty
               the model's defaults for requests that leave them unset, in place of the file's

Quantised weights are read as the numbers that they stand for. The directory holds what Hugging Face checkpoints have:
config.json, generation_config.json, the weights (model.safetensors, or parts of it with an index), tokenizer.json,
tokenizer_config.json and chat_template.jinja. The file needs its architecture and its tokenizer to be among these:

  architectures   llama (without experts), qwen2, qwen3, qwen3moe
  tokenizers      gpt2, that is byte-level BPE, split as gpt-2, smollm, qwen2 or llama-bpe

Sampling defaults (general.sampling.*, or those given) go into generation_config.json. Keys that only describe the model
are not copied. Every other key or tensor is refused by name, and so is a file in big-endian byte order, or without the
merges of its tokenizer. Exit code 1: it failed, and DIR is as it was.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Literal

from launch.inputs.arguments import handle_help, parse

DTYPES = ("float32", "bfloat16", "float16")
SAMPLING = {"temperature": float, "top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float}


def main(arguments: Sequence[str] | None = None) -> None:
    """Converts the file that the first argument names; reports an error in one line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if handle_help(arguments or ["--help"], __doc__):
        return
    try:
        file, directory, *rest = [*arguments[:2], *[""] * (2 - len(arguments)), *arguments[2:]]
        if not file or not directory or directory.startswith("dtype="):
            raise ValueError(f"{' '.join(arguments)}: there have to be a FILE.gguf and a DIR (see --help)")
        kinds = {"dtype": Literal["auto", "float32", "bfloat16", "float16"]} | SAMPLING
        sampling = parse(rest, kinds)
        dtype = sampling.pop("dtype", "auto")
        import_module("launch.inputs.conversion").convert(Path(file), Path(directory), dtype, sampling)
    except ValueError as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
