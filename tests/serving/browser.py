"""The server's page in a real browser, with a job under the test's control."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, Playwright, expect

from helix.engine.request import Request
from tests.serving.api_server import READY, ApiServer, FakeJob, api_server, tokens_of, until
from tests.serving.chats import END

NAMES = "chromium", "chromium-browser", "google-chrome", "chrome"
BINARY = next(filter(None, map(shutil.which, NAMES)), None)
MISSING = f"none of {', '.join(NAMES)} is in PATH: apt-get install chromium"
IN_CHROMIUM = [pytest.mark.clients, pytest.mark.skipif(BINARY is None, reason=MISSING)]
DEADLINE_MS = 60_000
KNOWN = r"status of (400|401|502|503)|ERR_(CONNECTION|INCOMPLETE_CHUNKED_ENCODING|EMPTY_RESPONSE)"


class ScriptedJob(FakeJob):
    """A job that emits texts when the test says so."""

    def __init__(self, model: Path) -> None:
        super().__init__(self._tell)
        self.end = tokens_of(END, str(model))
        self.ready = replace(READY, model=str(model))
        if len(self.end) == 1:  # a chat model
            self.ready = replace(self.ready, vocab=4100, eos=(0, *self.end))

    async def _tell(self, job: FakeJob, submit: Request) -> None:
        """The test emits by `write`."""

    async def write(self, text: str, finish: str | None = None) -> None:
        """Emits a text to the last request, token by token."""
        for token in tokens_of(text, self.ready.model):
            await self.emit(self.submits[-1], [token])
        if finish is not None:
            await self.emit(self.submits[-1], [self.ready.eos[-1]] if finish == "stop" else [], finish)


@dataclass
class PageDriver(ApiServer):
    """A front end with a page of it, and a user's actions there."""

    job: ScriptedJob
    page: Page

    @property
    def prompt(self) -> str:
        """Prompt text of the last request."""
        return self.session.tokenizer.backend.decode(self.job.submits[-1].prompt)

    async def new_tab(self, url: str = "") -> PageDriver:
        page = await self.page.context.new_page()
        await page.goto(url or self.url)
        return replace(self, page=page)

    async def expect_status(self, what: str | re.Pattern[str]) -> None:
        """Waits until the page shows this status."""
        await expect(self.page.locator("#state")).to_have_text(what)

    async def ready(self) -> None:
        await self.expect_status("Ready.")

    async def expect_text(self, text: str) -> None:
        await expect(self.page.locator("#talk")).to_contain_text(text)

    async def expect_request(self, act: Awaitable[Any]) -> None:
        """Acts, and waits for the request that this sends."""
        before = len(self.job.submits)
        await act
        await until(lambda: len(self.job.submits) == before + 1)

    async def send(self, text: str | None = None, keys: str = "Enter") -> None:
        if text is not None:
            await self.page.fill("#text", text)
        await self.expect_request(self.page.press("#text", keys))

    async def begin(self, question: str, text: str) -> None:
        """Sends a question, and emits the beginning of its answer."""
        await self.send(question)
        await self.job.write(text)
        await self.expect_text(text.strip())

    async def answer(self, text: str, finish: str = "stop") -> None:
        await self.job.write(text, finish)
        await expect(self.page.locator("#stop")).to_be_hidden()

    async def turn(self, question: str, message: str) -> None:
        await self.send(question)
        await self.answer(message)

    async def press(self, name: str) -> None:
        await self.page.get_by_role("button", name=name, exact=True).click()

    async def reload(self) -> None:
        await self.page.reload()
        await self.ready()


Browse = Callable[..., Awaitable[tuple[PageDriver, Page]]]  # the fixture `browse`


async def started(driver: Playwright) -> Browser:
    """Starts Chromium."""
    expect.set_options(timeout=DEADLINE_MS)
    return await driver.chromium.launch(executable_path=BINARY, args=["--no-sandbox"])


@asynccontextmanager
async def opened(
    browser: Browser, directory: Path, job: ScriptedJob, look: Any = None, **settings: Any
) -> AsyncIterator[PageDriver]:
    """Opens a page of a server; checks at the end that it made no external requests and logged no errors."""
    requests: list[str] = []
    complaints: list[str] = []
    async with api_server(directory, job, **settings) as made:
        context = await browser.new_context(**{"viewport": {"width": 1000, "height": 760}, **(look or {})})
        async with context:
            await context.grant_permissions(["clipboard-read", "clipboard-write"])
            page = await context.new_page()
            page.set_default_timeout(DEADLINE_MS)
            page.on("request", lambda request: requests.append(request.url))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
            await page.goto(f"{made.url}/")
            yield PageDriver(**vars(made), page=page)
        assert requests and all(url.startswith(f"{made.url}/") or url == "data:," for url in requests)
        assert [one for one in complaints if not re.search(KNOWN, one)] == []
