"""Plots figures from benchmark records: `helix plot [NAME ...]`."""

from __future__ import annotations

from benchmarks.records.figures import main

if __name__ == "__main__":
    main()
