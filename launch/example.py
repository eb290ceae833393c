"""Decoding from Python, with the demo model: `python -m launch.example`, or inside ranks that torchrun starts."""

from __future__ import annotations

from helix.llm import LLM
from launch.inputs.compose import ROOT

PATH = ROOT / "assets" / "demo-model"
PROMPTS = ['def read_json(path):\n    """Read a JSON file', "import os\n\n\nclass Path:"]


def main() -> None:
    with LLM(PATH, kvp=2) as llm:
        for output in llm.generate(PROMPTS, max_new_tokens=24):  # inside ranks: on rank 0
            print(f"{output.id} {output.finish_reason}: {PROMPTS[int(output.id)] + output.text!r}", flush=True)


if __name__ == "__main__":
    main()
