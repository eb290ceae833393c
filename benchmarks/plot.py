"""Draws figures from what benchmarks recorded: `helix plot [NAME ...]`."""

from __future__ import annotations

from benchmarks.records.figures import main

if __name__ == "__main__":
    main()
