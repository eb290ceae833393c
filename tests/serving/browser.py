"""The server's page in a real browser, and a job behind it that says what a test wants."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, Playwright, expect

from helix.engine.request import Request
from tests.serving.chats import END
from tests.serving.front import READY, FakeJob, Front, front, tokens_of, until

NAMES = "chromium", "chromium-browser", "google-chrome", "chrome"
BINARY = next(filter(None, map(shutil.which, NAMES)), None)
MISSING = f"none of {', '.join(NAMES)} is in PATH: apt-get install chromium"
IN_CHROMIUM = [pytest.mark.clients, pytest.mark.skipif(BINARY is None, reason=MISSING)]
DEADLINE_MS = 60_000
KNOWN = r"status of (400|401|502|503)|ERR_(CONNECTION|INCOMPLETE_CHUNKED_ENCODING|EMPTY_RESPONSE)"
Browse = Callable[..., Awaitable[tuple[Front, Page]]]  # of `opened`, without a browser and a directory


class Teller(FakeJob):
    """A job that says texts, each when the test wants it."""

    def __init__(self, model: Path) -> None:
        super().__init__(self._tell)
        self.end = tokens_of(END, str(model))
        self.ready = replace(READY, model=str(model))
        if len(self.end) == 1:  # a model for chats
            self.ready = replace(self.ready, vocab=4100, eos=(0, *self.end))

    async def _tell(self, job: FakeJob, submit: Request) -> None:
        """Sends to the last request what the test says."""

    async def write(self, text: str, finish: str | None = None) -> None:
        """Says a text, a token at a time."""
        for token in tokens_of(text, self.ready.model):
            await self.say(self.submits[-1], [token])
        if finish is not None:
            await self.say(self.submits[-1], [self.ready.eos[-1]] if finish == "stop" else [], finish)


async def started(driver: Playwright) -> Browser:
    expect.set_options(timeout=DEADLINE_MS)
    return await driver.chromium.launch(executable_path=BINARY, args=["--no-sandbox"])


@asynccontextmanager
async def opened(
    browser: Browser, directory: Path, job: Teller, look: Any = None, **settings: Any
) -> AsyncIterator[tuple[Front, Page]]:
    """A page of a server; in the end it has wanted nothing of others and complained of nothing."""
    requests: list[str] = []
    complaints: list[str] = []
    async with front(directory, job, **settings) as made:
        context = await browser.new_context(**{"viewport": {"width": 1000, "height": 760}, **(look or {})})
        async with context:
            await context.grant_permissions(["clipboard-read", "clipboard-write"])
            page = await context.new_page()
            page.set_default_timeout(DEADLINE_MS)
            page.on("request", lambda request: requests.append(request.url))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
            await page.goto(f"{made.url}/")
            yield made, page
        assert requests and all(url.startswith(f"{made.url}/") or url == "data:," for url in requests)
        assert [one for one in complaints if not re.search(KNOWN, one)] == []


def prompt(front: Front) -> str:
    """Of the last request."""
    return front.session.tokens.tokenizer.decode(front.job.submits[-1].prompt)


async def told(page: Page, what: str | re.Pattern[str]) -> None:
    """Waits until the page says this of itself."""
    await expect(page.locator("#state")).to_have_text(what)


async def ready(page: Page) -> None:
    await told(page, "Ready.")


async def free(page: Page) -> None:
    await expect(page.locator("#stop")).to_be_hidden()


async def shown(page: Page, text: str) -> None:
    await expect(page.locator("#talk")).to_contain_text(text)


async def requested(front: Front, act: Awaitable[Any]) -> None:
    """Does something, and waits for the request that it makes."""
    before = len(front.job.submits)
    await act
    await until(lambda: len(front.job.submits) == before + 1)


async def send(front: Front, page: Page, text: str | None = None, keys: str = "Enter") -> None:
    """Writes a text, presses Enter, and waits for the request."""
    if text is not None:
        await page.fill("#text", text)
    await requested(front, page.press("#text", keys))


async def begin(front: Front, page: Page, question: str, text: str) -> None:
    """A question, and the beginning of its answer."""
    await send(front, page, question)
    await front.job.write(text)  # type: ignore[attr-defined]
    await shown(page, text.strip())


async def answer(front: Front, page: Page, text: str, finish: str = "stop") -> None:
    """Says the rest of an answer."""
    await front.job.write(text, finish)
    await free(page)


async def turn(front: Front, page: Page, question: str, said: str) -> None:
    """A question with its answer."""
    await send(front, page, question)
    await answer(front, page, said)


async def press(page: Page, name: str) -> None:
    await page.get_by_role("button", name=name, exact=True).click()


async def reload(page: Page) -> None:
    await page.reload()
    await ready(page)
