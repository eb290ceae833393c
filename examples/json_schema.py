"""Structured output with a JSON schema: `python -m examples.json_schema [DIR]`."""

import json
import sys

from helix import LLM

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["read", "write"]}, "binary": {"type": "boolean"}},
    "required": ["name", "binary"],
    "additionalProperties": False,
}

with LLM(*(sys.argv[1:] or ["assets/demo-model"]), kvp=2) as llm:
    (output,) = llm.chat([{"role": "user", "content": "saved = "}], schema=SCHEMA, max_tokens=64)
    print(json.loads(output.text))
