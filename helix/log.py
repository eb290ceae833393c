"""The log of ranks, launchers and servers: one format on stderr, as text or as JSON lines.

Modules log through `logging`, under `helix`. Processes that Helix starts call `configure`; a program that uses `LLM`
configures logging itself and gets its ranks' records through `relay`. Standard library only: it runs before slow
imports.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterable
from datetime import datetime
from typing import Any, TextIO

LEVEL, FORMAT = "HELIX_LOG_LEVEL", "HELIX_LOG_FORMAT"  # environment variables; the ranks inherit them
NUMBERS = {"rank": "RANK", "process": "HELIX_PROCESS"}  # variables that number a process of a job or of a server
LEVELS, FORMATS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"), ("text", "json")
PREFIX = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} [A-Z]+ ((rank|process) \d+ )?[\w.]+: ")
STDOUT_CLOSED = "stdout is a pipe whose reader has closed it"


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the `sys.stderr` of the moment: a progress bar replaces it to keep lines above the bar."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class _Json(logging.Formatter):
    """One JSON object a record; `extra={"fields": {...}}` of a call adds fields to it."""

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "level": record.levelname,
            **_numbers(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps({key: value for key, value in found.items() if value is not None})


def _numbers() -> dict[str, int]:
    return {kind: int(os.environ[name]) for kind, name in NUMBERS.items() if name in os.environ}


def print_error(error: object) -> None:
    """Prints why this process ends, on one line of stderr."""
    print(f"error: {' '.join(str(error).splitlines())}", file=sys.stderr, flush=True)  # noqa: T201 - every command ends with it


def configure() -> None:
    """Sends this process's log to stderr; ends the process if an environment variable has a wrong value."""
    level, style = _variable(LEVEL, LEVELS, "INFO"), _variable(FORMAT, FORMATS, "text")
    who = "".join(f"{kind} {number} " for kind, number in _numbers().items())
    line = f"{{asctime}}.{{msecs:03.0f}} {{levelname}} {who}{{name}}: {{message}}"
    handler = _Stderr()
    handler.setFormatter(_Json() if style == "json" else logging.Formatter(line, "%Y-%m-%d %H:%M:%S", style="{"))
    logging.root.handlers[:] = [handler]  # a forked rank replaces its launcher's
    logging.getLogger("helix").setLevel(level)


def _variable(name: str, values: tuple[str, ...], default: str) -> str:
    value = os.environ.get(name, default)
    if value not in values:
        sys.exit(f"error: {name}={value}: must be one of {', '.join(values)}")
    return value


def message_lines(line: str) -> list[str]:
    """Returns the message and exception of a line of the log, in either format, or the line if it is another's."""
    record = _parse(line)
    text = PREFIX.sub("", line, count=1) if record is None else f"{record['message']}\n{record.get('exception', '')}"
    return text.splitlines()


def relay(lines: Iterable[str], keep: Any) -> None:
    """Logs the JSON lines of ranks in this process, with their loggers and levels; other output has level INFO.

    Args:
        keep: its `extend` gets the lines of each message.
    """
    for line in lines:
        keep.extend(message_lines(line))
        record = _parse(line) or {"message": line.rstrip(), "level": "INFO", "logger": "helix.ranks"}
        text = "\n".join(filter(None, (record["message"], record.get("exception"))))
        rank = f"rank {record['rank']}: " if "rank" in record else ""
        logging.getLogger(record["logger"]).log(logging.getLevelNamesMapping()[record["level"]], "%s%s", rank, text)


def _parse(line: str) -> dict[str, Any] | None:
    if not line.startswith('{"time": '):
        return None
    try:
        found: dict[str, Any] = json.loads(line)
    except ValueError:  # another process wrote into it
        return None
    return found
