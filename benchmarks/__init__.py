"""The laboratory: what measures, compares, draws and tabulates, beside its records and the log of what was tried."""

import signal
import sys

if sys.argv[0] == "-m":  # as in `launch`: control-C ends the imports of `python -m benchmarks.NAME` without a trace
    signal.signal(signal.SIGINT, signal.SIG_DFL)
