"""A streamed conversation: `python -m examples.chat [DIR]`."""

import sys

from helix import LLM

QUESTIONS = ["def read_json(path):", "def write_json(path, content):"]

with LLM(*(sys.argv[1:] or ["assets/demo-model"]), kvp=2) as llm:
    messages = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        print(f"> {question}")
        for piece in (answer := llm.stream(messages, max_tokens=32)):
            print(piece, end="", flush=True)
        print()
        messages.append(answer.output.message)
