"""The planner: the best layout of a model on these GPUs, and a prediction for it.

  helix plan llama-3.1-8b gpus=8 context=1M batch=8
  helix plan qwen2.5-7b gpus=8 context=1M ttl_ms=20                      the largest batch within 20 ms
  helix plan DIR gpus=4 context=128K acceptance=0.7 gamma=4              with speculative decoding
  helix plan qwen2.5-7b gpus=8 context=1M drafter=sparse sparsity=0.07 acceptance=0.9
                                                                the model drafts for itself, over 7% of its keys
  helix plan deepseek-r1 gpus=8 context=128K batch=8 drafter=mtp acceptance=0.8
                                                                its layer for multi-token prediction drafts
  helix plan qwen2.5-7b gpus=8 context=1M sparse=32                      block-sparse beside dense
  helix plan qwen2.5-7b gpus=1 context=1M sparse=32 tier=host hits=0.8   a cache in host memory

Every layout of exactly so many GPUs is predicted and ranked, with its speed, memory, what else would fit, the reason
why the first is first, whether splitting KV over GPUs pays at all, and the command that runs it. The runtime takes the
first one by itself with layout=auto. docs/planner.md explains the columns, docs/simulator.md the predictions.

  model       a directory with a checkpoint, ORG/NAME of the Hugging Face Hub, or one of conf/model/; needs no key
  gpus        GPUs of one NVLink domain
  context     tokens of each sequence in the cache, such as 131072, 128K or 1M
  batch       sequences (default 1); with ttl_ms and no batch: as many as give most tokens/s/GPU within it
  ttl_ms      the most milliseconds from one token of a sequence to its next; slower layouts come last
  hardware    one of conf/hardware/, or a file of your own, path/mine.yaml (default: this machine's GPU, else h200)
  backend     auto: the runtime's own collectives; nccl: the library's, where they were measured
  acceptance  probability that a drafted token is accepted: plans speculation
  gamma       drafted tokens of a step (default: the best one)
  drafter     ngram (default), whose drafts cost nothing; sparse: the model drafts for itself, and pays for it; mtp: its
              layer for multi-token prediction does; eagle3: a trained layer
  path        with drafter=eagle3: the directory of its checkpoint
  sparsity    with drafter=sparse: the share of its keys that drafts read (default 0.07)
  sparse      blocks that each KV head chooses: plans block-sparse attention, and says where dense attention is faster
              (attention=parts in its place: parts of blocks, which keep the single lines that blocks lose)
  tier        host: with sparse, keys and values lie in host memory, and what is not on the GPU comes over the link
  hits        with tier: the share of chosen blocks that are on the GPU already (default 0)
  ahead       with tier: of the blocks that are not on the GPU, the share that guesses name, so that they come while the
              layer before computes (default: nothing is guessed)
  host_bytes  with tier: host memory of a rank's keys and values (default: as much as they take)
  gpu_bytes   with tier: what they take on its GPU at most (default: the share of what weights leave)
  weights     fp8: plans weights that are rounded to FP8; bf16: weights that are unpacked (default: as they are stored)
  kv          fp8, fp8_all (index keys, too) or k16v8 (values alone): plans keys and values in FP8 (default: in the
              model's type)
  modes       layout modes to compare, such as tp,helix,dp (default: tp,medha,helix)
  attention   one of conf/attention/, for the size of blocks and those always read (with sparse: block_sparse)
  json        a file for all of this, `-` for the terminal
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from launch.inputs import front
from launch.inputs.arguments import helped, parse
from launch.inputs.files import check_writable, write_atomically

KEYS: dict[str, Any] = {
    "model": str, "gpus": int, "context": int, "batch": int, "ttl_ms": float, "hardware": str,
    "backend": Literal["auto", "nccl"], "acceptance": float, "gamma": int,
    "drafter": Literal["ngram", "sparse", "mtp", "eagle3"], "path": str, "sparsity": float, "sparse": int,
    "attention": str, "tier": Literal["host"], "hits": float, "ahead": float, "host_bytes": float, "gpu_bytes": float,
    "weights": Literal["bf16", "fp8"], "kv": Literal["fp8", "fp8_all", "k16v8"], "modes": list[str], "json": str,
}  # fmt: skip
NEEDED = ("model", "gpus", "context")


def main(arguments: Sequence[str] | None = None) -> None:
    """Answers one question; ends with the known values if a value is wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if helped(arguments or ["--help"], __doc__):
        return
    try:
        given = parse(arguments, KEYS, NEEDED, words=("model",))
        front.model_override(given["model"])  # or it is unknown
        if (path := given.get("json")) not in (None, "-"):
            check_writable("json", Path(path))
        planning = import_module("launch.inputs.planning")
        ranking, overrides = planning.answer(given)
        if path is None:
            planning.show(ranking, overrides)
            return
        text = json.dumps(planning.as_json(ranking, overrides, given), indent=1)
        if path == "-":
            print(text)
        else:
            planning.show(ranking, overrides)
            write_atomically(Path(path), text + "\n")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    gc.disable()  # an answer takes a second, of which looking for cycles would be a quarter
    main()
    gc.freeze()  # nor is there anything to look for at the end
