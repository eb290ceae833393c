"""Decode with Helix parallelism: `torchrun --nproc-per-node=N torchrun_entry.py KEY=VALUE ...`.

Without torchrun, `python torchrun_entry.py KEY=VALUE ...` starts the ranks that the layout asks for by itself.
`python torchrun_entry.py --help` explains the keys.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

# Control-C ends a process at once and without a trace, whatever it does: results are in their file as they come.
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the launcher held it back while Python started
# A terminal that cannot show a character gets its number; a run does not end for that.
sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]

import comm  # noqa: E402
import kernels  # noqa: E402
import launch  # noqa: E402

for package in (comm, kernels, launch):
    # Other distributions own the names `comm` and `kernels`: theirs must not be taken for ours.
    actual, wanted = Path(package.__file__ or "nowhere").resolve().parent.parent, Path(__file__).resolve().parent
    if actual != wanted:
        sys.exit(f"package {package.__name__!r} was imported from {actual} instead of {wanted}; check PYTHONPATH")

from launch.job import lifeline  # noqa: E402

lifeline.hold()

from launch.run import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
