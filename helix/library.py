"""transformers as jobs need it: its tokenizers and configs, without its models."""

from __future__ import annotations

import importlib.util
import os
from importlib.machinery import ModuleSpec
from unittest import mock

_find_spec = importlib.util.find_spec


def _without_torch(name: str, package: str | None = None) -> ModuleSpec | None:
    return None if name == "torch" else _find_spec(name, package)


def import_transformers() -> None:
    """Imports the library as it is where there is no torch, for as long as this process lives.

    Beside torch, whoever reads a config or a tokenizer imports what models and their training need: torch's compiler,
    and pandas and scikit-learn where they are installed. That takes 1 to 6 s.
    """
    quiet = mock.patch.dict(os.environ, TRANSFORMERS_NO_ADVISORY_WARNINGS="1")
    with mock.patch("importlib.util.find_spec", _without_torch), quiet:
        import transformers

        transformers.is_torch_available()  # it remembers the answer


__all__ = ["import_transformers"]
