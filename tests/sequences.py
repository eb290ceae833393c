"""Events of sequences, for tests that call what follows them."""

from __future__ import annotations

from typing import Any

import numpy as np

from helix.decision import Admission
from helix.sampling import SamplingParams


def admission(slot: int, start: int, pages: np.ndarray, limit: int, text: np.ndarray, **more: Any) -> Admission:
    """Makes the admission of a greedy sequence whose first tokens are `text`, int32 [n]."""
    sampling = more.pop("sampling", SamplingParams())
    return Admission(f"of slot {slot}", slot, len(text), text, start, pages, limit, limit, sampling, **more)
