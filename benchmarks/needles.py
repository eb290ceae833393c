"""Needles in code: `helix needles make | score`; `--help` says more."""

from __future__ import annotations

from benchmarks.quality.needles import main

if __name__ == "__main__":
    main()
