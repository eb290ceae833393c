"""Lossless self-speculation over few keys: `python -m examples.vegas [DIR]`."""

import sys

from helix import LLM

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\n" * 24 + "def mul(a, b):"
DRAFTS = ["speculation=sparse", "speculation.gamma=4"]

texts = []
for settings in ([], DRAFTS):
    with LLM(*(sys.argv[1:] or ["assets/demo-model"]), kvp=2, overrides=settings) as llm:
        (output,) = llm.generate(PROMPT, max_tokens=32)
        print(f"{' '.join(settings) or 'without drafts'}: {output.text!r}")
        texts.append(output.text)
print("the same text" if texts[0] == texts[1] else "different text: near ties were rounded differently")
