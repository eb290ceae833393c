"""Decisions of random schedules, to compare an engine before and after a change.

python -m tests.schedules FILE: records 200 schedules in FILE, or compares with those that it has, and prints the host's
microseconds for a step.

In a schedule requests arrive, are aborted, preempted and share prefixes, on a device that computes nothing, in virtual
time: no decision depends on how fast this machine is.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from argparse import ArgumentParser
from collections import deque
from dataclasses import fields, is_dataclass, replace
from hashlib import sha256
from pathlib import Path
from random import Random
from time import process_time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from helix.config import ScheduleConfig
from helix.engine import core
from helix.engine.core import Engine
from helix.engine.decision import Decision, Segment
from helix.engine.inbox import Abort
from helix.engine.request import Logprobs, PromptLogprobs, Request
from helix.layout import HelixLayout
from helix.placement import Stripes
from helix.sampling_params import SamplingParams
from helix.worker.graph_keys import SIZES
from helix.worker.keeps import EngineSizes
from tests.scheduling import Counting

SCHEDULES = 200
VOCAB, EOS = 1000, 7
LAUNCH_S, TOKEN_S, STEP_S, DRAFT_S = 1e-3, 4e-5, 4e-3, 3e-4


class Clock:
    """Virtual time: moves on when somebody waits."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-6)


class Arrivals:
    """An inbox whose requests and aborts come at their times."""

    def __init__(self, clock: Clock, items: list[tuple[float, Request | Abort]]) -> None:
        self._clock, self._items = clock, deque(sorted(items, key=lambda item: item[0]))

    @property
    def pending(self) -> bool:
        return bool(self._items) and self._items[0][0] <= self._clock.now

    @property
    def ended(self) -> bool:
        return not self._items

    def take(self) -> list[Request | Abort]:
        taken = []
        while self.pending:
            taken.append(self._items.popleft()[1])
        return taken

    def wait(self, seconds: float) -> bool:
        come = self._items[0][0] if self._items else math.inf
        self._clock.now = max(self._clock.now, min(come, self._clock.now + seconds))
        return self.pending or self.ended


class Drawn:
    """Tokens of a step that ends at a time."""

    def __init__(
        self, clock: Clock, tokens: list[tuple[int, int]], begin: float, end: float, idle: float = 0.0
    ) -> None:
        self._clock, self._tokens, self._end = clock, tokens, end
        self.seconds, self.came = end - begin, 0.0
        self.busy_seconds = self.seconds - idle

    @property
    def there(self) -> bool:
        return self._clock.now >= self._end

    def read(self) -> list[tuple[int, int]]:
        self._clock.now = self.came = max(self._clock.now, self._end)
        return self._tokens

    def logprobs(self, slot: int, count: int) -> Logprobs:
        return Logprobs(-slot, ((count, -1.0),))

    def scored(self, prefill: tuple[Segment, ...]) -> Any:
        for s in prefill:
            if len(s.scored):
                found = np.stack([s.scored, s.scored], 1)
                yield s.slot, PromptLogprobs(s.begin + 1, found, -found.astype(np.float32))


class Ranks:
    """A runner and its communicator: it notes decisions, and draws tokens that depend on request and position alone."""

    def __init__(self, clock: Clock, random: Random, log: list[Any]) -> None:
        self._clock, self._log, self._noise = clock, log, Random(random.random())
        dp = random.choice([1, 1, 1, 2])
        self.layout = HelixLayout.create("dp", dp=dp) if dp > 1 else HelixLayout.create(kvp=random.choice([1, 1, 2, 3]))
        drafts = random.choice([0, 0, 2, 4]) if dp == 1 else 0
        slots = random.choice([1, 2, 3, 8, 8, 16])
        states = random.random() < 0.3
        self.stripes = Stripes(self.layout, block := random.choice([4, 16]), random.choice([4, 16]))
        self.placement = SimpleNamespace(stripes=self.stripes, append_block=block, layout=self.layout)
        pages = max(random.choice([800, 1200, 4000]) // self.stripes.page_size, 8)
        self.cache = SimpleNamespace(
            fetches=False, remedy="raise kv.tokens", snapshots=6 * states, host_snapshots=2 * states, lacking=0.0
        )
        self.drafter = SimpleNamespace(own_pages=False, lacking=0.0, lags=random.random() < 0.2)
        self.policy = SimpleNamespace(from_tokens=random.choice([None, None, 0, 300]))
        layer = SimpleNamespace(
            mixer=SimpleNamespace(weights=500, multiplications=1), ffn=SimpleNamespace(multiplications=lambda hidden: 0)
        )
        spec = SimpleNamespace(
            vocab=VOCAB, eos=(EOS,), max_positions=4096, context="context", layers=[layer], full=[0], hidden=1
        )
        self.model = SimpleNamespace(spec=spec, layers_run=0)
        self.lacking = math.inf if states else random.choice([0.0, 0.0, 8.0])
        self.chunk_sizes = SIZES[: SIZES.index(8192) + 1] if random.random() < 0.5 else ()
        self.sizes = EngineSizes(slots, 2048, 0, drafts, pages)
        self.step_seconds: dict[tuple[int, int], float] = {}
        self.device = torch.device("cpu")
        self.state = SimpleNamespace(draft_limits=torch.zeros(1))
        self.eager_size, self.graphs = None, None
        self.comm = self
        self.rank, self.world_size, self.capturable = 0, 1, False
        self.rows: dict[int, list[Any]] = {}  # by slot: id, drawn, length, limit
        self.held: tuple[list[tuple[int, int]], float, float] | None = None
        self.device_at = 0.0
        self.limits: tuple[int, ...] = ()
        self.steps = 0

    # ---- the communicator

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        self._decision = value
        return value

    def check(self, wait: bool = True) -> None:
        pass

    # ---- the runner

    @property
    def is_computed(self) -> bool:
        return self.held is not None and self._clock.now >= self.held[2]

    def execute(self, share: Decision) -> list[Drawn]:
        d, drawn, clock = self._decision, list[Drawn](), self._clock
        self._log.append(d)
        clock.now += 2e-4
        begin = self.device_at = max(self.device_at, clock.now)
        if self.held is not None:
            tokens, since, computed = self.held
            self.held = None
            self.device_at += 1e-4
            drawn.append(Drawn(clock, tokens, since, self.device_at, max(begin - computed, 0.0)))
        for slot in d.retire:
            self.rows.pop(slot, None)
        for a in d.admit:
            self.rows[a.slot] = [a.id, a.drawn, a.resumes, a.limit, False]
        self.limits = d.draft_limits or self.limits
        if d.prefill:
            since, first = self.device_at, []
            seconds = LAUNCH_S + TOKEN_S * sum((s.end - s.begin) * (1 + s.end / 500) for s in d.prefill)
            self.device_at += seconds * (1 + 0.2 * self._noise.random())
            for s in d.prefill:
                row = self.rows[s.slot]
                row[2] = s.end
                if s.last:
                    first.append((s.slot, self._draw(row)))
                    row[4] = True
            drawn.append(Drawn(clock, first, since, self.device_at))
        for _ in range(d.decode_steps):
            since, tokens = self.device_at, []
            self.device_at += (STEP_S + DRAFT_S * d.kind.drafts) * (1 + 0.1 * self._noise.random())
            for slot, row in sorted(self.rows.items()):
                if not row[4] or row[2] >= row[3]:
                    continue
                most = min(d.kind.drafts, self.limits[slot] if slot < len(self.limits) else d.kind.drafts)
                keep = min(self._noise.randrange(most + 1) if most else 0, row[3] - row[2] - 1)
                for _ in range(1 + keep):
                    tokens.append((slot, self._draw(row)))
                row[2] += 1 + keep
            self.steps += 1
            if d.holds_draw:
                self.held = tokens, since, self.device_at
            else:
                drawn.append(Drawn(clock, tokens, since, self.device_at))
        return drawn

    def _draw(self, row: list[Any]) -> int:
        row[1] += 1
        number = int(sha256(f"{row[0]} {row[1]}".encode()).hexdigest()[:8], 16)
        return EOS if number % 97 == 0 else 8 + number % (VOCAB - 8)


def requests(random: Random, start: float) -> list[tuple[float, Request | Abort]]:
    """Requests of 1 to 40 clients: some share a prefix, some leave, some have grammars or want log-probabilities."""
    shared = [[random.randrange(VOCAB) for _ in range(random.choice([20, 200, 700]))] for _ in range(3)]
    items: list[tuple[float, Request | Abort]] = []
    guided, spread = random.random() < 0.25, random.choice([0.0, 0.2, 2.0, 8.0])
    for name in range(random.randrange(1, 40)):
        prompt = random.choice(shared)[: random.randrange(1, 700)] if random.random() < 0.6 else []
        prompt = prompt + [random.randrange(VOCAB) for _ in range(random.choice([1, 5, 40, 300]))]
        sampling = SamplingParams(
            temperature=random.choice([0.0, 0.0, 1.0]),
            top_p=random.choice([1.0, 0.9]),
            repetition_penalty=random.choice([1.0, 1.0, 1.0, 1.2]),
            logprobs=random.choice([None, None, None, 3]),
            prompt_logprobs=random.choice([None] * 9 + [1]),
        )
        grammar = Counting(name) if guided and random.random() < 0.5 else None
        at, new = start + spread * random.random(), random.choice([1, 2, 20, 60, 150, 300])
        salt, priority = random.choice([0, 0, 5]), random.choice([0, 0, 0, 1])
        items.append((at, Request(name, prompt, new, sampling, priority, salt, matcher=grammar)))
        if random.random() < 0.15:
            items.append((at + random.choice([0.0, 0.01, 0.3]), Abort(name)))
    return items


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return [[plain(k), plain(v)] for k, v in sorted(value.items())]
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def schedule(seed: int) -> tuple[list[Any], float, int]:
    """Serves a schedule; returns its decisions and updates, the host's seconds, and the number of steps."""
    random, clock, log = Random(seed), Clock(), list[Any]()
    ranks = Ranks(clock, random, log)
    bounds = ScheduleConfig(goal=random.choice(["latency", "balance", "throughput"]), lease=random.choice([16, 64]))
    ranks.sizes = replace(ranks.sizes, chunk=random.choice([16, 128, 1024]))
    engine = Engine(
        ranks,  # type: ignore[arg-type]
        bounds,
        adaptive=random.random() < 0.7,
        prefix_cache=random.random() < 0.8,
    )
    with patch.object(core, "perf_counter", clock.perf_counter), patch.object(core, "time", clock):
        inbox, begin = Arrivals(clock, requests(random, clock.now)), process_time()
        for updates in engine.serve(inbox):  # type: ignore[arg-type]
            log.extend(updates)
        return log, process_time() - begin, ranks.steps


def main() -> None:
    """Records or compares."""
    parser = ArgumentParser(
        "python -m tests.schedules", description="Compares an engine's decisions with recorded ones."
    )
    parser.add_argument("file", type=Path, help="record of decisions and updates, made where it is not there")
    file: Path = parser.parse_args().file
    lines, seconds, steps = list[str](), 0.0, 0
    gc.disable()
    for seed in range(SCHEDULES):
        log, spent, done = schedule(seed)
        seconds, steps = seconds + spent, steps + done
        lines.append(json.dumps([plain(entry) for entry in log]))
    print(f"{len(lines)} schedules, {steps} steps, {1e6 * seconds / steps:.1f} us a step")
    if not file.exists():
        file.write_text("\n".join(lines) + "\n")
        return
    differing = [i for i, (a, b) in enumerate(zip(file.read_text().splitlines(), lines, strict=True)) if a != b]
    sys.exit(f"schedules {differing} differ" if differing else 0)


if __name__ == "__main__":
    main()
