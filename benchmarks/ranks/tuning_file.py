"""Checks tuning settings before anything starts, and stores what has been measured so far."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from benchmarks.schema import LabConfig, bench_points
from helix.files import parse_json
from launch.inputs.files import claim, replace
from launch.inputs.prompt_files import PromptLine

# Settings that a line's figures do not depend on: the search, file names, and display.
FREE = {
    "record", "bench.kind", "bench.output", "bench.gammas", "bench.sparsities", "bench.grid", "comm.timeout_s",
    "decode.prompts", "decode.output", "decode.resume", "decode.stream", "speculation.drafter",
    "speculation.gamma", "speculation.sparsity", "speculation.adaptive",
}  # fmt: skip

# Keys by which the first line and the others are recognized.
HEAD = {"settings", "device", "commit"}
ROW = {"drafter", "gamma", "sparsity", "tokens_by_prompt", "step_us"}


def check_tuning(config: LabConfig, prompts: Sequence[PromptLine]) -> None:
    """Raises ValueError if there is nothing to tune, or no file for the measurements."""
    bench, speculation = config.bench, config.speculation
    if speculation.drafter != "sparse":
        raise ValueError(f"bench=tune tunes speculation=sparse, not speculation.drafter={speculation.drafter}")
    if ":" in speculation.policy:
        raise ValueError(f"speculation.policy={speculation.policy} has no sparsity to tune: set another policy")
    for key, values in (("gammas", bench.gammas), ("sparsities", bench.sparsities)):
        if not values or list(values) != sorted(set(values)) or values[0] <= 0:
            raise ValueError(f"bench.{key}={values} must be an ascending list of at least one positive number")
    if bench.gammas[-1] > speculation.gamma:
        too_many = f"more than speculation.gamma={speculation.gamma}, the most drafts of a step"
        raise ValueError(f"bench.gammas has {bench.gammas[-1]}, {too_many}: raise it, or leave out that value")
    if bench.sparsities[-1] > 1:
        raise ValueError(f"bench.sparsities={bench.sparsities} must be shares of the keys, at most 1")
    if bench.output is None:
        raise ValueError(
            "bench=tune needs bench.output, the file of its measurements: set bench.output=FILE.jsonl, or use helix "
            "tune"
        )
    if config.decode.output is not None:
        raise ValueError(f"decode.output={config.decode.output}: bench=tune writes no texts: leave it out")
    if prompts:
        if bench.acceptance is not None or config.model.load == "random" or config.comm.backend == "emulated":
            raise ValueError(
                "tuning on decode.prompts needs the model's own acceptance: leave out bench.acceptance, "
                "model.load=random and comm.backend=emulated, or decode.prompts, to tune on times of bench.points"
            )
        limits = [prompt.options.get("max_tokens", config.decode.max_tokens) for prompt in prompts]
        if any(not isinstance(limit, int) or limit < 2 for limit in limits):
            raise ValueError("tuning needs prompts with max_tokens of at least 2: set decode.max_tokens")
    elif bench.acceptance is None:
        raise ValueError(
            "nothing to tune on: set decode.prompts=FILE.jsonl, or set bench.acceptance=0.9 and bench.points=[1x128K] "
            "to tune on times only, at that acceptance"
        )
    elif len(bench_points(bench)) != 1:
        raise ValueError(f"bench.points={bench.points}: bench=tune takes one point: start a job for each")
    read_measured(config, prompts)


def settings(config: LabConfig, prompts: Sequence[PromptLine]) -> dict[str, Any]:
    """Returns the settings that the figures in a file depend on, by dotted key."""
    flat = _flat(asdict(config))
    if config.model.path is not None:
        flat["model.path"] = str(Path(config.model.path).resolve())
    free = FREE | ({"bench.points", "bench.steps"} if prompts else set())
    fixed_settings = {key: value for key, value in flat.items() if key not in free}
    if prompts:
        what = [[prompt.text, prompt.ids, dict(prompt.options)] for prompt in prompts]
        fixed_settings["prompts"] = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    return parse_json(json.dumps(fixed_settings))


def read_measured(config: LabConfig, prompts: Sequence[PromptLine]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Reads `bench.output`: its first line, which says where it was measured, and its rows; both may be empty.

    Raises:
        ValueError: the file has other content, or was measured with other settings.
    """
    path = Path(str(config.bench.output))
    raw_lines = path.read_bytes().split(b"\n") if path.exists() else []
    lines = []
    for number, raw_line in enumerate(raw_lines, 1):
        try:
            line = parse_json(raw_line.decode())
            if not isinstance(line, dict) or not line.keys() >= (HEAD if number == 1 else ROW):
                raise ValueError
            lines.append(line)
        except ValueError:
            if number == len(raw_lines):  # empty, or cut off by an interrupt
                continue
            raise ValueError(
                f"bench.output={path}, line {number}, is not a tuning record: move the file away"
            ) from None
    if not lines:
        return {}, []
    theirs, ours = lines[0]["settings"], settings(config, prompts)
    if differing := [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]:
        key = differing[0]
        raise ValueError(
            f"bench.output={path} was measured with {key}={theirs.get(key)}, not {ours.get(key)}: use another file "
            "(helix tune: another name), or move it away"
        )
    return lines[0], lines[1:]


class MeasuredFile:
    """The file of measurements, locked against other runs.

    Args:
        about: where it is measured, for the first line.

    Raises:
        ValueError: as for `read_measured`; or the file was measured on another device.
        OSError: it cannot be written.
    """

    def __init__(self, config: LabConfig, prompts: Sequence[PromptLine], about: dict[str, Any]) -> None:
        path = Path(str(config.bench.output))
        self._file: TextIO = claim(path)
        head, self.rows = read_measured(config, prompts)
        if head and head["device"] != (device := about["device"]):
            where = f"was measured on {head['device']}, and this is {device}"
            raise ValueError(f"bench.output={path} {where}: use another file")
        head = head or {"settings": settings(config, prompts), **about}
        new = replace(path, "".join(json.dumps(line) + "\n" for line in (head, *self.rows)))
        self._file.close()
        self._file = new

    def add(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat
