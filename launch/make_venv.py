"""Creates the virtual environment of `make`: `python launch/make_venv.py DIR`; standard library only.

If the Python that runs this has a torch in the range of `pyproject.toml`, the environment uses it and gets only the
missing packages. Otherwise everything is installed, pinned by `constraints.txt`.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def requirements() -> list[str]:
    """Returns the packages needed to run, serve and test."""
    import tomllib  # after the check of Python's version, which may lack it

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [
        *project["dependencies"],
        *(r for extra in ("gguf", "dev") for r in project["optional-dependencies"][extra]),
    ]


def fitting_torch(wanted: str) -> Distribution | None:
    """Returns the installed torch if `wanted` (`torch>=2.11,<2.14`) allows its version."""

    def release(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split("+")[0].split(".")[:2])

    try:
        installed = distribution("torch")
    except PackageNotFoundError:
        return None
    low, high = wanted.removeprefix("torch>=").split(",<")
    return installed if release(low) <= release(installed.version) < release(high) else None


def main() -> None:
    """Creates the environment at the path that the first argument names."""
    if sys.version_info < (3, 11):  # noqa: UP036 - tells users of an older Python
        sys.exit(f"Helix needs Python 3.11 or newer, this is {sys.version.split()[0]}; set PYTHON=/path/to/python3.11")
    target = Path(sys.argv[1])
    needed = requirements()
    torch = fitting_torch(next(r for r in needed if r.startswith("torch>")))
    whose = f"the torch {torch.version} of {sys.executable}" if torch else "its own torch"
    print(f"setting up {target} with {whose}", flush=True)
    venv.create(target, with_pip=True, symlinks=True)
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    if torch:
        # Not `system_site_packages`: that skips this Python's packages if it is itself in a virtual environment.
        packages = target / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        # Its name sorts before the path file of the checkout, whose packages `comm` and `kernels` must come last.
        (packages / "0-torch-of-the-host.pth").write_text(f"{torch.locate_file('')}\n")
        constraints = []
    pip = [str(target / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # An editable install of the project: it runs from its checkout and provides the command `helix`.
    if subprocess.run([*pip, *constraints, *needed, "--editable", str(ROOT)]).returncode:
        sys.exit(f"setting up {target} failed: see the output of pip above")


if __name__ == "__main__":
    main()
