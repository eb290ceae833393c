"""Kinds of jobs: decode prompts, or serve; other programs add their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from helix.config import Config
from launch.inputs.command_parser import CONF, Command
from launch.inputs.commands import RUN

if TYPE_CHECKING:  # they import torch
    from launch.inputs.prompt_files import PromptLine


@dataclass(frozen=True)
class JobKind:
    """A kind of job.

    Attributes:
        module: module whose `run(task)` does the work on every rank.
        client: module whose `decode(config, prompts, socket)` sends requests to the ranks; None: no client.
        name: name of its phase in the record.
        prompts: whether decode.prompts is needed, optional (taken), or ignored (none).
        timed: only times matter, so ranks may be emulated.
        load: number of sequences and tokens per sequence, for layout=auto without prompts.
        files: further files that it writes, by key, besides decode.output and record.
        check: raises ValueError if its own keys are wrong; called with the prompts.
    """

    module: str
    name: str
    client: str | None = None
    prompts: Literal["needed", "taken", "none"] = "none"
    timed: bool = False
    load: tuple[int, int] = (1, 1 << 17)
    files: dict[str, str] = field(default_factory=dict)
    check: Callable[[Sequence[PromptLine]], None] = lambda prompts: None


DECODE = JobKind("launch.job.serve", "decode", client="launch.batch", prompts="needed")
SERVE = JobKind("launch.job.serve", "decode")


def select_job_kind(config: Config) -> JobKind:
    """Returns the kind of a run: it serves if serve.socket is set, and otherwise decodes."""
    return DECODE if config.serve.socket is None else SERVE


@dataclass(frozen=True)
class Program:
    """A program that starts ranks or becomes one.

    Attributes:
        command: Python arguments before the settings.
        cli_command: the command as typed, with its settings.
        select: returns the job kind for a config; raises ValueError if the config has none.
    """

    command: tuple[str, ...]
    cli_command: Command
    select: Callable[[Config], JobKind]


RUNTIME = Program((str(CONF.parent / "torchrun_entry.py"),), RUN, select_job_kind)
