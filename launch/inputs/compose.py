"""Composes configs from command lines with Hydra, with one-line errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from threading import RLock
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from helix.config import Config
from helix.schema import build, describe_type, field_types, format_value, is_literal_text, leaves, unknown_key_message
from launch.inputs.command_parser import CONF, RUN, Command, CommandLine, Settings, nearest_shapes, parser
from launch.inputs.keys import keys

ROOT = CONF.parent
SCHEMA = "helix_schema"  # name under which the primary config finds the schema
HYDRA_LOCK = RLock()
HYDRA_DEFAULTS = (  # for --multirun; overrides of the user come later and win
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
    "hydra.output_subdir=null",
    "hydra.sweep.dir='sweeps/${now:%Y-%m-%d_%H-%M-%S}'",
)

OmegaConf.register_new_resolver("root", lambda: str(ROOT))


@dataclass(frozen=True)
class SweepPoint:
    """A point of `--multirun`: its overrides, config and directory, and the directory of the sweep."""

    overrides: list[str]
    config: Config
    directory: Path
    sweep: Path


def compose_config(overrides: Sequence[str], settings: Settings = RUN) -> Config:
    """Composes the config of a run.

    Raises:
        ValueError: an override is wrong; the message is one line.
    """
    return _as_config(_compose(overrides, settings), settings)


def points(line: CommandLine, directory: Path | None = None) -> list[SweepPoint]:
    """Composes each point of `--multirun`, as Hydra's sweeper lists them, and creates its directory.

    Args:
        directory: use it instead of hydra.sweep.dir.

    Raises:
        ValueError: an override is wrong; the message is one line.
    """
    found: list[tuple[list[str], DictConfig, Path, Path]] = []
    sweepers = {"basic"}

    def collect(config: DictConfig) -> None:
        job = HydraConfig.get()
        sweepers.add(job.runtime.choices["hydra/sweeper"])
        found.append((list(job.overrides.task), config, Path(job.runtime.output_dir), Path(job.sweep.dir).absolute()))

    with _translate_errors(line.settings), _open_hydra(line.settings) as search:
        checked = [_check_override(text, line.settings, sweeps=True) for text in line.overrides]
        directory_override = [] if directory is None else [f"hydra.sweep.dir='{directory}'"]
        overrides = [*HYDRA_DEFAULTS, search, *checked, *directory_override]
        GlobalHydra.instance().hydra.multirun(line.settings.primary, collect, overrides, with_log_configuration=False)
    if other := sweepers - {"basic"}:
        raise ValueError(f"hydra/sweeper={other.pop()} is not supported: it chooses points by results")
    if not found:
        raise ValueError("the sweep has no points: it has no values, or hydra/launcher runs them in other processes")
    numbers: dict[Path, int] = {}  # of points, by directory
    for number, (_, _, place, _) in enumerate(found):
        if (first := numbers.setdefault(place, number)) != number:
            raise ValueError(
                f"points {first} and {number} have the same directory, {place}: add ${{hydra.job.num}} to "
                "hydra.sweep.subdir"
            )
    return [SweepPoint(texts, _as_config(config, line.settings), *places) for texts, config, *places in found]


def info_text(line: CommandLine, command: Command) -> str | None:
    """Returns what `--help`, `--info` or `--cfg job` print; None without these options.

    Raises:
        ValueError: an override is wrong, or an option needs one of these.
    """
    options, settings = line.options, line.settings
    if "--help" in options:
        return parser(command).format_help()
    if "--cfg" not in options and (extra := next((o for o in ("--resolve", "--package") if o in options), None)):
        raise ValueError(f"{extra} needs --cfg job, which prints the config: add it")
    if options.get("--cfg", "job") != "job":
        raise ValueError(f"--cfg {options['--cfg']}: only --cfg job is supported, which prints the config")
    if "--info" in options:
        return _info(settings) + _config_yaml(line.overrides, {}, settings)
    if "--cfg" in options and "--multirun" in options:
        with TemporaryDirectory() as directory:
            several = enumerate([point.overrides for point in points(line, Path(directory))])
        return "".join(f"# point {i}: {' '.join(p)}\n{_config_yaml(p, options, settings)}" for i, p in several)
    return _config_yaml(line.overrides, options, settings) if "--cfg" in options else None


def _config_yaml(overrides: Sequence[str], options: dict[str, str], settings: Settings) -> str:
    config = _compose(overrides, settings)
    _as_config(config, settings)
    part = OmegaConf.select(config, name) if (name := options.get("--package")) else config
    if part is None or (name and not OmegaConf.is_config(part)):
        raise ValueError(f"--package {name}: the config has no such part; parts are {', '.join(map(str, config))}")
    return OmegaConf.to_yaml(part, resolve="--resolve" in options)


def _info(settings: Settings) -> str:
    groups = "\n".join(f"  {name}: {', '.join(found)}" for name, found in settings.groups.items())
    listed = "\n".join(
        f"  {key} ({default})\n{fill(f'{meaning} [{values}]', 112, initial_indent=' ' * 6, subsequent_indent=' ' * 6)}"
        for key, default, meaning, values in keys(settings.schema)
    )
    return (
        f"Groups: GROUP=OPTION takes GROUP/OPTION.yaml of {', '.join(map(str, settings.directories))}\n\n{groups}\n\n"
        f"Keys, with their defaults: KEY=VALUE sets one\n\n{listed}\n\nConfig of this command line:\n\n"
    )


@contextmanager
def _open_hydra(settings: Settings) -> Iterator[str]:
    """Opens Hydra with the directory of the primary config; yields the override that adds the others.

    Hydra's state is global: threads take turns, and a program that itself runs under Hydra gets its state back.
    """
    ConfigStore.instance().store(name=SCHEMA, node=asdict(settings.schema()))
    first = [d for d in settings.directories if (d / f"{settings.primary}.yaml").exists()][-1]
    others = (f"file://{path}" for path in settings.directories if path != first)
    places = ",".join(QuotedString(path, Quote.single).with_quotes() for path in others)
    with HYDRA_LOCK:
        outer = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        try:
            with initialize_config_dir(str(first), version_base="1.3", job_name="helix"):
                yield f"hydra.searchpath=[{places}]"
        finally:
            GlobalHydra.instance().hydra = outer


@contextmanager
def _translate_errors(settings: Settings) -> Iterator[None]:
    """Turns Hydra's errors into one line, with the nearest option or the type of the value."""
    try:
        yield
    except MissingConfigException as error:
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        raise ValueError(f"{group}={option}: {_no_option(group, option, error.options or [])}") from error
    except (HydraException, OmegaConfBaseException) as error:
        override = _first_line(error).partition("Error merging override ")[2]
        kinds = {name: kind for name, kind, _ in leaves(settings.schema)}
        if (kind := kinds.get(override.partition("=")[0].lstrip("+~"))) is not None:
            raise ValueError(f"{override} must be {describe_type(kind)}") from error
        raise ValueError(f"the settings are inconsistent: {_first_line(error)}") from error
    except OSError as error:
        raise ValueError(f"hydra.sweep.dir: {error.filename} cannot be created: {error.strerror}") from error


def _compose(overrides: Sequence[str], settings: Settings) -> DictConfig:
    checked = [_check_override(text, settings, sweeps=False) for text in overrides]
    # Hydra would take a text key that is also a folder of conf/, such as `hardware`, for a group.
    folders = {folder.name for directory in settings.directories for folder in directory.iterdir() if folder.is_dir()}
    names = field_types(settings.schema).keys() & folders - settings.groups.keys()
    texts = [text for text in checked if text.partition("=")[0] in names]
    with _translate_errors(settings), _open_hydra(settings) as search:
        config = compose(settings.primary, [*(text for text in checked if text not in texts), search])
    for text in texts:
        OmegaConf.update(config, text.partition("=")[0], _parsed(text).value())
    return config


def _as_config(config: DictConfig, settings: Settings) -> Config:
    try:
        content = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key or 'the config'}: {_first_line(error)}") from error
    assert isinstance(content, dict)
    return build(settings.schema, {str(key): value for key, value in content.items()})


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _check_override(text: str, settings: Settings, sweeps: bool) -> str:
    """Checks an override, or raises ValueError; quotes paths, and leaves the rest to Hydra's grammar."""
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError(f"{text!r} is not UTF-8 text")
    match = re.fullmatch(r"(\+\+|\+|~|)([^=]*)(=?)(.*)", text, re.DOTALL)
    assert match is not None, "any text matches"
    sign, key, equals, value = match.groups()
    if not key or (not equals and sign != "~"):
        raise ValueError(f"{text!r}: a setting is KEY=VALUE")
    for old in (f"{key}={value}", key):
        if (new := settings.schema.RENAMED.get(old)) is not None:
            raise ValueError(f"{text} is now {new.format(value)}")
    kinds = {name: kind for name, kind, _ in leaves(settings.schema)}
    if re.match(r"hydra[./]", key):
        if not sweeps:
            raise ValueError(f"{text}: Hydra's settings are only for --multirun: add -m, or leave it out")
    elif key == "experiment":
        sign = ""  # the primary config already names it
    elif key not in settings.groups and key not in kinds:
        parent = next((name for name, kind in kinds.items() if key.startswith(f"{name}.")), None)
        if parent is None:
            _refuse(key, text, settings)
        elif kinds[parent] != dict[str, Any]:
            raise ValueError(f"{key} is unknown: {parent} has no keys")
        sign = sign or "++"  # lets Hydra add keys that the primary config does not have
    elif sign == "+":
        raise ValueError(f"{text}: {key} already exists: leave out the +")
    if key in kinds and is_literal_text(kinds[key]) and equals:
        value = _literal_paths(key, value, sweeps)
    text = f"{sign}{key}{equals}{value}"
    override = _parsed(text)
    if override.is_sweep_override():
        if not sweeps:
            raise ValueError(f"{text}: a run has one value per key; for several use `helix sweep ...`, or -m")
    elif key in settings.groups and sign != "~":
        options = override.value() if isinstance(override.value(), list) else [override.value()]
        for option in options:
            if option not in settings.groups[key] and not (key == "experiment" and option is None):
                raise ValueError(f"{text}: {_no_option(key, format_value(option), settings.groups[key])}")
    return text


def _no_option(group: str, option: str, known: Sequence[str]) -> str:
    some = f"the closest are {nearest_shapes(option)}" if group == "model" else f"known: {', '.join(known)}"
    return f"{group} has no option {option}; {some}"


def _refuse(key: str, text: str, settings: Settings) -> None:
    if key.partition(".")[0] == "bench" and "bench" not in field_types(settings.schema):
        raise ValueError(f"{text}: to run benchmarks use helix bench {text} ...")
    names = [name for name, _, _ in leaves(settings.schema)]
    if children := [name for name in names if name.startswith(f"{key}.")]:
        raise ValueError(f"{text}: set one of the keys of {key}: {', '.join(children)}")
    parent, _, _ = key.rpartition(".")
    while parent and not any(name.startswith(f"{parent}.") for name in names):
        parent, _, _ = parent.rpartition(".")
    depth = len(parent.split(".")) if parent else 0
    siblings = dict.fromkeys(".".join(name.split(".")[: depth + 1]) for name in names if name.startswith(parent))
    raise ValueError(unknown_key_message(settings.schema, key, list(siblings)))


def _literal_paths(key: str, text: str, sweeps: bool) -> str:
    """Quotes paths, so that Hydra takes their characters literally: one path, or each of a sweep."""
    if text in ("", "null"):
        return text
    if re.fullmatch(r"'.*'|\".*\"", text, re.DOTALL) or (sweeps and re.fullmatch(r"\w+\(.*\)", text)):
        try:
            _parsed(f"{key}={text}")  # already in quotes, or a function of Hydra's sweeps
            return text
        except ValueError:
            pass
    if sweeps and "," in text:
        return ",".join(_literal_paths(key, part, sweeps) for part in text.split(","))
    return QuotedString(text, Quote.single).with_quotes()


def _parsed(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        key = text.partition("=")[0]
        raise ValueError(f"{text}: the value cannot be parsed; quote it, as in \"{key}='VALUE'\"") from error
