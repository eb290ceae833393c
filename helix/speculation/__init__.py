"""Drafters: who proposes the tokens that a decode step verifies."""

from __future__ import annotations

from helix.speculation.base import Draft, Drafter
from helix.speculation.ngram import NgramDrafter
from helix.speculation.replay import ReplayDrafter

__all__ = ["Draft", "Drafter", "NgramDrafter", "ReplayDrafter"]
