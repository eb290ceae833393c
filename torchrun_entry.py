"""Runs one rank under torchrun: `torchrun --nproc-per-node=N torchrun_entry.py KEY=VALUE ...`.

Without torchrun, `helix run KEY=VALUE ...` starts the ranks of the layout itself; `helix run --help` lists the keys.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import comm
import kernels
import launch

for package in (comm, kernels, launch):
    # Other distributions have packages named `comm` and `kernels`: refuse to run with theirs.
    actual, wanted = Path(package.__file__ or "nowhere").resolve().parent.parent, Path(__file__).resolve().parent
    if actual != wanted:
        sys.exit(f"package {package.__name__!r} was imported from {actual} instead of {wanted}; check PYTHONPATH")

from launch.job import lifeline  # noqa: E402

lifeline.begin()
gc.disable()  # during imports: collecting over the imported modules would double their time

from launch.run import entry  # noqa: E402

__all__ = ["entry"]

if __name__ == "__main__":
    sys.exit(entry(sys.argv[1:]))
