"""Times vLLM, where it is installed, on the crowds of `bench.traces=[crowds]`: `python -m benchmarks.vllm_crowds ...`.

Offline, without HTTP: a directory with a model's config, random weights, greedy tokens as numbers, no prefix cache.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.ranks.crowds import CROWDS

CHUNK = 16384  # tokens of a step


def main() -> None:
    """Appends a JSON line for each crowd to a file."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.vllm_crowds", description=__doc__, formatter_class=raw)
    parser.add_argument("model", help="directory with config.json")
    parser.add_argument("output", type=Path, help="JSON lines")
    parser.add_argument("--tp", type=int, default=1, help="GPUs")
    parser.add_argument("--vocab", type=int, default=150_000, help="token ids are below")
    given = parser.parse_args()
    vllm: Any = import_module("vllm")  # a machine may lack it, and --help works all the same
    engine = vllm.LLM(
        given.model, skip_tokenizer_init=True, tensor_parallel_size=given.tp, dtype="bfloat16", load_format="dummy",
        max_model_len=max(length + new for _, length, new in CROWDS), max_num_seqs=256, max_num_batched_tokens=CHUNK,
        enable_prefix_caching=False, generation_config="vllm", seed=0,
    )  # fmt: skip
    rng = random.Random(1)
    for count, length, new in CROWDS:
        prompts = [{"prompt_token_ids": [rng.randrange(given.vocab) for _ in range(length)]} for _ in range(count)]
        params = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        found = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        assert all(len(one.outputs[0].token_ids) == new for one in found)
        row = {"engine": f"vllm {vllm.__version__}", "gpus": given.tp, "goal": None}
        row |= {"requests": count, "length": length, "new": new, "seconds": seconds}
        with given.output.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
