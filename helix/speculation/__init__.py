"""Drafters: who proposes the tokens that a decode step verifies."""

from __future__ import annotations

from helix.speculation.base import Drafter
from helix.speculation.ngram import NgramDrafter

__all__ = ["Drafter", "NgramDrafter"]
