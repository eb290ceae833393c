"""An OpenAI-compatible HTTP server: `helix serve DIR --port 8000 layout.kvp=4 ...`.

Without settings it serves the demo model over two ranks. The ranks are separate processes; the server starts them and
restarts them if they fail.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from helix.checks import check
from helix.config import Config, DecodeConfig
from helix.files import read_text
from helix.hub import is_hub_id, resolve_hub_models
from helix.log import print_error
from launch.inputs import command_parser, compose
from launch.inputs.commands import SERVE
from launch.inputs.flags import API_KEY, CPU_TOKENS
from launch.job import lifeline
from launch.serving.security import ApiKeys, check_exposure

# Keys of `decode` that only `helix run` reads.
OFFLINE = ["prompts", "output", "resume", "stream", "temperature", "top_k", "top_p", "min_p", "seed", "stop"]


def main(arguments: Sequence[str]) -> int:
    """Serves until a signal; returns the exit code: 0, or 1 after printing an error on one line."""
    try:
        line = command_parser.read(arguments, SERVE)
        if (text := compose.info_text(line, SERVE)) is not None:
            print(text, end="")
            return 0
        if "--multirun" in line.options:
            raise ValueError("-m: a server runs one config; use `helix sweep` to run several over a prompt file")
        line = replace(line, overrides=[*_defaults(line.overrides), *line.overrides])
        config = compose.compose_config(line.overrides, line.settings)
        _check_unused(config)
        if config.serve.name is None and is_hub_id(str(config.model.path)):
            config.serve.name = str(config.model.path)
        resolve_hub_models(config)
        check(config)
        key = os.environ.pop(API_KEY, None)  # the ranks do not need it
        check_exposure(config.serve, key)
        keys = ApiKeys(config.serve.api_keys, key)
        if config.serve.chat_template is not None:  # fail before the weights load, which takes minutes
            read_text(Path(config.serve.chat_template))
        server = import_module("launch.serving.server")  # slow: imports the whole HTTP stack
        listeners = import_module("launch.serving.http").listen(config.serve)
    except ValueError as error:
        print_error(error)
        return 1
    return int(server.run(config.serve, keys, listeners, line.arguments))


def _check_unused(config: Config) -> None:
    if config.serve.socket is not None:
        raise ValueError(f"serve.socket={config.serve.socket} is of ranks started separately: set serve.attach instead")
    for name in OFFLINE:
        if (value := getattr(config.decode, name)) != getattr(DecodeConfig(), name):
            raise ValueError(f"decode.{name}={value} is for `helix run`; requests set it here: leave it out")


def _defaults(arguments: Sequence[str]) -> list[str]:
    """Returns the default settings: all GPUs, or two CPU ranks with a small KV cache."""
    keys = {text.partition("=")[0].lstrip("+") for text in arguments}
    if Path("/dev/nvidia0").exists():
        return [] if any(key.startswith("layout") for key in keys) else ["layout=auto"]
    layout = [] if any(key.startswith("layout") for key in keys) else ["layout.kvp=2"]
    return layout + ([] if "kv.tokens" in keys else [f"kv.tokens={CPU_TOKENS}"])


if __name__ == "__main__":
    lifeline.begin(serves=True)  # the server ends with the chat that started it
    sys.exit(main(sys.argv[1:]))
