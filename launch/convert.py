"""Converts a GGUF file, as used by llama.cpp, to a Hugging Face checkpoint: `helix convert FILE.gguf DIR`.

  helix convert model.gguf DIR                  DIR must be new or empty
  helix serve DIR

  dtype=auto   float32, bfloat16, float16, or auto: the file's dtype, or bfloat16 if its weights are quantized
  temperature, top_k, top_p, min_p, repetition_penalty
               sampling defaults for requests that leave them unset; they replace the file's

Quantized weights are dequantized. The directory contains config.json, generation_config.json, the weights
(model.safetensors, or shards with an index), tokenizer.json, tokenizer_config.json and chat_template.jinja. Supported:

  architectures   llama (without experts), qwen2, qwen3, qwen3moe
  tokenizers      gpt2, that is byte-level BPE, with the pre-tokenizer gpt-2, smollm, qwen2 or llama-bpe

Sampling defaults (general.sampling.*, or the arguments) go into generation_config.json. Purely descriptive keys are
dropped. Any other key or tensor is an error that names it, and so are a big-endian file and a tokenizer without
merges. If the conversion fails, the exit code is 1 and DIR is unchanged.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Literal

from launch.inputs.arguments import handle_help, parse

SAMPLING = {"temperature": float, "top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float}


def main(arguments: Sequence[str] | None = None) -> None:
    """Converts the file that the first argument names; reports an error on one line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if handle_help(arguments or ["--help"], __doc__):
        return
    try:
        file, directory, *rest = [*arguments[:2], *[""] * (2 - len(arguments)), *arguments[2:]]
        kinds = {"dtype": Literal["auto", "float32", "bfloat16", "float16"]} | SAMPLING
        if not file or not directory or directory.partition("=")[0] in kinds:
            raise ValueError(f"{' '.join(arguments)}: expected FILE.gguf DIR (see --help)")
        sampling = parse(rest, kinds)
        dtype = sampling.pop("dtype", "auto")
        import_module("launch.inputs.conversion").convert(Path(file), Path(directory), dtype, sampling)
    except ValueError as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that unfinished files are removed
    main()
