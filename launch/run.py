"""Runs a command line: checks it, then starts the ranks or becomes one.

Errors in the command line are reported before the slow imports; the rest is in `launch.job.rank`.
"""

from __future__ import annotations

import gc
import shlex
import time
from collections.abc import Callable, Sequence
from importlib import import_module

from helix.hub import resolve_hub_models
from helix.log import print_error
from helix.rank_info import RankInfo
from helix.transformers_import import import_transformers
from launch.client.errors import WRONG_SETTINGS
from launch.inputs import command_parser, compose, sweep_points
from launch.inputs.job_kinds import RUNTIME, Program
from launch.job import lifeline


def entry(arguments: Sequence[str], program: Program = RUNTIME) -> int:
    """Runs `main` as the whole of a process."""
    return main(arguments, program, alone=True)


def main(arguments: Sequence[str], program: Program = RUNTIME, alone: bool = False) -> int:
    """Runs a command line on this rank, or starts ranks if no launcher started this process.

    Args:
        alone: whether the process does nothing else: transformers may then be imported without torch.

    Returns:
        The exit code; errors in the arguments are printed to stderr, on one line.
    """
    rank_info = None
    try:
        rank_info = RankInfo.from_environment()
        line = command_parser.read(arguments, program.cli_command)
        if (text := compose.info_text(line, program.cli_command)) is not None:
            print(text, end="")
            return 0
        if "--multirun" in line.options:
            if rank_info is not None:
                typed = f"{program.cli_command.name} {shlex.join(line.arguments)} -m"
                raise ValueError(f"-m under torchrun would run the whole sweep on every rank; run `{typed}` instead")
            swept = sweep_points.read(line, program)
            gc.enable()
            return int(import_module("launch.job.sweep").sweep(*swept, line, program))  # takes seconds
        config = compose.compose_config(line.overrides, line.settings)
        resolve_hub_models(config)
        if config.serve.attach is not None:
            return int(import_module("launch.batch").decode_attached(config))
        job_kind = program.select(config)
        job = import_module("launch.job.rank")  # takes seconds
        if alone:
            import_transformers()
            gc.freeze()  # the imported modules stay: keep later collections, and the last one, from scanning them
            gc.enable()
        begin: Callable[[], int] = job.prepare(config, job_kind, rank_info, [*program.command, *line.arguments])
    except ValueError as error:
        if rank_info is not None and rank_info.local_rank:  # all ranks fail alike: local rank 0 prints the error
            time.sleep(2.0)  # the first rank to exit makes torchrun kill the others
        else:
            print_error(error)
        lifeline.end_torchrun(restartable=False)
        # Lets the process that started this job distinguish wrong settings from failed ranks.
        return WRONG_SETTINGS if any(text.startswith("serve.socket=") for text in arguments) else 1
    code = begin()
    if code:
        lifeline.end_torchrun()
    return code
