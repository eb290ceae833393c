"""The log: its formats, its variables, and what a program that embeds the ranks gets of it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from helix.log import message_lines, relay
from launch.client.supervisor import cause

LOGS = """
import logging
from helix import log
log.configure()
logging.getLogger("helix.launch.job.rank").info("two\\nlines, %d%%", 5)
logging.getLogger("helix.a").debug("not shown")
logging.getLogger("other").warning("of a library")
try:
    1 / 0
except ZeroDivisionError as error:
    logging.getLogger("helix.b").error("failed", exc_info=error, extra={"fields": {"batch": 3}})
log.print_error("rank 1 failed:\\nZeroDivisionError")
"""


def logged(**variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", LOGS], capture_output=True, text=True, env=variables)


@pytest.mark.parametrize(
    ("variables", "rank"), [({}, ""), ({"RANK": "3"}, "rank 3 "), ({"HELIX_PROCESS": "1"}, "process 1 ")]
)
def test_text_has_time_level_rank_and_logger(variables: dict[str, str], rank: str) -> None:
    lines = logged(**variables).stderr.splitlines()
    assert [line[23:] for line in lines[:4]] == [
        f" INFO {rank}helix.launch.job.rank: two", "", f" WARNING {rank}other: of a library",
        f" ERROR {rank}helix.b: failed",
    ]  # fmt: skip
    assert lines[1] == "lines, 5%" and lines[-2:] == [
        "ZeroDivisionError: division by zero", "error: rank 1 failed: ZeroDivisionError",
    ]  # fmt: skip
    assert cause(lines[:-1]) == "ZeroDivisionError: division by zero"
    assert cause(lines) == "rank 1 failed: ZeroDivisionError"


def test_json_has_the_same_and_a_calls_fields() -> None:
    *lines, error = logged(RANK="3", HELIX_LOG_FORMAT="json").stderr.splitlines()
    first, library, failed = map(json.loads, lines)
    assert first.pop("time").startswith("20")
    assert first == {"level": "INFO", "rank": 3, "logger": "helix.launch.job.rank", "message": "two\nlines, 5%"}
    assert library["level"] == "WARNING" and failed["batch"] == 3 and "division by zero" in failed["exception"]
    assert cause([*lines]) == "ZeroDivisionError: division by zero" and error.startswith("error: rank 1")


def test_the_level_is_a_variable_and_wrong_values_end_the_process() -> None:
    assert "not shown" in logged(HELIX_LOG_LEVEL="DEBUG").stderr
    assert " INFO " not in logged(HELIX_LOG_LEVEL="WARNING").stderr
    ended = logged(HELIX_LOG_FORMAT="xml")
    assert (ended.returncode, ended.stderr) == (1, "error: HELIX_LOG_FORMAT=xml: must be one of text, json\n")


def test_a_program_gets_its_ranks_records(caplog: pytest.LogCaptureFixture) -> None:
    """With their loggers and levels, so that it can silence or route them; and what is no record, at INFO."""
    lines = logged(RANK="3", HELIX_LOG_FORMAT="json").stderr.splitlines(keepends=True)
    kept: list[str] = []
    with caplog.at_level(logging.INFO):
        relay([*lines, '{"time": broken\n'], kept)
    found = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
    assert found[0] == ("helix.launch.job.rank", "INFO", "rank 3: two\nlines, 5%")
    assert found[1] == ("other", "WARNING", "rank 3: of a library")
    assert found[2][:2] == ("helix.b", "ERROR") and found[2][2].endswith("ZeroDivisionError: division by zero")
    assert [name for name, _, _ in found[3:]] == ["helix.ranks"] * 2
    assert kept[:2] == ["two", "lines, 5%"] and kept[-2:] == [
        "error: rank 1 failed: ZeroDivisionError",
        '{"time": broken',
    ]
    caplog.clear()
    logging.getLogger("helix").setLevel(logging.CRITICAL)
    try:
        relay(lines, [])
    finally:
        logging.getLogger("helix").setLevel(logging.NOTSET)
    assert [record.name for record in caplog.records] == ["other"]


def test_a_line_of_another_program_stays_as_it_is() -> None:
    assert message_lines("NCCL INFO: 2026-11-29 of no log") == ["NCCL INFO: 2026-11-29 of no log"]
    assert message_lines("2026-11-29 14:00:00.123 ERROR rank 1 helix.a: error: x") == ["error: x"]
