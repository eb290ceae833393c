"""Finds Helix's other packages: in the checkout, or in a folder of the wheel that only ranks have on their path.

Other distributions have packages named `comm`, `kernels` and `launch`, too, which stay importable next to `helix`.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).resolve().parent
ROOT = _HERE / "_runtime" if (_HERE / "_runtime").is_dir() else _HERE.parent


def rank_environment() -> dict[str, str]:
    """Returns the environment variables that put `ROOT` first on Python's path."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}  # else `python -m` looks in the working directory first


def import_package(name: str) -> ModuleType:
    """Imports a package of `ROOT`, even if it is not on Python's path.

    Raises:
        ImportError: this process has already imported another package of that name.
    """
    folder = ROOT / name
    if (module := sys.modules.get(name)) is None:
        spec = spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(module)
    elif folder not in {Path(place).resolve() for place in getattr(module, "__path__", ())}:
        where = module.__file__ or ", ".join(module.__path__)
        raise ImportError(
            f"Helix needs its package {name!r}, but this process has imported another one from {where}: run Helix in a "
            "separate process, such as `helix serve`"
        )
    return module


def import_object(key: str, path: str) -> Any:
    """Imports the object that `path`, MODULE:NAME, names; ValueError, which names the setting `key`, on failure."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{key}={path} cannot be imported: {error}") from error
