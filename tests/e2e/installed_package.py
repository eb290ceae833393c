"""Environments with Helix and foreign packages of the same names as ours, and notebooks in them."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from threading import Timer
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

from tests.e2e.command_line import ROOT, Job

# The version that transformers accepts, and a module with everything that transformers imports from it.
KERNELS = {
    "kernels-0.16.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: kernels\nVersion: 0.16.0\n",
    "kernels/__init__.py": "own = True\ndef __getattr__(name):\n    return name\n",
}


def install(directory: Path, editable: bool) -> Path:
    """Makes an environment with Helix and a package `kernels`; it sees this one's packages, including `comm`.

    Needs no network.

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
    for file, text in KERNELS.items():
        (packages / file).parent.mkdir()
        (packages / file).write_text(text)
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "0.pth").write_text("".join(f"{path}\n" for path in others))
    return environment / "bin"


def job(programs: Path, directory: Path, *words: str, program: str = "helix", log: Path | None = None) -> Job:
    """Runs a program of an environment in a directory."""
    command = ["env", "-u", "PYTHONPATH", "-C", str(directory), str(programs / program)]
    return Job(command, *words, log=log or directory / "log")


class Kernel(KernelManager):
    """A kernel manager with a given kernel spec."""

    kernel_spec: Any = None  # overrides a property that looks for an installed one


class Notebook:
    """A Jupyter kernel in a directory, with the Python of an environment."""

    def __init__(self, programs: Path, directory: Path) -> None:
        self._kernel = Kernel()
        command = [str(programs / "python"), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self._kernel.kernel_spec = KernelSpec(argv=command, language="python")
        self._kernel.start_kernel(cwd=str(directory))
        self._client = self._kernel.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(120)

    def run(self, cell: str, interrupted: bool = False) -> str:
        """Runs a cell, and optionally interrupts it after its first output.

        Returns:
            Its output, then its error.
        """
        output = ""

        def hear(message: dict[str, dict[str, str]]) -> None:
            nonlocal output
            if message["content"].get("name") == "stdout":
                output += message["content"]["text"]
                if interrupted:
                    Timer(0.5, self._kernel.interrupt_kernel).start()

        reply = self._client.execute_interactive(cell, timeout=200, output_hook=hear)["content"]
        return output + (f"{reply['ename']}: {reply['evalue']}" if reply["status"] == "error" else "")

    def close(self) -> None:
        self._client.stop_channels()
        self._kernel.shutdown_kernel()
