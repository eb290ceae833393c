"""Command lines as one types them: a model, files and flags, all of which stand for keys. Standard library alone."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from helix.hub import is_hub_id

API_KEY = "HELIX_API_KEY"
CPU_TOKENS = 65536  # of KV where there is no GPU and kv.tokens is unset: memory is not all the cache's
CONF = Path(__file__).resolve().parents[2] / "conf"


def shapes() -> list[str]:
    """Lists the names of conf/model/."""
    return sorted(path.stem for path in (CONF / "model").glob("*.yaml"))


def model_override(name: str) -> str:
    """Turns a model's name into the override that takes it: a directory, ORG/NAME of the Hub, or one of conf/model/.

    Raises:
        ValueError: it is none of them.
    """
    if Path(name).is_dir() or is_hub_id(name):
        return f"model.path={name}"
    if name in shapes():
        return f"model={name}"
    near = get_close_matches(name, shapes(), n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ValueError(
        f"{name!r} is not a directory, nor ORG/NAME[@REVISION] of the Hugging Face Hub, nor one of conf/model/: "
        f"{', '.join(shapes())}{hint}; a setting is KEY=VALUE"
    )


@dataclass(frozen=True)
class Flag:
    """A flag that stands for a key.

    Attributes:
        names: as in `--port`; the first is the one that help shows.
        value: what follows it, in help.
        key: that it sets; empty: it is the command's own.
        what: a few words on it; empty: those of the key are enough.
        override: overrides of a value; None: `KEY=VALUE`.
    """

    names: tuple[str, ...]
    value: str
    key: str
    what: str = ""
    override: Callable[[str], list[str]] | None = None

    def overrides(self, value: str) -> list[str]:
        return [f"{self.key}={value}"] if self.override is None else self.override(value)


def _dtype(value: str) -> list[str]:
    return [f"model.dtype={ {'half': 'float16', 'float': 'float32'}.get(value, value) }"]


def _api_key(value: str) -> list[str]:
    os.environ[API_KEY] = value  # not in the config, which records hold
    return []


def _weights(value: str) -> list[str]:
    if value != "fp8":
        raise ValueError(
            f"--quantization {value}: a checkpoint says how its weights are stored; fp8 rounds unquantised ones"
        )
    return ["model.weights=fp8"]


def _cache_dtype(value: str) -> list[str]:
    if value in ("auto", "bfloat16", "float16"):
        return []
    if value not in ("fp8", "fp8_e4m3", "fp8_all", "k16v8"):
        raise ValueError(f"--kv-cache-dtype {value}: keys and values are kept as auto, fp8, fp8_all or k16v8")
    return [f"kv.dtype={value.removesuffix('_e4m3')}"]


MODEL_FLAGS = (
    Flag(("--dtype",), "TYPE", "model.dtype", override=_dtype),
    Flag(("--tensor-parallel-size", "-tp"), "N", "layout=tp layout.tpa", "plain TP; better: layout=auto",
         lambda value: ["layout=tp", f"layout.tpa={value}"]),
    Flag(("--max-model-len",), "TOKENS", "decode.max_length"),
    Flag(("--max-num-seqs",), "N", "decode.max_batch"),
    Flag(("--gpu-memory-utilization",), "SHARE", "kv.memory_fraction", "of the memory that weights leave free"),
    Flag(("--quantization", "-q"), "fp8", "model.weights", "rounds an unquantised checkpoint to FP8", _weights),
    Flag(("--kv-cache-dtype",), "TYPE", "kv.dtype", "auto, fp8, fp8_all, or k16v8: values alone in FP8", _cache_dtype),
    Flag(("--seed",), "N", "decode.seed"),
)  # fmt: skip
RUN_FLAGS = (
    Flag(("--output", "-o"), "FILE", "decode.output"),
    Flag(("--max-tokens",), "N", "decode.max_new_tokens"),
    Flag(("--temperature",), "T", "decode.temperature"),
)
SERVE_FLAGS = (
    Flag(("--host",), "ADDRESS", "serve.host"),
    Flag(("--port",), "N", "serve.port"),
    Flag(("--api-key",), "KEY", API_KEY, "a variable of the environment; serve.api_keys=FILE for several", _api_key),
    Flag(("--served-model-name",), "NAME", "serve.name"),
    Flag(("--chat-template",), "FILE", "serve.chat_template"),
)
REFUSED = {
    "--trust-remote-code": "no code of a checkpoint is ever run: models are those that the runtime knows",
    "--pipeline-parallel-size": "layers are not split over ranks: layout=auto, or layout.kvp=N layout.tpa=M",
    "--config-path": "another folder of groups is --config-dir DIR",
    "--experimental-rerun": "a run's record holds its config: give its settings again",
}
HYDRA = {  # Hydra's own options, and whether a value follows
    "--help": False, "-h": False, "--info": False, "-i": False, "--hydra-help": False, "--resolve": False,
    "--cfg": True, "-c": True, "--package": True, "-p": True, "--config-dir": True, "-cd": True,
    "--config-name": True, "-cn": True, "--multirun": False, "-m": False,
}  # fmt: skip
SHORT = {
    "-h": "--help", "-i": "--info", "-c": "--cfg", "-p": "--package", "-cd": "--config-dir", "-cn": "--config-name",
    "-m": "--multirun",
}  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A command that composes a config.

    Attributes:
        name: as typed.
        about: a sentence.
        examples: three lines.
        words: keys of what stands without a flag, in order; the first is the model.
        flags: beside Hydra's.
        keys: those that matter most, and what they do.
    """

    name: str
    about: str
    examples: tuple[str, ...]
    words: tuple[str, ...] = ("model",)
    flags: tuple[Flag, ...] = MODEL_FLAGS
    keys: tuple[tuple[str, str], ...] = ()


LAYOUT_KEYS = (
    ("layout=auto", "the layout that the planner predicts to be the fastest"),
    ("layout.kvp=N layout.tpa=M", "attention: N ranks split the tokens, M the heads; N x M ranks in all"),
    ("layout=dp layout.dp=N", "a baseline: each of N ranks attends whole sequences of its own"),
)
LOSSLESS = ("speculation=ngram | sparse", "several tokens a step, none of them changed: by prompt lookup, by few keys")
LOSSY = ("attention=parts", "steps read few keys (lossy); block_sparse: faster, loses lines; with kv.tier=host")
RUN = Command(
    "helix run",
    "Decodes the prompts of a file with a Hugging Face checkpoint, over all ranks of a layout.",
    (
        "helix run ./llama-3.1-8b prompts.jsonl -o results.jsonl layout=auto",
        "helix run Qwen/Qwen3-8B prompts.jsonl layout.kvp=4 layout.tpa=2 decode.max_new_tokens=1K",
        "helix run ./llama-3.1-8b prompts.jsonl -m layout.kvp=1,2,4",
    ),
    ("model", "decode.prompts"),
    (*RUN_FLAGS, *MODEL_FLAGS),
    (
        *LAYOUT_KEYS, LOSSLESS, LOSSY,
        ("decode.resume=true", "keep the results that decode.output holds and run the rest"),
        ("hopb=on | off | auto", "overlap of the exchange with attention of other sequences"),
        ("record=FILE", "layout, versions, times and throughput of the run, JSON"),
    ),
)  # fmt: skip
SERVE = Command(
    "helix serve",
    "Serves a model over HTTP, with OpenAI's interface and a page to chat at.",
    (
        "helix serve ./llama-3.1-8b --port 8000",
        "helix serve Qwen/Qwen3-8B --host 0.0.0.0 --api-key secret --max-model-len 1M",
        "helix serve ./llama-3.1-8b layout.kvp=4 layout.tpa=2 speculation=sparse",
    ),
    flags=(*SERVE_FLAGS, *MODEL_FLAGS),
    keys=(
        *LAYOUT_KEYS, LOSSLESS, LOSSY,
        ("decode.max_batch=N", "sequences at a time; further ones wait"),
        ("schedule.goal=latency | throughput", "shorter pauses for new prompts, or more requests a second"),
        ("serve.api_keys=FILE", "lines of OWNER KEY"),
    ),
)  # fmt: skip
CHAT = Command(
    "helix chat",
    "Talks to a model in the terminal: one that it starts, or a server's.",
    (
        "helix chat ./smollm2-135m-instruct",
        "helix chat Qwen/Qwen3-8B layout=auto --system 'Answer in one sentence.'",
        "helix chat --url http://127.0.0.1:8000 --api-key secret",
    ),
    flags=(
        Flag(("--url",), "URL", "", "of a server, in place of MODEL"),
        Flag(("--system",), "TEXT", "", "told before the first question"),
        Flag(("--max-tokens",), "N", "", "of an answer"),
        Flag(("--temperature",), "T", "", "0 is greedy; unset: the model's own"),
        *SERVE_FLAGS[2:3],
        *MODEL_FLAGS,
    ),
    keys=LAYOUT_KEYS,
)
SWEEP = Command(
    "helix sweep",
    "Runs a job for each combination of several values, and tabulates and draws what they took.",
    (
        "helix sweep ./llama-3.1-8b prompts.jsonl layout.kvp=1,2,4 layout.tpa=1,2",
        "helix sweep ./llama-3.1-8b prompts.jsonl layout.kvp=2,4 hopb=off,on",
        "helix sweep ./llama-3.1-8b prompts.jsonl 'layout=glob(*)' hydra.sweep.dir=sweeps/mine",
    ),
    ("model", "decode.prompts"),
    (*RUN_FLAGS[1:], *MODEL_FLAGS),
    (
        ("KEY=A,B", "both values; range(1,5), choice(A,B) and, for a group's options, glob(*) as well"),
        ("hydra.sweep.dir=DIR", "where records, sweep.csv and sweep.png go (default: sweeps/DATE_TIME)"),
    ),
)
COMMANDS = {command.name.split()[-1]: command for command in (RUN, SERVE, CHAT, SWEEP)}


@dataclass(frozen=True)
class Line:
    """A command line, read.

    Attributes:
        overrides: of Hydra's grammar; what stood for a key is one.
        options: Hydra's options by their long names; "" where no value follows.
        own: values of flags without a key, by their first names.
    """

    overrides: list[str]
    options: dict[str, str]
    own: dict[str, str] = field(default_factory=dict)

    @property
    def places(self) -> list[str]:
        """The options that say where groups are."""
        kept = [(name, self.options[name]) for name in ("--config-dir", "--config-name") if name in self.options]
        return [word for pair in kept for word in pair]

    @property
    def arguments(self) -> list[str]:
        """The line for the ranks, in Hydra's grammar alone."""
        return self.places + self.overrides


def read(arguments: Sequence[str], command: Command) -> Line:
    """Reads what was typed behind a command's name.

    Raises:
        ValueError: a flag is unknown, refused, given twice or without its value; or a word stands for nothing.
    """
    flags = {name: flag for flag in command.flags for name in flag.names}
    overrides: list[str] = []
    options: dict[str, str] = {}
    own: dict[str, str] = {}
    words, seen = [*command.words], set[str]()
    left = [*arguments]
    while left:
        text = left.pop(0)
        name, equals, value = text.partition("=")
        if name in REFUSED:
            raise ValueError(f"{name} is refused: {REFUSED[name]}")
        if name in flags or name in HYDRA:
            long = SHORT.get(name, name) if name in HYDRA else flags[name].names[0]
            takes = HYDRA.get(name, True)
            if long in seen and long != "--multirun":
                raise ValueError(f"{long} is given twice")
            seen.add(long)
            if takes and not equals:
                if not left:
                    raise ValueError(f"{name} has no value behind it")
                value = left.pop(0)
            elif equals and not takes:
                raise ValueError(f"{text}: {name} takes no value")
            if name in flags and not flags[name].key:
                own[long] = value
            elif name in flags:
                overrides += flags[name].overrides(value)
            else:
                options[long] = value
        elif text.startswith("-") and text != "-":
            near = get_close_matches(name, [*flags, *HYDRA], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"{text} is not an option of {command.name}{hint} (--help lists them; KEY=VALUE sets any key)"
            )
        elif equals or re.match(r"[~+]", text) or not text.strip():
            overrides.append(text)
        elif words:
            key = words.pop(0)
            overrides.append(model_override(text) if key == "model" else f"{key}={text}")
        else:
            raise ValueError(f"{text!r}: a setting is KEY=VALUE, and {command.name} {_words(command)}")
    return Line(overrides, options, own)


def _words(command: Command) -> str:
    names = ["MODEL", *(f"{key.rpartition('.')[2].upper()}.jsonl" for key in command.words[1:])]
    return f"takes {' and '.join(names)} without a key"


def help_text(command: Command) -> str:
    """Writes what `--help` of a command prints."""
    words = ["[MODEL]", *("[PROMPTS.jsonl]" for _ in command.words[1:])]
    flags = [
        (
            f"{', '.join(flag.names)} {flag.value}",
            f"{flag.key}   ({flag.what})" if flag.key and flag.what else flag.key or flag.what,
        )
        for flag in command.flags
    ]
    wide = max(len(left) for left, _ in (*flags, *command.keys))

    def table(rows: Sequence[tuple[str, str]]) -> str:
        return "\n".join(f"  {left:<{wide}}  {right}" for left, right in rows)

    return f"""\
{command.about}

usage: {command.name} {" ".join(words)} [FLAG ...] [KEY=VALUE ...]

  MODEL is a directory with a Hugging Face checkpoint, ORG/NAME[@REVISION] of the Hub, or a shape of conf/model/.

{chr(10).join(f"  {example}" for example in command.examples)}

Flags, and the keys that they set:

{table(flags)}

Keys that matter most; lengths may be 128K or 1M:

{table(command.keys)}

`--info` lists all groups and keys with what they mean, `--cfg job` shows the values in effect, and `--hydra-help` says
which of Hydra's options there are. docs/reference/config.md has the same as a page.
"""


HYDRA_HELP = """\
Hydra's options that commands take (https://hydra.cc):

  --info, -i               groups, their options, where they lie, and all keys
  --cfg job, -c job        the config in effect; with -m that of each point
    --resolve              with its interpolations resolved
    --package P, -p P      a part of it, such as layout
  --config-dir DIR, -cd    a folder of groups of your own beside conf/: DIR/model/mine.yaml is model=mine
  --config-name NAME, -cn  DIR/NAME.yaml in place of conf/config.yaml
  --multirun, -m           several points: KEY=A,B, range(1,5), choice(A,B), glob(*); helix sweep needs no -m
  hydra.sweep.dir=DIR      of a sweep; hydra.run.dir=DIR is the same there
  --shell-completion bash  of `helix`: eval "$(helix --shell-completion bash)"; zsh and fish as well

Hydra's launchers, sweepers, logging and working directories are not used: ranks are started by helix or torchrun.
"""
