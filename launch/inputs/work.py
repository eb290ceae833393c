"""What a job does with its config: it decodes prompts or serves; other programs bring work of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from helix.config import Config
from launch.inputs.compose import ROOT, RUN, Settings
from launch.inputs.prompts import PromptLine


@dataclass(frozen=True)
class Work:
    """One kind of work.

    Attributes:
        module: whose `run(task)` does it, on every rank.
        name: of its phase in the record.
        prompts: whether decode.prompts are needed, taken where they are given, or none of its business.
        timed: only its time means something, so that drafts and blocks may be kept whatever the model says.
        load: sequences and tokens of each, by which layout=auto chooses where there are no prompts.
        files: that it writes, by key, beside decode.output and record.
        check: raises ValueError where keys of its own are wrong; called with the prompts.
    """

    module: str
    name: str
    prompts: Literal["needed", "taken", "none"] = "none"
    timed: bool = False
    load: tuple[int, int] = (1, 1 << 17)
    files: dict[str, str] = field(default_factory=dict)
    check: Callable[[Sequence[PromptLine]], None] = lambda prompts: None


DECODE = Work("launch.job.decode", "decode", "needed")
SERVE = Work("launch.job.serve", "decode")


def work_of(config: Config) -> Work:
    """The work of a run: it serves where there is a socket to serve at, and otherwise decodes."""
    return DECODE if config.serve.socket is None else SERVE


@dataclass(frozen=True)
class Program:
    """What makes a process a rank, or the launcher of ranks.

    Attributes:
        command: of Python's, before the settings.
        settings: what its command line can set.
        work: what a rank does, given its config; raises ValueError where the config does not say.
    """

    command: tuple[str, ...]
    settings: Settings
    work: Callable[[Config], Work]


RUNTIME = Program((str(ROOT / "torchrun_entry.py"),), RUN, work_of)
