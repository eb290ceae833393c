"""Commands, jobs and servers."""

import signal
import sys

if sys.argv[0] == "-m":  # before the imports of `python -m launch.NAME`: control-C exits without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
