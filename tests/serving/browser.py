"""A page of the server in a real browser, and a job behind it that says what a test wants."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from helix.engine.request import Request
from tests.serving.front import READY, FakeJob, Front, front, until, without_template
from tests.serving.test_chat import SPECIAL, TEMPLATE

playwright = pytest.importorskip("playwright.async_api", reason="no Playwright: pip install playwright")
Page, Route = playwright.Page, playwright.Route
expect = playwright.expect

NAMES = "chromium", "chromium-browser", "google-chrome", "chrome"
BINARY = next(filter(None, map(shutil.which, NAMES)), None)
MISSING = f"none of {', '.join(NAMES)} is in PATH: apt-get install chromium"
DEADLINE_MS = 30_000
Check = Callable[[Front, Page], Awaitable[None]]


class Teller(FakeJob):
    """A job that says texts, each when the test wants it."""

    def __init__(self, model: Path) -> None:
        super().__init__(self._tell)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self.end = 0
        if not self._tokenizer.chat_template:
            self.ready = replace(READY, model=str(model))
        else:
            self.end = self._tokenizer.convert_tokens_to_ids("<|im_end|>")
            self.ready = replace(READY, model=str(model), vocab=4100, eos=(0, self.end))

    async def _tell(self, job: FakeJob, submit: Request) -> None:
        """Sends to the last request what the test says."""

    async def write(self, text: str, finish: str | None = None) -> None:
        """Says a text, a token at a time."""
        for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]:
            await self.say(self.submits[-1], [token])
        if finish is not None:
            await self.say(self.submits[-1], [self.end] if finish == "stop" else [], finish)

    def prompt(self) -> str:
        return self._tokenizer.decode(self.submits[-1].prompt)


def chat_model(directory: Path) -> Path:
    """The demo model's tokenizer, with a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(READY.model)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def run(check: Check, directory: Path, model: Path | None = None, /, look: Any = None, **settings: Any) -> None:
    """Runs a check beside a page; in the end the page has wanted nothing of others and complained of nothing."""
    requests: list[str] = []
    complaints: list[str] = []

    async def with_page() -> None:
        async with (
            front(directory, Teller(model or without_template(directory)), **settings) as made,
            playwright.async_playwright() as driver,
            await driver.chromium.launch(executable_path=BINARY, args=["--no-sandbox"]) as browser,
            asyncio.timeout(150),
        ):
            context = await browser.new_context(**{"viewport": {"width": 1000, "height": 760}, **(look or {})})
            await context.grant_permissions(["clipboard-read", "clipboard-write"])
            page = await context.new_page()
            page.set_default_timeout(DEADLINE_MS)
            page.on("request", lambda request: requests.append(request.url))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
            await page.goto(f"{made.url}/")
            await check(made, page)
            assert requests and all(url.startswith(f"{made.url}/") or url == "data:," for url in requests)
            known = r"status of (400|401|502|503)|ERR_(CONNECTION|INCOMPLETE_CHUNKED_ENCODING|EMPTY_RESPONSE)"
            assert [c for c in complaints if not re.search(known, c)] == []

    expect.set_options(timeout=DEADLINE_MS)
    asyncio.run(with_page())


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


async def turn(front: Front, page: Page, question: str, answer: str) -> None:
    """A question with its answer."""
    await send(front, page, question)
    await front.job.write(answer, "stop")
    await free(page)


async def press(page: Page, name: str) -> None:
    await page.get_by_role("button", name=name, exact=True).click()


async def picture(page: Page, path: Path) -> None:
    await page.screenshot(path=path)
