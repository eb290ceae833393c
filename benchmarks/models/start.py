"""Times the start of a job until its first prompt can run: `helix bench start`.

Each model twice: with an empty cache of compiled kernels, and with the cache of the first run. The job is as a user
starts it, over all GPUs, with five prompts of token ids. `ready_s` is from the command to the first prompt, without
loading weights.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import jobs
from benchmarks.models.workloads import named
from benchmarks.runner import BenchContext, Row

PROMPTS, NEW_TOKENS = 5, 40


def measure(ctx: BenchContext, model: str) -> Iterator[Row]:
    """Yields the rows of a model's job, without and with compiled kernels."""
    with tempfile.TemporaryDirectory() as directory:
        prompts, record = Path(directory) / "prompts.jsonl", Path(directory) / "record.json"
        prompts.write_text("".join(json.dumps({"prompt_ids": [*range(1, 20 + i)]}) + "\n" for i in range(PROMPTS)))
        overrides = [*named(model), f"layout.kvp={ctx.ranks}", f"decode.prompts={prompts}", f"record={record}"]
        overrides += ["decode.stream=false", f"decode.max_tokens={NEW_TOKENS}"]
        for kernels in ("none", "compiled"):
            for _ in jobs.rows(overrides, TRITON_CACHE_DIR=str(Path(directory) / "kernels")):
                raise AssertionError("a job that decodes measures nothing else")
            written = json.loads(record.read_text(encoding="utf-8"))
            assert written["decode_tokens"] <= PROMPTS * NEW_TOKENS and written["prefill_tokens"] > 0
            phases = written["phases"]
            ready_s = sum(s for name, s in phases.items() if name not in ("load_s", "decode_s"))
            yield {
                "model": model,
                "layout": f"helix kvp={ctx.ranks}",
                "kernels": kernels,
                **phases,
                "ready_s": ready_s,
            }
