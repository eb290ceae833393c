"""Prompts of a file on the terminal: their progress, and their text as it comes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

FILE_WIDTH = 120  # characters of a line if the output is not a terminal
COUNT_S = 10.0  # between two lines about the number of prompts that are done
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def strip_control(text: str) -> str:
    """Returns a text without the control characters that a terminal would obey; tabs and line breaks stay."""
    return CONTROL.sub("", text)


def new_bar(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console)


class PromptsTerminal:
    """View of running prompts on the terminal.

    Args:
        streams: whether texts are shown as they come.
    """

    def __init__(self, streams: bool) -> None:
        self.console = Console(highlight=False)
        if not self.console.is_terminal:
            self.console.width = FILE_WIDTH
        self._streams = streams
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._counted = time.monotonic()
        self._text = SequentialOutput(lambda text: self.console.out(strip_control(text), end="", highlight=False))

    def prefill(self, done: int, total: int) -> None:
        """Shows the progress of admitted prompts' tokens, until all are done or text begins to stream."""
        if self._text.started or (self._bar is None and not done):
            return
        if self._bar is None:
            self._bar = new_bar(self.console)
            self._bar.start()
            self._task = self._bar.add_task("prefill", total=total)
        assert self._task is not None
        self._bar.update(self._task, completed=done, total=total)
        if done == total:
            self._end_bar(done=True)

    def show(self, name: str | int, text: str, ended: bool) -> None:
        """Shows new text of a prompt when it is its turn."""
        if self._streams:
            self._end_bar()
            self._text.push(name, text, ended)

    def refuse(self, name: str | int, reason: str) -> None:
        """Prints why a prompt has no answer."""
        self.console.print(f"[{name}] refused: {reason}", markup=False, style="red")

    def count(self, done: int, total: int) -> None:
        """Prints how many prompts are done, now and then, unless their text is streamed."""
        if not self._streams and (now := time.monotonic()) - self._counted > COUNT_S:
            self._counted = now
            self._end_bar()
            self.console.print(f"{done:,} of {total:,} prompts are done", markup=False)

    def finish(self, served: int, refused: int) -> None:
        """Prints the final counts."""
        self._end_bar()
        self.console.print(f"{served} served, {refused} refused")

    def _end_bar(self, done: bool = False) -> None:
        if self._bar is not None:
            self._bar.live.transient = not done  # an unfinished one disappears
            self._bar.stop()
            self._bar = None


class SequentialOutput:
    """Output stream that shows one request's text at a time and buffers the text of the others."""

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
