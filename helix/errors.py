"""Errors that end all ranks."""

from __future__ import annotations


class ConfigError(ValueError):
    """Raised by every rank alike, with one line about the cause; all ranks end."""


class RankError(RuntimeError):
    """Raised by a single rank, with one line about the cause; all ranks end."""
