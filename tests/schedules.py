"""Decisions of random schedules, to compare a scheduler before and after a change.

python -m tests.schedules FILE: records 200 schedules in FILE, or compares with those that it has, and prints the host's
microseconds for a decision.

In a schedule requests arrive, are aborted, preempted and share prefixes, on ranks that compute nothing, in virtual time
(`tests.scheduling`): no decision depends on how fast this machine is.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from dataclasses import fields, is_dataclass
from pathlib import Path
from random import Random
from time import process_time
from typing import Any

import numpy as np

from tests.scheduling import Serving

SCHEDULES = 200
GRIDS = (1, 4, 4), (2, 4, 16), (2, 16, 16), (3, 4, 4)  # kvp, append_block, page_size


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return [[plain(k), plain(v)] for k, v in sorted(value.items())]
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def schedule(seed: int) -> list[Any]:
    """Serves 1 to 40 requests; returns the decisions."""
    random = Random(seed)
    kvp, append_block, page_size = random.choice(GRIDS)
    serving = Serving(
        random.choice([800, 1200, 4000]) // page_size,
        kvp=kvp,
        append_block=append_block,
        page_size=page_size,
        homes=random.choice([1, 1, 1, 2]),
        ahead=random.choice([0, 1, 2]),
        caching=random.random() < 0.8,
        max_batch=random.choice([1, 2, 3, 8, 16]),
        prefill_chunk=random.choice([16, 128, 1024]),
        drafts=random.choice([0, 0, 2, 4]),
        kept=(0, 2, 1, 4, 0),
        goal=random.choice(["latency", "balance", "throughput"]),
        lease=random.choice([16, 64]),
    )
    shared = [[random.randrange(1000) for _ in range(random.choice([20, 200, 700]))] for _ in range(3)]
    log, left = list[Any](), random.randrange(1, 40)
    while left or serving.flying or serving.rows:
        if left and random.random() < 0.4:
            left -= 1
            prompt = random.choice(shared)[: random.randrange(1, 700)] if random.random() < 0.6 else []
            prompt = prompt + [random.randrange(1000) for _ in range(random.choice([1, 5, 40]))]
            new = random.choice([1, 2, 20, 60])
            if serving.stripes.pages_for(len(prompt) + new + serving.drafts) <= serving.pool.pages:
                of_request = {"priority": random.choice([0, 0, 0, 1]), "salt": random.choice([0, 0, 5])}
                serving.submit(prompt, new, guided=new > 1 and random.random() < 0.1, **of_request)
        if serving.served and random.random() < 0.02:
            serving.abort(random.choice(list(serving.served)))
        log.append(plain(serving.turn()))
    return log


def main() -> None:
    """Records or compares."""
    parser = ArgumentParser(
        "python -m tests.schedules", description="Compares a scheduler's decisions with recorded ones."
    )
    parser.add_argument("file", type=Path, help="record of decisions, made where it is not there")
    file: Path = parser.parse_args().file
    begin = process_time()
    logs = [schedule(seed) for seed in range(SCHEDULES)]
    decisions = sum(map(len, logs))
    print(f"{SCHEDULES} schedules, {decisions} decisions, {1e6 * (process_time() - begin) / decisions:.1f} us each")
    lines = [json.dumps(log) for log in logs]
    if not file.exists():
        file.write_text("\n".join(lines) + "\n")
        return
    differing = [i for i, (a, b) in enumerate(zip(file.read_text().splitlines(), lines, strict=True)) if a != b]
    sys.exit(f"schedules {differing} differ" if differing else 0)


if __name__ == "__main__":
    main()
