"""Prefix caching: questions about one document, prefilled once: `python -m examples.long_document [DIR]`."""

import sys
from pathlib import Path

from helix import LLM

QUESTIONS = ["\n\ndef main():\n    engine = Engine(", "\n\nclass Settings:\n", "\n\n# In short, this file"]

document = "".join(path.read_text() for path in sorted(Path("helix/engine").glob("*.py")))[:12_000]
with LLM(*(sys.argv[1:] or ["assets/demo-model"]), kvp=2) as llm:
    for question in QUESTIONS:
        (output,) = llm.generate(document + question, max_tokens=24)
        print(f"{output.cached_tokens} of {output.prompt_tokens} prompt tokens were in the cache: {output.text!r}")
