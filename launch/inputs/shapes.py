"""Model shapes in `conf/model/`."""

from __future__ import annotations

from functools import cache

from helix.models import DecoderSpec
from helix.setup.parts import make_spec
from launch.inputs.command_parser import CONF, nearest_shapes
from launch.inputs.compose import compose_config


def spec_of(model: str, *overrides: str) -> DecoderSpec:
    """Returns the spec of a shape with overrides."""
    return make_spec(compose_config([f"model={model}", *overrides]))


@cache
def load_spec(model: str) -> DecoderSpec:
    """Loads a shape from `conf/model/`.

    Raises:
        ValueError: the name is unknown; the message lists similar ones.
    """
    known = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
    if model not in known:
        raise ValueError(
            f"there is no shape {model!r}; the closest are {nearest_shapes(model)} (or add conf/model/{model}.yaml)"
        )
    return spec_of(model)
