"""Hardware descriptions for the planner: those of `conf/hardware/`, the user's files, and the one of a device."""

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
DRIVER = Path("/proc/driver/nvidia/gpus")  # has a folder per GPU, with the name of its model
CALIBRATE = "helix calibrate output=conf/hardware/mine.yaml"


def known_hardware() -> list[str]:
    """Lists the names of the descriptions in `conf/hardware/`."""
    return sorted(path.stem for path in HARDWARE.glob("*.yaml"))


def read_hardware(path: Path) -> dict[str, Any]:
    """Reads a description file; raises ValueError if the file cannot be read or is not YAML."""
    try:
        data = deepcopy(_parsed(path.read_text(encoding="utf-8")))
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"hardware {path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"hardware {path} is not a mapping")
    return data


@cache
def _parsed(text: str) -> Any:
    """Parses each text once: it takes 20 to 40 ms, and looking up a device reads all descriptions."""
    return OmegaConf.to_container(OmegaConf.load(StringIO(text)))


def load_hardware(name: str) -> Hardware:
    """Loads a description by its name in `conf/hardware/`, or from a user's file (`path/mine.yaml`).

    Raises:
        ValueError: the name is unknown (the message lists the known ones), or the description is incomplete.
    """
    if name.endswith(".yaml"):
        return Hardware.from_mapping(read_hardware(Path(name)))
    if name not in known_hardware():
        raise ValueError(
            f"hardware={name!r} is unknown; known: {', '.join(known_hardware())} (or add conf/hardware/{name}.yaml, "
            f"which `{CALIBRATE}` writes)"
        )
    return Hardware.from_mapping(read_hardware(HARDWARE / f"{name}.yaml"))


def hardware_of(device: str) -> Hardware:
    """Finds the description of a device by its `name`; of several, the one calibrated last.

    Raises:
        ValueError: there is no description; the message lists the others, and how to measure one.
    """
    known = [(name, read_hardware(HARDWARE / f"{name}.yaml")) for name in known_hardware()]
    fitting = [(data.get("calibrated", {}).get("date", ""), data) for _, data in known if data.get("name") == device]
    if not fitting:
        described = ", ".join(f"{data.get('name')} ({name})" for name, data in known)
        raise ValueError(f"there is no hardware description of {device!r}, only of {described}: run `{CALIBRATE}`")
    return Hardware.from_mapping(max(fitting, key=lambda dated: dated[0])[1])


def device_here() -> str | None:
    """Returns the name of this machine's first GPU from the driver; None if there is none or all are hidden.

    CUDA reports the same names, but importing torch takes seconds.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    for file in sorted(DRIVER.glob("*/information")):
        if (model := re.search(r"^Model:\s*(.+?)\s*$", file.read_text(), re.MULTILINE)) is not None:
            return model[1]
    return None
