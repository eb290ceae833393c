"""Several prompts at a time: `python -m examples.batch [DIR]`; under torchrun, the ranks are those that it started."""

import sys

from helix import LLM

PROMPTS = ['def read_json(path):\n    """Read a JSON file', "import os\n\n\nclass Path:"]

with LLM(*(sys.argv[1:] or ["assets/demo-model"]), kvp=2) as llm:
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, max_tokens=24)):  # inside ranks: on rank 0
        print(f"{output.finish_reason}: {prompt + output.text!r}", flush=True)
