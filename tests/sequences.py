"""Events of sequences, and specs of models, for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from helix.events.decision import Admission
from helix.events.sampling_params import SamplingParams
from helix.layers.attention import AttentionSpec
from helix.models import DecoderSpec


def admission(slot: int, start: int, pages: np.ndarray, limit: int, text: np.ndarray, **more: Any) -> Admission:
    """Makes the admission of a greedy sequence whose first tokens are `text`, int32 [n]."""
    sampling = more.pop("sampling", SamplingParams())
    return Admission(f"of slot {slot}", slot, len(text), text, start, pages, limit, limit, sampling, **more)


def with_windows(spec: DecoderSpec, *windows: int | None) -> DecoderSpec:
    """Gives a model as many layers, its first ones, with sliding windows of these tokens; None for no window."""
    layers = []
    for layer, window in zip(spec.layers, windows, strict=False):
        assert isinstance(layer.mixer, AttentionSpec)
        layers.append(replace(layer, mixer=replace(layer.mixer, window=window)))
    assert len(layers) == len(windows), f"{len(spec.layers)} layers have no {len(windows)} windows"
    return replace(spec, layers=tuple(layers))
