"""Hardware descriptions: those of `conf/hardware/`, the user's own, and the one of a device."""

from __future__ import annotations

import os
import re
from copy import deepcopy
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from helix.planner.hardware import Hardware

HARDWARE = Path(__file__).resolve().parents[2] / "conf" / "hardware"
DRIVER = Path("/proc/driver/nvidia/gpus")  # a folder for each GPU, with its model's name
CALIBRATE = "helix calibrate output=conf/hardware/mine.yaml"


def known_hardware() -> list[str]:
    return sorted(path.stem for path in HARDWARE.glob("*.yaml"))


def read_hardware(path: Path) -> dict[str, Any]:
    """Reads a description as it is written.

    Raises:
        ValueError: the file cannot be read or is not YAML.
    """
    try:
        data = deepcopy(_parsed(path.read_text(encoding="utf-8")))
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"hardware {path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"hardware {path} is not a mapping")
    return data


@cache
def _parsed(text: str) -> Any:
    """Parses a description, each text once: it takes 20 to 40 ms, and who looks for a device reads them all."""
    return OmegaConf.to_container(OmegaConf.load(StringIO(text)))


def load_hardware(name: str) -> Hardware:
    """Loads a description in `conf/hardware/`, or in a file of the user (`path/mine.yaml`).

    Raises:
        ValueError: the name is unknown (the message lists the known ones), or the description is incomplete.
    """
    if name.endswith(".yaml"):
        return Hardware.from_mapping(read_hardware(Path(name)))
    if name not in known_hardware():
        raise ValueError(
            f"unknown hardware {name!r}; known: {', '.join(known_hardware())} (or add conf/hardware/{name}.yaml, "
            f"which `{CALIBRATE}` measures)"
        )
    return Hardware.from_mapping(read_hardware(HARDWARE / f"{name}.yaml"))


def hardware_of(device: str) -> Hardware:
    """Finds the description of a device by its `name`; of several, the one calibrated last.

    Raises:
        ValueError: the device is not described; the message lists those that are, and says how to describe it.
    """
    known = [(name, read_hardware(HARDWARE / f"{name}.yaml")) for name in known_hardware()]
    fitting = [(data.get("calibrated", {}).get("date", ""), data) for _, data in known if data.get("name") == device]
    if not fitting:
        described = ", ".join(f"{data.get('name')} ({name})" for name, data in known)
        raise ValueError(f"no hardware profile is called {device!r}; there are {described}: run `{CALIBRATE}`")
    return Hardware.from_mapping(max(fitting, key=lambda dated: dated[0])[1])


def device_here() -> str | None:
    """Returns the name of this machine's first GPU, as the driver has it; None without one, or with all of them hidden.

    CUDA has the same names, but asking it takes torch, and seconds.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    for file in sorted(DRIVER.glob("*/information")):
        if (model := re.search(r"^Model:\s*(.+?)\s*$", file.read_text(), re.MULTILINE)) is not None:
            return model[1]
    return None
