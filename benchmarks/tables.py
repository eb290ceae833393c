"""Writes the tables of README.md and docs/ from benchmark records: `helix tables`."""

from __future__ import annotations

from benchmarks.records.tables import main

if __name__ == "__main__":
    main()
