"""Chromium without a screen, over its debugging pipe: JSON messages, each with a zero byte behind it.

Source: chromedevtools.github.io/devtools-protocol
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = "chromium", "chromium-browser", "google-chrome", "chrome"
BINARY = next(filter(None, map(shutil.which, NAMES)), None)
MISSING = f"none of {', '.join(NAMES)} is in PATH: apt-get install chromium"
FLAGS = "--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-background-networking"
DEADLINE_S = 30.0
MOST = 1 << 28  # bytes of a message: screenshots are large
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}


class Page:
    """A page of a browser.

    Attributes:
        requests: addresses that it wanted.
        complaints: what its console said: errors of scripts, and what its policy forbids.
    """

    def __init__(self, reader: asyncio.StreamReader, descriptor: int) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._descriptor = descriptor
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: dict[str, str] = {}
        self._reading = asyncio.create_task(self._read(reader))

    async def open(self, url: str, width: int = 1000, height: int = 760, dark: bool = False) -> None:
        """Opens an address in a new tab of a size."""
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        session = await self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": session["sessionId"]}
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.look(width, height, dark)
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href === {url!r} && document.readyState === 'complete'")

    async def look(self, width: int = 1000, height: int = 760, dark: bool = False) -> None:
        """Changes the size of the window, and whether its user likes it dark."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command to the browser and returns its answer."""
        number = next(self._numbers)
        self._waiting[number] = future = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params, **self._session}
        os.write(self._descriptor, json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(DEADLINE_S):
            answer = await future
        assert "error" not in answer, (method, answer)
        return answer["result"]

    async def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (expression, answer)
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        """Waits until an expression holds."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not await self.value(f"!!({expression})"):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"never {expression}; {await self.value('document.body.innerText')}") from None

    async def press(self, key: str, *, control: bool = False, shift: bool = False) -> None:
        """Presses a key and lets it go."""
        what = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": 2 * control + 8 * shift}
        text = {"text": "\r"} if key == "Enter" else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **what, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **what)

    async def type(self, text: str) -> None:
        """Writes a text where the cursor is."""
        await self.call("Input.insertText", text=text)

    async def screenshot(self, path: Path) -> None:
        """Keeps what the page looks like, as PNG."""
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                message = json.loads((await reader.readuntil(b"\0"))[:-1])
                if (future := self._waiting.pop(message.get("id", 0), None)) is not None:
                    future.set_result(message)
                    continue
                told = message["params"]
                match message["method"]:
                    case "Network.requestWillBeSent":
                        self.requests.append(told["request"]["url"])
                    case "Runtime.exceptionThrown":
                        self.complaints.append(str(told["exceptionDetails"]))
                    case "Log.entryAdded" if told["entry"]["level"] == "error":
                        self.complaints.append(str(told["entry"]))


@asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """A browser of its own, without the user's settings; it ends with the block."""
    assert BINARY is not None, MISSING
    (to_read, from_browser), (to_browser, to_write) = _pipe(), _pipe()
    with tempfile.TemporaryDirectory(prefix="helix-browser-", ignore_cleanup_errors=True) as profile:
        arguments = [BINARY, *FLAGS.split(), f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        null = (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)
        pipes = (os.POSIX_SPAWN_DUP2, to_browser, 3), (os.POSIX_SPAWN_DUP2, from_browser, 4)
        pid = os.posix_spawn(BINARY, arguments, os.environ, file_actions=[null, *pipes], setsid=True)
        os.close(to_browser)
        os.close(from_browser)
        reader = asyncio.StreamReader(limit=MOST)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(to_read, "rb")
        )
        try:
            yield Page(reader, to_write)
        finally:
            transport.close()
            os.close(to_write)
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _pipe() -> tuple[int, int]:
    """The ends of a pipe, whose numbers are not those at which the browser expects its own."""
    read, write = os.pipe()
    ends = fcntl.fcntl(read, fcntl.F_DUPFD_CLOEXEC, 10), fcntl.fcntl(write, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(read)
    os.close(write)
    return ends
