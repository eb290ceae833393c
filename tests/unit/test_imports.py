"""Imports point one way, and the project's names do not disturb those who own the same names elsewhere."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("kernels", "comm", "helix", "launch", "torchrun_entry")

# What each package may import of ours.
ALLOWED = {
    "kernels": {"kernels"},
    "comm": {"kernels", "comm"},
    "helix": {"kernels", "comm", "helix"},
    "launch": {"kernels", "comm", "helix", "launch"},
    "torchrun_entry": {"kernels", "comm", "launch"},
}
# Of others, kernels may import these alone.
KERNELS_LIBRARIES = {"torch", "triton"}

# Inside helix, a module imports only from ranks before its own (or from its own package).
HELIX_ORDER = [
    {"layout", "config", "graphs", "files"},
    {"kv_cache", "sampling"},
    {"request", "step"},
    {"attention", "text", "scheduler"},
    {"layers"},
    {"models"},
    {"loading", "speculation"},
    {"timings"},
    {"model_runner"},
    {"autotune"},
    {"engine"},
    {"simulate"},
]
# Imports that take seconds, and that rank 0 alone needs.
LATE = {"transformers", "tokenizers", "tomllib"}


def imports(tree: ast.AST) -> list[tuple[str, bool]]:
    """Modules imported, and whether inside a function."""
    found = []
    inside = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f) if n is not f}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where things come from"
            found.append((node.module or "", node in inside))
    return found


def helix_rank(module: str) -> int:
    return next(i for i, names in enumerate(HELIX_ORDER) if module in names)


def violations(path: str, source: str) -> list[str]:
    """What is wrong with the imports of the file at `path` (relative to the root)."""
    parts = Path(path).with_suffix("").parts
    package = parts[0]
    problems = []
    for module, late in imports(ast.parse(source)):
        top = module.split(".")[0]
        if late and top not in LATE:
            problems.append(f"{path} imports {module} inside a function")
        if top in OURS and top not in ALLOWED[package]:
            problems.append(f"{path} imports {module}: {package} may import {sorted(ALLOWED[package])}")
        if package == "kernels" and top not in OURS and top not in KERNELS_LIBRARIES | sys.stdlib_module_names:
            problems.append(f"{path} imports {module}: kernels may import {sorted(KERNELS_LIBRARIES)}")
        if package == "helix" and top == "helix" and len(parts) > 1 and parts[1] != "__init__":
            other = module.split(".")[1]
            if other != parts[1] and helix_rank(other) >= helix_rank(parts[1]):
                problems.append(f"{path} imports {module}, which does not come before it")
    return problems


def sources() -> list[Path]:
    return [ROOT / "torchrun_entry.py", *(f for p in OURS[:-1] for f in sorted((ROOT / p).rglob("*.py")))]


def test_imports_point_one_way() -> None:
    files = sources()
    assert len(files) > 40
    problems = [p for f in files for p in violations(str(f.relative_to(ROOT)), f.read_text())]
    assert problems == []


@pytest.mark.parametrize(
    "path, source",
    [
        ("kernels/x.py", "import comm.base"),
        ("kernels/x.py", "import numpy"),
        ("comm/x.py", "from helix.layout import HelixLayout"),
        ("helix/x.py", "import launch"),
        ("helix/layout.py", "from helix.engine import Engine"),
        ("helix/layers/x.py", "from helix.models import Decoder"),
        ("helix/step.py", "def f():\n    import helix.kv_cache"),
        ("torchrun_entry.py", "from helix.config import Config"),
    ],
)
def test_violations_are_found(path: str, source: str) -> None:
    if path.startswith("helix/x"):
        path = path.replace("/x", "/engine")
    assert violations(path, source)


def test_kernels_package_is_cheap_and_unversioned() -> None:
    tree = ast.parse((ROOT / "kernels/__init__.py").read_text())
    assert imports(tree) == []
    assert "__version__" not in ast.dump(tree)


def test_transformers_imports_beside_our_kernels(tmp_path: Path) -> None:
    """transformers asks for the version of whatever owns a module named `kernels`; ours must not look like theirs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"helix_runtime-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (info / "top_level.txt").write_text("\n".join(OURS))
    (info / "RECORD").write_text("kernels/__init__.py,,\ncomm/__init__.py,,\n")
    program = (
        "import importlib.metadata as m, kernels; "
        "assert 'helix-runtime' in m.packages_distributions()['kernels']; "
        "from transformers.models.llama.modeling_llama import LlamaForCausalLM; print(kernels.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT, env={"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(ROOT / "kernels/__init__.py")
