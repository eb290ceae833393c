"""Runs cells as Jupyter does, in a kernel of an environment."""

from __future__ import annotations

from pathlib import Path
from threading import Timer
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager


class Kernel(KernelManager):
    kernel_spec: Any = None  # there, a property that looks for one which is installed


class Notebook:
    """A kernel that starts in a directory, with the Python of a folder of programs."""

    def __init__(self, programs: Path, directory: Path) -> None:
        self._kernel = Kernel()
        command = [str(programs / "python"), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self._kernel.kernel_spec = KernelSpec(argv=command, language="python")
        self._kernel.start_kernel(cwd=str(directory))
        self._client = self._kernel.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(60)

    def run(self, cell: str, interrupted: bool = False) -> str:
        """Runs a cell, and interrupts it once it has printed something.

        Returns:
            What it printed, then its error.
        """
        said = ""

        def hear(message: dict[str, dict[str, str]]) -> None:
            nonlocal said
            if message["content"].get("name") == "stdout":
                said += message["content"]["text"]
                if interrupted:
                    Timer(0.5, self._kernel.interrupt_kernel).start()

        reply = self._client.execute_interactive(cell, timeout=90, output_hook=hear)["content"]
        return said + (f"{reply['ename']}: {reply['evalue']}" if reply["status"] == "error" else "")

    def close(self) -> None:
        self._client.stop_channels()
        self._kernel.shutdown_kernel()
