"""Runs pytest repeatedly in forks of a process that has done seconds of imports.

For each line of stdin, a folder and pytest's arguments as a JSON list, it prints the exit code. Nothing of this
repository is imported before the fork, so that it comes from that folder. Pytest's output is in the folder's `output`.
"""

from __future__ import annotations

import json
import os
import sys

os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}  # before triton decorates its own functions

import hypothesis  # noqa: F401
import pytest
import torch  # noqa: F401
import transformers  # noqa: F401
import triton  # noqa: F401

for line in sys.stdin:
    folder, *arguments = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = folder  # for the fork server of rank pools
        output_fd = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        code = pytest.main(arguments)
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
