"""Block-sparse attention on a long prompt: `python -m examples.block_sparse [DIR]`."""

import json
import sys
from pathlib import Path

from helix import LLM

SPARSE = [
    "attention=block_sparse",
    "attention.num_blocks=4",
]  # of 128 tokens each, besides the first and the latest blocks

with Path("assets/prompts.jsonl").open() as file:
    prompt = json.loads(next(file))["prompt"]  # 8K tokens of code, and a question about one line
for settings in ([], SPARSE):
    with LLM(*(sys.argv[1:] or ["assets/demo-model"]), kvp=2, overrides=settings) as llm:
        (output,) = llm.generate(prompt, max_tokens=8)
        print(f"{' '.join(settings) or 'all keys'}: {output.text!r}")
