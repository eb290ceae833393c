"""The command line: settings as Hydra's overrides, and a sentence for each mistake before anything is composed."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from helix.config import Config

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
PATHS = (
    *("model.path", "speculation.model.path", "decode.prompts", "decode.output", "record"),
    *("serve.socket", "serve.attach", "serve.chat_template", "serve.api_keys"),
)
SWEEP_DIR = "hydra.sweep.dir"
SWEEP = "for several use `python -m launch.sweep -m ...`"
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
    """What a command line can set.

    Attributes:
        schema: the keys.
        directories: with groups; the first also has the file that all begins with, and the text of `--help`.
        begin: that file's name, without its suffix.
        paths: keys whose values are paths.
    """

    schema: type[Config] = Config
    directories: tuple[Path, ...] = (CONF,)
    begin: str = "config"
    paths: tuple[str, ...] = PATHS

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """The options of each group that a run has; the simulator reads `hardware`."""
        names = sorted({*get_type_hints(self.schema), "experiment"})
        options = {n: sorted({f.stem for d in self.directories for f in (d / n).glob("*.yaml")}) for n in names}
        return {name: found for name, found in options.items() if found}

    @cached_property
    def help(self) -> str:
        return (self.directories[0] / "help.txt").read_text(encoding="utf-8")


RUN = Settings()


def composed(overrides: Sequence[str], settings: Settings = RUN) -> Config:
    """The config of a run.

    Raises:
        ValueError: a mistake in the overrides, in one line.
    """
    return as_config(_compose([_checked(text, settings, sweeps=False) for text in overrides], settings), settings)


def told(arguments: Sequence[str], settings: Settings = RUN) -> str | None:
    """What `--help` or `--cfg job` print; None where neither is there.

    Raises:
        ValueError: a mistake in the overrides, or another value of `--cfg`.
    """
    arguments = [*arguments]
    options = {"-h": "help", "--help": "help", "-c": "cfg", "--cfg": "cfg"}
    wanted = next((options[text] for text in arguments if text in options), None)
    if wanted is None:
        return None
    if wanted == "cfg" and "job" not in arguments:
        raise ValueError("--cfg prints what is in effect as `--cfg job`")
    overrides = [_checked(text, settings, sweeps=False) for text in arguments if text not in (*options, "job")]
    config = OmegaConf.to_yaml(_compose(overrides, settings), resolve=False)
    if wanted == "cfg":
        return config
    groups = "\n".join(f"  {name}: {', '.join(found)}" for name, found in settings.groups.items())
    return settings.help.replace("$GROUPS", groups).replace("$CONFIG", config)


def sweep_points(arguments: Sequence[str], settings: Settings = RUN) -> tuple[list[list[str]], Path | None]:
    """The overrides of each point of a sweep, and its directory where `hydra.sweep.dir` names one.

    Raises:
        ValueError: a mistake in the overrides.
    """
    axes: dict[str, list[str]] = {}
    directory = None
    for text in arguments:
        if text.startswith(f"{SWEEP_DIR}="):
            directory = Path(text.partition("=")[2])
            continue
        text = _checked(text, settings, sweeps=True)
        override = _parsed(text)
        axes[override.get_key_element()] = (
            [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
            if override.is_sweep_override()
            else [text]
        )
    return [list(point) for point in product(*axes.values())], directory


def as_config(config: DictConfig, settings: Settings = RUN) -> Config:
    """The dataclasses behind a composed config.

    Raises:
        ValueError: a key that they do not have was added to it (`+key=value`), or a value cannot be resolved.
    """
    _refuse_unknown(config, settings.schema, "")
    try:
        return cast(Config, OmegaConf.to_object(config))
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key or 'the config'}: {_line(error)}") from error


def _compose(overrides: list[str], settings: Settings) -> DictConfig:
    ConfigStore.instance().store(name="schema", node=settings.schema)
    try:
        with initialize_config_dir(str(settings.directories[0]), version_base="1.3"):
            return compose(settings.begin, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"the settings do not go together: {_line(error)}") from error


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _checked(text: str, settings: Settings, sweeps: bool) -> str:
    """One override as Hydra reads it: a path is taken literally, everything else by Hydra's grammar.

    Raises:
        ValueError: it sets nothing that there is, or to what it cannot be.
    """
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError(f"{text!r} is no UTF-8")
    if text in ("-m", "--multirun"):
        why = "; under torchrun every rank would run the whole sweep" if "TORCHELASTIC_RUN_ID" in os.environ else ""
        raise ValueError(f"one run has one config{why}: {SWEEP}")
    if text.startswith("-"):
        raise ValueError(f"{text} is no option: there are --help and --cfg job; a setting is KEY=VALUE")
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
        for one in override.sweep_string_iterator():
            _checked(f"{sign}{key}={one}", settings, sweeps=False)
    elif key in groups:
        if override.value() not in (*groups[key], *([None] if key == "experiment" else [])):
            raise ValueError(f"{text}: {key} has no option {value}; known: {', '.join(groups[key])}")
    elif not beneath_dict:
        _check_value(key, kind, value, override.value(), settings)
    return text


def _literal_paths(key: str, text: str, sweeps: bool) -> str:
    """Paths in quotes, so that Hydra reads nothing into their characters: one, or those that a sweep separates."""
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
    """The type of a key; None of those in a dict, which may be any.

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
    """Takes any values that fit; which it holds means nothing. Making it takes longer than all checks together."""
    return OmegaConf.structured(settings.schema)


@cache
def _parser() -> OverridesParser:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OverridesParser.create(GlobalHydra.instance().config_loader())


def _refuse_unknown(config: DictConfig, schema: type, prefix: str) -> None:
    """Raises ValueError for a key that is no field of the dataclass `schema`, or of those in it."""
    kinds = get_type_hints(schema)
    for key, value in config.items_ex(resolve=False):
        name = str(key)
        if name not in kinds:
            raise ValueError(_unknown(prefix, name, schema))
        if is_dataclass(kinds[name]) and isinstance(value, DictConfig):
            _refuse_unknown(value, cast(type, kinds[name]), f"{prefix}{name}.")
