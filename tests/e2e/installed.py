"""Environments in which Helix is installed beside packages of others that have the names of ours."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.e2e.cli import ROOT, Job

# The version that transformers takes for its own, and a module that has whatever transformers imports of it.
KERNELS = (
    "Metadata-Version: 2.1\nName: kernels\nVersion: 0.16.0\n",
    "own = True\ndef __getattr__(name):\n    return name\n",
)


def install(directory: Path, editable: bool) -> Path:
    """Makes an environment with Helix and a package `kernels`, which sees this one's other packages, among them `comm`.

    It needs no network.

    Returns:
        The folder of its programs.
    """
    environment = directory / "environment"
    build = f"from hatchling import build; build.build_{'editable' if editable else 'wheel'}({str(directory)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True)
    (wheel,) = directory.glob("*.whl")
    venv.create(environment, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", f"--python={environment}", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-compile", str(wheel)], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    for file, text in zip(("kernels-0.16.0.dist-info/METADATA", "kernels/__init__.py"), KERNELS, strict=True):
        (packages / file).parent.mkdir()
        (packages / file).write_text(text)
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "0.pth").write_text("".join(f"{path}\n" for path in others))
    return environment / "bin"


def job(programs: Path, directory: Path, *words: str, program: str = "helix") -> Job:
    """Runs a program of an environment in a directory."""
    return Job(
        ["env", "-u", "PYTHONPATH", "-C", str(directory), str(programs / program)], *words, log=directory / "log"
    )
