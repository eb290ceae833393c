"""The virtual environment that `make` uses: `python launch/make_venv.py DIR`; standard library alone.

Where the Python that runs this already has a torch in the range of `pyproject.toml`, the environment sees it and only
what is missing is added. Otherwise everything is installed, pinned by `constraints.txt`.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def requirements() -> list[str]:
    """Returns the packages needed to run, to serve and to test."""
    import tomllib  # not before the version of Python is known to have it

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [
        *project["dependencies"],
        *(r for extra in ("gguf", "dev") for r in project["optional-dependencies"][extra]),
    ]


def fitting_torch(wanted: str) -> Distribution | None:
    """Returns the version of the installed torch if `wanted` (`torch>=2.11,<2.14`) allows it."""

    def release(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split("+")[0].split(".")[:2])

    try:
        installed = distribution("torch")
    except PackageNotFoundError:
        return None
    low, high = wanted.removeprefix("torch>=").split(",<")
    return installed if release(low) <= release(installed.version) < release(high) else None


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever has no such Python should read it here
        sys.exit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; set PYTHON=/path/to/python3.11")
    target = Path(sys.argv[1])
    needed = requirements()
    torch = fitting_torch(next(r for r in needed if r.startswith("torch>")))
    whose = f"the torch {torch.version} of {sys.executable}" if torch else "a torch of its own"
    print(f"setting up {target} with {whose}", flush=True)
    venv.create(target, with_pip=True, symlinks=True)
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    if torch:
        # Not `system_site_packages`: this Python may be that of an environment itself, which it would pass over.
        packages = target / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        # By its name before the path file of the checkout, whose packages `comm` and `kernels` are last.
        (packages / "0-torch-of-the-host.pth").write_text(f"{torch.locate_file('')}\n")
        constraints = []
    pip = [str(target / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # The project itself as an editable install: it runs from its checkout, and `helix` is a command.
    if subprocess.run([*pip, *constraints, *needed, "--editable", str(ROOT)]).returncode:
        sys.exit(f"setting up {target} failed; what pip said stands above")


if __name__ == "__main__":
    main()
