"""Times what a step adds where a request wants something of its logits: `helix bench sampling`.

Bias, penalties and masks of all rows in one kernel, and the 20 best tokens of this rank with the weight of all, each
beside plain torch on the same columns. What is timed is compared with the reference first: logits bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.runner import Benchmark, Given, Part, Row
from benchmarks.timer import READ_CEILING, ROTATED, seconds
from kernels.tokens import reference as reference_shape
from kernels.tokens import reference as reference_top
from kernels.tokens.shape_logits import IN_PROMPT, ONCE, Shaping, shape_logits
from kernels.tokens.top_tokens import TOP, top_of_rank

COLUMNS = 19_008, 152_064  # of Qwen2.5-7B: on one of eight ranks, and on one alone
ROWS = 1, 8, 64
BYTES = 4 + 4 + 4 + 4 + 1 / 8  # a column: logits in and out, bias, what was seen, masks


def make_shaping(rows: int, columns: int) -> Shaping:
    """A wish of every kind in every slot."""
    generator = torch.Generator().manual_seed(0)
    seen = torch.randint(0, 3, (rows, columns), generator=generator) * ONCE
    seen |= torch.randint(0, 2, (rows, columns), generator=generator) * IN_PROMPT
    numbers = torch.linspace(0.5, 1.5, rows)
    return Shaping(
        shaped=torch.ones(rows, dtype=torch.bool),
        repetition=numbers,
        frequency=numbers / 2,
        presence=numbers - 1,
        ends_from=torch.full((rows,), 100),
        bias=torch.randn(rows, columns, generator=generator),
        seen=seen.int(),
        allowed=torch.randint(-(1 << 31), 1 << 31, (rows, -(-columns // 32)), generator=generator).int(),
    )


def moved(shaping: Shaping, device: torch.device) -> Shaping:
    """A copy on another device."""
    return Shaping(**{name: t.to(device, copy=True) for name, t in vars(shaping).items()})


def measure(given: Given, rows: int, columns: int) -> Iterator[Row]:
    """Shaping where all rows want it and where none does, and log-probabilities, in microseconds."""
    device, cpu = given.device, torch.device("cpu")
    copies = -(-ROTATED // int(rows * columns * BYTES)) if given.gpu else 1
    logits = [torch.randn(rows, columns, device=device) for _ in range(copies)]
    made = make_shaping(rows, columns)
    states = [moved(made, device) for _ in range(copies)]
    none = replace(states[0], shaped=torch.zeros_like(states[0].shaped))
    slots, last = torch.arange(rows), torch.full((rows,), 5)
    there = slots.to(device), last.to(device), (slots + 50).to(device)

    wanted = reference_shape.shape_logits(logits[0].to(cpu), moved(made, cpu), slots, last, slots + 50, first=0)
    if not torch.equal(shape_logits(logits[0], moved(made, device), *there, 0).to(cpu), wanted):
        raise RuntimeError(f"shape_logits differs from the reference at {rows} x {columns}")
    ids, values = reference_top.logprobs(top_of_rank(logits[0], there[1], 0).to(cpu))
    best_ids, best = reference_top.logprobs(reference_top.top_of_rank(logits[0].to(cpu), last, 0))
    if not torch.equal(ids, best_ids) or float((values - best).abs().max()) > 1e-5:
        raise RuntimeError(f"top_of_rank differs from the reference at {rows} x {columns}")

    runs: dict[str, Callable[[int], Any]] = {
        "us": lambda i: shape_logits(logits[i], states[i], *there, 0),
        "torch_us": lambda i: reference_shape.shape_logits(logits[i], states[i], *there, 0),
        "unshaped_us": lambda i: shape_logits(logits[i], none, *there, 0),
        "top_us": lambda i: top_of_rank(logits[i], there[1], 0),
        "torch_top_us": lambda i: logits[i].log_softmax(1).topk(TOP),
    }
    times = {name: seconds(run, copies, device) * 1e6 for name, run in runs.items()}
    floor_us = rows * columns * BYTES / READ_CEILING * 1e6
    yield {"kind": "sampling", "rows": rows, "columns": columns, **times, "floor_us": floor_us}


def cases(given: Given) -> Iterable[tuple[int, int]]:
    return [(rows, columns) for columns in COLUMNS for rows in ROWS] if given.gpu else [(2, 500)]


PART = Part(cases, measure, "rows columns us torch_us unshaped_us floor_us top_us torch_top_us")
ABOUT = "bias, penalties, masks and log-probabilities beside plain torch, on one GPU"
BENCHMARK = Benchmark(ABOUT, __doc__, (PART,))
