"""Shows a prompt file's progress and answers on the terminal."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

FILE_WIDTH = 120  # columns if the output is not a terminal
COUNT_S = 10.0  # interval of lines with the number of finished prompts
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def strip_control(text: str) -> str:
    """Removes control characters, which a terminal would execute, except tabs and line breaks."""
    return CONTROL.sub("", text)


def new_bar(console: Console) -> Progress:
    """Creates a progress bar."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console)


class PromptsTerminal:
    """Shows running prompts on the terminal.

    Args:
        streams: whether to show answers while they are generated.
    """

    def __init__(self, streams: bool) -> None:
        self.console = Console(highlight=False)
        if not self.console.is_terminal:
            self.console.width = FILE_WIDTH
        self._streams = streams
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._prefilled = False
        self._counted = time.monotonic()
        self._text = SequentialOutput(lambda text: self.console.out(strip_control(text), end="", highlight=False))

    def prefill(self, done: int, total: int) -> None:
        """Shows the prefill progress of admitted prompts until an answer begins; only the first full bar stays."""
        if self._text.started or (self._bar is None and done in (0, total)):
            return
        if self._bar is None:
            self._bar = new_bar(self.console)
            self._bar.start()
            self._task = self._bar.add_task("prefill", total=total)
        assert self._task is not None
        self._bar.update(self._task, completed=done, total=total)
        if done == total:
            self._end_bar(done=not self._prefilled)
            self._prefilled = True

    def show(self, name: str | int, text: str, ended: bool) -> None:
        if self._streams:
            self._end_bar()
            self._text.push(name, text, ended)

    def refuse(self, name: str | int, reason: str) -> None:
        self.console.print(f"[{name}] refused: {reason}", markup=False, style="red")

    def count(self, done: int, total: int) -> None:
        """Prints the number of finished prompts at intervals, unless answers are shown."""
        if not self._streams and (now := time.monotonic()) - self._counted > COUNT_S:
            self._counted = now
            self._end_bar()
            self.console.print(f"{done:,} of {total:,} prompts finished", markup=False)

    def finish(self, served: int, refused: int) -> None:
        self._end_bar()
        self.console.print(f"{served} served, {refused} refused")

    def _end_bar(self, done: bool = False) -> None:
        if self._bar is not None:
            self._bar.live.transient = not done  # hide an unfinished bar
            self._bar.stop()
            self._bar = None


class SequentialOutput:
    """Shows one request's text at a time, and buffers the text of the others."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.started = False
        self._write = write
        self._current: str | int | None = None
        self._buffered: dict[str | int, str] = {}
        self._ended: set[str | int] = set()

    def push(self, name: str | int, text: str, ended: bool) -> None:
        self.started = True
        self._buffered[name] = self._buffered.get(name, f"[{name}] ") + text
        if ended:
            self._ended.add(name)
        while self._buffered:
            if self._current is None:
                self._current = next(iter(self._buffered))
            self._write(self._buffered[self._current])
            self._buffered[self._current] = ""
            if self._current not in self._ended:
                return
            self._write("\n")
            del self._buffered[self._current]
            self._ended.discard(self._current)
            self._current = None
