"""Command lines as one types them: a model, files, flags and `KEY=VALUE`, all of which stand for keys."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from helix.config import Config
from helix.hub import is_hub_id
from helix.schema import field_types
from launch.inputs.flags import API_KEY, FOREIGN_FLAGS, HYDRA, Flag

CONF = Path(__file__).resolve().parents[2] / "conf"
MODEL = (
    "MODEL is a directory with a Hugging Face checkpoint, ORG/NAME[@REVISION] of the Hub, or a shape of conf/model/."
)


@dataclass(frozen=True)
class Settings:
    """Settings that a command line can have.

    Attributes:
        schema: dataclass with all keys.
        directories: directories of groups and primary configs.
        begin: name of the primary config, without suffix.
    """

    schema: type[Config] = Config
    directories: tuple[Path, ...] = (CONF,)
    primary: str = "config"

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """Options of each group, without `hardware`, which the simulator reads."""
        names = sorted({*(name for name, kind in field_types(self.schema).items() if is_dataclass(kind)), "experiment"})
        options = {n: sorted({f.stem for d in self.directories for f in (d / n).glob("*.yaml")}) for n in names}
        return {name: found for name, found in options.items() if found}

    def with_options(self, options: dict[str, str]) -> Settings:
        """Adds the groups of `--config-dir`, and begins with the file that `--config-name` names.

        Raises:
            ValueError: there is no such directory or file.
        """
        found = self
        if (given := options.get("--config-dir")) is not None:
            found = replace(found, directories=(*found.directories, Path(given).absolute()))
            if not found.directories[-1].is_dir():
                raise ValueError(f"--config-dir {given} is not a directory")
        if (name := options.get("--config-name")) is not None:
            found = replace(found, primary=name.removesuffix(".yaml"))
            if not any((directory / f"{found.primary}.yaml").exists() for directory in found.directories):
                where = ", ".join(map(str, found.directories))
                raise ValueError(f"--config-name {name}: no {found.primary}.yaml in {where}")
        return found


RUN = Settings()


@dataclass(frozen=True)
class Command:
    """A command that composes a config.

    Attributes:
        name: as typed.
        about: a sentence.
        examples: three lines.
        flags: beside Hydra's.
        keys: those that matter most, and what they do.
        words: keys of what stands without a flag, in order; the first is the model.
        settings: all that can be set.
    """

    name: str
    about: str
    examples: tuple[str, ...]
    flags: tuple[Flag, ...]
    keys: tuple[tuple[str, str], ...] = ()
    words: tuple[str, ...] = ("model",)
    settings: Settings = RUN


@dataclass(frozen=True)
class CommandLine:
    """A command line, read.

    Attributes:
        overrides: of Hydra's grammar; what stood for a key is one.
        options: Hydra's options by their long names; "" where no value follows.
        own: values of flags without a key, by their first names.
        settings: those of the command, with the user's own directories.
    """

    overrides: list[str]
    options: dict[str, str] = field(default_factory=dict)
    flag_values: dict[str, str] = field(default_factory=dict)
    settings: Settings = RUN

    @property
    def arguments(self) -> list[str]:
        """The line for the ranks, in Hydra's grammar alone."""
        kept = [(name, self.options[name]) for name in ("--config-dir", "--config-name") if name in self.options]
        return [word for pair in kept for word in pair] + self.overrides


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(message.removeprefix("argument "))


class _StoreOnce(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if self.nargs != 0 and getattr(namespace, self.dest) is not None:
            raise ValueError(f"{self.dest} is given twice")
        setattr(namespace, self.dest, "" if self.nargs == 0 else values)


def parser(command: Command) -> argparse.ArgumentParser:
    """Makes the parser of a command, whose help is what `--help` prints."""
    words = "".join(f" [{key.rpartition('.')[2].upper()}{'.jsonl' * (key != 'model')}]" for key in command.words)
    wide = max((len(left) for left, _ in command.keys), default=0)
    keys = "\n".join(f"  {left:<{wide}}  {right}" for left, right in command.keys)
    made = _Parser(
        command.name, f"{command.name}{words} [FLAG ...] [KEY=VALUE ...]", f"{command.about}\n\n{MODEL}\n\n"
        + "\n".join(f"  {example}" for example in command.examples),
        f"keys that matter most; lengths may be 128K or 1M:\n{keys}\n\n`--info` lists all groups and keys, with what "
        "they mean and may be; docs/reference/config.md\nhas the same as a page.",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=110),
        add_help=False, allow_abbrev=False,
    )  # fmt: skip
    made.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    for title, flags in (("flags, and the keys that they set", command.flags), ("Hydra's options", HYDRA)):
        group = made.add_argument_group(title)
        for flag in flags:
            what = f"{flag.key}   ({flag.what})" if flag.key and flag.what else flag.key or flag.what
            takes: dict[str, Any] = {"metavar": flag.value} if flag.value else {"nargs": 0}
            takes |= {"help": what.replace("%", "%%"), "action": _StoreOnce}
            group.add_argument(*flag.names, dest=flag.names[0], **takes)
    return made


def read(arguments: Sequence[str], command: Command) -> CommandLine:
    """Reads what was typed behind a command's name.

    Raises:
        ValueError: a flag is unknown, refused, given twice or without its value; or a word stands for nothing.
    """
    for text in arguments:
        if (answer := FOREIGN_FLAGS.get(name := text.partition("=")[0])) and not any(
            name in flag.names for flag in command.flags
        ):
            raise ValueError(f"{name} is not taken: {answer}")
    found, more = parser(command).parse_known_intermixed_args([*arguments])
    if more:
        known = [name for flag in (*command.flags, *HYDRA) for name in flag.names]
        near = get_close_matches(more[0].partition("=")[0], known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{more[0]} is not an option of {command.name}{hint} (--help lists them)")
    values = {name: value for name, value in vars(found).items() if name != "words" and value is not None}
    if API_KEY in [flag.key for flag in command.flags] and "--api-key" in values:
        os.environ[API_KEY] = values.pop("--api-key")  # not in the config, which records hold
    overrides = [
        text
        for flag in command.flags
        if flag.key and flag.names[0] in values
        for text in flag.overrides(values.pop(flag.names[0]))
    ]
    flag_values = {flag.names[0]: values.pop(flag.names[0]) for flag in command.flags if flag.names[0] in values}
    left = [*command.words]
    for text in found.words:
        if re.match(r"[~+]|[^=]*=", text) or not text.strip():
            overrides.append(text)
        elif not left:
            names = ["MODEL", *(f"{key.rpartition('.')[2].upper()}.jsonl" for key in command.words[1:])]
            raise ValueError(
                f"{text!r}: a setting is KEY=VALUE; {command.name} takes {' and '.join(names)} without a key"
            )
        else:
            overrides.append(model_override(text) if (key := left.pop(0)) == "model" else f"{key}={text}")
    return CommandLine(overrides, values, flag_values, command.settings.with_options(values))


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
    raise ValueError(
        f"{name!r} is no directory, nor ORG/NAME[@REVISION] of the Hugging Face Hub, nor a shape of conf/model/, of "
        f"which the nearest are {nearest_shapes(name)}; a setting is KEY=VALUE"
    )


def nearest_shapes(name: str) -> str:
    """Lists the five shapes whose names are most like this one."""
    return ", ".join(get_close_matches(name, shapes(), n=5, cutoff=0.0))
