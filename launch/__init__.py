"""Starting runs: torchrun jobs, sweeps, servers."""

import signal
import sys

if sys.argv[0] == "-m":  # `python -m launch.NAME` before its imports, which control-C ends without a trace
    signal.signal(signal.SIGINT, signal.SIG_DFL)
