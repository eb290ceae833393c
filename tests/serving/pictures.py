"""Takes the screenshots in docs/images with a scripted job: `python -m tests.serving.pictures`."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

from playwright.async_api import async_playwright

from tests.serving.api_server import ROOT, text_of
from tests.serving.browser import PageDriver, ScriptedJob, opened, started
from tests.serving.chats import chat_model

IMAGES = ROOT / "docs" / "images"
SYSTEM = "You explain how attention is computed over several GPUs. Be brief, and show formulas and code."
TITLES = {"Which layout for 8 GPUs and 1M tokens?": "KVP 8.", "What does HOP-B hide?": "The exchange."}
QUESTION = "How do partial results of attention become one?"
ANSWER = text_of("picture.md")
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1120, "height": 760}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1120, "height": 760}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 800}, "is_mobile": True, "has_touch": True},
}


async def converse(tab: PageDriver, name: str) -> None:
    """Plays a conversation and takes its screenshots."""
    page = tab.page
    await tab.ready()
    await tab.press("Settings")
    await page.get_by_label("System prompt").fill(SYSTEM)
    await page.keyboard.press("Escape")
    for question, answer in TITLES.items():
        await tab.turn(question, answer)
        await tab.press("New chat")
    await tab.send(QUESTION)
    for line in ANSWER.splitlines(keepends=True):
        await tab.job.write(line)
        await asyncio.sleep(0.05)
    await tab.answer("")
    await page.locator("#talk").evaluate("one => one.scrollTop = 0")
    await page.mouse.move(0, 0)
    await page.screenshot(path=IMAGES / f"page-{name}.png")


async def take() -> None:
    """Takes all screenshots."""
    async with async_playwright() as driver, await started(driver) as browser:
        for name, look in LOOKS.items():
            with tempfile.TemporaryDirectory() as directory:
                scripted_job = ScriptedJob(chat_model(Path(directory) / "example-8b-instruct"))
                async with opened(browser, Path(directory), scripted_job, look) as tab:
                    await converse(tab, name)


def main() -> None:
    """Runs the program."""
    argparse.ArgumentParser("python -m tests.serving.pictures", description=__doc__).parse_args()
    asyncio.run(take())


if __name__ == "__main__":
    main()
