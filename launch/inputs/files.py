"""Files that a run writes: replaced atomically, and locked by one run at a time."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from helix.files import check_file, parse_json

RECORD_KEYS = {"config", "layout", "backend", "versions", "phases"}  # identify a run's record


def check_writable(key: str, path: Path) -> None:
    """Raises ValueError if `path`, given as `key`, is not writable; creates no file."""
    target = os.path.realpath(path)
    try:
        with suppress(FileNotFoundError):
            check_file(path)
        with tempfile.TemporaryFile(dir=os.path.dirname(target)):  # replacing a file needs a writable directory
            pass
        if os.path.exists(target):
            claim(path).close()
    except OSError as error:
        raise ValueError(f"{key}={path} cannot be written: {error.strerror}") from error


def check_plot_path(path: Path) -> None:
    """Raises ValueError if the path of --plot has no image suffix or is not writable."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot={path} must end in .png, .svg or .pdf")
    check_writable("--plot", path)


def check_record(path: Path) -> None:
    """Raises ValueError if a record would overwrite a file that is not a record."""
    if not path.exists() or not path.stat().st_size:
        return
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict) or not content.keys() >= RECORD_KEYS:
        raise ValueError(f"record={path} exists and is not a record: move it away, or choose another file")


def claim(path: Path) -> TextIO:
    """Opens a file, created if missing, with an exclusive lock until it is closed or the process ends.

    Raises:
        OSError: the file cannot be opened, or another process has locked it.
    """
    while True:
        file = path.open("a", encoding="utf-8")
        _lock(file)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # the process that had locked it has replaced it


def _lock(file: TextIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise BlockingIOError(error.errno, "another run is writing it; wait for it, or choose another file") from None
    except OSError:
        pass  # a file system without locks


def replace(path: Path, texts: Iterable[str]) -> TextIO:
    """Replaces a file, or the target of a link, atomically.

    Returns:
        The new file, locked, open for more text.

    Raises:
        OSError: it failed; the old file is unchanged, and no temporary file is left.
    """
    target = Path(os.path.realpath(path))
    new = target.with_name(f".helix-{uuid.uuid4().hex}")
    file = new.open("x", encoding="utf-8", errors="backslashreplace")  # a lone surrogate becomes its JSON escape
    try:
        _lock(file)
        file.writelines(texts)
        file.flush()
        with suppress(FileNotFoundError):
            old = target.stat()
            with suppress(PermissionError):
                os.chown(new, old.st_uid, old.st_gid)
            new.chmod(stat.S_IMODE(old.st_mode))
        os.replace(new, target)
    except BaseException:
        with suppress(OSError):
            file.close()
        new.unlink()
        raise
    return file


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file atomically."""
    replace(path, [text]).close()
