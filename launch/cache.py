"""Shows or deletes the prefixes that `kv.prefix_dir` keeps on disk.

  helix cache list DIR      the models and settings whose prefixes are in DIR, and their bytes
  helix cache clear DIR     delete them, except those that a running job uses

Prefixes hold the tokens of prompts and answers. Those of a model are of no use to another one, nor to other settings
that change keys and values: checkpoint, model.config, kv.dtype, kv.page_size, layout. `clear` deletes nothing else.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from helix.files import read_json
from launch.inputs.arguments import handle_help

DESCRIPTION = "identity.json"  # as `helix.setup.prefix_store` writes it


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `list` or `clear`; reports an error on one line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if handle_help(arguments or ["--help"], __doc__):
        return
    try:
        if len(arguments) != 2 or arguments[0] not in ("list", "clear"):
            raise ValueError(f"{' '.join(arguments)}: expected list DIR or clear DIR (see --help)")
        what, folder = arguments[0], Path(arguments[1])
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a directory")
        for model in sorted(path.parent for path in folder.glob(f"*/{DESCRIPTION}")):
            print(f"{model.name}  {describe(model)}{clear(model) if what == 'clear' else ''}")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


def describe(model: Path) -> str:
    """Returns the checkpoint, the settings and the bytes on disk of a model's prefixes."""
    found = read_json(model / DESCRIPTION)
    size = sum(file.stat().st_blocks * 512 for file in model.rglob("*.seg"))
    try:
        dtype, append_block, page = found["kv"]
        layout = found["layout"]
        return (
            f"{found['path'] or 'random weights'}, {layout['mode']} {layout['kvp']}x{layout['tpa']}, kv.dtype={dtype}, "
            f"kv.append_block={append_block}, kv.page_size={page}: {size / 1e9:.2f} GB"
        )
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{model / DESCRIPTION} does not describe prefixes: move {model} away") from None


def clear(model: Path) -> str:
    """Deletes a model's prefixes; returns what to tell."""
    ranks = [path.parent for path in model.glob("*/lock")]
    with unused(ranks) as are_free:
        if not are_free:
            return ", in use"
        for rank in ranks:
            shutil.rmtree(rank)
        (model / DESCRIPTION).unlink()
        if not any(model.iterdir()):
            model.rmdir()
    return ", deleted"


@contextmanager
def unused(ranks: Sequence[Path]) -> Iterator[bool]:
    """Locks directories of ranks; yields whether no job uses any of them."""
    files = [os.open(rank / "lock", os.O_RDWR) for rank in ranks]
    try:
        for file in files:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        for file in files:
            os.close(file)


if __name__ == "__main__":
    main()
