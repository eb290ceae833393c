"""Drafters: they propose the tokens that a decode step verifies."""

from __future__ import annotations

from helix.speculation.acceptance import accepted_candidates
from helix.speculation.base import Draft, Drafter, NoDrafts
from helix.speculation.layer import LayerDrafter
from helix.speculation.model import DraftModel, ModelDrafter, check_draft
from helix.speculation.sparse import DraftBudget, SparseDrafter
from helix.speculation.suffix import SuffixDrafter

__all__ = [
    "Draft",
    "DraftBudget",
    "DraftModel",
    "Drafter",
    "LayerDrafter",
    "ModelDrafter",
    "NoDrafts",
    "SparseDrafter",
    "SuffixDrafter",
    "accepted_candidates",
    "check_draft",
]
