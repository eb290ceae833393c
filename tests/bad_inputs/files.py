"""Files that a run refuses.

A line of files.cases has a case's name, the setup in a directory, the command line, and words of the message. The
directory has model/ (the checkpoint "qwen3": one file of weights, no tokenizer), demo/ (the demo model: an index, two
shards, a tokenizer) and p.jsonl. File contents are written with Python's escapes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# A spare terminal: a run that replaced /dev/null as root would break it for every process.
DEVICE = os.ttyname(os.openpty()[1])
STANDS_FOR = {
    "INDEX": "model.safetensors.index.json",
    "SHARD": "model-00002-of-00002.safetensors",
    "OUTPUT": "decode.output={d}/out.jsonl",
    "RESUME": "decode.resume=true",
    "RECORD": "record={d}/r.json",
    "DEMO": "model.path={d}/demo",
    "DEVICE": DEVICE,
    "LONG": "x" * 300,
}
DEEP = '{"id": ' + "[" * 100_000 + "]" * 100_000 + "}"


def put(path: Path, content: str) -> None:
    """Writes a file."""
    text = content.replace("DEEP", DEEP).replace("ZEROS", r"\0" * 1000)
    path.write_bytes(text.encode("latin-1").decode("unicode_escape").encode("latin-1"))


def cut(path: Path, size: str) -> None:
    """Truncates a file."""
    path.write_bytes(path.read_bytes()[: int(size)])


def index_names(path: Path, shard: str) -> None:
    """Moves the last norm to another shard in the demo model's index."""
    content = json.loads(path.read_text())
    content["weight_map"]["model.norm.weight"] = shard
    path.write_text(json.dumps(content))


def put_draft(path: Path, content: str) -> None:
    """Makes a draft model: the demo model with another tokenizer.json."""
    shutil.copytree(path.parent.parent / "demo", path.parent)
    put(path, content)


VERBS: dict[str, Callable[[Path, str], Any]] = {
    "put": put,
    "cut": cut,
    "fifo": lambda path, _: os.mkfifo(path),
    "link": lambda path, to: path.symlink_to(to),
    "directory": lambda path, _: path.mkdir(),
    "names": index_names,
    "draft": put_draft,
}


def do(what: str, directory: Path) -> None:
    """Runs the setup of a case: a verb, a path and more; - for nothing."""
    if what == "-":
        return
    verb, name, *more = what.split(" ", 2)
    path = directory / name
    if verb in ("put", "fifo", "link", "directory"):
        path.unlink(missing_ok=True)
    VERBS[verb](path, *(more or [""]))


def cases() -> list[Any]:
    """Returns setup, command line and message of each case."""
    found = []
    for line in (Path(__file__).parent / "files.cases").read_text().splitlines()[1:]:
        name, case = line.split(" | ", 1)
        for word, text in STANDS_FOR.items():
            case = case.replace(word, text)
        what, _, answer = case.partition(" | ")
        found.append(pytest.param(what, *answer.split(" -> "), id=name))
    return found


# Requests that are refused while others are served, and words of the message.
REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt_ids": [1], "temperature": -1}, "temperature=-1"),
    ({"prompt_ids": [1], "temperature": float("inf")}, "temperature=inf"),
    ({"prompt_ids": [1], "temperature": float("nan")}, "temperature=nan"),
    ({"prompt_ids": [1], "seed": 2**70}, "seed=1180591620717411303424"),
    ({"prompt_ids": [1], "top_k": 2**70}, "top_k=1180591620717411303424"),
    ({"prompt_ids": [2**70]}, "prompt has token id 1180591620717411303424"),
    ({"prompt_ids": [-1]}, "token id -1"),
    ({"prompt_ids": []}, "prompt is an empty list"),
    ({"prompt_ids": [1], "max_tokens": 2**70}, "1180591620717411303424 new tokens are"),
    ({"prompt_ids": [1], "max_tokens": 0}, "max_tokens=0"),
]
