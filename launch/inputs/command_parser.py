"""Parses command lines: a model, files, flags and `KEY=VALUE` become Hydra overrides."""

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
from helix.files import is_directory
from helix.hub import is_hub_id
from helix.schema import field_types
from launch.inputs.flags import API_KEY, FOREIGN_FLAGS, HYDRA, Flag

CONF = Path(__file__).resolve().parents[2] / "conf"
MODEL = "MODEL is a Hugging Face checkpoint directory, ORG/NAME[@REVISION] on the Hub, or a shape from conf/model/."


@dataclass(frozen=True)
class Settings:
    """The keys and config groups that a command accepts.

    Attributes:
        schema: dataclass with all keys.
        directories: where groups and primary configs are looked up.
        primary: name of the primary config, without suffix.
    """

    schema: type[Config] = Config
    directories: tuple[Path, ...] = (CONF,)
    primary: str = "config"

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """Options of each group, without `hardware`, which only the simulator reads."""
        names = sorted({*(name for name, kind in field_types(self.schema).items() if is_dataclass(kind)), "experiment"})
        options = {n: sorted({f.stem for d in self.directories for f in (d / n).glob("*.yaml")}) for n in names}
        return {name: found for name, found in options.items() if found}

    def with_options(self, options: dict[str, str]) -> Settings:
        """Adds the directory of `--config-dir` and takes the primary config of `--config-name`.

        Raises:
            ValueError: the directory or file does not exist.
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
        about: one sentence for `--help`.
        examples: three lines for `--help`.
        flags: the command's flags, without Hydra's.
        keys: the most important keys and what they do.
        words: keys that positional arguments set, in order; the first is the model.
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
    """A parsed command line.

    Attributes:
        overrides: Hydra overrides, including what flags and positional arguments set.
        options: Hydra's options by long name; "" where no value follows.
        flag_values: values of flags without a key, by first name.
        settings: the command's settings, with the user's directories added.
    """

    overrides: list[str]
    options: dict[str, str] = field(default_factory=dict)
    flag_values: dict[str, str] = field(default_factory=dict)
    settings: Settings = RUN

    @property
    def arguments(self) -> list[str]:
        kept = [(name, self.options[name]) for name in ("--config-dir", "--config-name") if name in self.options]
        return [word for pair in kept for word in pair] + self.overrides


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(message.removeprefix("argument "))


class _StoreOnce(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if self.nargs != 0 and getattr(namespace, self.dest) is not None:
            raise ValueError(f"{self.dest} is given twice: leave one out")
        setattr(namespace, self.dest, "" if self.nargs == 0 else values)


def parser(command: Command) -> argparse.ArgumentParser:
    """Builds the argparse parser of a command."""
    words = "".join(f" [{key.rpartition('.')[2].upper()}{'.jsonl' * (key != 'model')}]" for key in command.words)
    wide = max((len(left) for left, _ in command.keys), default=0)
    keys = "\n".join(f"  {left:<{wide}}  {right}" for left, right in command.keys)
    made = _Parser(
        command.name, f"{command.name}{words} [FLAG ...] [KEY=VALUE ...]", f"{command.about}\n\n{MODEL}\n\n"
        + "\n".join(f"  {example}" for example in command.examples),
        f"most important keys; lengths may be written 128K or 1M:\n{keys}\n\n`--info` lists all groups and keys, with "
        "their meaning and values; so does docs/reference/config.md.",
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
    """Parses the arguments of a command.

    Raises:
        ValueError: a flag is unknown, unsupported, repeated or lacks its value; or there are too many arguments.
    """
    for text in arguments:
        if (answer := FOREIGN_FLAGS.get(name := text.partition("=")[0])) and not any(
            name in flag.names for flag in command.flags
        ):
            raise ValueError(f"{name} is not supported: {answer}")
    found, more = parser(command).parse_known_intermixed_args([*arguments])
    if more:
        known = [name for flag in (*command.flags, *HYDRA) for name in flag.names]
        near = get_close_matches(more[0].partition("=")[0], known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{more[0]} is not an option of {command.name}{hint} (--help lists them)")
    values = {name: value for name, value in vars(found).items() if name != "words" and value is not None}
    if API_KEY in [flag.key for flag in command.flags] and "--api-key" in values:
        os.environ[API_KEY] = values.pop("--api-key")  # not into the config, which records contain
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
                f"{text!r}: a setting is KEY=VALUE; without a key, {command.name} takes only {' and '.join(names)}"
            )
        else:
            overrides.append(model_override(text) if (key := left.pop(0)) == "model" else f"{key}={text}")
    return CommandLine(overrides, values, flag_values, command.settings.with_options(values))


def shapes() -> list[str]:
    """Lists the model shapes of conf/model/."""
    return sorted(path.stem for path in (CONF / "model").glob("*.yaml"))


def model_override(name: str) -> str:
    """Returns the override that selects a model: a directory, ORG/NAME on the Hub, or a shape of conf/model/.

    Raises:
        ValueError: it is none of them.
    """
    if is_directory(Path(name)) or is_hub_id(name):
        return f"model.path={name}"
    if name in shapes():
        return f"model={name}"
    raise ValueError(
        f"{name!r} is not a directory, ORG/NAME[@REVISION] on the Hugging Face Hub, or a shape of conf/model/ "
        f"(closest: {nearest_shapes(name)}); a setting is KEY=VALUE"
    )


def nearest_shapes(name: str) -> str:
    """Lists the five shapes with the most similar names."""
    return ", ".join(get_close_matches(name, shapes(), n=5, cutoff=0.0))
