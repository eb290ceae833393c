"""Work of a job: it decodes prompts or serves; other programs bring work of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from helix.config import Config
from launch.inputs.command_parser import CONF, Command
from launch.inputs.commands import RUN

if TYPE_CHECKING:  # they bring torch with them
    from launch.inputs.prompt_files import PromptLine


@dataclass(frozen=True)
class JobKind:
    """One kind of work.

    Attributes:
        module: module whose `run(task)` does the work, on every rank.
        client: module whose `decode(config, prompts, socket)` asks the ranks, beside them; None: nobody does.
        name: name of its phase in the record.
        prompts: whether decode.prompts are needed, taken if given, or ignored (none).
        timed: only its time counts, so that ranks may be emulated.
        load: number of sequences and tokens of each, for layout=auto without prompts.
        files: files that it writes, by key, beside decode.output and record.
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
    """Returns the work of a run: it serves if there is a socket to serve at, and otherwise decodes."""
    return DECODE if config.serve.socket is None else SERVE


@dataclass(frozen=True)
class Program:
    """A program whose processes are ranks, or launchers of ranks.

    Attributes:
        command: arguments of Python, before the settings.
        cli_command: the command as people type it, and all that can be set.
        select: returns a rank's work for a config, or raises ValueError if the config names none.
    """

    command: tuple[str, ...]
    cli_command: Command
    select: Callable[[Config], JobKind]


RUNTIME = Program((str(CONF.parent / "torchrun_entry.py"),), RUN, select_job_kind)
