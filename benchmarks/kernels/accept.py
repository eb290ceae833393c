"""Times what a step does after its logits: `helix bench accept`.

Candidates of greedy rows, of rows sampled with the target's noise, and of drafts under rejection sampling, each with
the launch after the all-gather that selects and commits the tokens: all of it on one GPU, and that launch alone
with the candidates of one and of eight ranks. Results are checked against the plain reference first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.runner import BenchContext, Row
from benchmarks.timer import READ_CEILING, ROTATED, seconds
from comm.solo import SoloCommunicator
from helix.speculation import accepted_candidates
from helix.worker.sampling import SamplingState, distribution, sample_drafts, sampled_candidates
from kernels.tokens.commit import Candidates, commit
from kernels.tokens.reference import commit as reference

COLUMNS = 19_008, 152_064  # Qwen2.5-7B's vocabulary: one of eight shards, and whole
SHAPES = (1, 0), (1, 4), (1, 11), (8, 0), (8, 8), (6, 11), (64, 4)  # sequences and drafts
MODES = "greedy", "sampled", "rejection"
HISTORY = 1 << 19  # no run commits this many tokens
ACCEPTANCE = 0.8  # per draft, for modes in which all tokens are known in advance
RANKS = 8
MAX_COPIES = 64  # need not exceed the L2: in a step the projection has just written the logits


class StepEnd:
    """The end of a step, from logits [B * (1 + n), V] on, with the state of its sequences."""

    def __init__(self, mode: str, rows: int, drafts: int, columns: int, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.mode, self.device, self.comm = mode, device, SoloCommunicator(device)
        self.logits = torch.randn(rows * (1 + drafts), columns, device=device, generator=generator)
        self.sampling = SamplingState.create(rows, device)
        self.sampling.temperature.fill_(float(mode != "greedy"))
        self.sampling.seed.copy_(torch.arange(rows))
        self.positions = torch.arange(rows * (1 + drafts), device=device)
        self.q = None
        if mode == "rejection":
            draft_logits = self.logits.view(rows, 1 + drafts, columns)[:, :drafts] * 0.95
            self.q, best = distribution(draft_logits, 0, self.sampling, self.comm, filtered=False)
            at = self.positions.view(rows, -1)[:, :drafts].contiguous()
            self.drafts = sample_drafts(self.q, best, 0, at, self.sampling.seed, self.comm)
        else:
            accepted = torch.rand(rows, drafts, device=device, generator=generator) < ACCEPTANCE
            self.drafts = torch.where(accepted, self.logits.argmax(1).view(rows, -1)[:, :drafts], 0)
        self.state = self.fresh()

    def fresh(self) -> tuple[Tensor, ...]:
        """Returns last tokens, lengths, limits, activity and history as before the first step."""
        rows = len(self.sampling.seed)
        last, lengths = torch.zeros(2, rows, dtype=torch.int64, device=self.device)
        active = torch.ones(rows, dtype=torch.bool, device=self.device)
        history = torch.zeros(rows, HISTORY, dtype=torch.int32, device=self.device)
        return last, lengths, torch.full_like(last, HISTORY - 64), active, history

    def candidates(self) -> Candidates:
        if self.q is not None:
            return accepted_candidates(
                self.logits, 0, self.drafts, self.q, self.positions, self.sampling, self.comm, filtered=False
            )
        flags = {"stochastic": self.mode == "sampled", "filtered": False}
        return Candidates(sampled_candidates(self.logits, 0, self.positions, self.sampling, self.comm, **flags))

    def commit(self, sampled: Candidates) -> Tensor:
        return commit(sampled, self.drafts if self.drafts.shape[1] else None, None, *self.state)[0]

    def check(self) -> None:
        """Compares a step with the reference.

        Raises:
            RuntimeError: tokens or state differ.
        """
        sampled, wanted = self.candidates(), self.fresh()
        tokens = reference(sampled, self.drafts, None, *wanted)[0]
        if self.mode == "greedy":
            best = self.logits.view(*tokens.shape, -1).argmax(-1)
            tokens = torch.where(tokens < 0, tokens, best)
        self.state = self.fresh()
        if not torch.equal(self.commit(sampled), tokens) or not all(map(torch.equal, self.state, wanted)):
            raise RuntimeError(f"{self.mode}: the commit differs from the reference at {tuple(tokens.shape)}")


def measure(ctx: BenchContext, mode: str, rows: int, drafts: int, columns: int) -> Iterator[Row]:
    """Times everything after the logits, and the launch after the all-gather alone, in microseconds."""
    device = ctx.device
    read = rows * (1 + drafts) * columns * 4
    copies = min(-(-ROTATED // read), MAX_COPIES) if ctx.gpu else 1
    phases = [StepEnd(mode, rows, drafts, columns, device, seed) for seed in range(copies)]
    phases[0].check()
    sampled = phases[0].candidates()
    gathered = Candidates(sampled.pairs.repeat(RANKS, 1, 1), sampled.accepted)
    runs: dict[str, Callable[[int], Any]] = {
        "us": lambda i: phases[i].commit(phases[i].candidates()),
        "commit_us": lambda i: phases[0].commit(sampled),
        "commit_of_ranks_us": lambda i: phases[0].commit(gathered),
    }
    times = {name: seconds(run, len(phases), device) * 1e6 for name, run in runs.items()}
    row = {"kind": "accept", "mode": mode, "rows": rows, "drafts": drafts, "columns": columns, "ranks": RANKS}
    yield row | times | {"floor_us": read / READ_CEILING * 1e6}


def cases(ctx: BenchContext) -> Iterable[tuple[str, int, int, int]]:
    """Returns mode, rows, drafts and columns of each case."""
    shapes = [(*shape, columns) for columns in COLUMNS for shape in SHAPES] if ctx.gpu else [(2, 3, 500)]
    return [(mode, *shape) for mode in MODES for shape in shapes if shape[1] or mode != "rejection"]
