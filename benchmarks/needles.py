"""Needle-in-a-haystack tests in code: `helix needles make | score`; see `--help`."""

from __future__ import annotations

from benchmarks.quality.needles import main

if __name__ == "__main__":
    main()
