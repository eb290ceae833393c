"""Draws figures from what benchmarks recorded: `python -m launch.plot [NAME ...]`."""

from __future__ import annotations

from launch.records.figures import main

if __name__ == "__main__":
    main()
