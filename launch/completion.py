"""Shell completion for `helix`: commands, flags, models, config groups, keys and files."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from helix.schema import choices, leaves
from launch.cli import COMMANDS, LABORATORY
from launch.inputs import command_parser
from launch.inputs.commands import COMMANDS as COMPOSING
from launch.inputs.flags import HYDRA
from launch.inputs.planner_commands import PLAN

BASH = """\
_helix() {
  COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
  local IFS=$'\\n'
  COMPREPLY=($(helix --complete "${COMP_LINE:0:COMP_POINT}"))
  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -o default -F _helix helix
"""
SCRIPTS = {
    "bash": BASH,
    "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{BASH}",
    "fish": "complete -c helix -a '(helix --complete (commandline -cp))'\n",
}


def candidates(line: str) -> list[str]:
    """Lists completions of the last word of a line; none where the shell's file completion applies."""
    words = line.split(" ")
    prefix, before = words[-1], [word for word in words[1:-1] if word]
    if not before:
        return _beginning(prefix, [*COMMANDS, *LABORATORY, "--help", "--version", "--shell-completion"])
    command = (COMPOSING | {"plan": PLAN}).get(before[0])
    if command is None:
        return []
    if prefix.startswith("-"):
        return _beginning(prefix, [name for flag in (*command.flags, *HYDRA) for name in flag.names])
    groups, schema = command.settings.groups, command.settings.schema
    values = groups | {name: choices(kind) for name, kind, _ in leaves(schema)}
    key, equals, _ = prefix.partition("=")
    if equals:
        return _beginning(prefix, [f"{key}={value}" for value in values.get(key, [])])
    shapes = command_parser.shapes() if not any("=" not in word and word[0] != "-" for word in before[1:]) else []
    return _beginning(prefix, [*shapes, *(f"{name}=" for name in values)]) if prefix else []


def _beginning(prefix: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if name.startswith(prefix)]


def main(option: str, arguments: Sequence[str]) -> int:
    """Prints the completions of a line, or the script for a shell; returns the exit code."""
    if option == "--complete":
        print("\n".join(candidates(" ".join(arguments))))
        return 0
    shell = arguments[0] if arguments else ""
    if shell not in SCRIPTS:
        print(f"error: --shell-completion {shell}: must be one of {', '.join(SCRIPTS)}", file=sys.stderr)
        return 1
    print(SCRIPTS[shell], end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
