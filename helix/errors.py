"""Errors that every rank raises alike."""

from __future__ import annotations


class ConfigError(ValueError):
    """Something is wrong on every rank alike: one line says what, and all of them end."""


class RankError(RuntimeError):
    """Something is wrong on one rank alone: one line says what, and all of them end."""
