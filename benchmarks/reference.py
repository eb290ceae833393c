"""Writes `docs/reference/config.md` from the config schemas and groups: `python -m benchmarks.reference`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.schema import SETTINGS, BenchConfig
from helix.config import Config
from launch.inputs.keys import keys

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "config.md"
HEAD = """\
# Configuration

<!-- Written by `python -m benchmarks.reference` from `helix/config.py`, `conf/` and `benchmarks/`; a test compares. -->

Set any key on the command line, as in `layout.kvp=4 decode.max_tokens=128`. `GROUP=OPTION` takes a file of
`conf/GROUP/`. Unknown keys and values out of range are refused before anything starts.

Hydra's habits ([overrides](https://hydra.cc/docs/advanced/override_grammar/basic/)), on `helix run`, `helix bench` and
`python torchrun_entry.py`:

| | |
|---|---|
| `-m KEY=A,B`, `range(1,5)`, `choice(A,B)`, `glob(*)` | a sweep, point after point; `helix sweep` is `helix run -m` |
| `hydra.sweep.dir=DIR`, `hydra.sweep.subdir=` | where a sweep writes; `${hydra.job.num}` may be a part |
| `hydra.job.name=NAME` | `${hydra.job.name}` in these |
| `hydra.sweeper.params` in a file | what an experiment sweeps over |
| `+experiment=NAME` | a file of `experiment/` |
| `+model.config.KEY=`, `++KEY=`, `~KEY` | keys that are added, set, or taken out, which leaves the default |
| `--cfg job`, `--package`, `--resolve`, `--info` | the config in effect, and all keys |
| `--config-dir DIR`, `--config-name NAME` | groups and a primary config of your own |

Hydra's logging and working directories are not used, and neither are launchers that run points in other processes.

| key | default | meaning | values |
|---|---|---|---|
"""
LABORATORY = """
## Benchmarks

`python -m benchmarks.entry` takes these in addition to all others.

| key | default | meaning | values |
|---|---|---|---|
"""
GROUPS = """
## Groups

| group | options |
|---|---|
"""


def page() -> str:
    """Returns the text of the page."""
    ours, theirs = [*keys(Config)], [*keys(BenchConfig, "bench.")]
    tables = (
        "".join(
            f"| `{key}` | {default if default == 'unset' else f'`{default}`'} | {meaning} | {values} |\n"
            for key, default, meaning, values in part
        )
        for part in (ours, theirs)
    )
    options: dict[str, set[str]] = {}
    for file in (file for directory in SETTINGS.directories for file in directory.glob("*/*.yaml")):
        options.setdefault(file.parent.name, set()).add(f"`{file.stem}`")
    groups = "".join(f"| `{name}` | {', '.join(sorted(found))} |\n" for name, found in sorted(options.items()))
    return HEAD + LABORATORY.join(tables) + GROUPS + groups


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
