"""Needles in code: `python -m launch.needles make | score`; `--help` says more."""

from __future__ import annotations

from launch.inputs.needles import main

if __name__ == "__main__":
    main()
