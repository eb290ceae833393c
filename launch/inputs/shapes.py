"""Model shapes in `conf/model/`."""

from __future__ import annotations

from functools import cache

from helix.models import DecoderSpec
from helix.setup.parts import make_spec
from launch.inputs.compose import compose_config


def spec_of(model: str, *overrides: str) -> DecoderSpec:
    """Returns the spec of a shape with overrides."""
    return make_spec(compose_config([f"model={model}", *overrides]))


@cache
def load_spec(model: str) -> DecoderSpec:
    """Loads a shape from `conf/model/`; raises ValueError, with similar names, if there is none."""
    return spec_of(model)
