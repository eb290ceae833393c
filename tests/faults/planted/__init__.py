"""Mistakes such as people make, each with the tests that have to notice it: the quickest that there are."""

from __future__ import annotations

from tests.faults.planted import block_sparse, cache, engine, launch, messages, model, simulate, speculation
from tests.faults.planted.fault import Fault

__all__ = ["FAULTS", "Fault"]

FAULTS = [
    *cache.FAULTS,
    *model.FAULTS,
    *messages.FAULTS,
    *engine.FAULTS,
    *speculation.FAULTS,
    *block_sparse.FAULTS,
    *simulate.FAULTS,
    *launch.FAULTS,
]
