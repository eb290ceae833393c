"""Errors that every rank raises alike."""

from __future__ import annotations


class ConfigError(ValueError):
    """Error that every rank raises alike, with one line about the cause; all ranks end."""


class RankError(RuntimeError):
    """Error of a single rank, with one line about the cause; all ranks end."""
