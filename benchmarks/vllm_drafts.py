"""Times drafts looked up in the text, by vLLM where it is installed or by Helix.

python -m benchmarks.vllm_drafts vllm DIR out.jsonl --drafts 5

A model continues edited copies of files (`benchmarks.quality.copy_prompts`), greedily, one prompt at a time: without
drafts, then with `drafts` tokens looked up in each step. Both engines get the same tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks import jobs
from benchmarks.quality.copy_prompts import copy_prompts

PROMPTS, NEW = 8, 256
LOOKUP = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}


def prompt_ids(model: Path) -> list[list[int]]:
    """Returns the tokens of the prompts."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer(str(p["prompt"]), add_special_tokens=False)["input_ids"] for p in copy_prompts(NEW)[:PROMPTS]]


def by_vllm(model: Path, prompts: list[list[int]], drafts: int) -> dict[str, Any]:
    """Returns tokens per second behind the first token; a start of vLLM for each way to draft."""
    try:
        vllm: Any = import_module("vllm")
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: install vLLM, or time Helix, `python -m benchmarks.vllm_drafts helix ...`")
    drafting = {"method": "ngram", "num_speculative_tokens": drafts, **LOOKUP} if drafts else None
    engine = vllm.LLM(
        str(model), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=8192, enable_prefix_caching=False,
        generation_config="vllm", seed=0, speculative_config=drafting,
    )  # fmt: skip

    def seconds(prompt: list[int], new: int) -> float:
        params = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        (found,) = engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        assert len(found.outputs[0].token_ids) == new
        return time.perf_counter() - begin

    seconds(prompts[0], NEW)
    spent = sum(seconds(prompt, NEW) - seconds(prompt, 1) for prompt in prompts)
    return {"engine": f"vllm {vllm.__version__}", "tokens_per_s": len(prompts) * (NEW - 1) / spent}


def by_helix(model: Path, prompts: list[list[int]], drafts: int) -> dict[str, Any]:
    """Returns tokens per second behind the first token."""
    drafting = ["speculation=ngram", f"speculation.gamma={drafts}"] if drafts else ["speculation=none"]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for i, ids in enumerate(prompts):
            file.write(json.dumps({"id": i, "prompt_ids": ids, "max_tokens": NEW, "ignore_eos": True}) + "\n")
        file.flush()
        job = [f"model.path={model}", "model.dtype=bfloat16", "decode.max_batch=1", "decode.stream=false"]
        record = jobs.measure(1, [*job, f"decode.prompts={file.name}", *drafting])
    kept = {key: record[key] for key in ("tokens_per_step", "ttl_p50_us")}
    return {"engine": "helix", "tokens_per_s": record["tokens_per_s_user"], **kept}


ENGINES = {"vllm": by_vllm, "helix": by_helix}


def main() -> None:
    """Appends a JSON line to a file."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.vllm_drafts", description=__doc__, formatter_class=raw)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", type=Path, help="directory of a checkpoint")
    parser.add_argument("output", type=Path, help="JSON lines")
    parser.add_argument("--drafts", type=int, default=0, help="of a step (default 0: none)")
    given = parser.parse_args()
    found = ENGINES[given.engine](given.model, prompt_ids(given.model), given.drafts)
    about = {"name": "vllm-drafts", "model": given.model.name, "drafts": given.drafts, "prompts": PROMPTS, "new": NEW}
    with given.output.open("a") as file:
        file.write(json.dumps(about | found) + "\n")


if __name__ == "__main__":
    main()
