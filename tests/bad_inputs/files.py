"""Bad files: (name, what to do in the directory d, overrides, exit code, fragment of the message).

d holds beforehand: model/ (a copy of checkpoint("qwen3"), one model.safetensors, no tokenizer), demo/ (a copy of the
demo
model: an index, two shards, a tokenizer) and p.jsonl ('{"id": "a", "prompt_ids": [1, 2, 3]}\n'). Every command line
begins with f"model.path={d}/model decode.prompts={d}/p.jsonl decode.max_tokens=2"; "{d}" in an override stands for
the directory.
"""

import json
import os
import socket
from pathlib import Path

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00002.safetensors"
DEEP = '{"id": ' + "[" * 100_000 + "]" * 100_000 + "}"


def put(name, content):
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    return lambda d: (
        (d / name).parent.mkdir(exist_ok=True),
        (d / name).unlink(missing_ok=True),
        (d / name).write_bytes(data),
    )


def line(**entry):
    return put("p.jsonl", '{"prompt_ids": [1]}\n' + json.dumps(entry) + "\n")


def fifo(name):
    return lambda d: ((d / name).unlink(missing_ok=True), os.mkfifo(d / name))


def folder(name):
    return lambda d: ((d / name).unlink(missing_ok=True), (d / name).mkdir())


def link(name, to):
    return lambda d: ((d / name).unlink(missing_ok=True), (d / name).symlink_to(to))


def sock(name):
    def bind(d):
        here = os.getcwd()
        os.chdir((d / name).parent)
        (d / name).unlink(missing_ok=True)
        socket.socket(socket.AF_UNIX).bind(Path(name).name)
        os.chdir(here)

    return bind


def cut(name, n):
    return lambda d: (d / name).write_bytes((d / name).read_bytes()[:n])


def index(**changed):  # the demo model's, with another weight_map or with entries of it changed
    def edit(d):
        content = json.loads((d / "demo" / INDEX).read_text())
        content["weight_map"] = changed["whole"] if "whole" in changed else content["weight_map"] | changed["entries"]
        (d / "demo" / INDEX).write_text(json.dumps(content))

    return edit


def both(*setups):
    return lambda d: [setup(d) for setup in setups]


PTY = (
    os.openpty()
)  # a device that nobody else needs: a run that replaced /dev/null as root would take it from everybody
DEVICE = os.ttyname(PTY[1])
nothing = lambda d: None  # noqa: E731
OUT, RESUME, RECORD = "decode.output={d}/out.jsonl", "decode.resume=true", "record={d}/record.json"
DEMO = "model.path={d}/demo"
NORM = "model.norm.weight"

CASES = [
    # Results that would be lost.
    ("resume over one line of notes", put("out.jsonl", "notes"), [OUT, RESUME], 1, "line 1, is not a result"),
    (
        "resume over one line of notes with its end",
        put("out.jsonl", "notes\n"),
        [OUT, RESUME],
        1,
        "line 1, is not a result",
    ),
    ("resume over JSON of somebody else", put("out.jsonl", '{"id": "a"}'), [OUT, RESUME], 1, "line 1, is not a result"),
    (
        "resume over a prompt file",
        put("out.jsonl", '{"id": "a", "prompt": "b'),
        [OUT, RESUME],
        1,
        "line 1, is not a result",
    ),
    (
        "resume over a torn line of another request",
        put("out.jsonl", '{"id": "z", "prompt_tokens": 3'),
        [OUT, RESUME],
        1,
        "line 1, is not a result",
    ),
    (
        "resume over a torn line that is not the last",
        put("out.jsonl", '{"id": "a", "prompt_tok\n\n'),
        [OUT, RESUME],
        1,
        "line 1, is not a result",
    ),
    ("resume over bytes", put("out.jsonl", b"\xff\xfe\x00\x01"), [OUT, RESUME], 1, "line 1, is not a result"),
    ("resume over nested JSON", put("out.jsonl", DEEP), [OUT, RESUME], 1, "line 1, is not a result"),
    (
        "resume over an id that is a list",
        put("out.jsonl", '{"id": [1], "request": "x", "finish_reason": "stop"}\n'),
        [OUT, RESUME],
        1,
        "line 1, is not a result",
    ),
    (
        "resume over other requests",
        put("out.jsonl", '{"id": "z", "request": "x", "finish_reason": "stop"}\n'),
        [OUT, RESUME],
        1,
        "which decode.prompts has not",
    ),
    (
        "resume over another prompt",
        put("out.jsonl", '{"id": "a", "request": "x", "finish_reason": "stop"}\n'),
        [OUT, RESUME],
        1,
        "of another prompt",
    ),
    ("no resume over anything", put("out.jsonl", "notes"), [OUT], 1, "decode.resume=true keeps its results"),
    ("record over notes", put("record.json", "notes"), [RECORD], 1, "is not a record"),
    (
        "record over a JSON object with versions",
        put("record.json", '{"versions": {"mine": 1}, "dear": "to me"}'),
        [RECORD],
        1,
        "is not a record",
    ),
    (
        "record over a list",
        put("record.json", '["config", "layout", "backend", "versions", "phases"]'),
        [RECORD],
        1,
        "is not a record",
    ),
    ("record over nested JSON", put("record.json", DEEP), [RECORD], 1, "is not a record"),
    ("record over bytes", put("record.json", b"\xff\xfe\x00\x01"), [RECORD], 1, "is not a record"),
    ("record over the model's config", nothing, ["record={d}/model/config.json"], 1, "is not a record"),
    (
        "output over the model's config",
        nothing,
        ["decode.output={d}/model/config.json", RESUME],
        1,
        "line 1, is not a result",
    ),
    ("output over the prompts", nothing, ["decode.output={d}/p.jsonl"], 1, "must be different files"),
    ("output over the prompts by a link", link("out.jsonl", "p.jsonl"), [OUT], 1, "must be different files"),
    (
        "output and record in one file by a link",
        link("out.jsonl", "record.json"),
        [OUT, RECORD],
        1,
        "must be different files",
    ),
    ("resume without an output", nothing, [RESUME], 1, "decode.resume=true continues decode.output"),
    # What is no regular file.
    ("output to a device", nothing, [f"decode.output={DEVICE}"], 1, "it is a device"),
    ("output to a link to a device", link("out.jsonl", DEVICE), [OUT], 1, "it is a device"),
    ("output to a FIFO", fifo("out.jsonl"), [OUT], 1, "it is a FIFO"),
    ("output to a link to a FIFO", both(fifo("pipe"), link("out.jsonl", "pipe")), [OUT], 1, "it is a FIFO"),
    ("output to a socket", sock("out.jsonl"), [OUT], 1, "it is a socket"),
    ("output to a directory", folder("out.jsonl"), [OUT], 1, "it is a directory"),
    ("output to a link to itself", link("out.jsonl", "out.jsonl"), [OUT], 1, "Too many levels of symbolic links"),
    ("output to an empty name", nothing, ["decode.output="], 1, "must be a path, or null"),
    ("output to a folder that is none", nothing, ["decode.output={d}/p.jsonl/out.jsonl"], 1, "Not a directory"),
    ("output to a missing folder", nothing, ["decode.output={d}/no/out.jsonl"], 1, "No such file or directory"),
    (
        "output to a link into a missing folder",
        link("out.jsonl", "no/out.jsonl"),
        [OUT],
        1,
        "No such file or directory",
    ),
    ("output to a long name", nothing, ["decode.output={d}/" + "x" * 300], 1, "File name too long"),
    (
        "an earlier run's results",
        put("o.jsonl", '{"id": "a"}\n'),
        ["decode.output={d}/o.jsonl"],
        1,
        "o.jsonl exists: decode.resume=true",
    ),
    ("output into /proc", nothing, ["decode.output=/proc/out.jsonl"], 1, "cannot be written"),
    ("record to a device", nothing, [f"record={DEVICE}"], 1, "it is a device"),
    ("record to a FIFO", fifo("record.json"), [RECORD], 1, "it is a FIFO"),
    (
        "record to a link to itself",
        link("record.json", "record.json"),
        [RECORD],
        1,
        "Too many levels of symbolic links",
    ),
    ("record to a directory", folder("record.json"), [RECORD], 1, "it is a directory"),
    ("prompts from a device", nothing, [f"decode.prompts={DEVICE}"], 1, "it is a device"),
    ("prompts from a FIFO", fifo("p.jsonl"), [], 1, "it is a FIFO"),
    ("prompts from a socket", sock("p.jsonl"), [], 1, "it is a socket"),
    ("prompts from a directory", folder("p.jsonl"), [], 1, "it is a directory"),
    ("prompts from a link to itself", link("p.jsonl", "p.jsonl"), [], 1, "Too many levels of symbolic links"),
    ("prompts from nowhere", link("p.jsonl", "nowhere"), [], 1, "No such file or directory"),
    ("prompts from an empty name", nothing, ["decode.prompts="], 1, "must be a path, or null"),
    ("prompts from a long name", nothing, ["decode.prompts={d}/" + "x" * 300], 1, "File name too long"),
    ("config.json is a FIFO", fifo("model/config.json"), [], 1, "config.json"),
    ("config.json is a link to itself", link("model/config.json", "config.json"), [], 1, "config.json"),
    (
        "generation_config.json is a FIFO",
        fifo("demo/generation_config.json"),
        [DEMO],
        1,
        "generation_config.json cannot be read: it is a FIFO",
    ),
    ("the index is a FIFO", fifo(f"demo/{INDEX}"), [DEMO], 1, f"{INDEX} cannot be read: it is a FIFO"),
    (
        "the weights are a FIFO",
        fifo("model/model.safetensors"),
        [],
        1,
        "model.safetensors cannot be read: it is a FIFO",
    ),
    (
        "the weights are a device",
        link("model/model.safetensors", DEVICE),
        [],
        1,
        "model.safetensors cannot be read: it is a device",
    ),
    (
        "the weights are a directory",
        folder("model/model.safetensors"),
        [],
        1,
        "model.safetensors cannot be read: it is a directory",
    ),
    (
        "the weights are a link to themselves",
        link("model/model.safetensors", "model.safetensors"),
        [],
        1,
        "Too many levels of symbolic links",
    ),
    ("a shard is a FIFO", fifo(f"demo/{SHARD}"), [DEMO], 1, f"{SHARD} cannot be read: it is a FIFO"),
    ("tokenizer.json is a FIFO", fifo("demo/tokenizer.json"), [DEMO], 1, "tokenizer.json cannot be read: it is a FIFO"),
    (
        "tokenizer_config.json is a FIFO",
        fifo("demo/tokenizer_config.json"),
        [DEMO],
        1,
        "tokenizer_config.json cannot be read: it is a FIFO",
    ),
    (
        "tokenizer_config.json is a device",
        link("demo/tokenizer_config.json", DEVICE),
        [DEMO],
        1,
        "tokenizer_config.json cannot be read: it is a device",
    ),
    # A checkpoint's index and shards.
    (
        "the index names a shard above",
        both(index(entries={NORM: f"../demo/{SHARD}"})),
        [DEMO],
        1,
        "which is not a path within",
    ),
    (
        "the index names a shard by its whole path",
        index(entries={NORM: "/etc/passwd"}),
        [DEMO],
        1,
        "which is not a path within",
    ),
    (
        "the index names a shard through a folder and back",
        index(entries={NORM: f"x/../../demo/{SHARD}"}),
        [DEMO],
        1,
        "which is not a path within",
    ),
    ("the index names a number", index(entries={NORM: 3}), [DEMO], 1, "which is not a path within"),
    ("the index names a list", index(entries={NORM: [SHARD]}), [DEMO], 1, "which is not a path within"),
    ("the index names nothing", index(entries={NORM: ""}), [DEMO], 1, "which is not a path within"),
    ("the index names null", index(entries={NORM: None}), [DEMO], 1, "which is not a path within"),
    ("the index names a null byte", index(entries={NORM: "a\0"}), [DEMO], 1, "which is not a path within"),
    ("the index has no weight_map", put(f"demo/{INDEX}", "{}"), [DEMO], 1, "has no weight_map"),
    ("the index has a list for a weight_map", index(whole=[SHARD]), [DEMO], 1, "has no weight_map"),
    ("the index has an empty weight_map", index(whole={}), [DEMO], 1, "has no weight_map"),
    ("the index is a list", put(f"demo/{INDEX}", "[]"), [DEMO], 1, "expected a JSON object"),
    ("the index is nested", put(f"demo/{INDEX}", DEEP), [DEMO], 1, "nested too deep"),
    ("the index promises a tensor", index(entries={"model.ghost": SHARD}), [DEMO], 1, "model.ghost"),
    ("the index names a missing shard", index(entries={NORM: "gone.safetensors"}), [DEMO], 1, "gone.safetensors"),
    (
        "a shard is missing",
        lambda d: (d / "demo" / SHARD).unlink(),
        [DEMO],
        1,
        f"names files that are missing: {SHARD}",
    ),
    ("a shard is a directory", folder(f"demo/{SHARD}"), [DEMO], 1, f"{SHARD} cannot be read: it is a directory"),
    ("a shard is empty", cut(f"demo/{SHARD}", 0), [DEMO], 1, "is truncated"),
    ("a shard is five bytes", cut(f"demo/{SHARD}", 5), [DEMO], 1, "is truncated"),
    ("a shard lacks most of its header", cut(f"demo/{SHARD}", 100), [DEMO], 1, "is truncated"),
    ("a shard lacks its end", cut(f"demo/{SHARD}", 50_000), [DEMO], 1, "is truncated"),
    (
        "a shard is text",
        put(f"demo/{SHARD}", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        [DEMO],
        1,
        "is not a safetensors file",
    ),
    ("a shard is zeros", put(f"demo/{SHARD}", bytes(1000)), [DEMO], 1, "is not a safetensors file"),
    (
        "a shard has a header that is no JSON",
        put(f"demo/{SHARD}", (16).to_bytes(8, "little") + b"x" * 100),
        [DEMO],
        1,
        "is not a safetensors file",
    ),
    # config.json and the tokenizer as files.
    ("config.json is no JSON", put("model/config.json", "{"), [], 1, "config.json: not JSON"),
    ("config.json is nested", put("model/config.json", DEEP), [], 1, "config.json: nested too deep"),
    ("config.json is UTF-16", put("model/config.json", "{}".encode("utf-16")), [], 1, "config.json is not UTF-8"),
    (
        "config.json has a long number",
        put("model/config.json", '{"a": ' + "9" * 5000 + "}"),
        [],
        1,
        "config.json: a number cannot be read: Exceeds",
    ),
    (
        "config.json has NaN",
        put("model/config.json", '{"a": NaN}'),
        [],
        1,
        "config.json: a number cannot be read: it is NaN",
    ),
    ("config.json is text", put("model/config.json", '"a"'), [], 1, "expected a JSON object"),
    ("config.json is a directory", folder("model/config.json"), [], 1, "config.json"),
    (
        "generation_config.json is nested",
        put("demo/generation_config.json", DEEP),
        [DEMO],
        1,
        "generation_config.json: nested too deep",
    ),
    ("tokenizer.json is no JSON", put("demo/tokenizer.json", "{"), [DEMO], 1, "tokenizer.json: not JSON"),
    ("tokenizer.json is a list", put("demo/tokenizer.json", "[]"), [DEMO], 1, "tokenizer.json holds a list"),
    ("tokenizer.json is empty", put("demo/tokenizer.json", ""), [DEMO], 1, "tokenizer.json: not JSON"),
    ("tokenizer.json is bytes", put("demo/tokenizer.json", b"\xff\xfe"), [DEMO], 1, "tokenizer.json is not UTF-8"),
    ("tokenizer.json is nested", put("demo/tokenizer.json", DEEP), [DEMO], 1, "tokenizer.json: nested too deep"),
    (
        "tokenizer_config.json is a list",
        put("demo/tokenizer_config.json", "[]"),
        [DEMO],
        1,
        "tokenizer_config.json holds a list",
    ),
    (
        "tokenizer_config.json is nested",
        put("demo/tokenizer_config.json", DEEP),
        [DEMO],
        1,
        "tokenizer_config.json: nested too deep",
    ),
    (
        "the draft's tokenizer has another shape",
        both(
            lambda d: __import__("shutil").copytree(d / "demo", d / "draft"),
            put("draft/tokenizer.json", '{"model": [], "added_tokens": {}}'),
        ),
        [DEMO, "speculation=model", "speculation.model.path={d}/draft"],
        1,
        "tokenizer.json",
    ),
    # Prompt lines.
    ("no prompts", put("p.jsonl", ""), [], 1, "holds no prompts"),
    ("prompts in UTF-16", put("p.jsonl", '{"prompt_ids": [1]}'.encode("utf-16")), [], 1, "is not UTF-8"),
    (
        "prompts in Latin-1",
        put("p.jsonl", '{"prompt_ids": [1], "id": "\xe9"}'.encode("latin-1")),
        [],
        1,
        "is not UTF-8",
    ),
    ("a line of null bytes", put("p.jsonl", "\0\0\0"), [], 1, "line 1: not JSON"),
    ("a nested line", put("p.jsonl", '{"prompt_ids": [1]}\n' + DEEP), [], 1, "line 2: nested too deep"),
    (
        "a long number",
        put("p.jsonl", '{"prompt_ids": [' + "9" * 5000 + "]}"),
        [],
        1,
        "line 1: a number cannot be read: Exceeds",
    ),
    (
        "a BOM in the middle",
        put("p.jsonl", '{"prompt_ids": [1]}\n\ufeff{"prompt_ids": [1]}'),
        [],
        1,
        "line 2: not JSON",
    ),
    ("a list", put("p.jsonl", "[1]"), [], 1, "a prompt is a JSON object"),
    ("two objects on a line", put("p.jsonl", '{"prompt_ids": [1]} {"prompt_ids": [1]}'), [], 1, "line 1: not JSON"),
    (
        "an id with half a character",
        line(id="a\ud83d", prompt_ids=[1]),
        [],
        1,
        'line 2: "id" has half a character at 1',
    ),
    ("a prompt with half a character", line(prompt="\udc00"), [], 1, 'line 2: "prompt" has half a character at 0'),
    (
        "a stop text with half a character",
        line(prompt_ids=[1], stop=["x", "ab\ud83d"]),
        [],
        1,
        'line 2: "stop" has half a character at 2',
    ),
    (
        "a stop text alone with half a character",
        line(prompt_ids=[1], stop="\ud83d"),
        [],
        1,
        'line 2: "stop" has half a character at 0',
    ),
    (
        "an id twice",
        put("p.jsonl", '{"id": 1, "prompt_ids": [1]}\n{"prompt_ids": [1]}'),
        [],
        1,
        "line 2: id 1 was used on line 1",
    ),
    ("an id that is a list", line(id=[1], prompt_ids=[1]), [], 1, "line 2: id [1] must be text or an integer"),
    ("an id that is a number with a point", line(id=1.0, prompt_ids=[1]), [], 1, "line 2: id 1.0 must be"),
    ("token ids with a point", line(prompt_ids=[1.0]), [], 1, 'line 2: "prompt_ids" must be a list of integers'),
    ("token ids as text", line(prompt_ids="1 2"), [], 1, 'line 2: "prompt_ids" must be a list of integers'),
    (
        "a temperature as text",
        line(prompt_ids=[1], temperature="hot"),
        [],
        1,
        "line 2: \"temperature\" must be a number, not 'hot'",
    ),
    (
        "a temperature as a truth",
        line(prompt_ids=[1], temperature=True),
        [],
        1,
        'line 2: "temperature" must be a number, not True',
    ),
    ("a top_k with a point", line(prompt_ids=[1], top_k=1.5), [], 1, 'line 2: "top_k" must be an integer, not 1.5'),
    ("a top_p as a list", line(prompt_ids=[1], top_p=[1]), [], 1, 'line 2: "top_p" must be a number, not [1]'),
    ("a seed as text", line(prompt_ids=[1], seed="5"), [], 1, "line 2: \"seed\" must be an integer, not '5'"),
    (
        "max_tokens with a point",
        line(prompt_ids=[1], max_tokens=2.0),
        [],
        1,
        'line 2: "max_tokens" must be an integer, not 2.0',
    ),
    (
        "max_tokens as text",
        line(prompt_ids=[1], max_tokens="many"),
        [],
        1,
        "line 2: \"max_tokens\" must be an integer, not 'many'",
    ),
    ("text without a tokenizer", line(prompt="hello"), [], 1, "has no tokenizer.json"),
    # Requests that are refused while the others are served.
    ("a temperature below 0", line(prompt_ids=[1], temperature=-1), [], 3, "temperature = -1"),
    (
        "a temperature beyond floats",
        put("p.jsonl", '{"prompt_ids": [1]}\n{"prompt_ids": [1], "temperature": 1e999}'),
        [],
        3,
        "temperature = inf",
    ),
    ("a temperature that is none", line(prompt_ids=[1], temperature=float("nan")), [], 3, "temperature = nan"),
    ("a seed beyond 64 bits", line(prompt_ids=[1], seed=2**70), [], 3, "seed = 1180591620717411303424"),
    ("a top_k beyond 64 bits", line(prompt_ids=[1], top_k=2**70), [], 3, "top_k = 1180591620717411303424"),
    ("a token id beyond 64 bits", line(prompt_ids=[2**70]), [], 3, "prompt has 1180591620717411303424"),
    ("a token id below 0", line(prompt_ids=[-1]), [], 3, "token id -1"),
    ("no token ids", line(prompt_ids=[]), [], 3, "prompt must not be empty"),
    (
        "max_tokens beyond 64 bits",
        line(prompt_ids=[1], max_tokens=2**70),
        [],
        3,
        "1180591620717411303424 new ones are",
    ),
    ("max_tokens of 0", line(prompt_ids=[1], max_tokens=0), [], 3, "max_tokens=0"),
]
