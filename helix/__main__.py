"""The command `helix`; `python -m helix` is the same."""

from __future__ import annotations

from helix.packages import import_package

import_package("launch")  # in a wheel, it is not on Python's path

from launch.cli import main  # noqa: E402

__all__ = ["main"]

if __name__ == "__main__":
    main()
