"""Generates for several prompts at once: `python -m examples.batch [DIR]`; also runs under torchrun."""

import sys

from helix import LLM

PROMPTS = ['def read_json(path):\n    """Read a JSON file', "import os\n\n\nclass Path:"]

with LLM(*(sys.argv[1:] or ["assets/demo-model"]), kvp=2) as llm:
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, max_tokens=24)):  # under torchrun: on rank 0
        print(f"{output.finish_reason}: {prompt + output.text!r}", flush=True)
