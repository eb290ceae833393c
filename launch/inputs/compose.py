"""Command line: settings as Hydra's overrides, with a sentence for each mistake before anything is composed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, is_dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import product
from pathlib import Path
from textwrap import fill
from types import NoneType
from typing import Any, cast, get_args, get_type_hints

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from helix.config import Config
from launch.inputs import front
from launch.inputs.arguments import tokens
from launch.inputs.front import Command, Line
from launch.inputs.keys import keys

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
PATHS = (
    *("model.path", "speculation.model.path", "decode.prompts", "decode.output", "record"),
    *("serve.socket", "serve.attach", "serve.chat_template", "serve.api_keys"),
)
SWEEP_DIRS = ("hydra.sweep.dir", "hydra.run.dir")
SWEEP = "for several use `helix sweep ...`, or -m"
EXPECTED = {
    int: "an integer of at most 64 bits",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list[str]: "a list of texts, such as [a,b]",
    list[int]: "a list of integers, such as [0,4]",
    list[float]: "a list of numbers, such as [0.05,0.1]",
    dict[str, Any]: "keys and values, such as {num_hidden_layers:4}",
}

OmegaConf.register_new_resolver("root", lambda: str(ROOT))


@dataclass(frozen=True)
class Settings:
    """Settings that a command line can have.

    Attributes:
        schema: dataclass with all keys.
        directories: directories of groups; the first also has the primary config.
        begin: name of the primary config, without suffix.
        paths: keys whose values are paths.
    """

    schema: type[Config] = Config
    directories: tuple[Path, ...] = (CONF,)
    begin: str = "config"
    paths: tuple[str, ...] = PATHS

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """Options of each group of a run, without `hardware`, which the simulator reads."""
        names = sorted({*(n for n, kind in get_type_hints(self.schema).items() if is_dataclass(kind)), "experiment"})
        options = {n: sorted({f.stem for d in self.directories for f in (d / n).glob("*.yaml")}) for n in names}
        return {name: found for name, found in options.items() if found}

    def of(self, line: Line) -> Settings:
        """Adds the groups of `--config-dir`, and begins with the file that `--config-name` names.

        Raises:
            ValueError: there is no such directory or file.
        """
        directories, begin = self.directories, self.begin
        if (given := line.options.get("--config-dir")) is not None:
            if not (directory := Path(given).absolute()).is_dir():
                raise ValueError(f"--config-dir {given} is not a directory")
            directories = (*directories, directory)
        if (name := line.options.get("--config-name")) is not None:
            begin = name.removesuffix(".yaml")
            having = [d for d in directories if (d / f"{begin}.yaml").exists()]
            if not having:
                raise ValueError(f"--config-name {name}: no {begin}.yaml in {', '.join(map(str, directories))}")
            directories = (having[-1], *(d for d in directories if d != having[-1]))
        return replace(self, directories=directories, begin=begin)


RUN = Settings()


def composed(overrides: Sequence[str], settings: Settings = RUN) -> Config:
    """Composes the config of a run.

    Raises:
        ValueError: a mistake in the overrides, in one line.
    """
    return as_config(_compose([_checked(text, settings, sweeps=False) for text in overrides], settings), settings)


def told(line: Line, command: Command, settings: Settings = RUN) -> str | None:
    """Writes what `--help`, `--info`, `--hydra-help` or `--cfg job` print; None where none of them is there.

    Raises:
        ValueError: a mistake in the overrides, or an option that goes with none of them.
    """
    options = line.options
    if "--help" in options:
        return front.help_text(command)
    if "--hydra-help" in options:
        return front.HYDRA_HELP
    if "--cfg" not in options and (extra := next((o for o in ("--resolve", "--package") if o in options), None)):
        raise ValueError(f"{extra} is of --cfg job, which shows the config in effect: add it")
    if "--cfg" not in options and "--info" not in options:
        return None
    if options.get("--cfg", "job") != "job":
        raise ValueError(f"--cfg {options['--cfg']}: take --cfg job, the config in effect; Hydra's own is not used")
    if "--info" in options:
        return _info(settings) + _shown(line.overrides, {}, settings)
    if "--multirun" in options or command is front.SWEEP:
        points, _ = sweep_points(line.overrides, settings)
        return "".join(f"# point {i}: {' '.join(p)}\n{_shown(p, options, settings)}" for i, p in enumerate(points))
    return _shown(line.overrides, options, settings)


def _shown(overrides: Sequence[str], options: dict[str, str], settings: Settings) -> str:
    config = _compose([_checked(text, settings, sweeps=False) for text in overrides], settings)
    part = OmegaConf.select(config, name) if (name := options.get("--package")) else config
    if part is None or (name and not OmegaConf.is_config(part)):
        raise ValueError(f"--package {name}: there is no such part; parts are {', '.join(map(str, config))}")
    return OmegaConf.to_yaml(part, resolve="--resolve" in options)


def _info(settings: Settings) -> str:
    groups = "\n".join(f"  {name}: {', '.join(found)}" for name, found in settings.groups.items())
    listed = "\n".join(
        f"  {key} ({default})\n{fill(meaning, 112, initial_indent='      ', subsequent_indent='      ')}"
        for key, default, meaning in keys(settings.schema)
    )
    return (
        f"Groups: GROUP=OPTION takes GROUP/OPTION.yaml of {', '.join(map(str, settings.directories))}\n\n{groups}\n\n"
        f"Keys, with their defaults: KEY=VALUE sets one\n\n{listed}\n\nConfig of this command line:\n\n"
    )


def sweep_points(arguments: Sequence[str], settings: Settings = RUN) -> tuple[list[list[str]], Path | None]:
    """Splits a sweep into the overrides of its points; returns them with the directory in `hydra.sweep.dir`, or None.

    Raises:
        ValueError: a mistake in the overrides.
    """
    axes: dict[str, list[str]] = {}
    directory = None
    for text in arguments:
        if text.partition("=")[0] in SWEEP_DIRS:
            directory = Path(text.partition("=")[2])
            continue
        text = _checked(text, settings, sweeps=True)
        override = _parsed(text)
        axes[override.get_key_element()] = (
            [f"{override.get_key_element()}={value}" for value in _swept(override, settings)]
            if override.is_sweep_override()
            else [text]
        )
    return [list(point) for point in product(*axes.values())], directory


def as_config(config: DictConfig, settings: Settings = RUN) -> Config:
    """Converts a composed config to its dataclasses.

    Raises:
        ValueError: an unknown key was added (`+key=value`), or a value cannot be resolved.
    """
    _refuse_unknown(config, settings.schema, "")
    try:
        return cast(Config, OmegaConf.to_object(config))
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key or 'the config'}: {_line(error)}") from error


def _compose(overrides: Sequence[str], settings: Settings) -> DictConfig:
    of_groups = tuple(text for text in overrides if text.partition("=")[0] in settings.groups)
    try:
        config = deepcopy(_composed_groups(of_groups, settings))
        ConfigLoaderImpl._apply_overrides_to_config([_parsed(t) for t in overrides if t not in of_groups], config)
        return config
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"the settings do not go together: {_line(error)}") from error


@lru_cache(maxsize=256)
def _composed_groups(of_groups: tuple[str, ...], settings: Settings) -> DictConfig:
    """Composes the chosen options of groups, whose files a process reads once.

    It takes 0.1 s, of which a plan or a sweep with many points needs few.
    """
    ConfigStore.instance().store(name="schema", node=settings.schema)
    first, *others = map(str, settings.directories)
    with initialize_config_dir(first, version_base="1.3"):
        places = ",".join(QuotedString(f"file://{place}", Quote.single).with_quotes() for place in others)
        return compose(settings.begin, [*of_groups, f"hydra.searchpath=[{places}]"])


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _checked(text: str, settings: Settings, sweeps: bool) -> str:
    """Checks one override and returns it for Hydra: paths are literal, everything else follows Hydra's grammar.

    Raises:
        ValueError: the key is unknown, or the value is not valid for it.
    """
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError(f"{text!r} is not UTF-8")
    match = re.fullmatch(r"(\+\+|\+|~|)([^=]*)(=?)(.*)", text, re.DOTALL)
    assert match is not None, "any text matches"
    sign, key, equals, value = match.groups()
    if not key or (not equals and sign != "~"):
        raise ValueError(f"{text!r}: a setting is KEY=VALUE")
    groups = settings.groups
    kind = None if key in groups else _kind_of(key, text, settings.schema)
    beneath_dict = key not in groups and kind is None
    if sign == "~" and not beneath_dict:
        raise ValueError(f"{text}: only keys of model.config can be taken out; {key} is set as {key}=VALUE")
    if sign == "+" and not beneath_dict:
        raise ValueError(f"{text}: {key} is there already: leave out the +")
    if kind is not None and (int in (kind, *get_args(kind)) or key in ("decode.prefill_chunk", "decode.max_batch")):
        value = re.sub(r"\b\d+[KM]\b", lambda found: str(tokens(found[0])), value)
        text = f"{sign}{key}={value}"
    if key in settings.paths:
        text = f"{sign}{key}={_literal_paths(key, value, sweeps)}"
    elif beneath_dict and not sign:
        text = f"++{text}"
    override = _parsed(text)
    if override.is_sweep_override():
        if not sweeps:
            raise ValueError(f"{text}: one run has one config; {SWEEP}")
        if not override.is_discrete_sweep():
            raise ValueError(f"{text}: an interval has no points; use a,b or range(a,b)")
        for one in _swept(override, settings):
            _checked(f"{sign}{key}={one}", settings, sweeps=False)
    elif key in groups:
        if override.value() not in (*groups[key], *([None] if key == "experiment" else [])):
            raise ValueError(f"{text}: {key} has no option {value}; known: {', '.join(groups[key])}")
    elif not beneath_dict:
        _check_value(key, kind, value, override.value(), settings)
    return text


def _swept(override: Override, settings: Settings) -> list[str]:
    """Lists the values of a sweep, of `glob` those of a group's options."""
    if isinstance(pattern := override.value(), Glob):
        key = override.get_key_element()
        if not (names := pattern.filter(settings.groups.get(key, []))):
            known = ", ".join(settings.groups.get(key, [])) or "none, as it is not a group"
            raise ValueError(f"{override.input_line}: glob takes options of {key}; known: {known}")
        return names
    try:
        values = [*override.sweep_string_iterator()]
    except (HydraException, ValueError) as error:  # a step of 0
        raise ValueError(f"{override.input_line}: {_line(error)}") from error
    if not values:
        raise ValueError(f"{override.input_line}: there is no value in it")
    return values


def _literal_paths(key: str, text: str, sweeps: bool) -> str:
    """Puts paths in quotes, so that Hydra takes their characters literally: one, or those that a sweep separates."""
    if text in ("", "null"):
        return text
    if re.fullmatch(r"'.*'|\".*\"", text, re.DOTALL) or (sweeps and re.fullmatch(r"\w+\(.*\)", text)):
        try:
            _parsed(f"{key}={text}")  # in quotes already, or a function of Hydra's sweeps
            return text
        except ValueError:
            pass
    if sweeps and "," in text:
        return ",".join(_literal_paths(key, part, sweeps) for part in text.split(","))
    return QuotedString(text, Quote.single).with_quotes()


def _kind_of(key: str, text: str, schema: type[Config]) -> Any:
    """Returns the type of a key; None if the key lies in a dict, whose values may be any.

    Raises:
        ValueError: the schema does not have it.
    """
    kind: Any = schema
    if key.partition(".")[0] == "bench" and "bench" not in get_type_hints(schema):
        raise ValueError(f"{text}: benchmarks have a command of their own: python -m benchmarks.entry {text} ...")
    for depth, name in enumerate(parts := key.split(".")):
        if not is_dataclass(kind):
            if kind == dict[str, Any]:
                return None
            raise ValueError(f"{key} is unknown: {'.'.join(parts[:depth])} has no keys of its own")
        kinds = get_type_hints(kind)
        if name not in kinds:
            raise ValueError(_unknown("".join(f"{part}." for part in parts[:depth]), name, cast(type, kind)))
        kind = kinds[name]
    return kind


def _unknown(prefix: str, name: str, schema: type) -> str:
    return f"{prefix}{name} is unknown; known: {', '.join(prefix + known for known in get_type_hints(schema))}"


def _check_value(key: str, kind: Any, text: str, value: Any, settings: Settings) -> None:
    if is_dataclass(kind):
        keys = ", ".join(f"{key}.{name}" for name in get_type_hints(kind))
        raise ValueError(f"{key}={text}: {key} is set by its keys: {keys}")
    optional = NoneType in get_args(kind)
    kind = next(k for k in get_args(kind) if k is not NoneType) if optional else kind
    try:
        OmegaConf.update(_schema(settings), key, value)
        fits = not (isinstance(value, list) and any(isinstance(one, list | dict) for one in value))
        fits &= not (isinstance(value, int) and not -(1 << 63) <= value < 1 << 63)
        fits &= not (key in settings.paths and value == "")
    except OmegaConfBaseException:
        fits = False
    if not fits:
        expected = "a path" if key in settings.paths else EXPECTED[kind]
        raise ValueError(f"{key}={text} must be {expected}{', or null' if optional else ''}")


def _parsed(text: str) -> Override:
    try:
        return _parser().parse_override(text)
    except HydraException as error:
        key = text.partition("=")[0]
        raise ValueError(f"{text}: the value cannot be read; put it in quotes, as in \"{key}='VALUE'\"") from error


@cache
def _schema(settings: Settings) -> DictConfig:
    """Returns the schema as a config; it is made once, since that takes longer than all checks together."""
    return OmegaConf.structured(settings.schema)


@cache
def _parser() -> OverridesParser:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OverridesParser.create(GlobalHydra.instance().config_loader())


def _refuse_unknown(config: DictConfig, schema: type, prefix: str) -> None:
    """Raises ValueError for a key that is not a field of the dataclass `schema` or of one in it."""
    kinds = get_type_hints(schema)
    for key, value in config.items_ex(resolve=False):
        name = str(key)
        if name not in kinds:
            raise ValueError(_unknown(prefix, name, schema))
        if is_dataclass(kinds[name]) and isinstance(value, DictConfig):
            _refuse_unknown(value, cast(type, kinds[name]), f"{prefix}{name}.")
