"""Warms up a small engine as on a GPU, without one, then serves chunks and steps; prints what would be compiled.

A separate program: the tests' process runs kernels in the interpreter, which does not compile. Nothing is
compiled here either: the arguments alone determine which kernels are needed.

    python -m tests.e2e.warmup_program "FAMILY KVP [pads] [drafts]" ...
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import product
from multiprocessing import get_context
from random import Random
from typing import Any

import numpy as np
import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from comm.loopback import LoopbackWorld, run_ranks
from helix.engine.core import Engine
from helix.engine.scheduler_output import NewRequest, PrefillChunk, SchedulerOutput
from helix.layout import HelixLayout
from helix.sampling_params import SamplingParams
from helix.speculation import SuffixDrafter
from helix.worker.graph_keys import DecodeGraphKey
from helix.worker.warmup import chunk_shapes, fill, precompile_kernels
from kernels import dispatch
from tests.e2e.checkpoints import DEMO, checkpoint
from tests.e2e.parity import build_engine
from tests.kernels.precompile import NoGPU

ROWS = (1, 2, 4, 8, 16, 32, 64)
CHUNKS = 24
DRAWS = (False, False), (True, False), (True, True)  # stochastic, filtered
met: set[tuple[str, str]] = set()  # in the warm-up
new: set[tuple[str, str]] = set()  # afterwards


def note(self: JITFunction, key: Any, *args: Any, **options: Any) -> None:
    """Records a compilation instead of running it."""
    found = self.fn.__name__, str(key)
    (new if serving else met).add(found)
    self.device_caches[0][0][key] = CompileRecorder()


class CompileRecorder:
    """A kernel that is never launched."""

    def result(self) -> CompileRecorder:
        return self


serving = False


def chunk(engine: Engine, counts: list[int], begin: int, random: Random) -> None:
    """Prefills a chunk of each sequence."""
    runner, slots = engine.runner, range(len(counts))
    ends = [begin + count for count in counts]
    pages = np.arange(runner.placement.stripes.pages_for(max(ends)), dtype=np.int32)
    admit = [
        NewRequest("any", i, end, np.zeros(end, np.int32), 0, pages, end, end, SamplingParams(), begin, begin)
        for i, end in zip(slots, ends, strict=True)
    ]
    parts = [
        PrefillChunk(i, begin, end, random.random() < 0.7, np.zeros(count, np.int32))
        for i, end, count in zip(slots, ends, counts, strict=True)
    ]
    rows = min(1 << (len(counts) - 1).bit_length(), runner.sizes.slots)
    stochastic, filtered = random.choice(DRAWS)
    kind = DecodeGraphKey(rows, engine.draft_sizes[-1], stochastic, filtered, process_logits=random.random() < 0.3)
    runner.execute(SchedulerOutput(0, (), (), (), tuple(admit), tuple(parts), 0, kind))
    runner.execute(SchedulerOutput.empty(tuple(slots)))


@torch.inference_mode()
def body(world: LoopbackWorld, rank: int, family: str, layout: HelixLayout, pads: bool, drafts: bool) -> None:
    """Runs a rank: warm-up, then chunks and steps, with a fixed number of drafts if any."""
    global serving
    path = DEMO if family == "demo" else checkpoint(family)
    engine = build_engine(
        path, layout, world.communicator(rank, layout.kvp_group(rank)), 16, page_size=64, max_batch=64,
        max_length=4000 if family != "demo" else 30_000, prefill_chunk=2048, pages=3000,
        drafter=SuffixDrafter(3, 2, 4096, 64, torch.device("cpu")) if drafts else None, adaptive=False,
    )  # fmt: skip
    engine.runner.pads_chunks = pads
    n = engine.draft_sizes[-1]
    kinds = [DecodeGraphKey(rows, n, *draws, process) for rows, draws, process in product(ROWS, DRAWS, (False, True))]
    precompile_kernels(engine.runner, chunk_shapes(engine.runner), kinds)
    serving = True
    random = Random(1)
    chunk_size = engine.runner.sizes.chunk
    launch = JITFunction.run
    JITFunction.run = lambda self, *args, **options: launch(self, *args, **options | {"warmup": True})
    for _ in range(CHUNKS):
        n = random.choice([1, 1, 2, 3, 8, 16, 33, 60])
        total = random.choice([random.randint(n, chunk_size), random.randint(n, max(n, chunk_size // 16))])
        cuts = sorted(random.sample(range(1, total), n - 1)) if total > n else list(range(1, n))
        counts = [b - a for a, b in zip([0, *cuts], [*cuts, max(total, n)], strict=True)]
        deepest = engine.runner.sizes.length - max(counts) - 1
        chunk(engine, counts, random.choice([0, random.randint(0, deepest)]), random)
    for rows, process in product(ROWS, (False, True)):
        fill(engine.runner, rows, 7)
        engine.runner.step(DecodeGraphKey(rows, engine.draft_sizes[-1], process_logits=process))
    JITFunction.run = launch


def rehearsed(family: str, kvp: str, *more: str) -> None:
    """Warms up a family's engine and prints the counts."""
    driver.set_active(NoGPU())
    dispatch.on_gpu = lambda t: True
    for name, module in [*sys.modules.items()]:  # with one SM nothing would be split
        if name.startswith("kernels.") and hasattr(module, "sm_count"):
            module.sm_count = lambda device: 132
    JITFunction._do_compile = note  # type: ignore[method-assign]
    # Library GEMMs would compute, but their results are not needed.
    torch.nn.functional.linear = lambda x, weight, bias=None: x.new_empty(*x.shape[:-1], len(weight))
    assert not triton.knobs.runtime.interpret
    layout = HelixLayout.create("helix", int(kvp))
    run_ranks(
        layout.world_size,
        partial(body, family=family, layout=layout, pads="pads" in more, drafts="drafts" in more),
        timeout_s=600.0,
    )
    print(len(met), len(new))
    for name, key in sorted(new):
        print(name, key)


if __name__ == "__main__":
    for case in sys.argv[1:]:  # in a fork, with no kernels recorded yet
        process = get_context("fork").Process(target=rehearsed, args=case.split())
        process.start()
        process.join()
        assert process.exitcode == 0, case
