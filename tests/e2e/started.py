"""Starts jobs in copies of a process that has imported what takes three seconds; a process of its own.

Of each line of stdin, a log and a program's arguments as a JSON list, it prints the id of the copy, then its exit code.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from torchrun_entry import entry  # isort: split

from benchmarks.program import PROGRAM
from helix.library import import_transformers
from launch.inputs.work import RUNTIME
from launch.job import lifeline

import_transformers()
for line in sys.stdin:
    log, laboratory, *arguments = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for output in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), output)
        lifeline.begin()
        code = entry(arguments, PROGRAM if laboratory else RUNTIME)
        sys.stdout.flush()
        os._exit(code)  # as a rank that is a copy ends
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
