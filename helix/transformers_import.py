"""Imports transformers for its configs, without its models."""

from __future__ import annotations

import importlib.util
import os
from importlib.machinery import ModuleSpec
from unittest import mock

_find_spec = importlib.util.find_spec


def _without_torch(name: str, package: str | None = None) -> ModuleSpec | None:
    return None if name == "torch" else _find_spec(name, package)


def import_transformers() -> None:
    """Imports transformers as if torch were not installed, for the lifetime of this process.

    With torch, reading a config also imports dependencies of models and training: torch's compiler, and
    pandas and scikit-learn if installed. That takes 1 to 6 s.
    """
    quiet = mock.patch.dict(os.environ, TRANSFORMERS_NO_ADVISORY_WARNINGS="1")
    with mock.patch("importlib.util.find_spec", _without_torch), quiet:
        import transformers

        transformers.is_torch_available()  # caches the answer


__all__ = ["import_transformers"]
