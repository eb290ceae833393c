"""Benchmarks: measure, compare, plot and tabulate. Records are in `results/`, the log of what was tried in `LOG.md`."""

import signal
import sys

if sys.argv[0] == "-m":  # as in `launch`: Ctrl-C during imports exits without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
