"""Files that a run refuses.

A case is its name, what is done in a directory, what is typed, and words of the message. The directory holds model/ (the
checkpoint "qwen3": one file of weights, no tokenizer), demo/ (the demo model: an index, two shards, a tokenizer) and
p.jsonl. `{d}` in what is typed stands for the directory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Setup = Callable[[Path], Any]

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00002.safetensors"
DEEP = '{"id": ' + "[" * 100_000 + "]" * 100_000 + "}"
# A terminal that nobody else needs: a run that replaced /dev/null as root would take it from everybody.
DEVICE = os.ttyname(os.openpty()[1])
OUTPUT, RESUME, RECORD, DEMO = (
    "decode.output={d}/out.jsonl",
    "decode.resume=true",
    "record={d}/r.json",
    "model.path={d}/demo",
)


def replaced(name: str, make: Callable[[Path], Any]) -> Setup:
    def setup(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        make(directory / name)

    return setup


def put(name: str, content: str | bytes) -> Setup:
    data = content if isinstance(content, bytes) else content.encode()
    return replaced(name, lambda path: path.write_bytes(data))


def fifo(name: str) -> Setup:
    return replaced(name, os.mkfifo)


def link(name: str, to: str) -> Setup:
    return replaced(name, lambda path: path.symlink_to(to))


def result(name: str) -> Setup:
    """A finished result of a request that was another."""
    return put("out.jsonl", json.dumps({"id": name, "request": "x", "finish_reason": "stop"}) + "\n")


def index_names(shard: str) -> Setup:
    """The index of the demo model has its last norm elsewhere."""

    def edit(directory: Path) -> None:
        content = json.loads((directory / "demo" / INDEX).read_text())
        content["weight_map"]["model.norm.weight"] = shard
        (directory / "demo" / INDEX).write_text(json.dumps(content))

    return edit


def other_draft(directory: Path) -> None:
    shutil.copytree(directory / "demo", directory / "draft")
    (directory / "draft" / "tokenizer.json").write_text('{"model": [], "added_tokens": {}}')


def nothing(directory: Path) -> None:
    pass


CASES: list[tuple[str, Setup, str, str]] = [
    # Results that would be lost.
    ("resume over notes", put("out.jsonl", "notes\n"), f"{OUTPUT} {RESUME}", "line 1, is not a result"),
    ("resume over prompts", put("out.jsonl", '{"id": "a", "prompt": "b'), f"{OUTPUT} {RESUME}", "is not a result"),
    ("resume over a torn line", put("out.jsonl", '{"id": "a", "prom\n\n'), f"{OUTPUT} {RESUME}", "is not a result"),
    ("resume over another's torn line", put("out.jsonl", '{"id": "z", "prom'), f"{OUTPUT} {RESUME}", "is not a result"),
    ("resume over bytes", put("out.jsonl", b"\xff\xfe\x00\x01"), f"{OUTPUT} {RESUME}", "line 1, is not a result"),
    ("resume over nested JSON", put("out.jsonl", DEEP), f"{OUTPUT} {RESUME}", "line 1, is not a result"),
    ("resume over other requests", result("z"), f"{OUTPUT} {RESUME}", "which decode.prompts has not"),
    ("resume over another prompt", result("a"), f"{OUTPUT} {RESUME}", "of another prompt"),
    ("resume without an output", nothing, RESUME, "decode.resume=true continues decode.output"),
    ("no resume over results", put("out.jsonl", '{"id": "a"}\n'), OUTPUT, "out.jsonl exists: decode.resume=true keeps"),
    ("record over another's JSON", put("r.json", '{"versions": {"mine": 1}}'), RECORD, "is not a record"),
    ("record over bytes", put("r.json", b"\xff\xfe\x00\x01"), RECORD, "is not a record"),
    ("output over a config", nothing, "decode.output={d}/model/config.json decode.resume=true", "is not a result"),
    ("record over a config", nothing, "record={d}/model/config.json", "is not a record"),
    ("output over the prompts", nothing, "decode.output={d}/p.jsonl", "must be different files"),
    ("output over the prompts by a link", link("out.jsonl", "p.jsonl"), OUTPUT, "must be different files"),
    ("output and record by a link", link("out.jsonl", "r.json"), f"{OUTPUT} {RECORD}", "must be different files"),
    # What is no regular file.
    ("output to a device", nothing, f"decode.output={DEVICE}", "it is a device"),
    ("output to a link to a device", link("out.jsonl", DEVICE), OUTPUT, "it is a device"),
    ("output to a FIFO", fifo("out.jsonl"), OUTPUT, "it is a FIFO"),
    ("output to a link to itself", link("out.jsonl", "out.jsonl"), OUTPUT, "Too many levels of symbolic links"),
    ("output below a file", nothing, "decode.output={d}/p.jsonl/out.jsonl", "Not a directory"),
    ("output to a long name", nothing, "decode.output={d}/" + "x" * 300, "File name too long"),
    ("output into /proc", nothing, "decode.output=/proc/out.jsonl", "cannot be written"),
    ("record to a device", nothing, f"record={DEVICE}", "it is a device"),
    ("prompts from a device", nothing, f"decode.prompts={DEVICE}", "it is a device"),
    ("prompts from a FIFO", fifo("p.jsonl"), "", "it is a FIFO"),
    ("a config that is a FIFO", fifo("model/config.json"), "", "config.json cannot be read: it is a FIFO"),
    ("an index that is a FIFO", fifo(f"demo/{INDEX}"), DEMO, f"{INDEX} cannot be read: it is a FIFO"),
    ("weights that are a FIFO", fifo("model/model.safetensors"), "", "safetensors cannot be read: it is a FIFO"),
    ("a tokenizer that is a FIFO", fifo("demo/tokenizer.json"), DEMO, "tokenizer.json cannot be read: it is a FIFO"),
    ("ends that are a FIFO", fifo("demo/generation_config.json"), DEMO, "cannot be read: it is a FIFO"),
    # Contents.
    ("a config of no JSON", put("model/config.json", "{"), "", "config.json: not JSON"),
    ("a config in UTF-16", put("model/config.json", "{}".encode("utf-16")), "", "config.json is not UTF-8"),
    ("ends that are nested", put("demo/generation_config.json", DEEP), DEMO, "generation_config.json: nested too deep"),
    ("an index without a map", put(f"demo/{INDEX}", "{}"), DEMO, "has no weight_map"),
    ("an index of a list", put(f"demo/{INDEX}", "[]"), DEMO, "expected a JSON object"),
    ("an index that leads away", index_names("/etc/passwd"), DEMO, "which is not a path within"),
    ("an index of a missing shard", index_names("gone.safetensors"), DEMO, "gone.safetensors"),
    ("a shard of text", put(f"demo/{SHARD}", "version https://git-lfs"), DEMO, "is not a safetensors file"),
    ("a shard of five bytes", put(f"demo/{SHARD}", bytes(5)), DEMO, "is truncated"),
    ("a tokenizer of no JSON", put("demo/tokenizer.json", ""), DEMO, "tokenizer.json: not JSON"),
    ("a tokenizer of a list", put("demo/tokenizer_config.json", "[]"), DEMO, "tokenizer_config.json holds a list"),
    (
        "a draft's tokenizer of another shape",
        other_draft,
        f"{DEMO} speculation=model speculation.model.path={{d}}/draft",
        "tokenizer.json has no vocabulary",
    ),
    ("no prompts", put("p.jsonl", ""), "", "holds no prompts"),
    ("prompts in UTF-16", put("p.jsonl", '{"prompt_ids": [1]}'.encode("utf-16")), "", "is not UTF-8"),
    ("a line of no JSON", put("p.jsonl", '{"prompt_ids": [1]}\n{"prompt_ids"\n'), "", "line 2: not JSON"),
    ("an id twice", put("p.jsonl", '{"id": 1, "prompt_ids": [1]}\n{"prompt_ids": [1]}'), "", "id 1 was used on line 1"),
    ("text without a tokenizer", put("p.jsonl", '{"prompt": "hello"}'), "", "has no tokenizer.json"),
]

# Requests that are refused while others are served, and words of the reason.
REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt_ids": [1], "temperature": -1}, "temperature = -1"),
    ({"prompt_ids": [1], "temperature": float("inf")}, "temperature = inf"),
    ({"prompt_ids": [1], "temperature": float("nan")}, "temperature = nan"),
    ({"prompt_ids": [1], "seed": 2**70}, "seed = 1180591620717411303424"),
    ({"prompt_ids": [1], "top_k": 2**70}, "top_k = 1180591620717411303424"),
    ({"prompt_ids": [2**70]}, "prompt has 1180591620717411303424"),
    ({"prompt_ids": [-1]}, "token id -1"),
    ({"prompt_ids": []}, "prompt must not be empty"),
    ({"prompt_ids": [1], "max_tokens": 2**70}, "1180591620717411303424 new ones are"),
    ({"prompt_ids": [1], "max_tokens": 0}, "max_tokens=0"),
]
