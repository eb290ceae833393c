"""Writes the tables of README.md and docs/ from what benchmarks recorded: `helix tables`."""

from __future__ import annotations

from benchmarks.records.tables import main

if __name__ == "__main__":
    main()
