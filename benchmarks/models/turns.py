"""Times drafts by lookup on turns of agents, and where little repeats: `helix bench turns`.

SmolLM2, greedy, answers the recorded turns of an agent (`assets/agent-turns.jsonl`), four at a time, and goes on with
copies of files; a shape with random weights says random text. Each without drafts, with `ngram`, which looks in the
sequence itself, and with `suffix`, which looks in earlier answers as well: four drafts in each step, or as many as
rank 0 chooses. `over_ngram` is the tokens per second of suffix drafts over those of `ngram` drafts as many as these.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks import jobs
from benchmarks.models.speculate import MEASURED
from benchmarks.models.workloads import named
from benchmarks.quality.agent_turns import turn_prompts
from benchmarks.quality.copy_prompts import copy_prompts
from benchmarks.runner import Benchmark, Given, Part, Row
from launch.inputs.compose import ROOT

SMALL = ROOT / "models" / "smollm2-135m-instruct"  # `make test-real` fetches it
SHAPE = "llama-3.1-8b"
TURN, EDIT, RANDOM = 96, 256, 512  # tokens of an answer
BATCH = 4
FIXED = ["speculation.gamma=4", "speculation.adaptive=false"]
DRAFTING = {
    "none": ["speculation=none"],
    "ngram, 4": ["speculation=ngram", *FIXED],
    "suffix, 4": ["speculation=suffix", *FIXED],
    "ngram, adaptive": ["speculation=ngram"],
    "suffix, adaptive": ["speculation=suffix"],
}
WAYS = {
    "turns": [*DRAFTING],
    "copies": ["none", "ngram, 4", "suffix, 4"],
    "random": ["none", "ngram, adaptive", "suffix, adaptive"],
}


def prompts(text: str) -> list[dict[str, object]]:
    """Returns the lines of a prompt file, of turns, copies or random text."""
    if text == "turns":
        return turn_prompts(AutoTokenizer.from_pretrained(SMALL), TURN)
    if text == "copies":
        return copy_prompts(EDIT)[: 2 * BATCH]
    draw = random.Random(0)
    ids = [[draw.randrange(4000) for _ in range(2048)] for _ in range(BATCH)]
    return [{"id": i, "prompt_ids": one, "max_tokens": RANDOM, "ignore_eos": True} for i, one in enumerate(ids)]


def cases(given: Given) -> list[tuple[str, str]]:
    """Models and texts; on a CPU random text of the demo model.

    Raises:
        ValueError: there is no SmolLM2.
    """
    if not given.gpu:
        return [("demo", "random")]
    if not SMALL.is_dir():
        raise ValueError(f"{SMALL} is missing: `make test-real` fetches it")
    return [(SMALL.name, "turns"), (SMALL.name, "copies"), (SHAPE, "random")]


def measure(given: Given, model: str, text: str) -> Iterator[Row]:
    """Rows of a job for each way of drafting, over the same prompts."""
    whose = [f"model.path={SMALL}"] if model == SMALL.name else named(model)
    plain: tuple[list[list[int]], float] | None = None
    speeds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        written, answers = Path(directory) / "prompts.jsonl", Path(directory) / "answers.jsonl"
        lines = prompts(text) if given.gpu else [{**line, "max_tokens": 8} for line in prompts(text)[:1]]
        written.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        job = [*whose, f"layout.kvp={given.ranks}", f"decode.max_batch={BATCH}", "decode.stream=false"]
        job += [f"decode.prompts={written}", f"decode.output={answers}"]
        for drafting in WAYS[text]:
            record = jobs.measure(given.ranks, [*job, *DRAFTING[drafting]])
            tokens = [json.loads(line)["output_ids"] for line in answers.read_text("utf-8").strip().split("\n")]
            answers.unlink()
            speeds[drafting] = record["tokens_per_s_user"]
            plain = plain or (tokens, speeds["none"])
            alike = drafting.replace("suffix", "ngram")
            yield {
                "kind": "turns", "text": text, "model": model, "layout": f"helix kvp={given.ranks} tpa=1",
                "drafting": drafting, "prompts": len(lines), "batch": BATCH,
                **{key: record[key] for key in MEASURED},
                "as_plain": sum(ours == theirs for ours, theirs in zip(tokens, plain[0], strict=True)),
                "gain": speeds[drafting] / plain[1],
                "over_ngram": speeds[drafting] / speeds[alike] if alike != drafting else None,
            }  # fmt: skip


BENCHMARK = Benchmark(
    "drafts looked up in the text and in earlier answers, on turns of agents and elsewhere",
    __doc__,
    (
        Part(
            cases,
            measure,
            "text model drafting tokens_per_step ttl_p50_us tokens_per_s_user gain over_ngram as_plain prompts",
        ),
    ),
)
