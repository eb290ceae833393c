"""The shapes of models in `conf/model/`."""

from __future__ import annotations

from functools import cache

from helix.models import DecoderSpec
from launch.inputs.compose import CONF, composed
from launch.inputs.parts import make_spec


def spec_of(model: str, *overrides: str) -> DecoderSpec:
    return make_spec(composed([f"model={model}", *overrides]))


@cache
def load_spec(model: str) -> DecoderSpec:
    """The shape in `conf/model/`.

    Raises:
        ValueError: there is none of this name; the message lists those known.
    """
    known = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
    if model not in known:
        raise ValueError(f"unknown model {model!r}; known: {', '.join(known)} (or add conf/model/{model}.yaml)")
    return spec_of(model)
