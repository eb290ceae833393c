"""What ranks report: progress of loading, the final table, the record."""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console as Terminal
from rich.table import Table

from helix.engine.timings import Timings
from helix.errors import RankError
from helix.layers.specs import Fp8Activations
from helix.layout import HelixLayout
from helix.models.checkpoint import fp8_format
from helix.models.decoder import Decoder
from helix.setup.parts import ignored
from helix.worker.model_runner import ModelRunner
from launch.inputs.files import write_atomically
from launch.inputs.preflight import CheckedRun
from launch.inputs.terminal import FILE_WIDTH, new_bar
from launch.job.lifeline import age_s, unfailing
from launch.job.membership import Job

LOG = logging.getLogger(f"helix.{__name__}")


class Phases:
    """Seconds of consecutive phases of a run; on Linux counted from the start of the launcher."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        launcher, own = age_s(os.getppid()), age_s(os.getpid())
        if launcher is not None and own is not None:
            self.seconds |= {"launcher_s": round(launcher - own, 6), "imports_s": round(own, 6)}
        self._last = time.perf_counter()

    def __str__(self) -> str:
        parts = (f"{name.removesuffix('_s').replace('_', ' ')} {s:.1f}" for name, s in self.seconds.items() if s > 0.05)
        return f"{sum(self.seconds.values()):.1f} s ({', '.join(parts)})"

    def mark(self, name: str) -> None:
        """Ends the phase `name`, which began at the end of the previous one."""
        now = time.perf_counter()
        self.seconds[f"{name}_s"] = round(now - self._last, 6)
        self._last = now


class Console:
    """Shows progress and results on rank 0's stdout; silent on other ranks."""

    def __init__(self, plan: CheckedRun, job: Job) -> None:
        self._layout = plan.layout
        self._speaks = job.leads
        stdout = unfailing(sys.stdout) if plan.config.serve.socket is not None else None
        self._terminal = Terminal(file=stdout, quiet=not job.leads, highlight=False)
        if not self._terminal.is_terminal:
            self._terminal.width = FILE_WIDTH

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Shows a progress bar while the context is open; yields a function that sets the number done."""
        if not self._speaks:
            yield lambda done: None
            return
        with new_bar(self._terminal) as progress:
            task = progress.add_task(what, total=total)
            yield lambda done: progress.update(task, completed=done)

    def row(self, row: dict[str, Any]) -> None:
        self._terminal.out(json.dumps(row), highlight=False)

    def finish(self, title: str, measured: dict[str, Any]) -> None:
        table = Table(title=title or None)
        for name in ("layout", "ranks", "step p50", "step p90", "tok/step", "tok/s/user", "tok/s/rank"):
            table.add_column(name, justify="left" if name == "layout" else "right")
        times = [_ms(measured[key]) for key in ("ttl_p50_us", "ttl_p90_us")]
        rates = [_number(measured[key]) for key in ("tokens_per_step", "tokens_per_s_user", "tokens_per_s_gpu")]
        table.add_row(str(self._layout), str(self._layout.world_size), *times, *rates)
        self._terminal.print(table)
        if measured["speculation"] is not None:
            self._terminal.print(_speculation_table(measured["speculation"]))
        held = Table("rank", "KV tokens", "KV bytes", title="peak KV cache use")
        by_rank = zip(measured["kv_tokens_per_rank"], measured["kv_bytes_per_rank"], strict=True)
        for rank, (tokens, size) in enumerate(by_rank):
            held.add_row(str(rank), f"{tokens:,}", f"{size:,}")
        self._terminal.print(held)


def log_plan(plan: CheckedRun, job: Job) -> None:
    """Logs what a job is about to run, on rank 0."""
    config, layout = plan.config, plan.layout
    if config.model.load == "random":
        LOG.warning("weights are random (model.load=random): times are meaningful, tokens are not")
    if config.speculation.drafter == "model" and config.speculation.model.load == "random":
        LOG.warning("the draft model's weights are random (speculation.model.load=random)")
    for line in ignored(config):
        LOG.warning(line)
    kind = plan.resolved["model"].get("model_type", config.model.path)
    LOG.info("model: %s (%s)", config.model.path or "a config without a checkpoint", kind)
    takes, why = ("layout:", "") if plan.reason is None else ("layout=auto chose", f": {plan.reason}")
    LOG.info("%s %s%s%s", takes, layout, _in_words(layout), why)
    where = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "CPU"
    emulated = f", {job.rank_info.world_size} of them real," if job.backend.startswith("emulated") else ""
    auto = " (comm.backend=auto)" if config.comm.backend == "auto" else ""
    LOG.info("ranks: %d%s on %s over %s%s", layout.world_size, emulated, where, job.backend, auto)


def describe_weights(model: Decoder) -> str:
    """Describes the size of this rank's weights."""
    weights = model.weights
    sizes = {str(dtype).removeprefix("torch."): size for dtype, size in weights.bytes_by_dtype.items()}
    dtype = next(iter(sizes))
    each = ", ".join(f"{_size(size)} in {dtype}" for dtype, size in sizes.items())
    formats, lossy = weights.formats, ""
    if isinstance(formats, Fp8Activations):
        formats, lossy = formats.formats, " (model.activations=fp8 rounds the activations of prompts, which is lossy)"
    if formats is fp8_format:
        lossy = " (float8: quantized while loading, which is lossy)" + lossy
    unpacked = "".join(f"; {names} unpacked to {dtype}: {why}" for names, why in weights.unpacked.items())
    return f"weights: {each}{' on each rank' if model.comm.world_size > 1 else ''}{lossy}{unpacked}"


def _speculation_table(measured: dict[str, Any]) -> Table:
    table = Table("mean gamma", "accepted drafts per step", "acceptance rate by draft index", title="speculation")
    rates = " ".join("-" if rate is None else f"{rate:.2f}" for rate in measured["acceptance_by_position"])
    table.add_row(_number(measured["mean_drafts"]), _number(measured["mean_accepted"]), rates)
    return table


def describe_hopb(runner: ModelRunner) -> str:
    """Describes what hopb=on changes in the steps of a warmed-up runner."""
    if runner.layout.kvp == 1:
        return "hopb=on has no effect: with layout.kvp=1 attention has no exchange"
    slots = runner.sizes.slots
    if slots == 1:
        return "hopb=on has no effect: steps have one sequence, and so only one exchange"
    chunks = {rows: runner.chunks(rows) for rows in (min(1 << i, slots) for i in range(1, slots.bit_length() + 1))}
    several = f"several sequences into {chunks[slots]} chunks"
    each = ", ".join(f"{rows} sequences into {count}" for rows, count in chunks.items())
    cut = several if len({*chunks.values()}) == 1 else f"{each} chunks"
    return f"hopb=on splits steps of {cut}; steps of one sequence have one exchange"


def summary(layout: HelixLayout, timings: Timings, bytes_per_token: list[int]) -> dict[str, Any]:
    """Converts rank 0's timings to the measured part of a record.

    Args:
        bytes_per_token: KV bytes per token on each rank.
    """
    ttl_s = list(timings.ttl_s)
    per_step = timings.decode_tokens / timings.sequence_steps if timings.sequence_steps else None
    tokens = [timings.kv_tokens[layout.dp_rank(r) * layout.kvp + layout.kvp_rank(r)] for r in range(layout.world_size)]
    return {
        "prefill_s": timings.prefill_s,
        "prefill_tokens": timings.prefill_tokens,
        "decode_s": sum(ttl_s),
        "decode_tokens": timings.decode_tokens,
        "decode_steps": len(ttl_s),
        "tokens_per_step": per_step,
        "ttl_p50_us": percentile_us(ttl_s, 50),
        "ttl_p90_us": percentile_us(ttl_s, 90),
        "tokens_per_s_user": per_step * len(ttl_s) / sum(ttl_s) if ttl_s and per_step else None,
        "tokens_per_s_gpu": timings.decode_tokens / sum(ttl_s) / layout.world_size if ttl_s else None,
        "speculation": _speculation(timings),
        "kv_tokens_per_rank": tokens,
        "kv_bytes_per_rank": [n * size for n, size in zip(tokens, bytes_per_token, strict=True)],
    }


def _speculation(timings: Timings) -> dict[str, Any] | None:
    steps, max_drafts = sum(timings.drafts.values()), max(timings.drafts, default=0)
    if max_drafts == 0:
        return None
    tried, accepted = timings.acceptance.verified[:max_drafts], timings.acceptance.accepted[:max_drafts]
    return {
        "mean_drafts": sum(n * count for n, count in timings.drafts.items()) / steps,
        "mean_accepted": sum(accepted) / max(timings.sequence_steps, 1),
        "steps_by_drafts": dict(sorted(timings.drafts.items())),
        "sequence_steps_by_accepted": dict(sorted(timings.accepted.items())),
        "acceptance_by_position": [k / n if n else None for k, n in zip(accepted, tried, strict=True)],
    }


def percentile_us(seconds: list[float], percent: float) -> float | None:
    """Returns a percentile of times, in microseconds; None without times."""
    return float(np.percentile(seconds, percent)) * 1e6 if seconds else None


def write_record(path: Path, plan: CheckedRun, job: Job, phases: Phases, measured: dict[str, Any]) -> None:
    """Writes config, provenance and measurements as one JSON object; raises RankError if that fails."""
    record = {
        "config": asdict(plan.config),
        "resolved": plan.resolved,
        "layout": asdict(plan.layout) | {"world_size": plan.layout.world_size},
        "layout_reason": plan.reason,
        "backend": job.backend,
        **provenance(job.device),
        "phases": phases.seconds,
        **measured,
    }
    try:
        write_atomically(path, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        output = plan.config.decode.output
        kept = "" if output is None or not plan.prompts else f"; all results are in decode.output={output}"
        raise RankError(f"record={path} cannot be written: {error.strerror}{kept}") from error


def provenance(device: torch.device) -> dict[str, Any]:
    """Returns the provenance of measurements: device, commit, versions."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else f"CPU ({platform.machine()})",
        "commit": _commit(),
        "versions": {name: version(name) for name in ("torch", "transformers", "safetensors", "hydra-core")}
        | {"python": platform.python_version(), "triton": _triton_version()}
        | ({"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if cuda else {}),
    }


def _triton_version() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:  # platforms without it run the reference kernels
        return None


def _commit() -> str | None:
    """Finds the checkout's commit, with + for local changes; the variable HELIX_COMMIT overrides it."""
    if "HELIX_COMMIT" in os.environ:
        return os.environ["HELIX_COMMIT"]
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # an archive or a wheel, which may be unpacked inside another repository
        return None
    git = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or the checkout belongs to another user
        return None


def _in_words(layout: HelixLayout) -> str:
    """Describes what a layout splits over how many ranks; empty for a single rank."""
    widths = {"sequences": layout.dp, "KV cache": layout.kvp, "attention heads": layout.tpa, "FFN": layout.tpf}
    split = {what: ranks for what, ranks in (widths | {"experts": layout.ep}).items() if ranks > 1}
    words = ", ".join(f"{what} over {ranks}" for what, ranks in split.items())
    return f" ({words} ranks)" if words else ""


def _size(n: int) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


def _ms(us: float | None) -> str:
    return "-" if us is None else f"{us / 1e3:.2f} ms"


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.1f}"
