"""Files of users: which are read, which are replaced, and what is left of both."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

import pytest

from helix.files import check_file, read_json, read_text
from launch.inputs.files import check_record, check_writable, claim, write_atomically


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writes beyond `size` bytes of a file fail, as on a disk that is full."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.fixture
def special(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Paths of what is no regular file, by what is said of them; a terminal, which can be replaced by nobody."""
    fifo, bound, loop = tmp_path / "fifo", tmp_path / "socket", tmp_path / "loop"
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    terminal = os.openpty()
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(os.path.relpath(bound))  # a name of 100 bytes at most
        yield {
            "it is a FIFO": fifo,
            "it is a socket": bound,
            "it is a device": Path(os.ttyname(terminal[1])),
            "it is a directory": tmp_path,
            "Too many levels of symbolic links": loop,
        }
    for end in terminal:
        os.close(end)


@pytest.mark.timeout(20)  # a FIFO that is opened waits for ever
def test_what_is_no_file_is_neither_read_nor_written(tmp_path: Path, special: dict[str, Path]) -> None:
    for i, (error, path) in enumerate(special.items()):
        link = tmp_path / f"link{i}"
        link.symlink_to(path)
        for name in (path, link):
            with pytest.raises(OSError, match=error):
                check_file(name)
            with pytest.raises(ValueError, match=f"{name} cannot be read: {error}"):
                read_text(name)
            before = os.lstat(path)
            with pytest.raises(ValueError, match=f"record={name} cannot be written: {error}"):
                check_writable("record", name)
            assert os.path.samestat(os.lstat(path), before) and link.is_symlink()


def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    path.chmod(0)
    with as_nobody(tmp_path), pytest.raises(ValueError, match=r"a\.json cannot be read: Permission denied"):
        read_json(path)


@contextmanager
def as_nobody(path: Path) -> Iterator[None]:
    """Root may read anything: for as long as the context lasts, this process is somebody who may not read in `path`."""
    if os.geteuid() != 0:
        yield
        return
    for parent in (path, *path.parents):
        if "pytest-of-" in str(parent):  # the directories above are none of ours
            parent.chmod(0o711)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    "content, error",
    [
        (b"{", r"a\.json: not JSON: Expecting property name .* at character 2"),
        (b'{"a":\n}', r"a\.json: not JSON: Expecting value at line 2, character 1"),
        (b"[" * 100_000, r"a\.json: nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", r"a\.json: a number cannot be read: Exceeds the limit \(4300 digits\) [^;]*$"),
        (b'{"a": NaN}', r"a\.json: a number cannot be read: it is NaN"),
        (b"[1]", r"a\.json must have a JSON object, not a list"),
        ("{}".encode("utf-16"), r"a\.json is not UTF-8 text: byte 1 "),
        (b"", r"a\.json: not JSON"),
    ],
)
def test_what_is_wrong_with_json_is_said(tmp_path: Path, content: bytes, error: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=error) as caught:
        read_json(path)
    assert "\n" not in str(caught.value)


def test_json_as_python_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('\ufeff{"time_step_limit": [0, Infinity], "a": 1, "a": 2}')
    assert read_json(path) == {"time_step_limit": [0, float("inf")], "a": 2}


def test_unwritable_places_are_named_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "nowhere").symlink_to("missing/out.jsonl")
    there = sorted(tmp_path.iterdir())
    for name in ("missing/out.jsonl", "nowhere", "x" * 300):
        with pytest.raises(ValueError, match=r"decode\.output=.* cannot be written"):
            check_writable("decode.output", tmp_path / name)
    check_writable("decode.output", tmp_path / "new.jsonl")
    assert sorted(tmp_path.iterdir()) == there


RECORD = '{"config": {}, "layout": {}, "backend": "gloo", "versions": {}, "phases": {}}'


@pytest.mark.parametrize(
    "text, fine",
    [
        ("", True),
        (RECORD, True),
        ('{"versions": {}}', False),
        ("notes", False),
        ("[1]", False),
        ("[" * 100_000, False),
        ('["config", "layout", "backend", "versions", "phases"]', False),
    ],
)
def test_a_record_overwrites_records_alone(tmp_path: Path, text: str, fine: bool) -> None:
    path = tmp_path / "record.json"
    check_record(path)
    path.write_text(text)
    with nullcontext() if fine else pytest.raises(ValueError, match=r"record\.json exists and is not a record"):
        check_record(path)


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link, target = tmp_path / "link", tmp_path / "far" / "target"
    link.symlink_to("far/target")
    for text in ("old", "new"):  # a link that leads nowhere is a name for what is to be
        write_atomically(link, text)
        assert link.is_symlink() and target.read_text() == text
    assert list(target.parent.iterdir()) == [target]


def test_a_file_keeps_its_mode_and_a_new_one_has_everybodys(tmp_path: Path) -> None:
    old, new, usual = (tmp_path / name for name in ("old", "new", "usual"))
    usual.touch()
    old.touch(0o640)
    if os.geteuid() == 0:
        os.chown(old, 65534, 65534)
    before = old.stat()
    for path in (old, new):
        write_atomically(path, "text")
    assert (old.stat().st_mode, old.stat().st_uid) == (before.st_mode, before.st_uid)
    assert new.stat().st_mode == usual.stat().st_mode


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with largest_file(9), pytest.raises(OSError, match="File too large"):
        write_atomically(path, "new, and too long")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_file_that_was_replaced_while_it_was_claimed_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run puts its results in order, and ends, between the opening of the file and its lock."""
    path, real, replaced = tmp_path / "file", fcntl.flock, []

    def flock(file: TextIO, how: int) -> None:
        if not replaced:
            replaced.append(True)
            write_atomically(path, "new")
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with claim(path) as file:
        assert os.path.samestat(os.fstat(file.fileno()), path.stat())
        with pytest.raises(BlockingIOError, match="another run is writing it"):
            claim(path)
    claim(path).close()


def test_a_file_system_without_locks_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: TextIO, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    write_atomically(tmp_path / "file", "text")
    claim(tmp_path / "file").close()
    assert (tmp_path / "file").read_text() == "text"
